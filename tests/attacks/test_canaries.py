"""A measured epsilon: correct code is not refuted, and planted errors are."""

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil import Federation, Privacy
from fedveil.attacks import canaries
from fedveil.attacks.canaries import measure_epsilon
from fedveil.defences import record_private
from fedveil.errors import BadArgument
from fedveil.models import mlp
from fedveil.privacy.measure import epsilon_lower_bound, gaussian_estimate, measure, p_value

ROUNDS, RATE = 150, 0.1


def federation(budget, defence="plain"):
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(60, 20, generator=draw), torch.randint(0, 5, (60,), generator=draw)) for _ in range(3)]
    torch.manual_seed(0)
    privacy = Privacy(epsilon=budget, rounds=ROUNDS, rate=RATE)
    model = mlp(20, 5, hidden=100, layers=1)
    return Federation(model, clients, defence, lambda parameters: torch.optim.SGD(parameters, 0.1), privacy=privacy)


@pytest.mark.parametrize("budget", [1.0, 3.0, 8.0])
def test_correct_code_is_not_refuted(budget):
    found = measure_epsilon(federation(budget), ROUNDS)
    assert found.bound < found.claimed <= budget
    assert 0 < found.estimate < found.claimed
    assert "not refuted" in str(found)


@pytest.mark.parametrize("budget", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("error", ["a quarter of the noise", "no clipping"])
def test_planted_errors_are_found(budget, error, monkeypatch):
    if error == "no clipping":
        monkeypatch.setattr(canaries, "clip_factors", lambda *given: torch.ones(1))
    else:
        add = record_private.add_noise
        monkeypatch.setattr(record_private, "add_noise", lambda sums, entropy: sums + (add(sums, entropy) - sums) / 4)
    found = measure_epsilon(federation(budget), ROUNDS)
    assert found.estimate > found.claimed
    if budget < 8:  # beyond it, no number of canaries proves anything at this delta
        assert found.contradicts
        assert "REFUTED" in str(found)


def test_the_bound_covers_a_mechanism_that_is_exactly_private():
    """Randomised response with a known epsilon: the bound exceeds it in about 5 % of runs."""
    epsilon, canary_count, runs = 1.0, 400, 400
    draw, wrong = np.random.default_rng(0), 0
    for _ in range(runs):
        right = int(draw.binomial(canary_count, 1 / (1 + np.exp(-epsilon))))
        wrong += epsilon_lower_bound(right, canary_count, canary_count, 0.0) > epsilon
    assert wrong <= stats.binom(runs, 0.05).ppf(1 - 1e-9)


def test_the_estimate_is_that_of_gaussian_scores():
    draw = np.random.default_rng(0)
    outside, inside = draw.normal(0, 1, 20_000), draw.normal(1.0, 1, 20_000)
    exact = 4.38  # of the Gaussian mechanism with mu = 1, at delta 1e-5
    assert exact - 0.25 < gaussian_estimate(inside, outside, 1e-5) < exact + 0.05
    assert gaussian_estimate(outside[:500], outside[500:1000], 1e-5) < 0.5


def test_guesses_are_the_extreme_scores():
    found = measure(np.arange(10.0), np.arange(10) >= 5, 1.0, 1e-5, 6)
    assert (found.right, found.guesses, found.canaries) == (6, 6, 10)
    assert p_value(0, 6, 10, 1.0, 1e-5) == 1.0
    assert epsilon_lower_bound(3, 6, 10, 1e-5) == 0.0


@pytest.mark.parametrize(
    ("defence", "count", "why"),
    [("veil", None, "no other defence"), ("plain", 10**6, "fewer than 10*"), ("plain", 2, "canaries must be")],
)
def test_what_cannot_be_measured_is_refused(defence, count, why):
    with pytest.raises(BadArgument, match=why):
        measure_epsilon(federation(3.0, defence), ROUNDS, canaries=count)
