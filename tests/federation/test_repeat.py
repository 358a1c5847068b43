"""What a run leaves behind can be used: its models, its configuration, the command that repeats it."""

import itertools
import json
import shlex
import shutil
import sys
from importlib import import_module

import pytest
import torch
from safetensors.torch import load_file
from tests.configs import config_of
from tests.small import SMALL

import fedveil
from fedveil.cli import main
from fedveil.data import load
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import metrics, predict
from fedveil.runs.folder import train

SHORT = ("--train-size", "60", "--clients", "2", "--epochs", "2")
QUICK = (*SHORT, "--hidden", "4")


@pytest.fixture
def at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(*words):
    assert main(["train", *QUICK, *words]) == 0


def folders(at):
    return sorted(path.name for path in (at / "runs").iterdir())


def test_the_repeat_command_works_as_often_as_it_is_pasted(at, capsys):
    trained("--defence", "plain")
    repeat = json.loads((at / "runs/digits-mlp-plain-0/summary.json").read_text())["repeat"]
    for _ in range(2):
        assert main(shlex.split(repeat)[1:]) == 0
    assert folders(at) == ["digits-mlp-plain-0", "digits-mlp-plain-0-2", "digits-mlp-plain-0-3"]
    models = [load_file(at / "runs" / name / "model.safetensors") for name in folders(at)]
    assert all(torch.equal(models[0][name], other[name]) for other in models[1:] for name in models[0])


def test_a_run_repeats_from_its_own_config_json(at, capsys):
    trained("--defence", "plain", "--out", "first", "--clip-norm", "0.5")
    assert main(["train", "first/config.json", "--out", "second"]) == 0
    assert (at / "first/config.json").read_text() == (at / "second/config.json").read_text()
    first, second = (load_file(at / name / "model.safetensors") for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_resume_goes_on_with_the_last_of_the_default_folders(at, capsys):
    for _ in range(2):
        trained("--defence", "plain")
    trained("--defence", "plain", "--epochs", "3", "--resume")
    lengths = [len((at / "runs" / name / "metrics.jsonl").read_text().splitlines()) for name in folders(at)]
    assert lengths[1] == 1.5 * lengths[0]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--resume", "--out", "none"), "none: there is no run to resume.\n  Fix: leave out --resume"),
        (("--resume",), "runs/digits-mlp-veil-0: there is no run to resume"),
        (("run",), "run: this is a folder, not a file.\n  Fix: use run/config.json to repeat the run in it, or"),
        (("torn.json",), "torn.json: invalid JSON"),
        (("list.json",), "list.json: must contain a JSON object, got list"),
    ],
)
def test_what_is_no_run_is_refused_and_nothing_is_made(at, capsys, words, text):
    (at / "run").mkdir()
    (at / "torn.json").write_text("{")
    (at / "list.json").write_text("[]")
    assert main(["train", *QUICK, *words]) == 2
    assert text in capsys.readouterr().err
    assert sorted(path.name for path in at.iterdir()) == ["list.json", "run", "torn.json"]


def test_progress_goes_to_a_log_where_there_is_no_terminal(at, capsys, monkeypatch):
    monkeypatch.setattr("fedveil.cli.show.LOG_INTERVAL", 0.0)
    trained("--defence", "plain", "--out", "run")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len((at / "run/metrics.jsonl").read_text().splitlines())
    assert lines[-1].startswith("100% epoch: 2.0/2, accuracy 0.")


def accuracy(model, data):
    return metrics(predict(model, data.test.inputs), data.test.targets)["accuracy"]


@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_the_last_and_the_best_model_load_in_one_line(tmp_path, network):
    config = config_of(**SMALL | {"batch_size": 5}, epochs=6, model=network, width=4, lr=0.3)
    summary = train(config, tmp_path / "run").to_dict()
    data = load("digits", flat=network == "mlp", train_size=60)
    last, best = fedveil.load_model(str(tmp_path / "run")), fedveil.load_model(tmp_path / "run", best=True)
    assert not last.training
    assert accuracy(last, data) == summary["accuracy"]
    assert accuracy(best, data) == summary["best"]
    assert summary["best"] > summary["accuracy"]  # or the test shows nothing
    assert summary["model"] == str(tmp_path / "run/model.safetensors")
    assert summary["best_model"] == str(tmp_path / "run/best.safetensors")


def test_a_model_of_the_users_own_loads_where_its_code_is_trusted(at, capsys):
    text = "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    (at / "minenet.py").write_text(text)
    assert main(["train", *SHORT, "--model", "minenet:net", "--out", "run", "--defence", "plain"]) == 0
    with pytest.raises(BadArgument, match="refers to code"):
        fedveil.load_model("run")
    loaded = fedveil.load_model("run", trust_code=True)
    other = fedveil.load_model("run", model=import_module("minenet").net())
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), other.parameters(), strict=True))
    sys.modules.pop("minenet")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (
            lambda run: [(run / name).unlink() for name in ("model.safetensors", "checkpoint.pt")],
            "there is no model: the run has no checkpoint yet",
        ),
        (lambda run: (run / "model.safetensors").write_bytes(b"torn"), "is damaged"),
        (shutil.rmtree, r"model\.safetensors: there is no model: there is no such folder"),
        (lambda run: (run / "encoding.json").unlink(), r"encoding\.json is missing in this folder"),
        (
            lambda run: (run / "encoding.json").write_text((run / "encoding.json").read_text().replace("[64]", "[63]")),
            "its values belong to another model",
        ),
        (
            lambda run: (run / "encoding.json").write_text('{"schema": 1}'),
            "it does not contain the shapes of inputs and outputs",
        ),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_with_a_reason(tmp_path, spoil, text):
    train(config_of(**SMALL, epochs=1), tmp_path / "run")
    spoil(tmp_path / "run")
    with pytest.raises(BadArgument, match=text):
        fedveil.load_model(tmp_path / "run")


def test_a_run_is_not_resumed_with_fewer_epochs(tmp_path):
    train(config_of(**SMALL, epochs=3), tmp_path / "run")
    before = (tmp_path / "run/config.json").read_text()
    with pytest.raises(BadArgument, match=r"(?s)has 3 epochs, more than 2.*--epochs 3 or more"):
        train(config_of(**SMALL, epochs=2), tmp_path / "run", resume=True)
    assert (tmp_path / "run/config.json").read_text() == before


def test_a_run_stops_early_with_patience_and_its_page_counts_the_rounds(tmp_path):
    summary = train(config_of(**SMALL, epochs=50, lr=1e-30, patience=2), tmp_path / "run")
    assert summary.rounds == 3 * 2  # of the first epoch and two that are no better
    text = "6 rounds with 2 clients. Stopped early, after 2 evaluations without improvement."
    assert text in (tmp_path / "run/report.html").read_text()


@pytest.mark.parametrize("schedule", ["plateau", "cosine"])
def test_schedules_by_name(tmp_path, schedule):
    train(config_of(**SMALL, epochs=2, schedule=schedule, schedule_every="round"), tmp_path / "run")
    rates = [json.loads(line)["lr"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    falling = [a > b for a, b in itertools.pairwise(rates)]
    assert all(falling) if schedule == "cosine" else not any(falling)
