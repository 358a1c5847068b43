"""Exact random draws: Bernoulli trials, Poisson samples and discrete Gaussian noise.

Probabilities are not rounded. A trial compares 53 random bits with a probability in float64. If the two are too close
to decide, which happens about once in 2^46 trials, further bits are drawn and compared in exact arithmetic.
Floating-point noise would not be safe: some values in the tail cannot occur, and the set of possible values depends on
the sum to which the noise is added.
"""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fedveil.scheme.noise import Entropy

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
SCALE = 2**20  # standard deviation of discrete Gaussian noise, in units of its grid
_BITS = 53
_GUARD = 2.0**-46  # far above the relative error of a probability in float64
_DIGITS = 60  # base precision, in decimal digits; it grows with the number of bits drawn


def poisson_sample(entropy: Entropy, records: int, rate: float) -> Integers:
    """Return the indices of a sample that contains each of `records` records independently with probability `rate`."""
    if rate >= 1:
        return np.arange(records)
    words = (entropy.words(records) >> np.uint64(64 - _BITS)).astype(np.int64)
    threshold = Fraction(rate) * 2**_BITS  # exact: `rate` is a float
    result = words < math.floor(threshold)
    for index in np.flatnonzero(words == math.floor(threshold)):  # the next bits decide
        result[index] = _trial(entropy, threshold - math.floor(threshold))
    return np.flatnonzero(result)


def _trial(entropy: Entropy, probability: Fraction) -> bool:
    """Return True with the given rational probability."""
    while True:
        probability *= 2**64
        word, integer = int(entropy.words(1)[0]), math.floor(probability)
        if word != integer:
            return word < integer
        probability -= integer


def exponential_trials(entropy: Entropy, numerators: NDArray[np.uint64], denominator: int) -> Booleans:
    """Return True with probability exp(-n / denominator) for each integer n."""
    words = entropy.words(len(numerators)) >> np.uint64(64 - _BITS)
    uniform = words.astype(np.float64) * 2.0**-_BITS  # the drawn number, rounded down by less than 2^-53
    probability = np.exp(-(numerators.astype(np.float64) / denominator))
    result: Booleans = uniform + 2.0**-_BITS <= probability * (1 - _GUARD)
    for index in np.flatnonzero(~result & (uniform < probability * (1 + _GUARD))):
        result[index] = _exponential_trial(entropy, int(words[index]), Fraction(int(numerators[index]), denominator))
    return result


def _exponential_trial(entropy: Entropy, word: int, exponent: Fraction) -> bool:
    """Complete a trial with probability exp(-exponent) whose first bits have been drawn."""
    bits = _BITS
    if not exponent:
        return True
    with localcontext() as context:
        while True:
            context.prec = _DIGITS + bits // 3
            probability = Fraction((-(Decimal(exponent.numerator) / Decimal(exponent.denominator))).exp())
            # the margin also covers the much smaller rounding error of the exponent
            error = probability / 10 ** (context.prec - 10)
            if Fraction(word + 1, 2**bits) <= probability - error:
                return True
            if Fraction(word, 2**bits) >= probability + error:
                return False
            word, bits = (word << 64) | int(entropy.words(1)[0]), bits + 64


def discrete_gaussian(entropy: Entropy, count: int) -> Integers:
    """Draw integers n with probability proportional to exp(-n^2 / (2 SCALE^2)).

    The function uses vectorised rejection sampling from a discrete Laplace distribution (Canonne, Kamath and Steinke,
    arXiv 2004.00010, algorithm 3). The tail is not truncated; only draws beyond 2^31, or 2,048 standard deviations,
    overflow.
    """
    result, num_drawn = np.empty(count, np.int64), 0
    while num_drawn < count:
        laplace = _discrete_laplace(entropy, count - num_drawn + (count - num_drawn) // 2 + 16)
        distance = (np.abs(laplace) - SCALE).astype(np.int64)
        accepted = laplace[exponential_trials(entropy, np.square(distance).astype(np.uint64), 2 * SCALE**2)]
        values = accepted[: count - num_drawn]
        result[num_drawn : num_drawn + len(values)] = values
        num_drawn += len(values)
    return result


def _discrete_laplace(entropy: Entropy, attempts: int) -> Integers:
    """Draw at most `attempts` integers n with probability proportional to exp(-|n| / SCALE)."""
    words = entropy.words(attempts)
    low = words % np.uint64(SCALE)  # uniform, because SCALE is a power of two
    negative = (words >> np.uint64(63)).astype(bool)
    accepted = exponential_trials(entropy, low, SCALE)
    low, negative = low[accepted], negative[accepted]
    size = low.astype(np.int64) + SCALE * _geometric(entropy, len(low))
    accepted = ~(negative & (size == 0))  # otherwise, 0 would be twice as likely
    result: Integers = np.where(negative, -size, size)[accepted]
    return result


def _geometric(entropy: Entropy, count: int) -> Integers:
    """Draw the number of successes before the first failure, with success probability exp(-1)."""
    result, active = np.zeros(count, np.int64), np.arange(count)
    while len(active):
        active = active[exponential_trials(entropy, np.ones(len(active), np.uint64), 1)]
        result[active] += 1
    return result
