"""Runs from flags and files."""

import json

import pytest
import torch
from safetensors.torch import load_file

from fedveil.cli import main
from fedveil.errors import BadArgument
from fedveil.runs.config import Config, build_model, configure, load_data, read_toml


def test_a_file_is_read_and_flags_override_it(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('epochs = 3\n[model]\nmodel = "mlp"\nhidden = 8\n[noise]\nadditive = 10\n')
    folder = tmp_path / "out"
    assert main(["train", str(tmp_path / "run.toml"), "--epochs", "1", "--out", str(folder), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    config = json.loads((folder / "config.json").read_text())
    assert (config["epochs"], config["hidden"], config["additive"]) == (1, 8, 10.0)
    assert summary["repeat"] == f"fedveil train --hidden 8 --additive 10.0 --epochs 1 --out {folder}"
    assert load_file(folder / "model.safetensors")["0.weight"].shape == (8, 64)


def test_a_run_prints_its_result_and_where_the_report_is(tmp_path, capsys):
    assert (
        main(["train", "--epochs", "1", "--defence", "plain", "--data", "diabetes", "--out", str(tmp_path / "r")]) == 0
    )
    captured = capsys.readouterr()
    assert captured.err == ""  # no live line where nobody looks
    assert "mse" in captured.out
    assert f"report         {tmp_path / 'r' / 'report.html'}" in captured.out
    assert (tmp_path / "r" / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"epoch": 3}, "there is no key 'epoch'.\n  Fix: did you mean 'epochs'?"),
        ({"qqq": 3}, "valid keys: data, path"),
        ({"epochs": "many"}, "epochs must be int, got 'many'"),
        ({"epochs": True}, "epochs must be int, got True"),
        ({"lr": "fast"}, "lr must be float, got 'fast'"),
        ({"defence": "moat"}, "defence must be one of plain, veil, ppdl, dbcl, spn, got 'moat'"),
        ({"clients": 0}, "clients must be at least 1, got 0"),
        (
            {"rounding": 1},
            "rounding makes a control of plain training, not of veil.\n  Fix: fedveil train --defence plain",
        ),
    ],
)
def test_bad_values_are_refused_with_the_nearest_good_one(values, text):
    with pytest.raises(BadArgument) as caught:
        configure(values)
    assert text in str(caught.value)


def test_a_rounding_control_is_a_run_like_others(tmp_path, capsys):
    found = {}
    for name, flags in (("plain", []), ("control", ["--rounding", "1"]), ("again", ["--rounding", "1"])):
        folder = tmp_path / name
        given = ["--data", "diabetes", "--epochs", "1", "--optimizer", "sgd", "--defence", "plain", *flags]
        assert main(["train", *given, "--out", str(folder), "--json"]) == 0
        repeat = json.loads(capsys.readouterr().out)["repeat"]
        assert ("--rounding 1" in repeat) == bool(flags)
        found[name] = torch.cat([value.flatten() for value in load_file(folder / "model.safetensors").values()])
    apart = float((found["control"] - found["plain"]).abs().max())
    assert 0 < apart < 1e-5  # a dozen float32 steps, rounded to 6e-8 each at weights below 1
    assert torch.equal(found["control"], found["again"])


@pytest.mark.parametrize(
    ("flag", "text"),
    [("--epoch", "did you mean --epochs?"), ("--batchsize", "did you mean --batch-size?"), ("--zz", "--help")],
)
def test_an_unknown_flag_is_refused_with_the_nearest_one(capsys, flag, text):
    assert main(["train", flag, "3"]) == 2
    assert f"there is no option '{flag}'" in (message := capsys.readouterr().err)
    assert text in message


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(BadArgument, match="cannot be read: No such file"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("epochs = ")
    with pytest.raises(BadArgument, match=r"bad.toml: is not TOML"):
        read_toml(tmp_path / "bad.toml")


def test_more_clients_than_records_are_refused(capsys, tmp_path):
    assert main(["train", "--clients", "5000", "--out", str(tmp_path / "r")]) == 2
    assert "5000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "outputs"),
    [("mlp", 10), ("cnn", 10), ("resnet8", 10), ("densenet", 10), ("tests.test_cli:sigmoid", None)],
)
def test_models_are_built_for_the_data_and_the_same_seed_gives_the_same_start(model, outputs):
    config = Config(model=model)
    data = load_data(config)
    first, second = build_model(config, data), build_model(config, data)
    assert type(first) is type(second)
    if outputs:
        assert first(data.test.inputs[:2]).shape == (2, outputs)
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Config(model="perceptron"), "there is no model 'perceptron'"),
        (Config(model="cnn", data="diabetes"), "cnn takes images, diabetes has rows of 10 numbers"),
    ],
)
def test_models_that_cannot_be_are_refused(config, text):
    with pytest.raises(BadArgument, match=text):
        build_model(config, load_data(config))
