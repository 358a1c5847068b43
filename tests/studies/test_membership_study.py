"""`fedveil attack membership`: who is a member, what is stored, what is printed."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from tests.configs import config_of

from fedveil.attacks.scores import Estimate
from fedveil.data import Data
from fedveil.data.dataset import DataPart
from fedveil.errors import BadArgument
from fedveil.progress import ignore_progress
from fedveil.runs.build import build_federation, load_data
from fedveil.studies.attack import AttackRequest
from fedveil.studies.audit.run import SUITE
from fedveil.studies.federations import observe
from fedveil.studies.jobs import Failure
from fedveil.studies.membership import attacks
from fedveil.studies.membership.attacks import divide_records
from fedveil.studies.membership.run import MEMBERSHIP, MembershipOptions, judge_attackers
from fedveil.studies.study import gather, publish
from fedveil.studies.verdicts import Label

CONFIG = config_of(data="digits", train_size=120, clients=2, hidden=12, epochs=3)
QUICK = MembershipOptions(shadows=2, lira=True, attack_epochs=3)


def test_members_and_others_are_disjoint_and_the_test_is_balanced():
    data = load_data(CONFIG)
    records, members = divide_records(CONFIG, data), len(data.train.inputs)
    every = np.concatenate(records.parts)
    assert len(set(every.tolist())) == len(every)
    assert len(records.test_members) == len(records.test_nonmembers)
    assert all((part < members).all() for part in (records.known_members, records.test_members))
    assert all((part >= members).all() for part in (records.known_nonmembers, records.test_nonmembers))
    assert torch.equal(records.pool.inputs[:members], data.train.inputs)
    assert all(map(np.array_equal, records.parts, divide_records(CONFIG, data).parts))


def test_a_held_out_record_that_equals_a_member_is_left_out():
    inputs = torch.arange(40.0).reshape(20, 2)
    test = torch.cat([inputs[:5], 100 + inputs[:7]])
    parts = DataPart(inputs, torch.arange(20) % 2), DataPart(test, torch.arange(12) % 2)
    data = Data("made", *parts, classes=("a", "b"))
    records = divide_records(CONFIG.changed(train_size=None), data)
    assert sorted(records.pool.inputs[20:, 0].tolist()) == sorted((100 + inputs[:7, 0]).tolist())
    with pytest.raises(BadArgument, match="no other client to attack"):
        divide_records(CONFIG.changed(clients=1), data)


def test_plain_and_veil_share_shadows_and_others_have_their_own(tmp_path):
    def shadows(count, *defences):
        asked = AttackRequest(CONFIG, defences, dataclasses.replace(QUICK, shadows=count))
        return MEMBERSHIP.shared_jobs(asked, tmp_path)

    jobs = shadows(2, "plain", "veil", "dbcl")
    assert [job.name for job in jobs] == [f"shadow-{kind}-{k}" for kind in ("plain", "dbcl") for k in range(2)]
    assert len({repr(job.task) for job in jobs}) == len(jobs)
    assert shadows(0, "plain") == []
    with pytest.raises(BadArgument, match="must be even"):
        shadows(3, "plain")
    assert all(job.task.everyone for job in attacks.shadow_jobs(CONFIG, ["veil"], 2, tmp_path, everyone=True))


def attacked(folder, config=CONFIG, options=QUICK, defences=("plain",)):
    asked = AttackRequest(config, tuple(defences), options)
    return publish(MEMBERSHIP, asked, gather(MEMBERSHIP, asked, folder, workers=1), folder, "again")


def stored(folder, defence="plain"):
    return json.loads((folder / "results.json").read_text(), parse_constant=pytest.fail)["results"][defence]


def test_every_attack_runs_on_every_defence_and_is_stored(tmp_path):
    every = {name: ["as published"] for name in ("plain", "veil", "ppdl", "dbcl", "spn")}
    every["veil"] += ["two broadcasts, no data", "own labels"]
    every["dbcl"] += ["sketches stacked"]
    names = {"last", "second", "third", "three", "full", "loss", "loss by class", "RMIA", "LiRA"}
    first = attacked(tmp_path, defences=every)
    for defence, attackers in every.items():
        found = stored(tmp_path, defence)
        assert list(found["attackers"]) == attackers
        assert found["gap"] == pytest.approx(found["train"] - found["test"])
        for attacker in found["attackers"].values():
            assert set(attacker["attacks"]) == names
            for attack in attacker["attacks"].values():
                for figure in (attack["accuracy"], attack["auc"]):
                    assert 0 <= figure["low"] <= figure["value"] <= figure["high"] <= 1
                assert attack["tpr"] == {"0.01": None, "0.001": None}  # too few records
    assert [row[0] for row in first.rows] == [name for name, attackers in every.items() for _ in attackers]
    assert "ROC: RMIA" in (tmp_path / "report.html").read_text()
    assert len(list(tmp_path.rglob("*.npz"))) == 2 * 4


def test_a_missing_shadow_makes_a_failed_attack_and_not_a_smaller_one(tmp_path):
    attacked(tmp_path)
    (tmp_path / "shadows" / "plain-1.npz").unlink()
    (tmp_path / "jobs" / "membership-plain.json").unlink()
    attacked(tmp_path)
    found = stored(tmp_path)["attackers"]["as published"]["attacks"]
    assert "plain-1.npz" in found["RMIA"]["failed"]
    assert "failed" in (tmp_path / "report.html").read_text()


def test_a_signal_below_chance_is_found_by_its_side_on_known_records():
    chance = np.random.default_rng(0)
    parts = {name: chance.normal(size=300) for name in ("victims", "fresh", "own", "known")}
    for effect in (-1.0, 1.0):
        moved = {name: part + effect * (name in ("victims", "own")) for name, part in parts.items()}
        found = attacks.measure(*moved.values(), form="x")
        assert found.turned == (effect < 0)
        assert min(found.auc.low, found.known.low) > 0.7
        assert found.accuracy.low > 0.6
        assert found.form == "x"
    # the test records do not choose the side
    wrong = attacks.measure(parts["victims"] - 1, parts["fresh"], parts["own"] + 1, parts["known"])
    assert not wrong.turned
    assert wrong.auc.high < 0.5


def test_choosing_the_side_on_known_records_finds_nothing_where_nothing_is():
    """The side is independent of the test records, so intervals keep their coverage."""
    trials = 400
    found = [attacks.measure(*np.random.default_rng(seed).normal(size=(4, 60))).auc for seed in range(trials)]
    spread = math.sqrt(0.95 * 0.05 / trials)
    assert sum(0.5 in one for one in found) / trials >= 0.95 - 3 * spread
    mean = np.mean([one.value for one in found])
    assert abs(mean - 0.5) < 4 * math.sqrt(121 / (12 * 60 * 60) / trials)  # variance of an AUC without a signal


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_squared_error_on_digits_leaks_more_through_losses_than_the_loss_threshold_shows(seed, tmp_path):
    """The federation of the audit's suite: two shadows, and most probabilities of its model round to 1."""
    config = config_of(**SUITE["digits, 2 clients"], defence="plain", seed=seed)
    data = load_data(config)
    records = divide_records(config, data, everyone=True)
    federation = build_federation(config, data)
    federation.fit(config.training.epochs)
    for number in range(2):
        work = attacks.TrainShadow(config, number, 2, tmp_path, everyone=True, matched=True)
        work(ignore_progress, None)
    observed = observe(federation)
    found = attacks.RecordAttacks(records, attacks.ShadowAttacks(config.defence.name, tmp_path, 2, False), None).run(
        observed, True, ignore_progress
    )
    assert found["RMIA"].form.startswith("exp(")
    assert found["RMIA"].known.value > found["loss"].known.value
    assert found["RMIA"].auc.value > found["loss"].auc.value
    assert found["RMIA"].auc.low > 0.7


def membership(**aucs):
    """A membership attack in which attackers have these AUCs."""
    scored = {name: attacks.AttackScores(auc, auc, {"0.01": None, "0.001": None}) for name, auc in aucs.items()}
    found = {name: attacks.AttackerResults({"three": one, "x": Failure("")}) for name, one in scored.items()}
    return attacks.Membership("accuracy", 1.0, 0.8, 0.2, "veil", 0, {}, found)


def test_the_strongest_attack_is_judged_beside_chance():
    results = {
        "plain": membership(published=Estimate(0.7, 0.68, 0.72)),
        "veil": membership(published=Estimate(0.51, 0.49, 0.53), own=Estimate(0.40, 0.38, 0.43)),
        "ppdl": membership(published=Estimate(0.51, 0.3, 0.7)),
    }
    verdicts = judge_attackers(results)
    labels = {"plain": Label.LEAK, "veil": Label.PARTIAL, "ppdl": Label.TOO_FEW}
    assert {name: one.label for name, one in verdicts.items()} == labels
    assert verdicts["veil"].strongest.is_below_guess
    shown = MEMBERSHIP.present(AttackRequest(CONFIG, tuple(results), QUICK), results)
    assert shown.verdict.startswith("Membership: LEAK (no defence 0.70)")
