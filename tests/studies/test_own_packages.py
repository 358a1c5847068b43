"""A defence of a user's own package takes part by one command."""

import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from tests.small import federation

from fedveil.attacks.registry import GENERIC_ATTACKERS
from fedveil.cli import main
from fedveil.defences import registry
from fedveil.lookup import import_object

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_defence"

SMALL = ["--data", "digits", "--train-size", "120", "--clients", "2", "--epochs", "2", "--hidden", "8"]


@pytest.fixture
def example(monkeypatch):
    """The package of examples/own_defence, as if it were installed."""
    monkeypatch.syspath_prepend(EXAMPLE / "src")
    monkeypatch.setattr(registry, "_RECORDS", dict(registry._RECORDS))
    yield tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]["fedveil.defences"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_defence"]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_example_looks_safe_to_published_attacks_and_falls_to_a_generic_one(example, tmp_path, capsys):
    spec = example["shifted"]
    flags = ["--data", "digits", "--train-size", "300", "--clients", "2", "--epochs", "30", "--workers", "1"]
    flags += ["--loss", "squared_error", "--settings", "size=1000.0", "--trials", "1", "--no-server"]
    assert main(["audit", *flags, "--defence", spec, "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "results.json").read_text())["results"][spec]["attackers"]
    assert set(found) == {"as published", *GENERIC_ATTACKERS, "outputs centred"}
    assert found["as published"]["agreement"]["high"] < 0.5  # one class or two, whatever the record
    for attacker in ("outputs calibrated", "outputs centred"):
        assert found[attacker]["agreement"]["value"] > 0.9
    assert f"{spec}, the model: LEAK: agreement" in " ".join(capsys.readouterr().out.split())
    assert main(["train", *SMALL, "--defence", spec, "--settings", "stairs=2", "--out", str(tmp_path / "run")]) == 2
    assert "stairs" in capsys.readouterr().err


def test_the_server_of_the_example_has_the_true_gradient(example):
    record, models = import_object(example["shifted"], "a defence", ""), []
    for defence in ("plain", record.target):
        run = federation(defence, lambda parameters: torch.optim.SGD(parameters, 1e-2), whole_shard=True)
        run.fit(rounds=3)
        models.append(torch.nn.utils.parameters_to_vector(run.model.parameters()).detach())
    torch.testing.assert_close(*models, rtol=1e-3, atol=1e-5)
