"""Epsilon against independent computations: integrals, Monte Carlo, Rényi divergences and closed forms."""

import math

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from fedveil.errors import BadArgument
from fedveil.privacy.accounting import (
    MAX_ROUNDS,
    Accountant,
    affordable_rounds,
    epsilon,
    milestone,
    renyi_epsilon,
    solve_noise,
)

DELTA = 1e-5
SETTINGS = [
    (rate, rounds, target)
    for rate, rounds in ((0.004, 200), (0.0155, 600), (0.05, 100), (0.2, 40), (1.0, 10))
    for target in (0.5, 1.0, 3.0, 8.0)
]


def one_round(budget, noise, rate):
    """Delta of one round by integration: a record is removed, or added."""
    grid = np.linspace(-12 * noise, 1 + 12 * noise, 200_001)
    without = stats.norm.pdf(grid, 0, noise)
    sampled = (1 - rate) * without + rate * stats.norm.pdf(grid, 1, noise)
    pairs = (without, sampled), (sampled, without)
    return max(integrate.trapezoid(np.maximum(0, a - math.exp(budget) * b), grid) for a, b in pairs)


@pytest.mark.parametrize(("noise", "rate"), [(0.9, 0.0155), (2.0, 0.1), (0.7, 0.3)])
def test_one_round_is_the_integral(noise, rate):
    exact = optimize.brentq(lambda budget: one_round(budget, noise, rate) - DELTA, 1e-6, 50)
    assert exact <= epsilon(1, noise, DELTA, rate) * (1 + 1e-6)
    assert epsilon(1, noise, DELTA, rate) == pytest.approx(exact, rel=2e-3)


def closed_form(rounds, noise, delta):
    """Epsilon of Gaussian noise without sampling (Balle and Wang)."""
    mu = math.sqrt(rounds) / noise
    find = lambda e: stats.norm.cdf(mu / 2 - e / mu) - math.exp(e + stats.norm.logcdf(-mu / 2 - e / mu)) - delta  # noqa: E731
    return optimize.brentq(find, 0, 500)


@pytest.mark.parametrize(("rounds", "noise"), [(1, 1.0), (30, 5.0), (400, 50.0)])
def test_rounds_without_sampling_have_a_closed_form(rounds, noise):
    assert epsilon(rounds, noise, DELTA) == pytest.approx(closed_form(rounds, noise, DELTA), rel=1e-6)
    assert epsilon(rounds, noise, DELTA, replace=True) == pytest.approx(closed_form(rounds, noise / 2, DELTA), rel=1e-6)


@pytest.mark.parametrize(("rate", "rounds", "target"), SETTINGS)
def test_the_noise_for_a_target_meets_it(rate, rounds, target):
    noise = solve_noise(target, rounds, DELTA, rate)
    assert target * 0.98 < epsilon(rounds, noise, DELTA, rate) <= target
    assert renyi_epsilon(rounds, noise, DELTA, rate) > target * 0.98  # proven, and looser
    assert epsilon(rounds, noise / 4, DELTA, rate) > 1.5 * target  # a planted error is not within any tolerance


def test_many_rounds_agree_with_monte_carlo():
    """Delta at an epsilon, from sampled privacy losses (of 600 rounds in which a record is there)."""
    rate, noise, rounds, trials = 0.0155, 0.9, 600, 30_000
    draw = np.random.default_rng(0)
    loss = np.zeros(trials)
    for _ in range(rounds):
        x = draw.normal(0, noise, trials) + (draw.random(trials) < rate)
        loss += np.log1p(rate * np.expm1((2 * x - 1) / (2 * noise**2)))
    for budget in (0.5, 1.0, 1.5):
        excess = np.maximum(0, 1 - np.exp(budget - loss))
        error = excess.std() / math.sqrt(trials)
        delta = optimize.brentq(lambda d: epsilon(rounds, noise, d, rate) - budget, 1e-9, 0.5, xtol=1e-7)  # noqa: B023
        assert abs(excess.mean() - delta) < 6.5 * error + 1e-4  # one in 10^10 trials


def test_a_group_costs_more_than_a_record_and_less_than_the_generic_bound():
    alone = epsilon(600, 0.9, DELTA, 0.0155)
    pair = epsilon(600, 0.9, DELTA, 0.0155, group=2)
    assert 2 * alone < pair < 3 * alone
    assert epsilon(10, 5.0, DELTA, group=3) == pytest.approx(epsilon(10, 5.0 / 3, DELTA), rel=1e-9)


def test_a_running_epsilon_is_an_upper_bound_within_a_few_rounds():
    for rounds in range(1, 3000):
        assert rounds <= milestone(rounds) <= 1.02 * rounds + 1
    assert len({milestone(rounds) for rounds in range(1, 3000)}) < 270
    spent = Accountant(1.0, DELTA, 0.01)
    for _ in range(60):
        spent.count(["a", "b"])
    spent.count(["a"])
    assert spent.rounds == 61
    assert spent.epsilon() <= spent.epsilon(running=True) <= 1.02 * spent.epsilon()
    assert spent.epsilon() == spent.by_client()["a"] > spent.by_client()["b"]


IMPOSSIBLE = {"delta": (0.0, 1.0, math.nan), "rounds": (-1,), "noise": (-1.0,), "rate": (0.0, 1.1)}


@pytest.mark.parametrize(("name", "value"), [(name, bad) for name, values in IMPOSSIBLE.items() for bad in values])
def test_impossible_settings_are_refused(name, value):
    with pytest.raises(BadArgument):
        epsilon(**{"rounds": 1, "noise": 1.0, "delta": DELTA, name: value})


def test_no_rounds_cost_nothing_and_no_noise_everything():
    assert epsilon(0, 1.0, DELTA, 0.1) == 0.0
    assert math.isinf(epsilon(1, 0.0, DELTA, 0.1))
    with pytest.raises(BadArgument, match="replace is not supported with sampling"):
        epsilon(1, 1.0, DELTA, 0.1, replace=True, group=2)
    with pytest.raises(BadArgument, match="epsilon must be a finite number above 0"):
        solve_noise(0.0, 10, DELTA)


def test_a_budget_that_never_ends_is_cut_off():
    assert affordable_rounds(8.0, 1e3, DELTA) == MAX_ROUNDS
