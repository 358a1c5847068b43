"""`fedveil attack poisoning` from end to end, on digits."""

import json

import pytest
from tests.configs import config_of

from fedveil.federation.aggregators import RULES
from fedveil.federation.limits import Limits
from fedveil.runs.build import build_limits
from fedveil.studies import poisoning
from fedveil.studies.attack import AttackRequest
from fedveil.studies.jobs import Failure
from fedveil.studies.poisoning import BOUNDED, HONEST, POISONING, UNLIMITED, LimitOutcomes, Poisoning, PoisoningOptions
from fedveil.studies.study import gather, publish

SMALL = {**POISONING.defaults, "defence": "plain", "train_size": 200, "hidden": 10}


def attacked(folder, options, defences=("plain",), **changes):
    asked = AttackRequest(config_of(**{**SMALL, **changes}), defences, options)
    results = gather(POISONING, asked, folder, workers=1)
    return results, publish(POISONING, asked, results, folder, "again")


def test_every_attack_has_a_row_under_both_defences(tmp_path):
    options = PoisoningOptions("sign-flip,overflow,buffers", "none", rounds=2)
    _, shown = attacked(tmp_path, options, ("plain", "veil"))
    rows = {(row[0], row[1]): dict(zip(shown.header, row, strict=True)) for row in shown.rows}
    assert list(rows) == [(defence, name) for defence in ("plain", "veil") for name in options.attack_names()]
    assert rows["veil", "overflow"][shown.header[-1]] == "2/2, 0"
    assert rows["plain", HONEST][shown.header[-1]] == "0/0, 0"
    assert rows["plain", "buffers"][UNLIMITED] == "does not apply: the model has no buffers"
    for name in (UNLIMITED, BOUNDED):
        for attack in (HONEST, "sign-flip"):  # the noise changes nothing but rounding
            assert rows["plain", attack][name] == rows["veil", attack][name]
    json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)


def test_a_run_that_ends_early_is_a_result_with_a_reason(tmp_path):
    results, shown = attacked(tmp_path, PoisoningOptions("sign-flip", "none", rounds=2), max_norm=1e-9)
    (found,) = results["plain"].outcomes("sign-flip", BOUNDED)
    assert (found.accuracy, found.rounds) == (None, 0)
    assert "no valid reply after 1 attempt: client 0: refused: its gradient has norm" in found.ended
    assert [row[shown.header.index(BOUNDED)] for row in shown.rows] == ["ended", "ended"]
    (text,) = [section for section in shown.sections if section.title == "Runs that ended early"]
    assert text.paragraphs[1].startswith("plain, sign-flip, bounds: round 0: no valid reply")


def test_refused_updates_of_honest_clients_are_counted_separately(tmp_path):
    options = PoisoningOptions(attacks="square-overflow", rules="none", rounds=2)
    results, _ = attacked(tmp_path, options, norm_factor=1.0)  # a bound so tight that honest updates are refused, too
    (honest,), (poisoned,) = (results["plain"].outcomes(name, BOUNDED) for name in (HONEST, "square-overflow"))
    assert honest.refused == 0 < honest.refused_honest
    assert poisoned.refused == 2
    assert poisoned.refused_honest > 0


def run(accuracy, refused=0, refused_honest=0):
    return poisoning.RunOutcome(accuracy, "" if accuracy else "it ended", 50, refused, refused_honest)


def test_cells_are_means_over_seeds_and_count_runs_that_ended_early():
    assert poisoning.LimitFigures("plain", "x", UNLIMITED, [run(0.80), run(0.88)]).cell() == "84.0"
    assert poisoning.LimitFigures("plain", "x", UNLIMITED, [run(None), run(0.88)]).cell() == "88.0 (1 of 2 ended)"
    both = [
        LimitOutcomes({UNLIMITED: run(value), BOUNDED: run(0.9, refused=50, refused_honest=1)})
        for value in (0.90, 0.94)
    ]
    found = Poisoning({HONEST: both, "overflow": both, "buffers": [Failure("it broke"), both[0]]})
    assert poisoning.show({"plain": found}, [UNLIMITED, BOUNDED], 2).rows == [
        ["plain", "honest", "92.0", "90.0", "100/0, 2"],
        ["plain", "overflow", "92.0", "90.0", "100/200, 2"],
        ["plain", "buffers", "failed: it broke", "", ""],
    ]


def test_the_verdict_is_that_of_the_worst_attack_under_the_defence_that_suffers_most():
    limits = [UNLIMITED, BOUNDED, "median"]

    def poisoned(**attacks):
        runs = {HONEST: [0.95] * 3, **attacks}
        endings = {name: LimitOutcomes(dict(zip(limits, map(run, own), strict=True))) for name, own in runs.items()}
        return Poisoning({name: [own] for name, own in endings.items()})

    plain, ended = poisoned(records=[0.1, 0.9, 0.94], buffers=[0.5, 0.3, 0.91]), poisoned(overflow=[None, 0.95, 0.95])
    verdicts = [
        poisoning.show(found, limits, 1).verdict for found in ({"plain": plain}, {"plain": plain, "veil": ended}, {})
    ]
    assert verdicts[0].endswith("attack: no limits 10.0 %, bounds 30.0 %, median 91.0 %; with honest clients 95.0 %.")
    assert "attack: no limits no model, bounds 30.0 %" in verdicts[1]
    assert verdicts[2].startswith("No verdict")


def test_bounds_are_the_default_limits_and_come_with_every_rule():
    every = PoisoningOptions().configs(config_of(**{**SMALL, "hostile": 2, "norm_factor": 3.0}))
    found = {name: build_limits(config.limits) for name, config in every.items()}
    assert list(found) == [UNLIMITED, BOUNDED, *RULES]
    assert found[UNLIMITED] is None
    assert found[BOUNDED] == Limits(hostile=2, norm_factor=3.0)
    assert found["krum"] == Limits("krum", hostile=2, norm_factor=3.0)
    assert build_limits(PoisoningOptions().configs(config_of(**SMALL))[BOUNDED].limits) == Limits()
