"""The audit says what holds: the model as received near chance, adaptive attackers near the truth."""

import json

import pytest
from tests.configs import config_of

from fedveil import cli
from fedveil.data import Data
from fedveil.data.records import Part
from fedveil.runs.build import build_federation, load_data
from fedveil.studies.audit.attackers import attacker_table, member_table
from fedveil.studies.audit.members import LOOKS, MemberAttacks, averaged_members
from fedveil.studies.audit.page import verdict
from fedveil.studies.audit.results import Audited, Figures, Guessing, Members, Tried
from fedveil.studies.audit.verdicts import leak, word
from fedveil.studies.estimates import Estimate
from fedveil.studies.jobs import Failed
from fedveil.studies.membership.attacks import ByShadows
from fedveil.studies.membership.records import records_of
from fedveil.studies.victim import observe

FEDERATION = ["--data", "digits", "--train-size", "300", "--clients", "2", "--loss", "squared_error"]
SMALL = [*FEDERATION, "--epochs", "60", "--workers", "1", "--trials", "2", "--no-server"]


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
    assert value(results, "veil", "two broadcasts, no data", "agreement") >= 0.98
    assert value(results, "veil", "six broadcasts, no data", "agreement") >= 0.98
    assert value(results, "veil", "own labels", "agreement") >= 0.95
    assert value(results, "plain", "as published", "agreement") == 1.0
    assert value(results, "dbcl", "sketches stacked", "agreement") > value(results, "dbcl", "as published", "agreement")


def test_membership_follows_the_model_that_the_attacker_has(audited):
    _, results = audited
    undefended, fitted = (
        results[defence]["attackers"][attacker]["membership"]["attacks"]["loss by class"]["auc"]
        for defence, attacker in (("plain", "as published"), ("veil", "own labels"))
    )
    assert abs(fitted["value"] - undefended["value"]) < 0.05
    assert undefended["low"] > 0.5


def test_every_membership_attack_is_measured_and_the_headline_is_chosen_on_known_records(audited):
    folder, results = audited
    names = ["loss", "loss by class", "white-box network", "RMIA"]
    for defence, found in results.items():
        for figures in found["attackers"].values():
            attacks = figures["membership"]["attacks"]
            assert sorted(attacks) == sorted(names)
            assert attacks["loss"]["broadcasts"] == (10 if defence == "veil" else 1)
            assert attacks["white-box network"]["broadcasts"] == (LOOKS if defence == "veil" else 1)
    page = (folder / "report.html").read_text()
    for words in ("Membership, attack by attack", "Attackers", "rebuilds records", *names):
        assert words in page


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
    own = ["--trials", "2", "--workers", "1", "--shadows", "0", "--no-network", "--no-server"]
    assert cli.main(["audit", str(run), *own]) == 0
    printed = capsys.readouterr().out
    assert "undefended" in printed
    assert (run / "audit" / "report.html").exists()
    assert cli.main(["audit", str(run), "--defence", "veil"]) == 2
    assert "a run has its own defence" in capsys.readouterr().err


def point(value):
    return Estimate(value, value, value)


def tried(known, auc, tpr=0.1):
    return Tried(known, point(0.6), point(auc), {"0.01": point(tpr), "0.001": None})


def test_the_attack_is_chosen_on_known_records_and_never_on_the_test():
    found = Members({"loss": tried(known=0.7, auc=0.6), "RMIA": tried(known=0.6, auc=0.9)})
    assert found.attack == "loss"
    assert found.best.auc.value == 0.6


def test_every_attack_is_averaged_over_the_broadcasts_under_which_it_ran():
    first = Members({"loss": tried(0.5, 0.5), "white-box network": tried(0.9, 0.8)}, {"RMIA": "no classes"})
    found = averaged_members([first, Members({"loss": tried(0.7, 0.6)})])
    assert found.attacks["loss"].known == pytest.approx(0.6)
    assert found.attacks["loss"].auc.value == pytest.approx(0.55)
    assert [one.broadcasts for one in found.attacks.values()] == [2, 1]
    assert found.attacks["loss"].tpr["0.001"] is None
    assert found.left_out == {"RMIA": "no classes"}


def test_the_page_says_which_attackers_do_not_apply_and_why():
    view = Figures(point(0.1), membership=Members({"loss": tried(0.5, 0.5)}, {"RMIA": "the targets have no classes"}))
    found = Audited(
        *("accuracy", 1.0, 1.0, 0.0, "a", 10, 1, 1, {"as published": view}, {}, Guessing(0.1)),
        inapplicable={"two rounds": "there is one broadcast"},
        not_rebuilt={"as published": "the first layer is a convolution"},
    )
    assert attacker_table({"a": found, "b": Failed("why")}).rows == [
        ["a", "as published", "attacks the model"],
        ["a", "two rounds", "does not apply: there is one broadcast"],
        ["a", "as published", "rebuilds no records: the first layer is a convolution"],
    ]
    rows = member_table({"a": found}).rows
    assert [row[2] for row in rows] == ["loss *", "RMIA"]
    assert rows[1][3] == "the targets have no classes"
    assert {len(row) for row in rows} == {len(member_table({"a": found}).header)}


def test_without_classes_the_network_and_the_loss_still_attack_and_nothing_is_shadowed(tmp_path):
    config = config_of(data="digits", train_size=120, clients=2, hidden=12, epochs=2)
    whole = load_data(config)
    values = {part: getattr(whole, part) for part in ("train", "test")}
    numbers = {name: Part(part.tensor, part.targets.double().float()[:, None] / 10) for name, part in values.items()}
    data = Data("numbers", numbers["train"], numbers["test"])
    federation = build_federation(config, data)
    attacks = MemberAttacks(records_of(config, data, everyone=True), ByShadows(config, tmp_path, 2, False), True, 0)
    found = attacks.look(observe(federation), 0, False)
    assert set(found.attacks) == {"loss", "white-box network"}
    assert set(found.left_out) == {"loss by class", "RMIA"}
    assert set(attacks.look(observe(federation), LOOKS, False).attacks) == {"loss"}


def test_words_follow_the_figures():
    assert [word(leak(value, 0.1, 1.0)) for value in (0.1, 0.5, 0.99)] == [
        "is nearly protected",
        "is partly protected",
        "is not protected",
    ]
    assert "failed" in verdict("veil", Failed("why"), None)


def test_a_record_counts_as_known_ten_decibels_above_a_guess():
    def found(psnr, **others):
        view = Figures(point(0.1), membership=Members({"loss": Tried(0.5, point(0.5), point(0.5), {})}))
        built = {"as published": point(psnr), "floor": point(35.0), **{name: point(v) for name, v in others.items()}}
        return Audited("accuracy", 1.0, 1.0, 0.0, "a", 10, 1, 20, {"as published": view}, built, Guessing(0.1))

    plain = found(80.0)
    assert "a single record is not protected" in verdict("a", found(46.0), plain)
    for psnr in (40.0, 34.0):
        assert "is not shown to leak, but only the published attack was run" in verdict("a", found(psnr), plain)
    assert "a single record is partly protected" in verdict("a", found(34.0, two=40.0), plain)
