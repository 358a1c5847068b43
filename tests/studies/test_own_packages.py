"""A defence and an attack of a user's own package take part by one command each."""

import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from fedveil import Federation
from fedveil.attacks.registry import GENERIC
from fedveil.cli import main
from fedveil.defences import registry
from fedveil.lookup import imported
from fedveil.models import mlp

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_defence"

DEFENCE = '''
"""A defence of our own: plain training whose gradients are rounded to few bits."""

import dataclasses

from fedveil.defences import Plain


class Coarse(Plain):
    """Gradients rounded to `steps` parts of their largest entry."""

    def __init__(self, steps=64):
        super().__init__()
        self.name, self.steps = "coarse", steps

    def upload(self, update, client=0):
        """Round."""
        rounded = {}
        for name, gradient in update.gradients.items():
            unit = gradient.abs().amax().clamp(min=1e-30) / self.steps
            rounded[name] = (gradient / unit).round() * unit
        return dataclasses.replace(update, gradients=rounded)
'''
ATTACK = '''
"""An attack of our own: how often the model's most likely class is the majority's."""

from dataclasses import dataclass
from pathlib import Path

from fedveil.federation.evaluate import predict
from fedveil.runs.config import Config
from fedveil.studies.attack import AttackStudy, option
from fedveil.studies.jobs import Failed, Result
from fedveil.studies.study import Shown
from fedveil.studies.federations import load_or_train
from fedveil.studies.observation import observe


@dataclass(frozen=True)
class Options:
    """Our own flags."""

    label: int = option(3, "the class to look for")


@dataclass(frozen=True)
class Counted(Result):
    """How often a class is answered."""

    share: float


@dataclass(frozen=True)
class Count:
    """Look at the last broadcast."""

    config: Config
    label: int
    run: Path

    def __call__(self, progress, done):
        """Count."""
        federation, data = load_or_train(self.config, self.run, progress)
        answers = predict(observe(federation).model, data.test.tensor).argmax(1)
        return Counted(float((answers == self.label).double().mean()))


class CountStudy(AttackStudy[Options, Counted]):
    """How often one class is answered."""

    name = "count"
    summary = "how often the model that a client receives answers one class"
    options = Options
    result = Counted
    defaults = {"data": "digits", "epochs": 1, "hidden": 8}

    def attack(self, asked, defence, folder):
        """See `Count`."""
        return Count(asked.config_for(defence), asked.options.label, self.run_folder(asked, defence, folder))

    def show(self, asked, results):
        """One row per defence."""
        rows = [[name, "failed" if isinstance(r, Failed) else f"{r.share:.3f}"] for name, r in results.items()]
        return Shown("", "", ["defence", "share"], rows, "The share of held-out records.", [])
'''


def forget(package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


@pytest.fixture
def example(monkeypatch):
    """The package of examples/own_defence, as if it were installed."""
    monkeypatch.syspath_prepend(EXAMPLE / "src")
    monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))
    yield tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]["fedveil.defences"]
    forget("own_defence")


@pytest.fixture
def own(tmp_path, monkeypatch):
    package = tmp_path / "own_package"
    package.mkdir()
    monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))
    (package / "__init__.py").write_text("")
    (package / "defences.py").write_text(DEFENCE)
    (package / "attacks.py").write_text(ATTACK)
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    forget("own_package")


SMALL = [
    "--data",
    "digits",
    "--train-size",
    "120",
    "--clients",
    "2",
    "--epochs",
    "2",
    "--hidden",
    "8",
    "--workers",
    "1",
]


def test_a_defence_of_one_s_own_is_audited_by_one_command(own, tmp_path, capsys):
    spec, out = "own_package.defences:Coarse", tmp_path / "out"
    words = ["audit", *SMALL, "--defence", spec, "--trials", "2", "--no-server", "--out", str(out)]
    words += ["--lr", "0.02", "--batch-size", "4"]  # a model that always gives the same answer has nothing to find
    assert main(words) == 0, capsys.readouterr().err
    found = json.loads((out / "results.json").read_text())["results"]
    assert set(found) == {spec, "undefended"}
    assert set(found[spec]["attackers"]) == {"as published", *GENERIC}
    assert set(found["undefended"]["attackers"]) == {"as published"}
    assert found[spec]["attackers"]["as published"]["agreement"]["value"] == 1.0
    assert f"{spec}, the model: LEAK" in capsys.readouterr().out


def agreement(folder, defence, attacker):
    return json.loads((folder / "results.json").read_text())["results"][defence]["attackers"][attacker]["agreement"]


def test_the_example_looks_safe_to_published_attacks_and_falls_to_a_generic_one(example, tmp_path, capsys):
    spec, own = example["shifted"], ["outputs centred"]
    flags = ["--data", "digits", "--train-size", "300", "--clients", "2", "--epochs", "30", "--workers", "1"]
    flags += ["--loss", "squared_error", "--settings", "size=1000.0", "--trials", "1", "--no-server"]
    words = ["audit", *flags, "--defence", spec, "--out", str(tmp_path)]
    assert main(words) == 0, capsys.readouterr().err
    printed, page = " ".join(capsys.readouterr().out.split()), (tmp_path / "report.html").read_text()
    assert agreement(tmp_path, spec, "as published")["high"] < 0.5  # one class or two, whatever the record
    for attacker in ["outputs calibrated", *own]:
        assert agreement(tmp_path, spec, attacker)["value"] > 0.9
    for attacker in ["as published", *GENERIC, *own]:
        assert attacker in page
    assert f"{spec}, the model: LEAK: agreement" in printed
    assert "as published" in printed


def steps_of(defence):
    chance = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 5, generator=chance), torch.randn(8, 3, generator=chance)) for _ in range(2)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mlp(5, 3, hidden=4)
    run = Federation(model, data, defence, lambda p: torch.optim.SGD(p, 1e-2), batch_size=4, whole_shard=True)
    run.fit(rounds=3)
    return torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()


def test_the_example_s_server_has_the_true_gradient(example):
    record = imported(example["shifted"], "a defence", "")
    torch.testing.assert_close(*(steps_of(name) for name in ("plain", record.target)), rtol=1e-3, atol=1e-5)


def test_its_settings_are_flags_and_it_trains(own, tmp_path, capsys):
    flags = [*SMALL[:-2], "--defence", "own_package.defences:Coarse", "--settings", "steps=2"]
    assert main(["train", *flags, "--out", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    assert main(["train", *flags[:-1], "stairs=2", "--out", str(tmp_path / "other")]) == 2
    assert "stairs" in capsys.readouterr().err


def test_an_attack_of_one_s_own_runs_by_one_command(own, tmp_path, capsys):
    words = ["attack", "own_package.attacks:CountStudy", *SMALL, "--defence", "plain,veil", "--label", "1", "--json"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    rows = json.loads(capsys.readouterr().out)
    assert [row["defence"] for row in rows] == ["plain", "veil"]
    assert all(0 <= float(row["share"]) <= 1 for row in rows)
    assert "how often the model" in (tmp_path / "out" / "report.html").read_text().lower()
