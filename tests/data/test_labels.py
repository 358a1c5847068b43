"""Some classes of a data set as a data set of its own."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.configs import config_of

from fedveil.cli import main
from fedveil.data import Data, Part, keep_labels, load, other_labels, parse_labels
from fedveil.errors import BadArgument
from fedveil.runs.build import load_data


def small():
    inputs = torch.arange(8.0).view(8, 1)
    targets = torch.tensor([3, 0, 1, 2, 3, 0, 1, 2])
    part = Part(inputs, targets)
    columns = {"number": np.arange(8)}
    return Data("small", part, part, part, classes=("a", "b", "c", "d"), columns=columns)


def test_kept_records_keep_their_input_their_name_and_their_columns():
    data = small()
    found = keep_labels(data, (1, 3))
    assert found.classes == ("b", "d")
    for part in (found.train, found.test, found.validation):
        for record, target in zip(part.inputs, part.targets, strict=True):
            place = int(record)
            assert data.classes[data.train.targets[place]] == found.classes[target]
        assert len(part.inputs) == 4
    assert found.columns["number"].tolist() == found.train.inputs.flatten().tolist()


def test_two_complements_hold_all_records():
    data = load("digits")
    labels = parse_labels("second-half", 10)
    parts = [keep_labels(data, some) for some in (labels, other_labels(labels, 10))]
    assert [part.classes for part in parts] == [("5", "6", "7", "8", "9"), ("0", "1", "2", "3", "4")]
    assert sum(len(part.train.inputs) for part in parts) == len(data.train.inputs)
    assert sum(len(part.test.inputs) for part in parts) == len(data.test.inputs)


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("0-2,7", (0, 1, 2, 7)),
        ("3", (3,)),
        ("5, 1", (1, 5)),
        ("first-half", (0, 1, 2, 3)),
        ("second-half", (4, 5, 6, 7, 8)),
    ],
)
def test_labels_are_read(text, labels):
    assert parse_labels(text, 9) == labels


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' of '' names no classes"),
        ("a-b", "names no classes"),
        ("4-2", "not a class or a range"),
        ("0-9", "there are 9"),
    ],
)
def test_labels_that_do_not_exist_are_refused(text, words):
    with pytest.raises(BadArgument, match=words):
        parse_labels(text, 9)


def test_data_without_such_records_is_refused():
    with pytest.raises(BadArgument, match="is a regression and has no classes"):
        keep_labels(load("diabetes"), (0,))
    data = small()
    data = dataclasses.replace(data, test=Part(data.test.inputs[:1], data.test.targets[:1]))
    with pytest.raises(BadArgument, match="has no record of a"):
        keep_labels(data, (0,))


def test_a_federation_trains_on_some_classes(tmp_path, capsys):
    flags = ["--labels", "5-9", "--epochs", "1", "--defence", "plain", "--out", str(tmp_path / "r")]
    assert main(["train", *flags]) == 0
    assert "--labels 5-9" in capsys.readouterr().out
    assert load_data(config_of(labels="5-9")).outputs == 5


def test_pixels_become_inputs_and_back():
    data = dataclasses.replace(load("digits", flat=False), scale=((0.3,), (0.2,)))
    pixels = torch.rand((2, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(data.pixels(data.standardise(pixels)), pixels, atol=2 * torch.finfo(torch.float32).eps)
    with pytest.raises(BadArgument, match="are not images"):
        data.standardise(pixels.flatten(1))
