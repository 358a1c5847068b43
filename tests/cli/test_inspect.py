"""The command line, in process, on what it prints."""

import json

import pytest
from torch import nn

from fedveil.cli import main


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


def sigmoid():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Sigmoid())


def headless():
    return nn.Sequential(nn.LayerNorm(3), nn.Sigmoid())


MODEL = "tests.cli.test_inspect:small"


def test_inspect_prints_axes_symmetry_coverage_and_limits(capsys):
    assert main(["inspect", MODEL, "--input", "3,8,8"]) == 0
    assert capsys.readouterr().out == (
        "Plan of Sequential: 1,570 parameters: 92.9% scaled or with additive noise, 7.1% changed in sign, "
        "0.0% only moved, 0.0% bare\n"
        "the final layer, 4 with 10 outputs, takes additive noise\n"
        "The factors (or signs) of 7.6% of the values follow from values that clients know (1.weight): only their "
        "positions, and signs where factors have any, stay secret.\n"
        "\n"
        "  channels from  units  factors   limited by\n"
        "  0.weight           4  signs     1 (BatchNorm2d): batch statistics let only signs through, because of eps\n"
        "  1.weight           4  positive  2 (ReLU): it lets only positive factors through\n"
    )


def test_inspect_in_evaluation_mode_lets_more_through(capsys):
    main(["inspect", MODEL, "--input", "3,8,8", "--eval"])
    assert "  0.weight           4  any" in capsys.readouterr().out


def test_inspect_as_json_is_read_by_machines(capsys):
    assert main(["inspect", MODEL, "--input", "3,8,8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["coverage"] == 1.0
    assert sum(plan["shares"].values()) == pytest.approx(1)
    assert plan["known"]["names"] == ["1.weight"]
    assert plan["head"] == "4"
    assert [axis["symmetry"] for axis in plan["axes"]] == ["signs", "positive"]


@pytest.mark.parametrize(
    ("model", "texts"),
    [
        ("tests.cli.test_inspect", ["a model is named as package.module:name"]),
        ("nowhere.at_all:x", ["cannot import nowhere.at_all"]),
        ("tests.cli.test_inspect:nothing", ["module tests.cli.test_inspect has no 'nothing'"]),
        ("tests.cli.test_inspect:MODEL", ["cannot be called without arguments"]),
        ("builtins:dict", ["gave dict, not a torch.nn.Module"]),
        ("tests.cli.test_inspect:headless", ["Sequential: no layer can take additive noise"]),
        ("./nets.py:Net", ["./nets.py is a file", "Fix: nets:Net, where"]),
        ("my/nets.py:Net", ["my/nets.py is a file", "Fix: my.nets:Net, where"]),
        ("torch.nn:Identiti", ["module torch.nn has no 'Identiti'", "Fix: torch.nn:Identity is the nearest"]),
        ("torch.nn:qqqq", ["module torch.nn has no 'qqqq'", "Fix: name something that torch.nn defines"]),
    ],
)
def test_a_model_that_cannot_be_inspected_is_refused(capsys, model, texts):
    assert main(["inspect", model, "--input", "3"]) == 2
    captured = capsys.readouterr()
    assert all(text in captured.err for text in texts), captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (["3,x"], "--input 3,32,32"),
        (["ids=5:int", "3"], "some arguments have names and some have none"),
        (["ids=5", "ids=5"], "ids is there twice"),
        (["ids=5:text"], "there is no type 'text' in 'ids=5:text'"),
        (["2 words=5"], "'2 words' in '2 words=5' is not a valid argument name"),
        (["ids=x:int"], "'x' is not a list of sizes"),
        ([""], "'' is not a list of sizes"),
    ],
)
def test_invalid_inputs_are_refused(capsys, inputs, text):
    assert main(["inspect", MODEL, *(word for one in inputs for word in ("--input", one))]) == 2
    assert text in capsys.readouterr().err


def test_an_error_in_a_users_module_is_not_taken_for_a_missing_name(tmp_path, monkeypatch):
    (tmp_path / "broken_nets.py").write_text("import math\nmath.nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError, match="module 'math' has no attribute 'nothing'"):
        main(["inspect", "broken_nets:Net", "--input", "4"])


def test_an_exposed_head_is_chosen_by_name_and_the_plan_says_what_it_costs(capsys):
    assert main(["inspect", "tests.cli.test_inspect:sigmoid", "--input", "3", "--head", "exposed"]) == 0
    assert "HEAD EXPOSED: no additive noise, clients read the true predictions" in capsys.readouterr().out
