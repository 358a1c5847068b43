"""A measured epsilon: correct code is not refuted, and planted errors are."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

import fedveil
from fedveil import Privacy, measure_epsilon
from fedveil.defences import record_private
from fedveil.defences.plain import Plain
from fedveil.errors import BadArgument
from fedveil.models import mlp
from fedveil.privacy import gradients
from fedveil.privacy.measure import epsilon_lower_bound, gaussian_estimate, measure, p_value
from fedveil.records.shards import generator

# Settings in which the audit is strong enough, found by trial: 60 rounds missed a quarter of the noise and shuffling at
# epsilon 3, and at rate 0.1 shuffling was missed at epsilon 1 with 60, 150 and 300 rounds.
ROUNDS, CLIENTS, OWN = 300, 3, 20
RATE, LOW_RATE = 0.1, 0.04  # the lower the rate, the more of the claim rests on secret samples
ERRORS = ("a quarter of the noise", "no clipping", "shuffling")


def small_clients():
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(OWN, 8, generator=draw), torch.randint(0, 3, (OWN,), generator=draw)) for _ in range(CLIENTS)]


def network():
    torch.manual_seed(0)
    return mlp(8, 3, hidden=4, layers=1)


def run(budget, rate=RATE, **named):
    privacy = Privacy(epsilon=budget, rounds=ROUNDS, rate=rate)
    return measure_epsilon(network(), small_clients(), optimizer=torch.optim.SGD, privacy=privacy, **named)


def shuffled(client, number, records):
    """A batch of a shuffled epoch of 25 rounds, in an order that anyone who knows the seed can repeat."""
    epoch, batch = divmod(number, round(1 / LOW_RATE))
    order = torch.randperm(records, generator=generator("shuffle", client, epoch))
    return torch.tensor_split(order, round(1 / LOW_RATE))[batch]


def plant_error(error, monkeypatch):
    """Change the code that trains; return what the auditor knows in addition."""
    if error == "no clipping":
        monkeypatch.setattr(
            gradients, "clip_factors", lambda squares, included, *given: included.double().expand_as(squares)
        )
    elif error == "a quarter of the noise":
        add = record_private.add_noise
        monkeypatch.setattr(record_private, "add_noise", lambda sums, entropy: sums + (add(sums, entropy) - sums) / 4)
    else:
        calls = []

        def sample(self, records):
            client, number = len(calls) % CLIENTS, len(calls) // CLIENTS
            calls.append(records)
            rows = shuffled(client, number, records)
            return rows, torch.ones(len(rows), dtype=torch.bool)

        draw = record_private.RecordPrivateClient.sample
        monkeypatch.setattr(
            record_private.RecordPrivateClient,
            "sample",
            lambda self, records: draw(self, 1) if records == 1 else sample(self, records),
        )
        return {"rate": LOW_RATE, "order": lambda client, number: shuffled(client, number, OWN + 3000 // CLIENTS)}
    return {}


def check_correct(budget):
    found = run(budget)
    assert found.bound < found.claimed <= budget
    assert 0 < found.estimate < found.claimed
    bound = math.floor(100 * found.bound) / 100
    assert repr(found) == f"claimed {found.claimed:.2f}, measured at least {bound:.2f} (95 %)"
    print(f"correct, epsilon {budget:g}: {found}, estimate {found.estimate:.2f}")


def check_error(error, budget, monkeypatch):
    found = run(budget, **plant_error(error, monkeypatch))
    print(f"{error}, epsilon {budget:g}: {found}, estimate {found.estimate:.2f}")
    assert found.estimate > found.claimed
    if budget < 8:  # beyond it, no number of canaries proves anything at this delta
        assert found.contradicts
        assert repr(found).endswith("REFUTED")


def test_correct_code_is_not_refuted():
    check_correct(3.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [1.0, 3.0, 8.0])
def test_correct_code_is_not_refuted_with_other_seeds(budget, seed):
    """By theorem, a false alarm has a probability of at most 5 % per run.

    The name of the test, which contains `seed`, seeds the choice of canaries, the samples and the noise.
    """
    check_correct(budget)


def test_a_planted_error_is_found(monkeypatch):
    check_error("a quarter of the noise", 3.0, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("error", ERRORS)
def test_planted_errors_are_found_at_each_budget(error, budget, monkeypatch):
    check_error(error, budget, monkeypatch)


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


class Overconfident(Plain):
    """A defence of another package that claims an epsilon and adds no noise."""

    def server(self, model, example, loss):
        found = super().server(model, example, loss)
        found.accountant = SimpleNamespace(epsilon=lambda: 2.0, delta=1e-6)
        return found


@pytest.mark.parametrize(("defence", "named"), [(Overconfident(), {}), ("plain", {"claimed": 2.0, "delta": 1e-6})])
def test_the_claim_of_another_package_is_measured(defence, named):
    found = measure_epsilon(network(), small_clients(), defence, rounds=30, canaries=400, batch_size=5, **named)
    assert (found.claimed, found.delta, found.canaries, found.guesses, found.right) == (2.0, 1e-6, 400, 200, 200)
    assert found.contradicts


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ({"rounds": 3}, "does not protect individual records"),
        ({"privacy": Privacy(noise=1.0, unit="client"), "rounds": 3}, "does not protect individual records"),
        ({"privacy": Privacy(noise=1.0, rate=0.1)}, "the number of rounds is missing"),
        ({"rounds": 3, "claimed": 1.0, "canaries": 2}, "canaries must be"),
    ],
)
def test_what_cannot_be_measured_is_refused(named, why):
    with pytest.raises(BadArgument, match=why):
        fedveil.measure_epsilon(network(), small_clients(), **named)
