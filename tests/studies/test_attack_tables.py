"""Tables 3 and 4 over seeds: planted results against arithmetic by hand, and jobs that resume seed by seed."""

import dataclasses
import json

import pytest

from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.scores import Estimate
from fedveil.studies.inversion.results import Counts, Inversion, InversionFigures, SuccessRate
from fedveil.studies.jobs import Failure
from fedveil.studies.membership.attacks import Attacker, AttackScores, Membership
from fedveil.studies.membership.run import MEMBERSHIP
from fedveil.studies.paper.attack_tables import MEMBERSHIP_KIND, attack_graph, present_table3, present_table4
from fedveil.studies.paper.plan import read_plan
from fedveil.studies.paper.reproduce import EXHIBITS, has_failure
from fedveil.studies.study import run_graph


def attack_plan(name, **changed):
    plan = read_plan(name, "quick")
    settings = plan.settings.model_copy(update={"defences": ["plain", "veil"]} | changed)
    return dataclasses.replace(plan, settings=settings)


def membership(seed, successes):
    """Planted: each attacker's success, on all layers. Its choice is a point more; accuracy is 0.8 + seed / 10."""
    found = {}
    for name, value in successes.items():
        scored = AttackScores(Estimate(value, value - 0.25, value + 0.25), Estimate(0.5, 0.5, 0.5), {}, value + 0.01)
        found[name] = Attacker("V-out", dict.fromkeys(("last", "second", "third", "three"), scored))
    quality = ("accuracy", 1.0, 0.8 + seed / 10, 0.2 - seed / 10)
    return Membership(*quality, "veil", seed, {}, found)


def planted(seeds=(0.5, 0.6, 0.7), **others):
    plain = {seed: membership(seed, {PUBLISHED: value + 0.2}) for seed, value in enumerate(seeds)}
    veil = {
        seed: membership(seed, {PUBLISHED: value} | {name: values[seed] for name, values in others.items()})
        for seed, value in enumerate(seeds)
    }
    return {"digits": {"plain": plain, "veil": veil}}


def rows_of(shown, measure, defence):
    rows = [dict(zip(shown.header, row, strict=True)) for row in shown.rows]
    return {row["attacker"]: row for row in rows if row["measure"] == measure and row["defence"] == defence}


def test_cells_chart_and_summary_are_means_over_seeds():
    """By hand: 0.5, 0.6, 0.7 have mean 0.6 and deviation 0.1; Student's 0.975 quantile at 2 degrees is 4.302653."""
    results = planted(first=[0.7, 0.8, 0.9], second=[0.8, 0.9, 1.0])
    shown = present_table3(attack_plan("table3", seeds=3), results)
    half = 10 * 4.302653 / 3**0.5
    rows = rows_of(shown, "ASR, last layer", "veil")
    assert list(rows) == [PUBLISHED, "first", "second"]
    assert rows[PUBLISHED]["ours"] == f"60.0 [{60 - half:.1f}, {60 + half:.1f}]"
    assert rows[PUBLISHED]["ours, its choice"] == f"61.0 [{61 - half:.1f}, {61 + half:.1f}]"
    assert rows["second"]["ours"] == f"90.0 [{90 - half:.1f}, 100.0]"
    assert [row["paper"] == "50.24" for row in rows.values()] == [True, False, False]
    [accuracy] = rows_of(shown, "accuracy", "veil").values()
    assert accuracy["ours"] == f"90.0 [{90 - half:.1f}, 100.0]"
    marks = {(mark.group, mark.name): mark for mark in shown.sections[0].rows}
    found = marks["digits, veil", f"ours, {PUBLISHED}"]
    assert (found.value, found.low, found.high) == pytest.approx((60, 60 - half, 60 + half))
    [(_, theirs, ours)] = shown.headline
    assert theirs == "plain 77.56, veil 49.93"
    assert ours == "plain 80.0, veil 60.0, by an adaptive attacker (second) 90.0"
    single = rows_of(present_table3(attack_plan("table3"), planted([0.6])), "ASR, last three", "veil")[PUBLISHED]
    assert (single["ours"], single["ours, its choice"]) == ("60.0 [35.0, 85.0]", "61.0")  # interval over records


def test_missing_seeds_of_an_attacker_are_counted_and_failed_ones_named():
    plan, results = attack_plan("table3", seeds=3), planted(some=[0.7, 0.8, 0.9])
    del results["digits"]["veil"][1].attackers["some"]
    results["digits"]["plain"][2] = Failure("no memory")
    shown = present_table3(plan, results)
    assert rows_of(shown, "ASR, last layer", "veil")["some"]["ours"].endswith("(2 of 3 seeds)")
    assert [row["ours"] for row in rows_of(shown, "ASR, last layer", "plain").values()] == ["failed: seed 2: no memory"]
    assert not shown.headline
    plain = json.loads(json.dumps(MEMBERSHIP_KIND.dump_python(results, mode="json")))
    assert has_failure(plain)
    assert MEMBERSHIP_KIND.validate_python(plain) == results


def test_distances_and_limits_of_table_4_are_means_over_seeds():
    def judged(value, far):
        return SuccessRate(value, 0.0, 1.0, 1, 2, far, 100 * far)

    def inverted(seed):
        one = InversionFigures("V-out", judged(0.5, 1.0 + seed), judged(1.0, 3.0), judged(1.0, 1.0))
        limits = judged(0.1 * seed, 1.0), judged(1.0, 1.0)
        return Inversion("plain", seed, 1.0, 0.9, ["a", "b"], Counts(1, 1, 1, 1), {PUBLISHED: one}, *limits)

    results = {"digits": {"plain": {seed: inverted(seed) for seed in range(3)}}}
    shown = present_table4(attack_plan("table4", seeds=3, defences=["plain"]), results)
    row = rows_of(shown, "feature distance", "plain")[PUBLISHED]
    assert (row["ours, self-judged"], row["ours"]) == ("3", "2.000 [0.000, 4.484]")  # 2 + 4.302653 / sqrt(3)
    assert rows_of(shown, "ASR", "plain")[PUBLISHED]["ours"] == "50.0"
    assert "without any model 10.0 [0.0, 34.8], held-out real images 100.0, guessing 50.0." in shown.note


def test_more_seeds_resume_from_the_first(tmp_path):
    group = {"data": "digits", "train_size": 40, "test_size": 40, "clients": 2, "model": "cnn", "width": 2, "epochs": 1}
    attack = {"shadows": 0, "full": False, "attack_epochs": 1}

    def run(seeds):
        plan, said = attack_plan("table3", seeds=seeds, defences=["plain"], runs=[group], attack=attack), {}
        graph, show = attack_graph(MEMBERSHIP, plan, tmp_path), lambda name, _, what: said.setdefault(name, what)
        return run_graph(graph, tmp_path, workers=1, show=show)["digits"]["plain"], said

    alone, before = run(1)
    both, after = run(2)
    assert both[0] == alone[0]
    assert [both[seed].seed for seed in both] == [0, 1]
    assert both[0].attackers != both[1].attackers
    assert {name for name, what in after.items() if what == "kept"} == set(before)
    assert set(after) - set(before) == {"membership-digits-1-train-plain", "membership-digits-1-membership-plain"}


def test_jobs_of_seeds_have_different_names_and_figure_4_has_those_of_the_first(tmp_path):
    plan = attack_plan("table4", seeds=3)
    names = [job.name for job in EXHIBITS["table4"].graph(plan, tmp_path).jobs]
    assert len(names) == len(set(names)) == 3 * 6  # generator, evaluator, two trained and two attacked federations
    assert {job.name for job in EXHIBITS["fig4"].graph(plan, tmp_path).jobs} == set(names[:6])
