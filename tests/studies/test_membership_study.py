"""`fedveil attack membership`: who is a member, what is kept, what is printed."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.configs import config_of

from fedveil.cli import main
from fedveil.data import Data
from fedveil.data.dataset import Part
from fedveil.errors import BadArgument
from fedveil.runs.build import load_data
from fedveil.studies.attack import AttackRequest
from fedveil.studies.estimates import Estimate
from fedveil.studies.jobs import Failed
from fedveil.studies.membership.page import judge_attackers
from fedveil.studies.membership.records import divide_records, shadow_jobs, shadow_members
from fedveil.studies.membership.results import Attacker, AttackScores, Membership, Sizes
from fedveil.studies.membership.run import MEMBERSHIP, MembershipOptions
from fedveil.studies.study import gather, publish
from fedveil.studies.verdicts import Label

CONFIG = config_of(data="digits", train_size=120, clients=2, hidden=12, epochs=3)
QUICK = MembershipOptions(shadows=2, lira=True, attack_epochs=3)


def test_members_and_non_members_are_told_apart_and_tests_are_balanced():
    data = load_data(CONFIG)
    records = divide_records(CONFIG, data)
    parts = [records.own, records.known, records.victims, records.fresh]
    every = np.concatenate(parts)
    assert len(set(every.tolist())) == len(every)
    assert len(records.victims) == len(records.fresh)
    members = len(data.train.inputs)
    assert (records.own < members).all()
    assert (records.victims < members).all()
    assert (records.known >= members).all()
    assert (records.fresh >= members).all()
    assert len(records.pool.inputs) <= 2 * members
    assert torch.equal(records.pool.inputs[:members], data.train.inputs)
    again = divide_records(CONFIG, data)
    assert all(np.array_equal(getattr(records, n), getattr(again, n)) for n in ("own", "known", "victims", "fresh"))


def test_a_held_out_record_that_equals_a_member_is_no_non_member():
    inputs = torch.arange(40.0).reshape(20, 2)
    test = torch.cat([inputs[:5], 100 + inputs[:7]])
    data = Data("made", Part(inputs, torch.arange(20) % 2), Part(test, torch.arange(12) % 2), classes=("a", "b"))
    records = divide_records(CONFIG.changed(train_size=None), data)
    others = records.pool.inputs[20:]
    assert sorted(others[:, 0].tolist()) == sorted((100 + inputs[:7, 0]).tolist())
    with pytest.raises(BadArgument, match="no other client to learn about"):
        divide_records(CONFIG.changed(clients=1), data)


def test_plain_and_veil_share_shadows_and_others_have_their_own(tmp_path):
    def shadows(count, *defences):
        asked = AttackRequest(CONFIG, defences, dataclasses.replace(QUICK, shadows=count))
        return MEMBERSHIP.shared(asked, tmp_path)

    jobs = shadows(2, "plain", "veil", "dbcl")
    assert [job.name for job in jobs] == [f"shadow-{kind}-{k}" for kind in ("plain", "dbcl") for k in range(2)]
    assert len({repr(job.work) for job in jobs}) == len(jobs)
    assert shadows(0, "plain") == []
    with pytest.raises(BadArgument, match="in pairs"):
        shadows(3, "plain")
    every = shadow_jobs(CONFIG, ["veil"], 2, tmp_path, everyone=True)
    assert all(job.work.everyone for job in every)
    first, second = shadow_members(CONFIG, 10, 2)
    assert (first != second).all()


def attacked(folder, config=CONFIG, options=QUICK, defences=("plain",)):
    asked = AttackRequest(config, tuple(defences), options)
    return publish(MEMBERSHIP, asked, gather(MEMBERSHIP, asked, folder, workers=1), folder, "again")


def finite(value):
    json.loads(json.dumps(value), parse_constant=lambda name: pytest.fail(f"{name} in the results"))


def test_it_attacks_every_defence_prints_table_3_and_goes_on(tmp_path):
    defences = ["plain", "veil", "ppdl", "dbcl", "spn"]
    first = attacked(tmp_path, defences=defences)
    found = json.loads((tmp_path / "results.json").read_text())["results"]
    finite(found)
    names = {"last", "second", "third", "three", "full", "loss", "loss by class", "RMIA", "LiRA online", "LiRA offline"}
    every = {name: ["as published"] for name in defences} | {
        "veil": ["as published", "two broadcasts, no data", "own labels"],
        "dbcl": ["as published", "sketches stacked"],
    }
    assert {name: list(found[name]["attackers"]) for name in defences} == every
    for defence, attacker in [(d, found[d]["attackers"][who]) for d, whole in every.items() for who in whole]:
        assert attacker["view"] == "V-out"
        assert set(attacker["attacks"]) == names
        for attack in attacker["attacks"].values():
            for figure in (attack["accuracy"], attack["auc"]):
                assert 0 <= figure["low"] <= figure["value"] <= figure["high"] <= 1
            assert attack["tpr"] == {"0.01": None, "0.001": None}  # too few records
        assert found[defence]["gap"] == pytest.approx(found[defence]["train"] - found[defence]["test"])
    assert [row[0] for row in first.rows] == ["plain", "veil", "veil", "veil", "ppdl", "dbcl", "dbcl", "spn"]
    assert first.header[3] == "train-test gap"
    page = (tmp_path / "report.html").read_text()
    assert "ROC: RMIA" in page
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.np[yz]")}
    again = attacked(tmp_path, defences=defences)
    assert again.rows == first.rows
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.np[yz]")}


def test_the_command_line_attacks_a_run_and_says_how_to_repeat_it(tmp_path, capsys):
    flags = ["--data", "digits", "--train-size", "120", "--clients", "2", "--hidden", "12", "--epochs", "2"]
    run, own = tmp_path / "run", ["--shadows", "0", "--attack-epochs", "2", "--no-full", "--workers", "1"]
    assert main(["train", *flags, "--defence", "plain", "--out", str(run)]) == 0
    assert main(["attack", "membership", "--run", str(run), *own]) == 0
    out = capsys.readouterr().out
    assert "plain    V-out, as published" in out
    assert f"--run {run} --shadows 0 --no-full" in out
    found = json.loads((run / "attack-membership" / "results.json").read_text())["results"]["plain"]
    names = {"last", "second", "third", "three", "loss", "loss by class"}
    assert set(found["attackers"]["as published"]["attacks"]) == names
    own += ["--model", "mlp", "--defence", "plain", "--out", str(run / "b")]
    assert main(["attack", "membership", *flags, *own]) == 0
    assert "--data digits" in capsys.readouterr().out


def test_a_shadow_that_is_missing_is_a_failed_attack_and_not_a_smaller_one(tmp_path):
    attacked(tmp_path)
    (tmp_path / "shadows" / "plain-1.npy").unlink()
    (tmp_path / "jobs" / "membership-plain.json").unlink()
    attacked(tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())["results"]["plain"]["attackers"]["as published"]
    assert "plain-1.npy" in found["attacks"]["RMIA"]["failed"]
    assert "failed" in (tmp_path / "report.html").read_text()


def membership(**aucs):
    """A membership attack in which attackers have these AUCs."""
    scored = {name: AttackScores(auc, auc, {"0.01": None, "0.001": None}) for name, auc in aucs.items()}
    found = {name.replace("_", " "): Attacker("V-out", {"three": one, "x": Failed("")}) for name, one in scored.items()}
    return Membership("accuracy", 1.0, 0.8, 0.2, "veil", 0, Sizes(1, 1, 1, 1), found)


def test_the_strongest_attack_is_judged_beside_chance():
    results = {
        "plain": membership(as_published=Estimate(0.7, 0.68, 0.72)),
        "veil": membership(as_published=Estimate(0.51, 0.49, 0.53), own_labels=Estimate(0.40, 0.38, 0.43)),
        "ppdl": membership(as_published=Estimate(0.51, 0.3, 0.7)),
        "spn": Failed("why"),
    }
    verdicts = judge_attackers(results)
    labels = {"plain": Label.LEAK, "veil": Label.PARTIAL, "ppdl": Label.TOO_FEW}
    assert {name: one.label for name, one in verdicts.items()} == labels
    assert verdicts["veil"].strongest.below
    shown = MEMBERSHIP.present(AttackRequest(CONFIG, tuple(results), QUICK), results)
    assert shown.title == "Attack: membership on digits, mlp"
    assert shown.verdict.startswith("Membership: LEAK (no defence 0.70)")
    assert [row[:2] for row in shown.rows][-1] == ["spn", "failed"]


REAL = Path(os.environ.get("FEDVEIL_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")


@pytest.mark.slow
def test_an_overfitted_plain_federation_on_cifar10_gives_its_members_away(tmp_path, monkeypatch):
    if not (REAL / "cifar10").is_dir():
        pytest.skip(f"no cifar10 in {REAL}")
    monkeypatch.setenv("FEDVEIL_DATA", str(REAL))
    config = config_of(**{**MEMBERSHIP.defaults, "train_size": 2000, "test_size": 2000})
    attacked(tmp_path, config, MembershipOptions(shadows=0, attack_epochs=30))
    found = json.loads((tmp_path / "results.json").read_text())["results"]["plain"]
    assert found["train"] >= 0.95
    attacks = found["attackers"]["as published"]["attacks"]
    assert attacks["full"]["accuracy"]["low"] > 0.6
    assert attacks["loss"]["accuracy"]["low"] > 0.6
