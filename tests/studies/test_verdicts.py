"""Verdicts follow the intervals of the strongest attackers, beside the best constant answer and no defence."""

import dataclasses
import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.scores import Estimate, auc, proportion
from fedveil.studies import verdicts
from fedveil.studies.verdicts import AGREEMENT, ALPHA, MEMBERSHIP, RANKING, RECORD, Finding, Label, judge

BELOW = Estimate(0.40, 0.38, 0.43)
ADAPTIVE = "adaptive"


def around(value, reach=0.005):
    return Estimate(value, value - reach, value + reach)


def assess(measure, guess, trials=2, **figures):
    """What follows for attackers with these figures."""
    every = {name.replace("_", " "): figure for name, figure in figures.items()}
    return measure.compare(list(every.items()), guess, trials)


def verdict(measure, guess, plain, trials=2, **figures):
    undefended = assess(measure, guess, **{ADAPTIVE: plain})
    return judge(measure, guess, assess(measure, guess, trials, **figures), undefended)


@pytest.mark.parametrize(
    ("low", "high", "two_sided", "finding"),
    [
        (0.51, 0.53, False, Finding.FOUND),
        (0.38, 0.43, True, Finding.FOUND),
        (0.38, 0.43, False, Finding.NOTHING),
        (0.46, 0.54, True, Finding.NOTHING),
        (0.44, 0.54, True, Finding.TOO_FEW),
        (0.44, 0.56, False, Finding.TOO_FEW),
    ],
)
def test_the_interval_decides(low, high, two_sided, finding):
    measure = MEMBERSHIP if two_sided else RANKING
    (found,) = measure.compare([("x", Estimate((low + high) / 2, low, high))], 0.5)
    assert found.finding is finding
    assert found.is_below_guess == (finding is Finding.FOUND and two_sided)
    (single,) = measure.compare([("x", Estimate(0.9, 0.9, 0.9))], 0.5, trials=1)
    assert (single.finding, single.trials_needed) == (Finding.TOO_FEW, None)


@pytest.mark.parametrize(
    ("measure", "guess", "figure", "plain", "label"),
    [
        (AGREEMENT, 0.91, around(0.91, 0.008), around(1.0, 0.0), Label.PROTECTED),  # it always answers "no"
        (AGREEMENT, 0.91, around(0.95, 0.008), around(1.0, 0.0), Label.PARTIAL),  # four of nine points
        (AGREEMENT, 0.1, around(0.12), around(1.0, 0.0), Label.SLIGHT),
        (AGREEMENT, 0.5, Estimate(0.6, 0.3, 0.85), around(0.99), Label.TOO_FEW),
        (MEMBERSHIP, 0.5, Estimate(0.52, 0.4, 0.64), around(0.7), Label.TOO_FEW),
        (MEMBERSHIP, 0.5, BELOW, around(0.62), Label.LEAK),  # 0.10 of 0.12
        (MEMBERSHIP, 0.5, BELOW, BELOW, Label.LEAK),
        (MEMBERSHIP, 0.5, around(0.5, 0.03), around(0.7), Label.PROTECTED),
        (MEMBERSHIP, 0.5, around(0.5, 0.03), around(0.5, 0.03), Label.NOTHING),
        (MEMBERSHIP, 0.5, around(0.6), around(0.5, 0.03), Label.LEAK),  # what plain training does not leak
        (RECORD, 11.0, Estimate(10.5, -18.6, 39.7), around(40.0), Label.TOO_FEW),
        (RECORD, 11.0, around(11.2, 0.5), around(40.0), Label.PROTECTED),
        (RECORD, 35.0, around(46.0), around(80.0), Label.LEAK),  # ten decibels above a guess
        (RECORD, 35.0, around(40.0), around(80.0), Label.PARTIAL),
    ],
)
def test_labels_follow_the_figures(measure, guess, figure, plain, label):
    assert verdict(measure, guess, plain, adaptive=figure).label is label


def test_without_an_adaptive_attacker_a_record_that_does_not_leak_is_untested_and_without_any_there_is_no_verdict():
    for psnr in (40.0, 34.0):
        assert verdict(RECORD, 35.0, around(80.0), as_published=around(psnr)).label is Label.UNTESTED
    assert verdict(RECORD, 35.0, around(80.0), as_published=around(46.0)).label is Label.LEAK
    assert verdict(RECORD, 35.0, around(80.0), as_published=around(34.0), two=around(40.0)).label is Label.PARTIAL
    assert verdict(RECORD, 11.0, around(90.0)) is None


def test_the_strongest_attacker_decides_and_a_verdict_has_its_figure_interval_and_references():
    below = verdict(MEMBERSHIP, 0.5, around(0.7), adaptive=BELOW, other=Estimate(0.53, 0.51, 0.55))
    assert (below.strongest.attacker, below.strongest.value) == (ADAPTIVE, pytest.approx(0.6))
    unsure = Estimate(0.65, 0.4, 0.9)
    found = verdict(MEMBERSHIP, 0.5, around(0.7), adaptive=around(0.6), other=unsure)
    assert (found.label, found.strongest.attacker) == (Label.PARTIAL, ADAPTIVE)  # a sure leak comes first
    assert verdict(MEMBERSHIP, 0.5, around(0.7), adaptive=around(0.51), other=unsure).label is Label.TOO_FEW
    said = str(verdict(MEMBERSHIP, 0.5, around(0.62), adaptive=BELOW))
    assert said.startswith("LEAK: AUC 0.40 [0.38, 0.43] (adaptive), below chance: 0.60")
    assert said.endswith("guessing 0.50, undefended 0.62")
    said = str(verdict(RECORD, 11.0, around(40.0), as_published=around(12.0), adaptive=Estimate(24.1, 22.0, 26.3)))
    assert said.startswith("LEAK: PSNR 24.1 [21.7, 26.6] dB (adaptive); guessing 11.0 dB, undefended 40.0 dB")
    assert said.endswith("as published 12.0 dB")


def test_the_headline_gathers_defences_by_label():
    found = {
        "plain": assess(MEMBERSHIP, 0.5, as_published=around(0.7)),
        "veil": assess(MEMBERSHIP, 0.5, as_published=around(0.51), own_labels=around(0.69)),
        "spn": assess(MEMBERSHIP, 0.5, as_published=around(0.5)),
        "failed": [],
    }
    judged = verdicts.judge_defences(MEMBERSHIP, 0.5, found)
    said = verdicts.headline(judged)
    assert said == "Membership: LEAK (no defence 0.70, veil 0.69), PROTECTED (spn 0.50); guessing 0.50."
    assert judged["veil"].published.attacker == PUBLISHED
    alone = {"mine:Defence": dataclasses.replace(judged["veil"], undefended=None)}
    assert "no undefended federation was attacked" in verdicts.headline(alone)
    assert verdicts.headline({}).startswith("No verdict")


ATTACKERS, SEEDS = 6, 400


def attack_noise(seed, effect=0.0):
    """AUCs of correlated attackers, the last of which has a signal of `effect` standard deviations."""
    chance = np.random.default_rng(seed)
    shared, own = chance.normal(size=(2, 50)), chance.normal(size=(ATTACKERS, 2, 50))
    own[-1, 0] += 2 * effect
    return [(str(number), auc(*(shared + one) / 2)) for number, one in enumerate(own)]


def test_where_nothing_leaks_one_of_several_attackers_finds_something_at_most_as_often_as_alpha():
    holm, each = 0, 0
    for seed in range(SEEDS):
        figures = attack_noise(seed)
        holm += any(one.finding is Finding.FOUND for one in MEMBERSHIP.compare(figures, 0.5))
        each += any(0.5 not in figure for _, figure in figures)
    spread = 3 * math.sqrt(ALPHA * (1 - ALPHA) / SEEDS)  # three standard errors
    assert holm / SEEDS <= ALPHA + spread
    assert each / SEEDS > ALPHA + spread  # without the correction, attackers find leaks where there are none


def test_intervals_hold_for_all_attackers_at_once_and_leaks_are_found_in_order_of_evidence():
    truth, covered = ndtr(0.5), 0  # the difference of two scores is normal with mean 0.5 and variance 1
    for seed in range(SEEDS):
        figures = MEMBERSHIP.compare(attack_noise(seed, effect=0.5), 0.5)
        covered += all(0.5 in one.estimate for one in figures[:-1]) and truth in figures[-1].estimate
    assert covered / SEEDS >= 1 - ALPHA - 3 * math.sqrt(ALPHA * (1 - ALPHA) / SEEDS)

    def figure(p):
        return "x", Estimate(0.6, 0.6 - 0.1 * ndtri(0.975) / ndtri(1 - p / 2), 0.7)

    chosen = [one.finding is Finding.FOUND for one in MEMBERSHIP.compare([figure(p) for p in (0.02, 0.04, 0.01)], 0.5)]
    assert chosen == [True, True, True]  # 0.01 < 0.05 / 3, then 0.02 < 0.05 / 2, then 0.04 < 0.05
    chosen = [one.finding is Finding.FOUND for one in MEMBERSHIP.compare([figure(p) for p in (0.02, 0.03, 0.04)], 0.5)]
    assert chosen == [False, False, False]  # 0.02 > 0.05 / 3 ends the search


@pytest.mark.parametrize("seed", range(20))
def test_with_the_number_of_trials_that_would_be_enough_there_is_a_finding_or_none(seed):
    chance = np.random.default_rng(seed)
    rate = chance.uniform(0.5, 0.62)
    for measure in (AGREEMENT, RANKING):
        (few,) = measure.compare([("x", proportion(int(chance.binomial(40, rate)), 40))], 0.5)
        if few.finding is Finding.TOO_FEW:
            many = int(1.1 * few.trials_needed)  # the interval of the larger sample may be of a rate with more spread
            (decided,) = measure.compare([("x", proportion(int(chance.binomial(many, rate)), many))], 0.5)
            assert few.trials_needed > 40
            assert decided.finding is not Finding.TOO_FEW


def test_a_verdict_of_too_few_trials_has_the_number_that_would_be_enough():
    figure = dataclasses.replace(Estimate(0.52, 0.4, 0.64), sample_size=100)
    found = verdict(MEMBERSHIP, 0.5, around(0.7), adaptive=figure)
    assert found.label is Label.TOO_FEW
    assert str(found).endswith(f"about {100 * round((0.24 / 0.05) ** 2 * 100) // 100:,} records would be enough")
