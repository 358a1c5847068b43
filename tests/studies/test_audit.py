"""The audit says what holds: the model as received near chance, adaptive attackers near the truth."""

import json

import pytest

from fedveil import cli
from fedveil.studies.audit import harden as hardening
from fedveil.studies.audit.page import leak, verdict, word
from fedveil.studies.audit.results import Audited, Figures, Members
from fedveil.studies.estimates import Estimate
from fedveil.studies.jobs import Failed
from fedveil.studies.study import gather, publish

FEDERATION = ["--data", "digits", "--train-size", "300", "--clients", "2"]
SMALL = [*FEDERATION, "--epochs", "60", "--workers", "1", "--trials", "2"]


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    arguments = ["audit", *SMALL, "--groups", "10", "--defence", "plain,veil,dbcl", "--out", str(folder)]
    assert cli.main(arguments) == 0
    return folder, json.loads((folder / "results.json").read_text())["results"]


def value(results, defence, attacker, name):
    return results[defence]["attackers"][attacker][name]["value"]


def test_an_adaptive_attacker_has_the_model_and_a_published_one_has_nothing(audited):
    _, results = audited
    assert value(results, "veil", "as published", "agreement") < 0.35  # one in ten on average over secrets
    assert results["veil"]["broadcasts"] == 10
    assert value(results, "veil", "offset removed", "agreement") >= 0.9
    assert value(results, "veil", "own labels", "agreement") >= 0.95
    assert value(results, "plain", "as published", "agreement") == 1.0
    assert value(results, "dbcl", "sketches stacked", "agreement") > value(results, "dbcl", "as published", "agreement")


def test_membership_follows_the_model_that_the_attacker_has(audited):
    _, results = audited
    undefended = results["plain"]["attackers"]["as published"]["membership"]["auc"]
    fitted = results["veil"]["attackers"]["own labels"]["membership"]["auc"]
    assert abs(fitted["value"] - undefended["value"]) < 0.05
    assert undefended["low"] > 0.5


def test_records_are_rebuilt_from_veiled_broadcasts_too(audited):
    _, results = audited
    built = results["veil"]["rebuilt"]
    assert built["two broadcasts, own records"]["value"] > built["floor"]["value"]
    assert built["as published"]["value"] < built["two broadcasts, own records"]["value"]
    assert results["plain"]["rebuilt"]["as published"]["value"] > 40


def test_the_page_and_the_verdict_tell_both(audited, capsys):
    folder, _ = audited
    page = (folder / "report.html").read_text()
    assert "Verdict" in page
    assert page.index("Verdict") < page.index("Result")
    assert "is not protected" in page
    assert "as published" in page
    assert cli.main(["audit", *SMALL, "--groups", "10", "--defence", "plain,veil,dbcl", "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "veil: the model is not protected" in printed
    assert "published attacks reach" in printed
    assert "--data digits" in printed.rpartition("repeat: fedveil audit ")[2]


def test_a_run_s_folder_is_audited_beside_an_undefended_one(tmp_path, capsys):
    run = tmp_path / "run"
    assert cli.main(["train", *FEDERATION, "--epochs", "20", "--defence", "veil", "--out", str(run)]) == 0
    assert cli.main(["audit", str(run), "--trials", "2", "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "undefended" in printed
    assert (run / "audit" / "report.html").exists()
    assert cli.main(["audit", str(run), "--defence", "veil"]) == 2
    assert "a run has its own defence" in capsys.readouterr().err


def test_hardening_measures_are_compared_over_seeds(tmp_path, monkeypatch):
    few = {name: hardening.MEASURES[name] for name in ("as it is: m = 10", "m = 1", "whole shards, 150 rounds")}
    monkeypatch.setattr(hardening, "MEASURES", few)
    asked = hardening.Hardening(2, 2, {**hardening.BASE, "epochs": 10, "train_size": 200})
    results = gather(hardening.HARDEN, asked, tmp_path, workers=1)
    shown = publish(hardening.HARDEN, asked, results, tmp_path, "again")
    assert [row[0] for row in shown.rows] == [*few, "guessing"]
    assert all("[" in cell for row in shown.rows[:-1] for cell in row[1:])
    assert (tmp_path / "report.html").exists()


def test_words_follow_the_figures():
    assert [word(leak(value, 0.1, 1.0)) for value in (0.1, 0.5, 0.99)] == [
        "is protected",
        "is partly protected",
        "is not protected",
    ]
    assert "failed" in verdict("veil", Failed("why"), None)


def test_a_record_counts_as_known_ten_decibels_above_a_guess():
    def found(psnr, **others):
        def point(value):
            return Estimate(value, value, value)

        view = Figures(point(0.1), membership=Members("loss", point(0.5), point(0.5), {}))
        built = {"as published": point(psnr), "floor": point(35.0), **{name: point(v) for name, v in others.items()}}
        return Audited("accuracy", 1.0, 1.0, 0.0, "a", 10, 1, 1, {"as published": view}, built)

    plain = found(80.0)
    assert "a single record is not protected" in verdict("a", found(46.0), plain)
    for psnr in (40.0, 34.0):
        assert "is not shown to leak, but only the published attack was run" in verdict("a", found(psnr), plain)
    assert "a single record is partly protected" in verdict("a", found(34.0, two=40.0), plain)
