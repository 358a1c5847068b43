"""`fedveil audit --epsilon`: the measured epsilon of a run, in the terminal and on a page."""

import json
import re

import pytest

from fedveil import cli
from fedveil.runs.settings import configure
from fedveil.studies.jobs import Failure
from fedveil.studies.measured_epsilon import EPSILON

TRAIN = ["train", "--data", "digits", "--defence", "veil", "--hidden", "5", "--layers", "1", "--train-size", "100"]


def test_the_epsilon_of_a_run_is_printed_and_written(tmp_path, capsys):
    run = tmp_path / "run"
    assert cli.main([*TRAIN, "--epsilon", "3", "--rate", "0.5", "--epochs", "2", "--out", str(run)]) == 0
    assert cli.main(["audit", str(run), "--epsilon"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"Epsilon: claimed 3\.00, measured at least [01]\.\d\d \(95 %\)\.", out)
    found = json.loads((run / "epsilon" / "results.json").read_text())["results"]["measured"]
    assert (found["guesses"], found["canaries"]) == (1500, 3000)
    assert "not a proof" in (run / "epsilon" / "report.html").read_text()


@pytest.mark.parametrize(
    ("flags", "why"),
    [([], "no differential privacy"), (["--epsilon", "3", "--unit", "client"], "protects clients")],
)
def test_a_configuration_without_privacy_for_records_is_refused(flags, why, tmp_path, capsys):
    words = ["audit", "--data", "digits", "--defence", "plain", *flags, "--measure-epsilon", "--out", str(tmp_path)]
    assert cli.main(words) != 0
    shown = capsys.readouterr().err
    assert why in shown
    assert "Fix: pass --" in shown


def test_a_failure_is_shown():
    assert EPSILON.present(configure({}), Failure("no memory")).verdict == "Failed: no memory"
