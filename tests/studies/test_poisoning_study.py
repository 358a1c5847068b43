"""`fedveil attack poisoning` from end to end, on digits."""

import json

import pytest
from tests.configs import config_of

from fedveil.attacks.poisoning import ATTACKS
from fedveil.cli.studies import AttackCommand
from fedveil.errors import BadArgument
from fedveil.federation.aggregators import RULES
from fedveil.federation.limits import Limits
from fedveil.runs.build import build_limits
from fedveil.studies.attack import AttackRequest
from fedveil.studies.jobs import Failed
from fedveil.studies.poisoning.page import BOUNDED, HONEST, UNLIMITED, Setting, show
from fedveil.studies.poisoning.results import Ending, Endings, Poisoning
from fedveil.studies.poisoning.run import POISONING, PoisoningOptions
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
    assert list(rows) == [(defence, name) for defence in ("plain", "veil") for name in options.names()]
    assert rows["veil", "overflow"][shown.header[-1]] == "2/2, 0"
    assert rows["plain", HONEST][shown.header[-1]] == "0/0, 0"
    assert rows["plain", "buffers"][UNLIMITED] == "does not apply: the model has no buffers"
    for name in (UNLIMITED, BOUNDED):
        for attack in (HONEST, "sign-flip"):  # the noise changes nothing, but for rounding
            assert rows["plain", attack][name] == rows["veil", attack][name]
    json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert "Accuracy: veil" in (tmp_path / "report.html").read_text()


def test_seeds_are_runs_of_their_own_and_a_stopped_study_goes_on(tmp_path):
    options = PoisoningOptions(attacks="sign-flip", rules="none", rounds=2, seeds=2)
    first, _ = attacked(tmp_path, options)
    assert len(first["plain"].attacks["sign-flip"]) == 2
    kept = tmp_path / "jobs" / "plain-sign-flip-0.json"
    before = kept.stat().st_mtime_ns
    (tmp_path / "jobs" / "plain-honest-1.json").unlink()
    again, _ = attacked(tmp_path, options)
    assert again == first
    assert kept.stat().st_mtime_ns == before


def test_a_run_that_ends_is_a_result_with_a_reason(tmp_path):
    results, shown = attacked(tmp_path, PoisoningOptions("sign-flip", "none", rounds=2), max_norm=1e-9)
    (found,) = results["plain"].endings("sign-flip", BOUNDED)
    assert (found.accuracy, found.rounds) == (None, 0)
    why = "round 0: 0 updates are left, too few for mean; client 0: its gradient has norm"
    assert found.ended.startswith(why)
    assert [row[shown.header.index(BOUNDED)] for row in shown.rows] == ["ended", "ended"]
    (text,) = [section for section in shown.sections if section.title == "Runs that ended early"]
    assert text.paragraphs[1].startswith(f"plain, sign-flip, bounds: {why}")


def test_refused_updates_of_honest_clients_are_counted_apart(tmp_path):
    options = PoisoningOptions(attacks="square-overflow", rules="none", rounds=2)
    results, _ = attacked(tmp_path, options, norm_factor=1.0)  # a bound so tight that honest updates are refused, too
    (honest,), (poisoned,) = (results["plain"].endings(name, BOUNDED) for name in (HONEST, "square-overflow"))
    assert honest.refused == 0 < honest.wronged
    assert poisoned.refused == 2
    assert poisoned.wronged > 0


def run(accuracy, ended="", refused=0, wronged=0):
    return Ending(accuracy, ended, 50, refused, wronged)


def test_figures_are_means_over_seeds_and_differences_within_them():
    honest, limits = [run(0.90), run(0.94)], [UNLIMITED, BOUNDED]
    row = Setting("plain", "x", UNLIMITED, [run(0.80), run(0.88)], honest)
    assert row.accuracy.value == pytest.approx(0.84)
    assert row.points.value == pytest.approx(-8)
    assert (row.cell(), row.ended) == ("84.0", 0)
    half = Setting("plain", "x", UNLIMITED, [run(None, "why"), run(0.88)], honest)
    assert (half.cell(), half.points.value) == ("88.0 (1 of 2 ended)", pytest.approx(-6))
    both = [Endings({UNLIMITED: one, BOUNDED: run(0.9, refused=50, wronged=1)}) for one in honest]
    found = Poisoning({HONEST: both, "overflow": both, "buffers": [Failed("it broke"), both[0]]})
    shown = show({"plain": found, "veil": Failed("no")}, limits, 2)
    rows = shown.rows
    assert [row[1:] for row in rows[:2]] == [
        ["honest", "92.0", "90.0", "100/0, 2"],
        ["overflow", "92.0", "90.0", "100/200, 2"],
    ]
    assert rows[2][2] == "failed: it broke"
    assert rows[3][:2] == ["veil", "failed"]
    assert {len(row) for row in rows} == {len(shown.header)}
    assert [section.title for section in shown.sections][-1] == "All figures"


def poisoning(honest, **attacks):
    limits = (UNLIMITED, BOUNDED, "median", "krum")
    runs = {HONEST: [honest] * 4, **attacks}
    endings = {name: [run(value, "" if value else "it ended") for value in own] for name, own in runs.items()}
    return Poisoning({name: [Endings(dict(zip(limits, own, strict=True)))] for name, own in endings.items()})


def test_the_verdict_is_that_of_the_worst_attack_under_the_defence_that_suffers_most():
    limits = [UNLIMITED, BOUNDED, "median", "krum"]
    plain = poisoning(0.95, **{"sign-flip": [0.1, 0.9, 0.94, 0.7], "buffers": [0.5, 0.3, 0.91, 0.8]})
    said = show({"plain": plain, "veil": Failed("x")}, limits, 1).verdict
    assert said.endswith("attack: 10.0 % (no limits), 30.0 % (bounds), 91.0 % (median); 95.0 % with honest clients.")
    ended = poisoning(0.95, overflow=[None, 0.95, 0.95, 0.95])
    assert "attack: no model (no limits), 30.0 % (bounds)" in show({"plain": plain, "veil": ended}, limits, 1).verdict
    assert show({"plain": Failed("x")}, limits, 1).verdict.startswith("No verdict")


@pytest.mark.parametrize(
    ("options", "changes", "what"),
    [
        ({"attacks": "sign-flop"}, {}, "there is no attack 'sign-flop'"),
        ({"rules": "meadian"}, {}, "there is no rule 'meadian'"),
        ({}, {"hostile": 2}, "krum against 2 hostile clients needs 7, not 5"),
        ({"rules": "none"}, {"hostile": 5}, "5 of 5 clients"),
        ({"rules": "none"}, {"hostile": 0}, "0 of 5 clients"),
        ({"rules": "none"}, {"aggregator": "krum"}, "the attack compares all rules"),
        ({"rules": "none"}, {"data": "diabetes", "train_size": None}, "it has no classes"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_trained(tmp_path, options, changes, what):
    with pytest.raises(BadArgument, match=what):
        attacked(tmp_path, PoisoningOptions(**options), **changes)
    assert not (tmp_path / "jobs").exists()


def test_numbers_that_mean_nothing_are_refused():
    with pytest.raises(BadArgument, match="--seeds must be a whole number of at least 1"):
        PoisoningOptions(seeds=0)
    with pytest.raises(BadArgument, match="hostile clients take part in training"):
        POISONING.graph(AttackRequest(config_of(**SMALL), ("plain",), PoisoningOptions(), "run"), "out")


def test_bounds_are_the_default_limits_and_come_with_every_rule():
    assert PoisoningOptions().names() == [HONEST, *ATTACKS]
    every = PoisoningOptions().configs(config_of(**{**SMALL, "hostile": 2, "norm_factor": 3.0}))
    found = {name: build_limits(config.limits) for name, config in every.items()}
    assert list(found) == [UNLIMITED, BOUNDED, *RULES]
    assert found[UNLIMITED] is None
    assert found[BOUNDED] == Limits(hostile=2, norm_factor=3.0)
    assert found["krum"] == Limits("krum", hostile=2, norm_factor=3.0)
    usual = PoisoningOptions().configs(config_of(**SMALL))
    assert build_limits(usual[BOUNDED].limits) == Limits()


def test_the_command_attacks_plain_and_veil_by_default():
    command = AttackCommand.parse("fedveil attack", ["poisoning", "--rounds", "3"])
    assert command.defences == ("plain", "veil")
    assert command.attack == PoisoningOptions(rounds=3)
    assert command.config.training.lr == 0.01
