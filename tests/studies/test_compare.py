"""`fedveil compare`: one table and one page for several defences."""

import json

import pytest

from fedveil import cli
from fedveil.defences.registry import BUILT_IN
from fedveil.errors import BadArgument
from fedveil.studies.compare import check_defences

DEFENCES = tuple(record.name for record in BUILT_IN)


def test_every_defence_runs_and_the_veil_is_as_near_to_plain_as_rounding(tmp_path, capsys):
    flags = ["--epochs", "2", "--hidden", "10", "--clients", "3", "--loss", "cross_entropy", "--seeds", "2", "--json"]
    flags += ["--workers", "1"]  # in this process, whose secrets are seeded
    names = ",".join(("plain", "baseline", *DEFENCES[1:]))
    assert cli.main(["compare", *flags, "--defences", names, "--out", str(tmp_path)]) == 0
    rows = {row["defence"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == names.split(",")
    far = {name: float(rows[name]["difference from plain"]) for name in ("veil", "baseline")}
    assert far["veil"] <= 3 * max(1 / 359, far["baseline"])  # 359 test records
    size = {name: int(row["bytes per client and round"].replace(",", "")) for name, row in rows.items()}
    assert size["dbcl"] < size["plain"] < size["veil"]
    assert size["ppdl"] < size["plain"] == size["spn"] == size["baseline"]
    found = json.loads((tmp_path / "results.json").read_text())["results"]
    assert {name: len(runs) for name, runs in found.items()} == dict.fromkeys(rows, 2)


def test_a_run_that_diverges_is_shown_as_failed(tmp_path, capsys):
    flags = ["--epochs", "3", "--optimizer", "sgd", "--lr", "1e6", "--hidden", "10", "--seeds", "1"]
    assert cli.main(["compare", *flags, "--defences", "plain", "--out", str(tmp_path)]) == 0
    assert "failed with seed 0" in capsys.readouterr().out
    assert "diverged" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("names", "why"),
    [("plain veils", "there is no defence 'veils'"), ("veil veil", "is given twice"), ("", "no defence is given")],
)
def test_unknown_repeated_and_missing_names_are_refused(names, why):
    with pytest.raises(BadArgument, match=why):
        check_defences(names.split(), DEFENCES, "--defences")
