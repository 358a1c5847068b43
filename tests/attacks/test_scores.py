"""Figures of an attack against slow and obvious ones."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, t, ttest_1samp

from fedveil.attacks import scores
from fedveil.attacks.scores import Estimate, auc, balanced_accuracy, best_threshold, proportion, roc, tpr_at
from fedveil.errors import BadArgument

SCORES = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=12)


@given(members=SCORES, others=SCORES)
def test_auc_is_the_share_of_pairs_in_order_with_ties_by_half(members, others):
    pairs = [(a > b) + (a == b) / 2 for a, b in itertools.product(members, others)]
    found, turned = auc(members, others), auc([-a for a in members], [-b for b in others])
    assert found.value == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert turned.value == pytest.approx(1 - found.value, abs=1e-12)


@given(members=SCORES, others=SCORES)
def test_the_best_threshold_is_the_best_of_all(members, others):
    def accuracy(threshold):
        return (np.mean(np.array(members) >= threshold) + np.mean(np.array(others) < threshold)) / 2

    chosen = best_threshold(members, others)
    assert accuracy(chosen) == pytest.approx(max(map(accuracy, [-math.inf, *members, *others, math.inf])), abs=1e-12)
    assert balanced_accuracy(members, others, chosen).value == pytest.approx(accuracy(chosen), abs=1e-12)


@given(members=SCORES, others=SCORES, rate=st.sampled_from([0.01, 0.1, 0.25, 0.5, 1.0]))
def test_a_true_positive_rate_keeps_the_false_positive_rate(members, others, rate):
    assert np.mean(np.array(others) > scores.threshold_at(others, rate)) <= rate
    lower = [t for t in [-math.inf, *others] if np.mean(np.array(others) > t) <= rate]
    assert tpr_at(members, others, rate).value == max(np.mean(np.array(members) > t) for t in lower)


@pytest.mark.parametrize(("hits", "trials"), [(0, 20), (1, 20), (7, 20), (20, 20)])
def test_clopper_pearson_ends_leave_half_of_the_error_on_each_side(hits, trials):
    found = proportion(hits, trials)
    assert binom.sf(hits - 1, trials, found.low) == pytest.approx(0.025) if hits else found.low == 0
    assert binom.cdf(hits, trials, found.high) == pytest.approx(0.025) if hits < trials else found.high == 1


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99, 0.9999])
def test_an_interval_of_another_level_is_what_would_have_been_computed(level):
    chance = np.random.default_rng(0)
    members, others = chance.normal(1, 1, 80), chance.normal(0, 1, 60)
    cases = [
        (auc(members, others), auc(members, others, level=level)),
        (auc([1.0] * 9, [0.0] * 5), auc([1.0] * 9, [0.0] * 5, level=level)),
        (proportion(3, 20), proportion(3, 20, level=level)),
        (proportion(0, 20), proportion(0, 20, level=level)),
    ]
    mean, reach = np.mean(members), t.ppf((1 + level) / 2, 79) * np.std(members, ddof=1) / math.sqrt(80)
    cases.append((scores.average(members.tolist()), Estimate(mean, mean - reach, mean + reach)))
    for found, wanted in cases:
        again = found.at_level(level)
        assert (again.value, again.low, again.high) == pytest.approx((wanted.value, wanted.low, wanted.high), abs=1e-9)


def test_a_p_value_is_the_level_at_which_the_interval_ends_at_the_guess():
    sample = np.random.default_rng(0).normal(0.3, 1, 30)
    assert scores.average(sample.tolist()).p_value(0.0) == pytest.approx(ttest_1samp(sample, 0.0).pvalue, rel=1e-6)
    tail = 2 * min(binom.cdf(4, 20, 0.5), 1.0)
    assert proportion(4, 20).p_value(0.5) == pytest.approx(tail, rel=1e-6)
    assert proportion(10, 20).p_value(0.5) == 1.0


def areas(shift, r):
    truth = 0.5 * math.erfc(-shift / 2)  # P(N(shift, 1) > N(0, 1))
    return truth in auc(r.normal(shift, 1, 150), r.normal(0, 1, 150))


def accuracies(shift, r):
    truth = 0.5 * math.erfc(-shift / 2 / math.sqrt(2))
    return truth in balanced_accuracy(r.normal(shift, 1, 80), r.normal(0, 1, 120), shift / 2)


@pytest.mark.parametrize(
    ("covers", "shift"), [*[(areas, s) for s in (0.0, 1.0, 2.0)], *[(accuracies, s) for s in (0.0, 1.0, 4.0)]]
)
def test_intervals_have_their_coverage(covers, shift):
    found = sum(covers(shift, np.random.default_rng(seed)) for seed in range(400)) / 400
    assert found >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 400)  # three standard errors of 400 trials


def test_perfect_and_tied_scores_have_intervals_with_a_width_and_a_rate_takes_ten_expected_false_positives():
    assert auc([1.0] * 50, [0.0] * 50).low == pytest.approx(0.025 ** (1 / 50))
    tied = auc([1.0] * 50, [1.0] * 50)
    assert tied.value == 0.5
    assert tied.low < 0.4 < 0.6 < tied.high
    assert best_threshold([1.0] * 5, [1.0] * 5) == -math.inf
    cases = [(10_000, 0.001), (9_999, 0.001), (1_000, 0.01), (999, 0.01)]
    assert [scores.has_enough(*case) for case in cases] == [True, False, True, False]


def test_a_roc_curve_rises_from_one_false_positive_to_all_and_the_interval_of_a_mean_is_students():
    chance = np.random.default_rng(0)
    members, others = chance.normal(1, 1, 300), chance.normal(0, 1, 500)
    curve = roc(members, others)
    assert (curve[0][0], curve[-1]) == (1 / 500, (1.0, 1.0))
    assert all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(curve))
    assert dict(curve)[1 / 500] == tpr_at(members, others, 1 / 500).value
    found = scores.average([1.0, 2.0, 3.0])
    reach = 4.302652730 / 3**0.5  # the quantile 0.975 with two degrees of freedom, from a printed table
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 - reach, 2 + reach))
    assert scores.average([1.0, 2.0, 3.0], minimum=0.0, maximum=4.0) == Estimate(2.0, 0.0, 4.0)
    assert scores.average([1.0]) == Estimate(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("call", "given", "why"),
    [
        (auc, ([math.nan], [0.0]), "a score for members is NaN"),
        (tpr_at, ([1.0], [], 0.1), "there are no scores for others"),
        (proportion, (3, 2), "3 hits in 2 trials"),
    ],
)
def test_scores_without_an_order_are_refused(call, given, why):
    with pytest.raises(BadArgument, match=why):
        call(*given)
