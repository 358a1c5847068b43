"""Compute a lower bound on the true epsilon from an auditor's guesses of which canaries were in the data.

Each of m canaries is in the data with probability 1/2. The auditor observes the run and makes r guesses, of which v are
correct. The bound is the smallest epsilon for which v correct guesses are not too unlikely in an (epsilon,
delta)-private run (Steinke, Nasr and Jagielski, arXiv 2305.08846, theorem 5.2). The number of guesses must be fixed
before the run. At delta = 1e-5 and 95 % confidence, the bound cannot exceed about 8, regardless of the number of
canaries.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from fedveil.privacy.accounting import epsilon

Reals = NDArray[np.float64]
Booleans = NDArray[np.bool_]
MAX_EPSILON = 50.0  # upper end of the search for epsilon


def epsilon_lower_bound(correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """Return a lower bound on the true epsilon, which is wrong with probability at most 1 - confidence."""

    def excess(epsilon: float) -> float:
        return p_value(correct, guesses, canaries, epsilon, delta) - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    if excess(MAX_EPSILON) < 0:
        return MAX_EPSILON
    return float(optimize.brentq(excess, 0.0, MAX_EPSILON, xtol=1e-6))


def p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Bound the probability of at least this many correct guesses in an (epsilon, delta)-private run."""
    distribution = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    beta = float(distribution.sf(correct - 1))
    steps = np.arange(1, canaries + 1)
    mass = np.cumsum(distribution.pmf(correct - steps))
    return min(1.0, beta + 2 * canaries * delta * float(np.max(mass / steps, initial=0.0)))


def gaussian_estimate(inside: Reals, outside: Reals, delta: float, confidence: float = 0.95) -> float:
    """Estimate epsilon from the scores of canaries inside and outside the data, as for a Gaussian mechanism.

    The estimate is tighter than `epsilon_lower_bound` but proves nothing, because it assumes normally distributed
    scores. It uses the lower end of a confidence interval for the distance between the means.
    """
    if not outside.std():  # there is no noise
        return math.inf if inside.mean() > outside.mean() else 0.0
    distance = (inside.mean() - outside.mean()) / outside.std(ddof=1)
    error = math.sqrt(
        inside.var(ddof=1) / outside.var(ddof=1) / len(inside) + 1 / len(outside) + distance**2 / (2 * len(outside))
    )
    mu = float(distance - stats.norm.ppf(confidence) * error)
    return epsilon(1, 1 / mu, delta) if mu > 0 else 0.0


@dataclass(frozen=True, repr=False)
class MeasuredEpsilon:
    """The result of one run with canaries.

    Attributes:
        claimed: the epsilon that the accountant claims.
        bound: a lower bound on the true epsilon, with 95 % confidence.
        estimate: an estimate of the true epsilon, tighter than the bound but not a proof: it assumes Gaussian scores.
        delta: the delta of these three values of epsilon.
        right: number of correct guesses.
        guesses: number of guesses.
        canaries: number of canaries.
    """

    claimed: float
    bound: float
    estimate: float
    delta: float
    right: int
    guesses: int
    canaries: int

    @property
    def contradicts(self) -> bool:
        """Whether the claim is refuted with 95 % confidence."""
        return self.bound > self.claimed

    def format_bound(self) -> str:
        """Return the bound, rounded down."""
        return f"{math.floor(100 * self.bound) / 100:.2f}"

    def __repr__(self) -> str:
        verdict = ": the claim is REFUTED" if self.contradicts else ""
        return f"claimed {self.claimed:.2f}, measured at least {self.format_bound()} (95 %){verdict}"


def measure(scores: Reals, included: Booleans, claimed: float, delta: float, guesses: int) -> MeasuredEpsilon:
    """Measure epsilon by guessing that canaries with high scores were included and those with low scores were not.

    Args:
        scores: the score of each canary; a canary with a higher score is more likely to have been included.
        included: whether each canary was included.
        claimed: the claimed epsilon.
        delta: the delta of the claim.
        guesses: the number of guesses, which must be fixed before the run.
    """
    order = np.argsort(scores)
    low, high = order[: guesses // 2], order[len(order) - (guesses - guesses // 2) :]
    correct = int(included[high].sum() + (~included[low]).sum())
    bound = epsilon_lower_bound(correct, guesses, len(scores), delta)
    estimate = gaussian_estimate(scores[included], scores[~included], delta)
    return MeasuredEpsilon(claimed, bound, estimate, delta, correct, guesses, len(scores))
