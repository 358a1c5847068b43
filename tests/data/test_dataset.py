"""Data sets in memory, and users' records as such: several tensors, integers, targets at each position."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.data.making import refused
from tests.small import Records
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from fedveil.data import Data, DataPart, from_records, keep_labels, load

IDS = torch.arange(12).reshape(4, 3)
MASK = torch.tensor([[True, False]] * 4)
LABELS = torch.tensor([0, 1, 1, 0])
PAIRS = TensorDataset(IDS.float(), LABELS)
HUGE = torch.full((4, 2), 1e300, dtype=torch.float64)


def read(given, **options):
    """Data of the same records for training and testing."""
    return from_records("mine", given, given, **options)


def test_integers_stay_integers_and_other_numbers_become_single_precision():
    rows = [({"ids": IDS[k].int(), "mask": MASK[k], "age": 40.5 + k}, int(LABELS[k])) for k in range(4)]
    rows[1] = ({"age": 41.5, **{name: rows[1][0][name] for name in ("mask", "ids")}}, 1)  # keys in another order
    inputs, targets = read(Records(items=rows)).train
    assert torch.equal(inputs["ids"], IDS)
    assert (inputs["ids"].dtype, inputs["mask"].dtype, inputs["age"].dtype) == (torch.int64, torch.bool, torch.float32)
    assert inputs["age"].tolist() == [40.5, 41.5, 42.5, 43.5]
    assert torch.equal(targets, LABELS)
    dtypes = {torch.int32: torch.int64, torch.uint8: torch.float32, torch.float64: torch.float32}
    for given, wanted in dtypes.items():
        assert read(Records(IDS.to(given), LABELS)).train.tensor.dtype == wanted


def test_targets_may_be_numbers_classes_or_a_class_at_each_position():
    numbers = read((IDS, torch.ones(4)))
    assert (numbers.train.targets.shape, numbers.outputs, numbers.classes) == ((4, 1), 1, ())
    assert read(PAIRS, classes=["a", "b", "c", "d"]).outputs == 4
    targets = torch.stack([torch.tensor([[0, 1, 2], [2, 1, k]]) for k in range(4)])
    data = read(Records(torch.zeros(4, 1, 2, 3), targets))
    assert (data.train.targets.shape, data.classes, data.outputs) == ((4, 2, 3), ("0", "1", "2", "3"), 4)
    data = read(((IDS, torch.ones(4, 3, dtype=torch.float64)), LABELS), classes=["no", "yes"])
    assert repr(data) == "Data('mine', train=4, test=4, inputs[0] (3,), inputs[1] (3,), 2 classes)"
    with refused("mine.train: classes are given, but targets are not integers"):
        read((IDS, torch.rand(4)), classes=["a"])


def test_records_stay_together_when_some_are_taken():
    part = DataPart({"ids": IDS, "more": (IDS.float(),)}, LABELS)
    for rows in (torch.tensor([2, 0]), np.array([2, 0]), [2, 0]):
        taken = part.take(rows)
        assert taken.inputs["ids"].tolist() == taken.inputs["more"][0].tolist() == [[6, 7, 8], [0, 1, 2]]
        assert taken.targets.tolist() == [1, 0]
    kept = keep_labels(read(({"ids": IDS, "age": IDS[:, 0].float()}, LABELS)), [1])
    assert (kept.train.inputs["ids"].tolist(), kept.train.inputs["age"].tolist()) == ([[3, 4, 5], [6, 7, 8]], [3, 6])
    assert torch.equal(DataPart(IDS, LABELS).tensor, IDS)
    with refused("expected each record to be a single tensor, got a dict of tensors"):
        _ = part.tensor


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ([((IDS[0], torch.tensor([torch.nan])), 0)], [", record 0: found NaN or infinity in inputs[1]"]),
        ([], [": there are no records"]),
        ([(torch.zeros(2), -1)], [": targets range from -1"]),
        ((IDS, HUGE), [", record 0: found a number that is infinite in torch.float32 in targets"]),
        ((HUGE, LABELS), [", record 0: found a number that is infinite in torch.float32 in inputs"]),
        (PAIRS, [": expected inputs to be float of shape (3,), as for mine.train, got integer"]),
    ],
)
def test_records_that_cannot_be_read_are_refused(given, texts):
    where = "mine.test" if given is PAIRS else "mine.train"
    given = Records(items=given) if isinstance(given, list) else given
    with refused(where + texts[0], *texts[1:]):
        from_records("mine", given, (IDS, LABELS) if given is PAIRS else given)


def test_floating_targets_that_look_like_classes_are_a_regression_with_a_note():
    found = read((IDS, LABELS.double().numpy()))
    assert (found.classes, found.outputs) == ((), 1)
    assert "2 distinct integer values and are treated as regression targets" in found.notes[0]
    for targets in (LABELS, torch.tensor([0.5, 1, 2, 3]), torch.arange(8.0).reshape(4, 2)):
        assert read((IDS, targets)).notes == ()


def pad(items):
    return pad_sequence([item[0] for item in items], batch_first=True), torch.tensor([item[1] for item in items])


def test_a_loader_gives_every_record_once_in_one_batch_of_its_collate_fn():
    rows = Records(items=[(torch.arange(k + 1), k % 2) for k in range(4)])
    found = read(DataLoader(rows, 2, collate_fn=pad, shuffle=True, drop_last=True)).train
    assert found.tensor.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 2, 0], [0, 1, 2, 3]]
    assert found.targets.tolist() == [0, 1, 0, 1]


INPUTS, TARGETS = torch.zeros(3, 2), torch.zeros(3, 1)


@pytest.mark.parametrize(
    ("inputs", "targets", "more", "text"),
    [
        (INPUTS[:0], TARGETS[:0], {}, "x.train: inputs has 0 records"),
        (INPUTS.to(torch.complex64), TARGETS, {}, "x.train: inputs has dtype torch.complex64"),
        ({"age": INPUTS.double()}, TARGETS, {}, "x.train: inputs['age'] has dtype torch.float64"),
        (INPUTS, TARGETS[:2], {}, "x.train: inputs has 3 records, but there are 2 targets"),
        (INPUTS, TARGETS, {"classes": ("a",)}, "use torch.int64 targets of shape (records,)"),
        (INPUTS, torch.tensor([0, 1, 5]), {"classes": ("a", "b")}, "targets range from 0 to 5, but there are 2"),
        (
            INPUTS,
            TARGETS,
            {"columns": {"c": np.zeros(2)}},
            "x.columns['c']: expected 3 values, one per training",
        ),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(inputs, targets, more, text):
    part = DataPart(inputs, targets)
    with refused(text):
        Data("x", part, part, **more)


def test_pixels_become_inputs_and_back():
    data = dataclasses.replace(load("digits", flat=False), scale=((0.3,), (0.2,)))
    pixels = torch.rand((2, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(data.pixels(data.standardise(pixels)), pixels, atol=2 * torch.finfo(torch.float32).eps)
    for change in (data.standardise, load("digits").pixels):
        with refused("are not images"):
            change(pixels.flatten(1))
