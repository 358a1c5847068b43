"""`fedveil inspect`: what it prints, the inputs that it takes, and models that it refuses."""

import json

import pytest
import torch
from torch import nn

from fedveil.cli import main
from fedveil.cli.inspection import example_inputs
from fedveil.graph.inputs import call

HERE = "tests.cli.test_inspection"
MODEL = f"{HERE}:small"


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


def sigmoid():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Sigmoid())


def headless():
    return nn.Sequential(nn.LayerNorm(3), nn.Sigmoid())


class Both(nn.Module):
    """Words and numbers."""

    def __init__(self):
        super().__init__()
        self.words, self.numbers, self.head = nn.Embedding(9, 6), nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, ids, numbers):
        return self.head(torch.tanh(self.words(ids).mean(1) + self.numbers(numbers)))


def test_inspect_prints_axes_symmetry_coverage_and_limits_as_text_and_as_json(capsys):
    assert main(["inspect", MODEL, "--input", "3,8,8"]) == 0
    text = capsys.readouterr().out
    assert "Plan of Sequential: 1,570 parameters: 92.9% scaled or with additive noise, 7.1% with changed signs" in text
    assert "the final layer, 4 with 10 outputs, receives additive noise" in text
    assert "  1.weight           4  positive  2 (ReLU): it lets only positive factors through\n" in text
    assert main(["inspect", MODEL, "--input", "3,8,8", "--eval"]) == 0
    assert "  0.weight           4  any" in capsys.readouterr().out
    assert main(["inspect", f"{HERE}:sigmoid", "--input", "3", "--head", "exposed"]) == 0
    assert "HEAD EXPOSED: no additive noise; clients see the true predictions" in capsys.readouterr().out
    assert main(["inspect", MODEL, "--input", "3,8,8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["coverage"], plan["known"]["names"], plan["head"]) == (1.0, ["1.weight"], "4")
    assert sum(plan["shares"].values()) == pytest.approx(1)
    assert [axis["symmetry"] for axis in plan["axes"]] == ["signs", "positive"]
    assert main(["inspect", f"{HERE}:Both", "--input", "5:int", "--input", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["head"] == "head"


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


@pytest.mark.parametrize(
    ("model", "inputs", "texts"),
    [
        (HERE, ["3"], ["a model must be given as package.module:name"]),
        ("nowhere.at_all:x", ["3"], ["cannot import nowhere.at_all"]),
        (f"{HERE}:MODEL", ["3"], ["cannot be called without arguments"]),
        ("builtins:dict", ["3"], ["expected a torch.nn.Module, got dict"]),
        (f"{HERE}:headless", ["3"], ["Sequential: no layer can take additive noise"]),
        ("./nets.py:Net", ["3"], ["./nets.py is a file", "nets:Net"]),
        ("torch.nn:Identiti", ["3"], ["module torch.nn has no attribute 'Identiti'", "torch.nn:Identity"]),
        (MODEL, ["3,x"], ["--input 3,32,32"]),
        (MODEL, ["ids=5:int", "3"], ["some arguments are named and some are not"]),
        (MODEL, ["ids=5", "ids=5"], ["ids is given twice"]),
        (MODEL, ["ids=5:text"], ["unknown type 'text' in 'ids=5:text'"]),
        (MODEL, ["2 words=5"], ["'2 words' in '2 words=5' is not a valid argument name"]),
        (MODEL, ["ids=x:int"], ["'x' is not a list of sizes"]),
    ],
)
def test_models_and_inputs_that_do_not_exist_are_refused(capsys, model, inputs, texts):
    assert main(["inspect", model, *(word for one in inputs for word in ("--input", one))]) == 2
    captured = capsys.readouterr()
    assert all(text in captured.err for text in texts), captured.err
    assert captured.out == ""


def test_an_error_in_a_users_module_is_not_taken_for_a_missing_name(tmp_path, monkeypatch):
    (tmp_path / "broken_nets.py").write_text("import math\nmath.nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError, match="module 'math' has no attribute 'nothing'"):
        main(["inspect", "broken_nets:Net", "--input", "4"])
