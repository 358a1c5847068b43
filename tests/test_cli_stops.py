"""`fedveil train` that is stopped says which round is saved and how to resume it, and that command does so."""

import json
import os
import shlex
import signal

import pytest
from tests.configs import config_of
from tests.small import SMALL
from torch import nn

from fedveil.cli import main
from fedveil.defences.plain import PlainRound
from fedveil.federation import checkpoint
from fedveil.runs.config import flags_of
from fedveil.runs.folder import train

FLAGS = shlex.split(flags_of({**SMALL, "data": "digits", "epochs": 4, "layers": 2}))
PER_EPOCH = 2  # rounds


@pytest.fixture(autouse=True)
def harmless():
    """A SIGTERM that nobody waits for fails a test, and does not end all of them."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


class Signalled:
    """Sends this process a signal, or several, when it is called so often."""

    def __init__(self, number, *signals):
        self.left, self.signals, self.real = number, signals, PlainRound.recover

    def __call__(self, defence, updates, weights):
        self.left -= 1
        if not self.left:
            for each in self.signals:
                os.kill(os.getpid(), each)
        return self.real(defence, updates, weights)


def stopped(monkeypatch, words, number, *signals):
    called = Signalled(number, *signals)
    with monkeypatch.context() as patch:
        patch.setattr(PlainRound, "recover", lambda *given: called(*given))
        return main(["train", *words])


def rounds_in(folder):
    return [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


CASES = {
    "SIGTERM": ((signal.SIGTERM,), 143),
    "SIGTERM twice": ((signal.SIGTERM, signal.SIGTERM), 143),
    "SIGINT": ((signal.SIGINT,), 130),
}


@pytest.mark.parametrize("case", CASES)
def test_a_signal_saves_the_round_and_prints_the_command_that_resumes(tmp_path, monkeypatch, capsys, case):
    (signals, code), folder = CASES[case], tmp_path / "a run"
    before = signal.getsignal(signal.SIGTERM)
    assert stopped(monkeypatch, [*FLAGS, "--out", str(folder)], 6, *signals) == code
    assert signal.getsignal(signal.SIGTERM) == before
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedveil: ")]
    command = shlex.join(["fedveil", "train", "--resume", "--out", str(folder)])
    assert line == f"fedveil: stopped; round 5 is saved, and this resumes after it: {command}"
    assert checkpoint.load(folder / "checkpoint.pt")["round"] == 5
    assert main(shlex.split(command)[1:]) == 0
    assert rounds_in(folder) == list(range(1, 4 * PER_EPOCH + 1))


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 10))


def test_the_command_trusts_code_that_the_user_has_named(tmp_path, monkeypatch, capsys):
    words = ["--defence", "plain", "--train-size", "60", "--model", "tests.test_cli_stops:network", "--clients", "2"]
    assert stopped(monkeypatch, [*words, "--epochs", "2", "--out", str(tmp_path)], 2, signal.SIGTERM) == 143
    command = capsys.readouterr().err.rpartition("this resumes after it: ")[2]
    assert main(shlex.split(command)[1:]) == 0
    assert command.strip().endswith("--trust-code")


def test_resume_takes_the_configuration_of_the_folder_and_compares_the_flags_that_are_given(tmp_path, capsys):
    train(config_of(**SMALL, epochs=1), tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    out = ["--resume", "--out", str(tmp_path)]
    assert main(["train", *out]) == 0
    assert json.loads((tmp_path / "config.json").read_text()) == before
    assert main(["train", *out, "--epochs", "3", "--clients", "2"]) == 0
    assert rounds_in(tmp_path) == list(range(1, 3 * PER_EPOCH + 1))
    capsys.readouterr()
    for words, told in {
        ("--hidden", "5"): ("the run here has hidden = 4, not 5", "leave out --hidden"),
        ("--batch-size", "7"): ("the run here has batch_size = 15, not 7", "leave out --batch-size"),
        ("--epochs", "2"): ("the run here has 3 epochs, more than 2", "--epochs 3 or more"),
    }.items():
        assert main(["train", *out, *words]) == 2
        said = capsys.readouterr().err
        assert all(text in said for text in told), said
    assert main(["train", "--resume", "--out", str(tmp_path / "nothing")]) == 2
    assert "there is no run to go on with" in capsys.readouterr().err
