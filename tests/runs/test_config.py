"""Runs from flags and files."""

import json
import re
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from tests.configs import config_of

from fedveil.cli import main
from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.runs.build import build_federation, build_model, load_data
from fedveil.runs.choices import format_command
from fedveil.runs.config import SECTIONS, LossName, configure, read_file
from fedveil.runs.folder import open_run, read_config, train
from fedveil.scheme import LOSSES


def test_a_file_is_read_and_flags_override_it(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('epochs = 3\n[model]\nmodel = "mlp"\nhidden = 8\n[defence]\nadditive = 10\n')
    folder = tmp_path / "out"
    assert main(["train", str(tmp_path / "run.toml"), "--epochs", "1", "--out", str(folder), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    config = json.loads((folder / "config.json").read_text())
    values = config["training"]["epochs"], config["model"]["hidden"], config["defence"]["additive"]
    assert values == (1, 8, 10.0)
    assert summary["repeat"] == "fedveil train --hidden 8 --additive 10.0 --loss cross_entropy --epochs 1"
    assert load_file(folder / "model.safetensors")["0.weight"].shape == (8, 64)


def test_a_run_prints_its_result_and_where_the_report_is(tmp_path, capsys):
    assert (
        main(["train", "--epochs", "1", "--defence", "plain", "--data", "diabetes", "--out", str(tmp_path / "r")]) == 0
    )
    captured = capsys.readouterr()
    assert re.fullmatch(r"100% epoch: 1\.0/1, mse \d\.\d{4}\n", captured.err)  # lines for a log, no live one
    assert "mse" in captured.out
    assert f"report         {tmp_path / 'r' / 'report.html'}" in captured.out
    assert (tmp_path / "r" / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"epoch": 3}, "there is no key 'epoch'.\n  Fix: did you mean 'epochs', of [training]?"),
        ({"qqq": 3}, "valid keys: data, path"),
        ({"epochs": "many"}, "epochs must be int, got 'many'"),
        ({"epochs": True}, "epochs must be int, got True"),
        ({"lr": "fast"}, "lr must be float, got 'fast'"),
        ({"loss": "squared"}, "loss must be 'absolute_error', 'binary_cross_entropy'"),
        ({"clients": 0}, "clients must be greater than or equal to 1, got 0"),
        ({"lr": -1.0}, "lr must be greater than 0, got -1.0"),
        ({"lr": float("nan")}, "lr must be a finite number, got nan"),
        ({"trainng": {"lr": 1.0}}, "there is no section [trainng].\n  Fix: did you mean [training]?"),
        ({"data": {"lr": 1.0}}, "'lr' is in section [data].\n  Fix: move it to [training]"),
        ({"lr": 1.0, "training": {"lr": 2.0}}, "'lr' is given twice.\n  Fix: keep the one in [training]"),
        ({"model": {"model": "cnn", "name": "mlp"}}, "'name' is given twice"),
        ({"label_smoothing": 0.1, "loss": "squared_error"}, "squared_error has none"),
    ],
)
def test_bad_values_are_refused_with_the_nearest_good_one(values, text):
    with pytest.raises(BadArgument) as caught:
        configure(values)
    assert text in str(caught.value)


def test_a_rounding_baseline_is_a_run_like_others(tmp_path, capsys):
    found = {}
    rounding = ["--settings", "rounding=1"]
    for name, flags in {"plain": [], "baseline": rounding, "again": rounding}.items():
        folder = tmp_path / name
        given = ["--data", "diabetes", "--epochs", "1", "--optimizer", "sgd", "--defence", "plain", *flags]
        assert main(["train", *given, "--out", str(folder), "--json"]) == 0
        repeat = json.loads(capsys.readouterr().out)["repeat"]
        assert ("--settings rounding=1" in repeat) == bool(flags)
        found[name] = torch.cat([value.flatten() for value in load_file(folder / "model.safetensors").values()])
    apart = float((found["baseline"] - found["plain"]).abs().max())
    assert 0 < apart < 1e-5  # a dozen float32 steps, rounded to 6e-8 each at weights below 1
    assert torch.equal(found["baseline"], found["again"])


@pytest.mark.parametrize(
    ("flag", "text"),
    [("--epoch", "--epochs INT"), ("--batchsize", "--batch-size INT"), ("--zz", "fedveil train --help")],
)
def test_an_unknown_flag_is_refused_with_the_nearest_one(capsys, flag, text):
    assert main(["train", flag, "3"]) == 2
    assert f"Unrecognized options: {flag}" in (message := capsys.readouterr().err)
    assert text in message


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(BadArgument, match="cannot be read: No such file"):
        read_file(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("epochs = ")
    with pytest.raises(BadArgument, match=r"bad.toml: is not TOML"):
        read_file(tmp_path / "bad.toml")


def test_more_clients_than_records_are_refused(capsys, tmp_path):
    assert main(["train", "--clients", "5000", "--out", str(tmp_path / "r")]) == 2
    assert "5000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "outputs"),
    [("mlp", 10), ("cnn", 10), ("resnet8", 10), ("densenet", 10), ("tests.cli.test_inspect:sigmoid", None)],
)
def test_models_are_built_for_the_data_and_the_same_seed_gives_the_same_start(model, outputs):
    config = config_of(model=model)
    data = load_data(config)
    first, second = build_model(config, data), build_model(config, data)
    assert type(first) is type(second)
    if outputs:
        assert first(data.test.inputs[:2]).shape == (2, outputs)
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (config_of(model="perceptron"), "there is no model 'perceptron'"),
        (config_of(model="cnn", data="diabetes"), "cnn takes images, and a record is 10 numbers in a row"),
    ],
)
def test_models_that_cannot_be_are_refused(config, text):
    with pytest.raises(BadArgument, match=text):
        build_model(config, load_data(config))


def test_sections_and_keys_alone_give_the_same_configuration_and_are_read_again():
    nested = configure({"data": {"name": "bank", "clients": 3}, "training": {"lr": 1}})
    assert nested == configure({"data": "bank", "clients": 3, "lr": 1.0})
    assert configure(nested.to_sections()) == nested
    assert nested.changed(lr=2.0).training.lr == 2.0
    assert format_command(nested) == "--data bank --clients 3 --lr 1.0"


def test_every_value_has_a_description_and_the_losses_are_those_there_are():
    for section in SECTIONS.values():
        assert all(field.description for field in section.model_fields.values())
    assert set(get_args(LossName)) == set(LOSSES)


def test_a_missing_device_and_a_model_that_does_not_fit_are_refused(tmp_path):
    with pytest.raises(BadArgument, match="cannot use 'cuda:7'"):
        build_federation(config_of(device="cuda:7"), load_data(config_of()))
    wrong = config_of(model="tests.cli.test_inspect:sigmoid")  # three inputs, digits have 64
    with pytest.raises(BadArgument, match=r"the clients' records: .* does not take them"):
        train(wrong, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ['{"data": {}}', '{"schema": 2}', "[1]", "{"])
def test_a_file_of_another_schema_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadArgument, match=r"has schema (None|2), and this version reads|is not JSON|not sections"):
        read_config(tmp_path)


def test_kept_noise_is_drawn_anew_when_a_run_is_resumed_and_its_page_says_so(tmp_path):
    given = {"clients": 2, "hidden": 8, "train_size": 60, "batch_size": 15, "groups": 10, "keep_noise": True}
    directions = []
    for epochs in (1, 2):
        summary = train(config_of(epochs=epochs, **given), tmp_path, resume=epochs > 1)
        page = (tmp_path / "report.html").read_text()
        assert "kept over rounds" in page
        assert ("drawn 2 times at least, because the run was resumed" in page) == (epochs > 1)
        assert "--keep-noise" in summary.repeat
    state = checkpoint.load(tmp_path / "checkpoint.pt")
    assert state["defence"] == {"name": "veil", "draws": 2}
    for _ in range(2):
        _, federation = open_run(tmp_path)
        sent = [federation.defence_server.start_round(federation.model).broadcast.head.direction for _ in range(2)]
        assert torch.equal(*sent)
        directions.append(sent[0])
    assert not torch.equal(*directions)
