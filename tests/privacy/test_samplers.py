"""Exact samplers: against exact probabilities, with the decisions that float64 cannot make, and in the far tail."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from fedveil.privacy import samplers
from fedveil.privacy.samplers import SCALE, discrete_gaussian, exponential_trials, poisson_sample
from fedveil.scheme import Entropy


class Scripted(Entropy):
    """Entropy that returns given words."""

    def __init__(self, *words):
        super().__init__()
        self.left = list(words)

    def words(self, count):
        taken, self.left = self.left[:count], self.left[count:]
        return np.array(taken, np.uint64)


def oracle(word, more, exponent):
    """Whether a uniform number with these first bits is below exp(-exponent), in exact arithmetic."""
    import mpmath

    with mpmath.workdps(120):
        chance = mpmath.exp(-mpmath.mpf(exponent.numerator) / exponent.denominator)
        return mpmath.mpf((word << 64) | more) / mpmath.mpf(2) ** 117 < chance


@pytest.mark.parametrize("exponent", [Fraction(1), Fraction(3, 7), Fraction(1, SCALE), Fraction(40), Fraction(0)])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_trials_too_close_for_floats_are_decided_exactly(exponent, offset):
    word = min(max(0, int(math.exp(-exponent) * 2**53) + offset), 2**53 - 1)
    for more in (0, 2**63, 2**64 - 1):
        entropy = Scripted(word << 11, more, *[0] * 4)
        found = exponential_trials(entropy, np.array([exponent.numerator], np.uint64), exponent.denominator)
        assert bool(found[0]) == oracle(word, more, exponent)


def test_exact_decisions_are_needed():
    """Necessity: there are first 53 bits that do not decide."""
    exponent = Fraction(1, 3)
    near = int(math.exp(-exponent) * 2**53)
    ends = [{oracle(word, more, exponent) for more in (0, 2**64 - 1)} for word in range(near - 2, near + 3)]
    assert {True, False} in ends


@pytest.mark.parametrize("rate", [0.1, 1.5 * 2.0**-60])
def test_a_rate_is_met_exactly(rate):
    edge = math.floor(Fraction(rate) * 2**53)
    rest = math.floor((Fraction(rate) * 2**53 - edge) * 2**64)
    assert 0 < rest < 2**64  # 53 bits do not decide
    for words, expected in (
        ([(edge + 1) << 11], False),
        ([edge << 11, rest - 1], True),
        ([edge << 11, rest + 1], False),
    ):
        assert bool(len(poisson_sample(Scripted(*words), 1, rate))) == expected


@pytest.mark.parametrize("rate", [0.003, 0.2, 0.97])
def test_samples_are_independent_with_their_rate(rate):
    entropy, counts = Entropy(), np.zeros(500)
    for _ in range(400):
        counts[poisson_sample(entropy, 500, rate)] += 1
    total = stats.binom(500 * 400, rate)
    assert total.ppf(1e-10) <= counts.sum() <= total.ppf(1 - 1e-10)
    each = stats.binom(400, rate)
    assert each.ppf(1e-13) <= counts.min()
    assert counts.max() <= each.ppf(1 - 1e-13)
    assert list(poisson_sample(entropy, 5, 1.0)) == [0, 1, 2, 3, 4]


def test_noise_has_the_discrete_gaussian_distribution(monkeypatch):
    """At a scale of 4, where every probability can be compared."""
    monkeypatch.setattr(samplers, "SCALE", 4)
    drawn, count = discrete_gaussian(Entropy(), 200_000), 200_000
    exact = np.exp(-np.square(np.arange(-60, 61)) / 32.0)
    exact /= exact.sum()
    for value in range(-14, 15):
        own = stats.binom(count, exact[value + 60])
        assert own.ppf(1e-11) <= (drawn == value).sum() <= own.ppf(1 - 1e-11), value


def test_noise_at_its_scale():
    drawn = discrete_gaussian(Entropy(), 100_000) / SCALE
    assert stats.kstest(drawn, "norm").statistic < 0.011  # exceeded with probability 2 exp(-2 n d^2) < 1e-10
    assert stats.kstest(1.05 * drawn, "norm").statistic > 0.011  # a planted error shows
    assert abs(drawn.var() - 1) < 0.03
    assert len(np.unique(np.round(drawn * SCALE).astype(np.int64) % 2)) == 2  # every integer can occur


@pytest.mark.parametrize("value", [7 * SCALE, 7 * SCALE + 1, 9 * SCALE + 12345, 30 * SCALE + 1])
@pytest.mark.parametrize("negative", [False, True])
def test_values_in_the_far_tail_can_occur(value, negative):
    """Words that lead to a value beyond 6.5 standard deviations, one after the other."""
    low, turns = value % SCALE, value // SCALE
    sure, never = 0, 2**64 - 1
    candidate = low | (1 << 63 if negative else 0)
    words = [candidate, *[never >> 1] * 16, sure, *[never] * 16]  # of 17 candidates the first is kept
    words += [sure] * turns + [never]  # its geometric part
    words += [sure, *[0] * 20]  # the last trial; where 53 bits do not decide, more follow
    found = discrete_gaussian(Scripted(*words), 1)
    assert found.tolist() == [-value if negative else value]
