"""What hardens the veil: measures on one federation, their cost in accuracy, and a verdict that follows the figures."""

import json

import pytest

from fedveil.attacks.scores import Estimate
from fedveil.cli.studies import AuditCommand
from fedveil.defences.accountant import epsilon
from fedveil.errors import BadArgument
from fedveil.runs.config import configure
from fedveil.studies.audit import harden
from fedveil.studies.audit.harden import HARDEN, Hardening, MeasureRow, base_values, measure_row, measures, verdict
from fedveil.studies.audit.results import AuditResult, Guessing, Members, ModelFigures
from fedveil.studies.audit.run import AuditOptions
from fedveil.studies.jobs import Failure
from fedveil.studies.membership.attacks import AttackScores
from fedveil.studies.study import gather, publish

TINY = {"train_size": 40, "test_size": 40, "epochs": 1, "hidden": 8}
SOME = ("noise kept over rounds", "no veil at all")


def point(value):
    return Estimate(value, value, value)


def audited(test, **members):
    """An audit in which attackers reach these balanced accuracies."""
    scores = {name: AttackScores(point(value), point(value + 0.01), {}, known=1.0) for name, value in members.items()}
    looks = {name: ModelFigures(point(0.9), membership=Members({"loss": one})) for name, one in scores.items()}
    built = {"a": point(20.0), "b": point(24.0), "floor": point(12.0)}
    return AuditResult("accuracy", 1.0, test, 1.0 - test, "veil", 1, 1, looks, built, Guessing(0.1))


def row(name, membership, cost):
    figures = {harden.MEMBERSHIP: membership, harden.COST: cost if isinstance(cost, Estimate) else point(cost)}
    return MeasureRow(name, "own labels", figures)


def test_the_study_runs_and_shows_every_measure(tmp_path):
    asked = Hardening(base_values(TINY), 2, AuditOptions(1, 1, network=False, shadows=2), SOME)
    results = gather(HARDEN, asked, tmp_path, workers=1)
    assert not [one for found in results.values() for one in found if isinstance(one, Failure)]
    shown = publish(HARDEN, asked, results, tmp_path, "again")
    lines = {line[0]: dict(zip(shown.header, line, strict=True)) for line in shown.rows}
    assert list(lines) == list(SOME)
    assert all("[" in line["accuracy, %"] for line in lines.values())
    assert lines["no veil at all"]["cost, points"] == "0.0"
    kept = json.loads((tmp_path / "results.json").read_text())["results"]["noise kept over rounds"]
    assert "RMIA" in kept[0]["attackers"]["own labels"]["membership"]["attacks"]  # its shadows were found


@pytest.mark.slow
def test_every_measure_can_be_audited(tmp_path):
    asked = Hardening(base_values(TINY), 1, AuditOptions(1, 1, network=False, shadows=0))
    results = gather(HARDEN, asked, tmp_path, workers=1)
    assert not [one for found in results.values() for one in found if isinstance(one, Failure)]


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
        assert 0.999 * budget < epsilon(values["epochs"], values["dp_noise"], values["dp_delta"]) <= budget


def test_costs_are_paired_by_seed_and_the_best_attacker_is_that_of_the_mean():
    seeds = [audited(0.80, x=0.50, y=0.54), audited(0.70, x=0.56, y=0.54)]
    found = measure_row("measure", seeds, [audited(0.81, x=0.6), audited(0.71, x=0.6)])
    cost, membership = found.figures[harden.COST], found.figures[harden.MEMBERSHIP]
    assert cost.value == pytest.approx(0.01)
    assert cost.high - cost.low < 1e-9  # accuracies differ between seeds, their differences do not
    assert (found.attacker, membership.value) == ("y", pytest.approx(0.54))  # the mean of maxima would be 0.55
    assert found.figures["membership AUC"].value == pytest.approx(0.55)
    assert [found.figures[name].value for name in ("rebuilt, dB", "guess, dB")] == [24.0, 12.0]


BARE = row("no veil at all", point(0.9), 0.0)
DEAR, WEAK = row("dear", point(0.5), 0.1), row("weak", point(0.8), 0.0)


@pytest.mark.parametrize(
    ("rows", "label", "named"),
    [
        ([row("good", Estimate(0.515, 0.511, 0.519), 0.004)], "GOOD ENOUGH", "good (membership 51.5 [51.1"),
        ([row("open", Estimate(0.515, 0.49, 0.54), 0.004)], "TOO FEW SEEDS", "open (membership"),
        ([row("open", Estimate(0.53, 0.51, 0.55), 0.0)], "TOO FEW SEEDS", "open (membership"),
        ([row("open", point(0.5), Estimate(0.004, -0.01, 0.018))], "TOO FEW SEEDS", "open (membership"),
        ([row("better", point(0.53), 0.005)], "NONE GOOD ENOUGH", "best at that cost: better (membership 53.0 %"),
    ],
)
def test_the_verdict_names_the_measures_that_hold_the_attacker_cheaply(rows, label, named):
    said = verdict([BARE, *rows, DEAR, WEAK])
    assert said.startswith(label)
    assert named in said
    assert "dear" not in said
    assert "weak" not in said
    assert verdict([BARE, *rows, row("good", point(0.51), 0.001)]).startswith("GOOD ENOUGH")


def test_there_is_no_verdict_where_nothing_could_be_found():
    assert "within the limit" in verdict([row("no veil at all", point(0.51), 0.0), row("a", point(0.5), 0.0)])
    for rows in ([row("no veil at all", None, 0.0), row("a", None, 0.0)], [BARE]):
        assert "was not measured" in verdict(rows)


def test_flags_choose_the_federation_and_those_that_are_measured_are_refused():
    assert base_values({})["data"] == "digits"
    assert base_values({"data": "cifar10", "epochs": 3})["epochs"] == 3
    assert base_values({"data": "cifar10"})["train_size"] == 1000
    assert "train_size" not in base_values({"data": "bank"})
    with pytest.raises(BadArgument, match="it measures several --weight-decay"):
        AuditCommand.parse("fedveil audit", ["--harden", "--weight-decay", "0.1"]).run()
