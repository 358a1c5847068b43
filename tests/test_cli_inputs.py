"""`fedveil inspect` and `fedveil train` with models and data of the user's own, of any form."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedveil.cli import main
from fedveil.cli.inputs import example_inputs
from fedveil.data import from_records
from fedveil.graph.inputs import call

HERE = "tests.test_cli_inputs"


class Both(nn.Module):
    """Words and numbers."""

    def __init__(self):
        super().__init__()
        self.words, self.numbers, self.head = nn.Embedding(9, 6), nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, ids, numbers):
        return self.head(torch.tanh(self.words(ids).mean(1) + self.numbers(numbers)))


def two():
    return nn.Bilinear(3, 4, 2)


def masks():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 1))


def part(records=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (records, 5), generator=generator)
    numbers = torch.randn(records, 3, generator=generator)
    return {"ids": ids, "numbers": numbers}, (numbers[:, 0] > 0).long()


def pairs():
    return part(), part(20, 1)


def data():
    return from_records("named", *(((x["ids"], x["numbers"]), y) for x, y in pairs()), classes=["low", "high"])


NAMED = data()


def pictures():
    found = []
    for records, seed in ((30, 0), (10, 1)):
        pixels = torch.randn(records, 1, 4, 5, generator=torch.Generator().manual_seed(seed))
        found.append((pixels, (pixels[:, 0] > 0).long()))
    return found


def broken():
    raise TypeError("inside the factory")


def wants(something):
    return something


def test_sizes_names_and_types_make_what_forward_takes():
    assert [tuple(x.shape) for x in example_inputs(["3,32,32"])] == [(2, 3, 32, 32)]
    first, second = example_inputs(["3", "4:int"], "float64")
    assert (first.dtype, second.dtype, second.shape) == (torch.float64, torch.int64, (2, 4))
    named = example_inputs(["ids=128:int", "mask=128:bool", "length=:int", "numbers=3"])
    assert {name: (tuple(x.shape), x.dtype) for name, x in named.items()} == {
        "ids": ((2, 128), torch.int64),
        "mask": ((2, 128), torch.bool),
        "length": ((2,), torch.int64),
        "numbers": ((2, 3), torch.float32),
    }
    assert call(Both(), example_inputs(["numbers=3", "ids=5:int"])).shape == (2, 2)


def test_inspect_takes_one_input_for_each_argument(capsys):
    assert main(["inspect", f"{HERE}:Both", "--input", "5:int", "--input", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["head"] == "head"


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (["ids=5:int", "3"], "some arguments have names and some have none"),
        (["ids=5", "ids=5"], "ids is there twice"),
        (["ids=5:text"], "there is no type 'text' in 'ids=5:text'"),
        (["2 words=5"], "'2 words' in '2 words=5' is no name of an argument"),
        (["ids=x:int"], "'x' is not a list of sizes"),
        ([""], "'' is not a list of sizes"),
    ],
)
def test_inputs_that_are_none_are_refused(capsys, inputs, text):
    assert main(["inspect", f"{HERE}:Both", *(word for one in inputs for word in ("--input", one))]) == 2
    assert text in capsys.readouterr().err


def train(folder, *arguments):
    return main(["train", "--defence", "plain", "--epochs", "8", "--lr", "0.05", "--batch-size", "8", *arguments,
                 "--clients", "2", "--loss", "cross_entropy", "--out", str(folder), "--json"])  # fmt: skip


@pytest.mark.parametrize("spec", ["pairs", "data", "NAMED"])
def test_data_of_any_form_trains_a_model_that_takes_it(spec, tmp_path, capsys):
    assert train(tmp_path / "run", "--data", f"{HERE}:{spec}", "--model", f"{HERE}:Both") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["accuracy"] > 0.75
    assert f"--data {HERE}:{spec} " in summary["repeat"]
    model = Both()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    inputs, targets = part(20, 1)
    right = (model(**inputs).argmax(1) == targets).double().mean()
    assert summary["accuracy"] == pytest.approx(float(right))
    assert (tmp_path / "run" / "report.html").exists()


def test_a_run_on_ones_own_data_is_resumed(tmp_path, capsys):
    both = ["--data", f"{HERE}:pairs", "--model", f"{HERE}:Both"]
    assert train(tmp_path / "run", *both) == 0
    assert train(tmp_path / "run", *both, "--epochs", "9", "--resume") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rounds"] == 9 * 3


def test_a_class_at_each_pixel_is_trained_and_counted(tmp_path, capsys):
    assert train(tmp_path / "run", "--data", f"{HERE}:pictures", "--model", f"{HERE}:masks") == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] > 0.8
    assert "Answers on the test data" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--data", f"{HERE}:nothing"], f"module {HERE} has no 'nothing'"),
        (["--data", f"{HERE}:"], "data is named as package.module:name"),
        (["--data", f"{HERE}:wants"], "cannot be called without arguments"),
        (["--data", f"{HERE}:two"], "gave Bilinear, not data"),
        (["--data", f"{HERE}:part"], "it is a dict, not records with their targets"),
        (["--data", f"{HERE}:pairs", "--train-size", "3"], "--train-size is for data sets of the library"),
        (["--data", f"{HERE}:pairs", "--path", "x"], "--path is for data sets of the library"),
        (["--data", f"{HERE}:pairs"], "mlp takes one tensor of floating numbers"),
    ],
)
def test_data_that_is_none_is_refused(arguments, text, tmp_path, capsys):
    assert train(tmp_path / "run", *arguments) == 2
    assert text in capsys.readouterr().err


def test_an_attack_on_records_of_several_tensors_says_that_it_takes_one(tmp_path, capsys):
    arguments = ["attack", "membership", "--data", f"{HERE}:pairs", "--model", f"{HERE}:Both", "--clients", "2"]
    assert main([*arguments, "--defence", "plain", "--epochs", "1", "--out", str(tmp_path / "a")]) == 2
    assert "this takes records of one tensor only" in capsys.readouterr().err


def test_what_the_page_shows_runs(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parent.parent / "docs" / "inputs.md").read_text()
    code, commands = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1] for kind in ("python", "sh"))
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        runpy.run_path("mine.py", run_name="__main__")
        assert float(capsys.readouterr().out) > 0.55
        for command in commands.splitlines():
            assert main(shlex.split(command, comments=True)[1:]) == 0
    assert "the final layer, head with 2 outputs, takes additive noise" in (printed := capsys.readouterr().out)
    assert "accuracy" in printed
    sys.modules.pop("mine")


def test_an_error_in_a_factory_is_its_own(tmp_path):
    with pytest.raises(TypeError, match="inside the factory"):
        train(tmp_path / "run", "--data", f"{HERE}:broken")
