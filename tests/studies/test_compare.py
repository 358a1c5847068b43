"""`fedveil compare`: one table and one page for several defences."""

import json

import pytest
from tests.configs import config_of

from fedveil import cli
from fedveil.errors import BadArgument
from fedveil.runs.folder import train
from fedveil.studies.compare import DEFENCES, check_defences

ALL = DEFENCES


def test_every_defence_runs_and_the_veil_is_as_near_to_plain_as_rounding(tmp_path, capsys):
    flags = ["--epochs", "2", "--hidden", "10", "--clients", "3", "--loss", "cross_entropy", "--seeds", "2", "--json"]
    flags += ["--workers", "1"]  # in this process, whose secrets are seeded
    names = ",".join(("plain", "baseline", *ALL[1:]))
    assert cli.main(["compare", *flags, "--defences", names, "--out", str(tmp_path)]) == 0
    rows = {row["defence"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == names.split(",")
    sample = 1 / 359  # the test records of digits
    assert float(rows["veil"]["difference from plain"]) <= 3 * max(
        sample, float(rows["baseline"]["difference from plain"])
    )
    size = {name: int(row["bytes per client and round"].replace(",", "")) for name, row in rows.items()}
    assert size["dbcl"] < size["plain"] < size["veil"]
    assert size["ppdl"] < size["plain"] == size["spn"] == size["baseline"]
    found = json.loads((tmp_path / "results.json").read_text())["results"]
    assert {name: len(runs) for name, runs in found.items()} == dict.fromkeys(rows, 2)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "jobs").iterdir()}
    assert cli.main(["compare", *flags, "--defences", names, "--out", str(tmp_path)]) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "jobs").iterdir()} == before  # it resumes


def test_a_run_that_diverges_is_shown_as_failed(tmp_path, capsys):
    flags = ["--epochs", "3", "--optimizer", "sgd", "--lr", "1e6", "--hidden", "10", "--seeds", "1"]
    flags += ["--defences", "plain"]
    assert cli.main(["compare", *flags, "--out", str(tmp_path)]) == 0
    assert "failed with seed 0" in capsys.readouterr().out
    assert "diverged" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["plain", "veils"], "there is no defence 'veils'"),
        (["veil", "veil"], "is given twice"),
        ([], "no defence is named"),
    ],
)
def test_names_that_make_no_sense_are_refused(names, text):
    with pytest.raises(BadArgument, match=text):
        check_defences(names, ALL, "--defences")


@pytest.mark.parametrize("defence", ALL)
@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet8"])
def test_train_takes_every_defence_and_resumes(tmp_path, defence, model):
    settings = {"hidden": 10, "width": 4, "clients": 2, "loss": "cross_entropy", "defence": defence, "model": model}
    short = config_of(epochs=1, batch_size=256, **settings)
    train(short, tmp_path)
    summary = train(config_of(epochs=2, batch_size=256, **settings), tmp_path, resume=True)
    assert summary.rounds == 6
    assert 0 <= summary.metrics["accuracy"] <= 1


def test_a_checkpoint_of_another_defence_is_refused(tmp_path):
    from tests.federation.test_engine import net, parts, sgd

    from fedveil.federation import Federation

    Federation(net(), parts(), "plain", sgd).fit(rounds=1, folder=tmp_path)
    with pytest.raises(BadArgument, match="the checkpoint is of defence 'plain', not 'dbcl'"):
        Federation(net(), parts(), "dbcl", sgd).resume(tmp_path)
