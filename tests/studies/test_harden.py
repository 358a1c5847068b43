"""What hardens the veil: measures on one federation, their cost in accuracy, and a verdict that follows the figures."""

import dataclasses
import json
import math

import pytest

from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.registry import ATTACKERS
from fedveil.cli.studies import Audit
from fedveil.defences.accountant import epsilon
from fedveil.errors import BadArgument
from fedveil.runs.config import configure
from fedveil.studies.audit import harden
from fedveil.studies.audit.harden import (
    HARDEN,
    Hardening,
    MeasureRow,
    base_values,
    largest_mean,
    measure_row,
    measures,
    verdict,
)
from fedveil.studies.audit.results import AuditResult, Guessing, MemberAttack, Members, ModelFigures
from fedveil.studies.audit.run import AuditOptions
from fedveil.studies.estimates import Estimate
from fedveil.studies.jobs import Failed
from fedveil.studies.study import gather, publish

TINY = {"train_size": 40, "test_size": 40, "epochs": 1, "hidden": 8}
COSTS = Estimate(0.004, -0.01, 0.018)
SOME = ("noise kept over rounds", "no veil at all")


def point(value):
    return Estimate(value, value, value)


def figures(value):
    return MemberAttack(point(value), point(value + 0.01), {}, 1.0)


def audited(test, **members):
    """An audit in which attackers reach these balanced accuracies."""
    looks = {
        name: ModelFigures(point(0.9), membership=Members({"loss": figures(value)})) for name, value in members.items()
    }
    built = {"a": point(20.0), "b": point(24.0), "floor": point(12.0)}
    return AuditResult("accuracy", 1.0, test, 1.0 - test, "veil", 10, 1, 1, looks, built, Guessing(0.1))


def row(name, membership, cost):
    return MeasureRow(name, point(0.9), point(cost), {}, "own labels", membership, None, None, None)


def test_the_study_runs_and_shows_every_measure(tmp_path):
    asked = Hardening(base_values(TINY), 2, AuditOptions(1, 1, network=False, shadows=2), SOME)
    results = gather(HARDEN, asked, tmp_path, workers=1)
    assert not [one for found in results.values() for one in found if isinstance(one, Failed)]
    shown = publish(HARDEN, asked, results, tmp_path, "again")
    lines = {line[0]: dict(zip(shown.header, line, strict=True)) for line in shown.rows}
    assert list(lines) == list(SOME)
    assert all("[" in line["accuracy, %"] for line in lines.values())
    assert lines["no veil at all"]["cost, points"] == "0.0"
    assert {f"agreement {name}, %" for name in (PUBLISHED, *ATTACKERS["veil"].models)} <= set(shown.header)
    assert (tmp_path / "report.html").exists()
    kept = json.loads((tmp_path / "results.json").read_text())["results"]["noise kept over rounds"]
    assert "RMIA" in kept[0]["attackers"]["own labels"]["membership"]["attacks"]  # its shadows were found


@pytest.mark.slow
def test_every_measure_can_be_audited(tmp_path):
    results = gather(
        HARDEN, Hardening(base_values(TINY), 1, AuditOptions(1, 1, network=False, shadows=0)), tmp_path, workers=1
    )
    assert not [one for found in results.values() for one in found if isinstance(one, Failed)]


def test_every_measure_is_a_configuration_that_changes_something():
    for data in ("digits", "cifar10", "bank"):
        base = base_values({"data": data})
        configs = [configure({"defence": "veil", **base, **changes}) for changes in measures(base).values()]
        assert len(set(map(repr, configs))) == len(configs)
        assert {config.training.loss for config in configs} == set(harden.UNDEFENDED)


def test_measures_that_differ_by_the_veil_only_share_their_shadows(tmp_path):
    jobs = HARDEN.audits(Hardening(seeds=2), tmp_path)
    assert jobs["noise kept over rounds", 1].after == jobs["no veil at all", 1].after
    assert jobs["noise kept over rounds", 1].after != jobs["no veil at all", 0].after
    assert jobs["weight decay 0.01", 0].after != jobs["no veil at all", 0].after
    assert jobs["cross-entropy, 7 decoys", 0].after == jobs["no veil at all, cross-entropy", 0].after
    names = [job.name for job in HARDEN.graph(Hardening(seeds=2), tmp_path).jobs]
    assert len(names) == len(set(names))


def test_noise_spends_the_budget_that_the_measure_names_and_hardly_less():
    for budget in harden.UNIT_NOISE:
        values = harden.private(budget)
        spent = epsilon(values["epochs"], values["dp_noise"], values["dp_delta"])
        assert 0.999 * budget < spent <= budget
        assert math.isclose(values["dp_noise"], harden.UNIT_NOISE[budget] * math.sqrt(harden.DP_ROUNDS))


def test_costs_are_paired_by_seed_and_the_best_attacker_is_that_of_the_mean():
    seeds = [audited(0.80, x=0.50, y=0.54), audited(0.70, x=0.56, y=0.54)]
    plain = [audited(0.81, x=0.6), audited(0.71, x=0.6)]
    found = measure_row("measure", seeds, plain)
    assert found.cost.value == pytest.approx(0.01)
    assert found.cost.high - found.cost.low < 1e-9  # accuracies differ between seeds, their differences do not
    assert (found.attacker, found.membership.value) == ("y", pytest.approx(0.54))  # of each seed: 0.55
    assert found.auc.value == pytest.approx(0.55)
    assert (found.rebuilt.value, found.floor.value) == (24.0, 12.0)
    assert largest_mean({"nothing": []}) == ("", None)


BARE = row("no veil at all", point(0.9), 0.0)
DEAR, WEAK = row("dear", point(0.5), 0.1), row("weak", point(0.8), 0.0)


def test_the_verdict_names_the_measures_that_hold_the_attacker_cheaply():
    said = verdict([BARE, row("good", Estimate(0.515, 0.511, 0.519), 0.004), DEAR, WEAK])
    assert said.startswith(
        "GOOD ENOUGH (membership at most 52 %, cost at most 0.5 points): good (membership 51.5 [51.1"
    )
    assert "dear" not in said
    assert "weak" not in said


@pytest.mark.parametrize(
    ("membership", "cost"),
    [(Estimate(0.515, 0.49, 0.54), point(0.004)), (Estimate(0.53, 0.51, 0.55), point(0.0)), (point(0.5), COSTS)],
)
def test_an_interval_that_holds_its_limit_leaves_the_verdict_open(membership, cost):
    rows = [BARE, dataclasses.replace(row("open", membership, 0.0), cost=cost), DEAR, WEAK]
    assert verdict(rows).startswith("TOO FEW SEEDS")
    assert "open (membership" in verdict(rows)
    assert "weak" not in verdict(rows)
    assert verdict([*rows, row("good", point(0.51), 0.001)]).startswith("GOOD ENOUGH")


def test_the_verdict_says_that_none_does_and_what_comes_nearest():
    said = verdict([BARE, WEAK, row("better", point(0.53), 0.005), DEAR])
    assert said.startswith("NONE GOOD ENOUGH")
    assert "best at that cost: better (membership 53.0 %, cost 0.5 points); cheapest with that membership: dear" in said
    assert "cheapest" not in verdict([BARE, WEAK])


def test_there_is_no_verdict_where_nothing_could_be_found():
    assert "within the limit" in verdict([row("no veil at all", point(0.51), 0.0), row("a", point(0.5), 0.0)])
    assert "was not measured" in verdict([row("no veil at all", None, 0.0), row("a", None, 0.0)])
    assert "was not measured" in verdict([BARE])


def test_flags_choose_the_federation_and_those_that_are_measured_are_refused():
    assert base_values({})["data"] == "digits"
    assert base_values({"data": "cifar10", "epochs": 3})["epochs"] == 3
    assert base_values({"data": "cifar10"})["train_size"] == 1000
    assert "train_size" not in base_values({"data": "bank"})
    words = ["--harden", "--data", "cifar10", "--epochs", "3", "--trials", "1"]
    found = Audit.read("fedveil audit", words, "")
    assert {"data", "epochs", "trials"} <= set(found.given)
    with pytest.raises(BadArgument, match="it measures several --weight-decay"):
        Audit.read("fedveil audit", ["--harden", "--weight-decay", "0.1"], "")()
