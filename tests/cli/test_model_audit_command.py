"""`fedveil audit --weights`: a model's file and two files of records become a page and a table of records."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.attacks.victims import CLASSES, memorise, records
from torch import nn

from fedveil import cli
from fedveil.errors import BadArgument
from fedveil.models import mlp
from fedveil.studies.model_audit.files import load_weights, read_members_and_others

COUNT = 60
MODULE = """
import torch
from fedveil.models import mlp
from tests.attacks.victims import CLASSES, WIDTH, memorise

def net():
    return mlp(WIDTH, CLASSES, layers=2, hidden=128)

def train(batch):
    return memorise(*batch, seed=5, steps=60)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A package with a model, its weights, and the records of members and others as CSV and as arrays."""
    (tmp_path / "audited_package.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    inputs, targets = records(2 * COUNT, seed=1)
    parts = {"in": slice(COUNT), "out": slice(COUNT, None)}
    model = memorise(inputs[parts["in"]], targets[parts["in"]])
    torch.save(model.state_dict(), "final.pt")
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, "checkpoint.ckpt")
    save_file(model.state_dict(), "final.safetensors")
    for name, rows in parts.items():
        table = np.concatenate([inputs[rows].numpy(), targets[rows, None].numpy()], 1)
        header = ",".join([*(f"x{number}" for number in range(inputs.shape[1])), "label"])
        np.savetxt(f"{name}.csv", table, delimiter=",", header=header, comments="", fmt="%.9g")
        np.savez(f"{name}.npz", inputs=inputs[rows].numpy(), targets=targets[rows].numpy())
    return tmp_path


@pytest.mark.parametrize(("weights", "kind"), [("final.pt", "csv"), ("final.safetensors", "npz")])
def test_a_model_that_memorised_its_records_is_found_from_files(folder, weights, kind, capsys):
    words = ["--model", "audited_package:net", "--weights", weights, "--members", f"in.{kind}", "--others"]
    words += [f"out.{kind}", "--loss", "squared_error", "--out", "found", "--no-network"]
    assert cli.main(["audit", *words, "--train", "audited_package:train", "--shadows", "2"]) == 0
    said = capsys.readouterr().out
    assert "The model reveals which records it was trained on." in said
    assert "RMIA" in said
    page = (folder / "found" / "report.html").read_text()
    assert "--train audited_package:train" in page
    rows = list(csv.DictReader((folder / "found" / "records.csv").read_text().splitlines()))
    assert sorted(int(row["record"]) for row in rows) == list(range(COUNT))
    assert cli.main(["audit", *words, "--json"]) == 0
    assert {row["attack"].rstrip(" *") for row in json.loads(capsys.readouterr().out)} == {"loss", "loss by class"}


def test_weights_of_all_forms_give_the_same_model(folder):
    models = [load_weights(mlp(48, CLASSES, layers=2, hidden=128), folder / name)
              for name in ("final.pt", "checkpoint.ckpt", "final.safetensors")]  # fmt: skip
    first, *more = (list(model.state_dict().values()) for model in models)
    assert all(all(map(torch.equal, first, other)) for other in more)


class Unpickled(nn.Module):
    """A model that was saved whole; reading it would run its package's code."""


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"weights": "whole.pt"}, "cannot be read without running code"),
        ({"weights": "absent.pt"}, "there is no such file"),
        ({"weights": "other.pt"}, "its values belong to another model"),
        ({"weights": "numbers.pt"}, "it does not contain named tensors"),
        ({"weights": "broken.safetensors"}, "is damaged"),
        ({"others": "in.csv"}, "60 of the 60 others are also members"),
        ({"others": "reordered.csv"}, "but in.csv has the columns"),
        ({"target": "answer"}, "columns are missing: answer"),
        ({"members": "empty.npz", "others": "empty.npz"}, "expected the arrays inputs and targets, got values"),
        ({"members": "", "weights": "final.pt"}, "flags are missing: --members"),
        ({"train": "audited_package:MODULE_THAT_IS_NOT"}, "has no attribute"),
        ({"train": "audited_package:torch"}, "expected a function, got module"),
    ],
)
def test_files_that_do_not_fit_are_refused(folder, words, why, capsys):
    torch.save(Unpickled(), "whole.pt")
    torch.save({"weight": torch.zeros(2)}, "other.pt")
    torch.save([1, 2], "numbers.pt")
    (folder / "broken.safetensors").write_bytes(b"not safetensors")
    lines = (folder / "out.csv").read_text().splitlines()
    (folder / "reordered.csv").write_text("\n".join([re.sub("x0,x1", "x1,x0", lines[0]), *lines[1:]]))
    np.savez("empty.npz", values=np.zeros(3))
    given = {"model": "audited_package:net", "weights": "final.pt", "members": "in.csv", "others": "out.csv", **words}
    flags = [part for name, value in given.items() if value for part in (f"--{name}", value)]
    assert cli.main(["audit", *flags]) == 2
    assert re.sub(r"\s+", " ", capsys.readouterr().err).find(why) >= 0


def test_images_are_read_with_the_same_classes(tmp_path):
    from PIL import Image

    chance = np.random.default_rng(0)
    for part, classes in (("in", "ab"), ("out", "ab"), ("strange", "ac")):
        for name in classes:
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(3):
                pixels = chance.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number}.png")
    (inputs, targets), (others, _) = read_members_and_others(tmp_path / "in", tmp_path / "out", size=8)
    assert inputs.shape == others.shape == (6, 3, 8, 8)
    assert targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert 0 <= inputs.min() <= inputs.max() <= 1
    first = np.asarray(Image.open(tmp_path / "in" / "a" / "0.png")).transpose(2, 0, 1) / 255
    assert np.allclose(inputs[0], first)
    with pytest.raises(BadArgument, match="unknown classes: c"):
        read_members_and_others(tmp_path / "in", tmp_path / "strange", size=8)


def test_integers_are_classes_unless_the_task_is_regression(tmp_path):
    (tmp_path / "one.csv").write_text("x,y\n0.5,1\n1.5,2\n")
    (tmp_path / "two.csv").write_text("x,y\n0.5,1.5\n")
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    assert read_members_and_others(one, one)[0][1].tolist() == [1, 2]
    assert not read_members_and_others(one, one)[0][1].is_floating_point()
    assert read_members_and_others(one, two)[0][1].is_floating_point()
    assert read_members_and_others(one, one, task="regression")[0][1].is_floating_point()
    with pytest.raises(BadArgument, match="a target is not an integer"):
        read_members_and_others(one, two, task="classification")
    assert read_members_and_others(one, one, target="x")[0][0].tolist() == [[1.0], [2.0]]
