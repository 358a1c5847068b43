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


MODEL = "tests.test_cli:small"


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
    ("arguments", "message"),
    [
        (["tests.test_cli"], "a model is named as package.module:name"),
        (["nowhere.at_all:x"], "cannot import nowhere.at_all"),
        (["tests.test_cli:nothing"], "module tests.test_cli has no 'nothing'"),
        (["tests.test_cli:MODEL"], "cannot be called without arguments"),
        (["tests.test_cli:dict"], "has no 'dict'"),
        (["builtins:dict"], "gave dict, not a torch.nn.Module"),
        (["tests.test_cli:headless"], "Sequential: no layer can take additive noise"),
    ],
)
def test_misuse_exits_with_2_and_says_what_is_wrong(capsys, arguments, message):
    assert main(["inspect", *arguments, "--input", "3"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_shape_that_is_none_is_refused(capsys):
    assert main(["inspect", MODEL, "--input", "3,x"]) == 2
    assert "--input 3,32,32" in capsys.readouterr().err


def test_an_exposed_head_is_chosen_by_name_and_the_plan_says_what_it_costs(capsys):
    assert main(["inspect", "tests.test_cli:sigmoid", "--input", "3", "--head", "exposed"]) == 0
    assert "HEAD EXPOSED: no additive noise, clients read the true predictions" in capsys.readouterr().out
