"""What hardens the veil: measures on one federation, their cost in accuracy, and a verdict that follows the figures."""

import dataclasses
import json
import math

import pytest

from fedveil.attacks.observed import PUBLISHED
from fedveil.cli.studies import AuditCommand
from fedveil.defences.accountant import epsilon
from fedveil.defences.registry import find
from fedveil.errors import BadArgument
from fedveil.runs.config import configure
from fedveil.studies.audit import harden
from fedveil.studies.audit.harden import HARDEN, Hardening, Row, base_of, best_of, measures, one_line, row_of, verdict
from fedveil.studies.audit.results import Audited, Figures, Guessing, Members, Tried
from fedveil.studies.audit.run import Options
from fedveil.studies.estimates import Estimate
from fedveil.studies.jobs import Failed
from fedveil.studies.study import gather, publish

TINY = {"train_size": 40, "test_size": 40, "epochs": 1, "hidden": 8}
COSTS = Estimate(0.004, -0.01, 0.018)
SOME = ("noise kept over rounds", "no veil at all")


def point(value):
    return Estimate(value, value, value)


def audited(test, **members):
    """An audit in which attackers reach these balanced accuracies."""
    looks = {
        name: Figures(point(0.9), membership=Members({"loss": Tried(1.0, point(value), point(value + 0.01), {})}))
        for name, value in members.items()
    }
    built = {"a": point(20.0), "b": point(24.0), "floor": point(12.0)}
    return Audited("accuracy", 1.0, test, 1.0 - test, "veil", 10, 1, 1, looks, built, Guessing(0.1))


def row(name, membership, cost):
    return Row(name, point(0.9), point(cost), {}, "own labels", membership, None, None, None)


def test_the_study_runs_and_shows_every_measure(tmp_path):
    asked = Hardening(base_of(TINY), 2, Options(1, 1, network=False, shadows=2), SOME)
    results = gather(HARDEN, asked, tmp_path, workers=1)
    assert not [one for found in results.values() for one in found if isinstance(one, Failed)]
    shown = publish(HARDEN, asked, results, tmp_path, "again")
    lines = {line[0]: dict(zip(shown.header, line, strict=True)) for line in shown.rows}
    assert list(lines) == list(SOME)
    assert all("[" in line["accuracy, %"] for line in lines.values())
    assert lines["no veil at all"]["cost, points"] == "0.0"
    assert {f"agreement {name}, %" for name in (PUBLISHED, *find("veil").attackers)} <= set(shown.header)
    assert (tmp_path / "report.html").read_text().index("Verdict") > 0
    kept = json.loads((tmp_path / "results.json").read_text())["results"]["noise kept over rounds"]
    assert "RMIA" in kept[0]["attackers"]["own labels"]["membership"]["attacks"]  # its shadows were found


@pytest.mark.slow
def test_every_measure_can_be_audited(tmp_path):
    results = gather(HARDEN, Hardening(base_of(TINY), 1, Options(1, 1, network=False, shadows=0)), tmp_path, workers=1)
    assert not [one for found in results.values() for one in found if isinstance(one, Failed)]


def test_every_measure_is_a_configuration_that_changes_something():
    for data in ("digits", "cifar10", "bank"):
        base = base_of({"data": data})
        configs = [configure({"defence": "veil", **base, **changes}) for changes in measures(base).values()]
        assert len(set(map(repr, configs))) == len(configs)
        assert {config.training.loss for config in configs} == set(harden.UNDEFENDED)


def test_measures_that_differ_by_the_veil_only_share_their_shadows(tmp_path):
    jobs = HARDEN.audits(Hardening(seeds=2), tmp_path)
    assert jobs["noise kept over rounds", 1].after == jobs["no veil at all", 1].after
    assert jobs["noise kept over rounds", 1].after != jobs["no veil at all", 0].after
    assert jobs["weight decay 0.01", 0].after != jobs["no veil at all", 0].after
    assert jobs["cross-entropy, 7 decoys", 0].after == jobs["no veil at all, cross-entropy", 0].after
    names = [job.name for job in HARDEN.jobs(Hardening(seeds=2), tmp_path)]
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
    found = row_of("measure", seeds, plain)
    assert found.cost.value == pytest.approx(0.01)
    assert found.cost.high - found.cost.low < 1e-9  # accuracies differ between seeds, their differences do not
    assert (found.attacker, found.membership.value) == ("y", pytest.approx(0.54))  # of each seed: 0.55
    assert found.auc.value == pytest.approx(0.55)
    assert (found.rebuilt.value, found.floor.value) == (24.0, 12.0)
    assert best_of({"nothing": []}) == ("", None)


def test_the_verdict_names_the_measures_that_hold_the_attacker_cheaply():
    bare = row("no veil at all", point(0.9), 0.0)
    narrow = Estimate(0.515, 0.511, 0.519)
    said = verdict([bare, row("good", narrow, 0.004), row("dear", point(0.5), 0.1), row("weak", point(0.8), 0.0)])
    assert said.startswith("good (membership 51.5 [51.1, 51.9] %, cost 0.4 points): holds the best")
    assert "dear" not in said
    assert "weak" not in said


@pytest.mark.parametrize(
    ("membership", "cost"),
    [(Estimate(0.515, 0.49, 0.54), point(0.004)), (Estimate(0.53, 0.51, 0.55), point(0.0)), (point(0.5), COSTS)],
)
def test_an_interval_that_holds_its_limit_leaves_the_verdict_open(membership, cost):
    bare = row("no veil at all", point(0.9), 0.0)
    open_one = dataclasses.replace(row("open", membership, 0.0), cost=cost)
    rows = [bare, open_one, row("dear", point(0.5), 0.1), row("weak", point(0.8), 0.0)]
    assert verdict(rows).startswith("There are too few seeds to tell which setting holds the best membership attacker")
    assert "perhaps open (membership" in verdict(rows)
    assert "weak" not in verdict(rows)
    assert one_line(rows).startswith("Too few seeds to tell if open holds the best membership attacker to 52 % for 0.5")
    good = row("good", point(0.51), 0.001)
    assert "At least one setting holds" in one_line([*rows, good])


def test_the_verdict_says_that_none_does_and_what_comes_nearest():
    bare = row("no veil at all", point(0.9), 0.0)
    said = verdict(
        [bare, row("weak", point(0.8), 0.0), row("better", point(0.53), 0.005), row("dear", point(0.5), 0.1)]
    )
    assert said.startswith("No setting holds the best membership attacker to 52 % at a cost of at most 0.5 points")
    assert "The best at that cost is better (membership 53.0 %" in said
    assert "is dear (membership 50.0 %, cost 10.0 points)" in said
    assert "None holds" in verdict([bare, row("weak", point(0.8), 0.0)])


def test_there_is_no_verdict_where_nothing_could_be_found():
    assert "no more than asked" in verdict([row("no veil at all", point(0.51), 0.0), row("a", point(0.5), 0.0)])
    assert "was not measured" in verdict([row("no veil at all", None, 0.0), row("a", None, 0.0)])


def test_flags_choose_the_federation_and_those_that_are_measured_are_refused():
    assert base_of({})["data"] == "digits"
    assert base_of({"data": "cifar10", "epochs": 3})["epochs"] == 3
    assert base_of({"data": "cifar10"})["train_size"] == 1000
    assert "train_size" not in base_of({"data": "bank"})
    words = ["--harden", "--data", "cifar10", "--epochs", "3", "--trials", "1"]
    found = AuditCommand.parse("fedveil audit", words)
    assert {"data", "epochs", "trials"} <= set(found.given)
    with pytest.raises(BadArgument, match="it measures several --weight-decay"):
        AuditCommand.parse("fedveil audit", ["--harden", "--weight-decay", "0.1"]).run()
