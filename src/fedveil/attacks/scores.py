"""Measures of how well scores separate members from others. In every attack, larger scores indicate members.

All intervals are two-sided, at 95 % by default. They account for the random choice of the scored records, but not for
randomness in training the model.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtr, ndtri, stdtr, stdtrit

from fedveil.errors import BadArgument

Scores = NDArray[np.float64]
MIN_FALSE_POSITIVES = 10  # number of expected false positives needed to estimate a rate


Method = Literal["normal", "logit", "student", "binomial"]
MIN_P_VALUE = 1e-12  # smaller p-values are reported as this value


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval.

    Attributes:
        value, low, high: the value and the ends of the interval.
        sample_size: number of records or repetitions that the interval is based on; 0 if it is unknown.
        method: how the interval was computed: a normal quantile of the value or of its logit, Student's quantile, or
            Clopper and Pearson's interval.
        repeats: number of repeated measurements, for Student's quantile.
    """

    value: float
    low: float
    high: float
    sample_size: int = field(default=0, compare=False, kw_only=True)
    method: Method = field(default="normal", compare=False, kw_only=True)
    repeats: int = field(default=0, compare=False, kw_only=True)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def at_level(self, level: float) -> Self:
        """Return the estimate with an interval of another level."""
        if self.method == "binomial":
            ends = proportion(round(self.value * self.sample_size), self.sample_size, level=level)
            return replace(self, low=min(self.value, ends.low), high=max(self.value, ends.high))
        factor = self._quantile((1 + level) / 2) / self._quantile(0.975)
        transform, inverse = self._scale
        low, high = (
            inverse(transform(self.value) + factor * (transform(end) - transform(self.value)))
            for end in (self.low, self.high)
        )
        low, high = (
            self.low if self.low == 0 else low,
            self.high if self.high == 1 else high,
        )  # fractions keep their ends 0 and 1
        return replace(self, low=low, high=high)

    def p_value(self, hypothesis: float) -> float:
        """Return the smallest alpha for which the interval of level 1 - alpha does not include `hypothesis`."""
        if self.method == "binomial":
            low, high = math.log(MIN_P_VALUE), 0.0
            for _ in range(40):
                midpoint = (low + high) / 2
                low, high = (midpoint, high) if hypothesis in self.at_level(1 - math.exp(midpoint)) else (low, midpoint)
            return math.exp(high)
        transform, _ = self._scale
        distance, half_width = abs(transform(self.value) - transform(hypothesis)), self._half_width(hypothesis)
        if distance == 0:
            return 1.0
        quantile = distance / half_width * self._quantile(0.975) if half_width > 0 else math.inf
        tail = float(stdtr(self.repeats - 1, -quantile)) if self._is_students else float(ndtr(-quantile))
        return max(2 * tail, MIN_P_VALUE)

    @property
    def _is_students(self) -> bool:
        return self.method == "student" and self.repeats > 1

    @property
    def _scale(self) -> tuple[Callable[[float], float], Callable[[float], float]]:
        """The transform that makes the interval symmetric, and its inverse."""
        return (_logit, _expit) if self.method == "logit" and 0 < self.value < 1 else (float, float)

    def _half_width(self, hypothesis: float) -> float:
        """Return the half-width of the interval on the side of `hypothesis`."""
        transform, _ = self._scale
        return abs(transform(self.value) - transform(self.low if hypothesis < self.value else self.high))

    def _quantile(self, probability: float) -> float:
        return float(stdtrit(self.repeats - 1, probability) if self._is_students else ndtri(probability))


def _logit(value: float) -> float:
    value = min(max(value, 1e-300), 1 - 2**-53)
    return math.log(value) - math.log1p(-value)


def _expit(value: float) -> float:
    return 1 / (1 + math.exp(-min(max(value, -700), 700)))


def check_scores(members: ArrayLike, others: ArrayLike) -> tuple[Scores, Scores]:
    """Return both arrays of scores as flat float64 arrays; reject empty arrays and NaN."""
    result = np.asarray(members, np.float64).ravel(), np.asarray(others, np.float64).ravel()
    for name, scores in zip(("members", "others"), result, strict=True):
        if not len(scores):
            raise BadArgument("scores", f"there are no scores for {name}", "score at least one record of each group")
        if np.isnan(scores).any():
            raise BadArgument("scores", f"a score for {name} is NaN")
    return result


def proportion(hits: int, trials: int, *, level: float = 0.95) -> Estimate:
    """Return the hit rate with the exact interval of Clopper and Pearson (1934)."""
    if not 0 <= hits <= trials or trials < 1:
        raise BadArgument("proportion", f"got {hits} hits in {trials} trials")
    tail, misses = (1 - level) / 2, trials - hits
    low = float(betaincinv(hits, misses + 1, tail)) if hits else 0.0
    high = float(betaincinv(hits + 1, misses, 1 - tail)) if misses else 1.0
    return Estimate(hits / trials, low, high, sample_size=trials, method="binomial")


def average(values: Sequence[float], *, minimum: float = -math.inf, maximum: float = math.inf) -> Estimate:
    """Return the mean of repeated measurements with Student's 95 % interval, clipped to [minimum, maximum].

    For a single measurement, both ends of the interval equal the value.
    """
    count, mean = len(values), statistics.fmean(values)
    if count < 2:
        return Estimate(mean, mean, mean, sample_size=count, method="student", repeats=count)
    half_width = float(stdtrit(count - 1, 0.975)) * statistics.stdev(values) / math.sqrt(count)
    ends = max(minimum, mean - half_width), min(maximum, mean + half_width)
    return Estimate(mean, *ends, sample_size=count, method="student", repeats=count)


def placements(scores: Scores, reference: Scores) -> Scores:
    """For each score, return the fraction of `reference` scores below it; ties count half."""
    sorted_reference = np.sort(reference)
    num_below, num_at_or_below = (
        np.searchsorted(sorted_reference, scores, "left"),
        np.searchsorted(sorted_reference, scores, "right"),
    )
    return np.asarray((num_below + num_at_or_below) / (2 * len(sorted_reference)))


def auc(members: ArrayLike, others: ArrayLike, *, level: float = 0.95) -> Estimate:
    """Return the probability that a random member has a larger score than a random other record; ties count half.

    The variance follows DeLong et al. (1988), and the interval is computed on logits:

        var = var(placements of members) / members + var(placements of others) / others

    If the variance is 0 (all pairs in order, or all tied), the function uses the interval of Clopper and Pearson for
    min(members, others) disjoint pairs, which is wider than necessary.
    """
    member_scores, other_scores = check_scores(members, others)
    member_placements, other_placements = (
        placements(member_scores, other_scores),
        placements(other_scores, member_scores),
    )
    value, num_pairs = float(member_placements.mean()), min(len(member_scores), len(other_scores))
    variance = (
        (member_placements.var(ddof=1) / len(member_scores) + other_placements.var(ddof=1) / len(other_scores))
        if num_pairs > 1
        else 0.0
    )
    if variance <= 0 or value in (0.0, 1.0):
        pairs = proportion(round(value * num_pairs), num_pairs, level=level)
        ends = min(value, pairs.low), max(value, pairs.high)
        return Estimate(value, *ends, sample_size=num_pairs, method="binomial")
    logit = math.log(value / (1 - value))
    half_width = float(ndtri((1 + level) / 2)) * math.sqrt(variance) / (value * (1 - value))
    low, high = _expit(logit - half_width), _expit(logit + half_width)
    return Estimate(value, low, high, sample_size=len(member_scores) + len(other_scores), method="logit")


def has_enough(others: int, rate: float) -> bool:
    """Return whether at least ten false positives are expected; a rate of 0.1 % needs 10,000 others."""
    return others * rate >= MIN_FALSE_POSITIVES - 1e-9


def threshold_at(others: ArrayLike, rate: float) -> float:
    """Return the lowest threshold that at most a fraction `rate` of the others exceeds."""
    descending = np.sort(np.asarray(others, np.float64).ravel())[::-1]
    num_allowed = math.floor(rate * len(descending) + 1e-9)
    return float(descending[num_allowed]) if num_allowed < len(descending) else -math.inf


def tpr_at(members: ArrayLike, others: ArrayLike, rate: float, *, level: float = 0.95) -> Estimate:
    """Return the true-positive rate at the given false-positive rate.

    As usual, the threshold is chosen from the scores of the same others (`threshold_at`). The Clopper-Pearson interval
    accounts for the choice of members, but not for the choice of the threshold.
    """
    member_scores, other_scores = check_scores(members, others)
    return proportion(int((member_scores > threshold_at(other_scores, rate)).sum()), len(member_scores), level=level)


def best_threshold(members: ArrayLike, others: ArrayLike) -> float:
    """Return a threshold with the largest balanced accuracy, halfway between two scores; -inf if none beats chance."""
    member_scores, other_scores = check_scores(members, others)
    values = np.unique(np.concatenate([member_scores, other_scores]))
    true_positives = len(member_scores) - np.searchsorted(np.sort(member_scores), values, "left")
    false_positives = len(other_scores) - np.searchsorted(np.sort(other_scores), values, "left")
    gain = true_positives / len(member_scores) - false_positives / len(other_scores)
    best = int(gain.argmax())
    if best == 0 or gain[best] <= 0:
        return -math.inf
    low, high = float(values[best - 1]), float(values[best])
    midpoint = low + (high - low) / 2 if math.isfinite(high - low) else high
    return midpoint if low < midpoint else high


def balanced_accuracy(members: ArrayLike, others: ArrayLike, threshold: float, *, level: float = 0.95) -> Estimate:
    """Return (TPR + TNR) / 2, the paper's attack success rate; a score of at least `threshold` indicates a member.

    The Clopper-Pearson intervals of both rates are combined by the method of Zou and Donner (2008) for independent
    estimates. The lower end is value - sqrt((TPR - TPR_low)^2 + (TNR - TNR_low)^2) / 2; the upper end is analogous.
    """
    member_scores, other_scores = check_scores(members, others)
    tpr = proportion(int((member_scores >= threshold).sum()), len(member_scores), level=level)
    tnr = proportion(int((other_scores < threshold).sum()), len(other_scores), level=level)
    value = (tpr.value + tnr.value) / 2
    low = math.hypot(tpr.value - tpr.low, tnr.value - tnr.low) / 2
    high = math.hypot(tpr.high - tpr.value, tnr.high - tnr.value) / 2
    ends = max(0.0, value - low), min(1.0, value + high)
    return Estimate(value, *ends, sample_size=len(member_scores) + len(other_scores))


def roc(members: ArrayLike, others: ArrayLike, *, points: int = 120) -> list[tuple[float, float]]:
    """Return pairs (FPR, TPR) for a ROC curve on logarithmic axes, with FPR from 1 / others to 1."""
    member_scores, other_scores = check_scores(members, others)
    counts = np.unique(np.round(np.geomspace(1, len(other_scores), points)).astype(int))
    rates = [float(count) / len(other_scores) for count in counts]
    return [(rate, float((member_scores > threshold_at(other_scores, rate)).mean())) for rate in rates]
