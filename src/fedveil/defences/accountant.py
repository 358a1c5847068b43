"""What rounds of Gaussian noise add up to; the figures are those of Google's dp-accounting."""

import math
from collections.abc import Callable
from functools import lru_cache

from fedveil.errors import BadArgument

Epsilon = Callable[[float, float], float]


def library() -> Epsilon:
    """dp-accounting's exact epsilon of one Gaussian mechanism; it comes with an extra."""
    try:
        from dp_accounting import get_epsilon_gaussian
    except ImportError as error:
        what = f"privacy is accounted with dp-accounting, which cannot be imported ({error})"
        raise BadArgument("Private", what, "pip install 'fedveil[dp]'") from error
    found: Epsilon = get_epsilon_gaussian
    return found


@lru_cache(maxsize=1024)
def epsilon(rounds: int, noise: float, delta: float, *, replace: bool = False) -> float:
    """The epsilon that `rounds` rounds of noise spend, at a delta.

    A round adds N(0, (noise clip)^2) to a sum that one client can move by `clip`, from what it is without the client.
    Rounds of Gaussian noise, each chosen in view of those before, are together as private as one with noise /
    sqrt(rounds) (Dong, Roth and Su, arXiv 1905.02383: mu-GDP composes), of which the library has the exact epsilon
    (Balle and Wang, arXiv 1805.06530). There is no amplification by sampling: the run's seed, which is public, chooses
    the clients.

    Args:
        rounds: in which a client took part; for the guarantee of all, the most of any.
        noise: standard deviation of the noise on the sum, over clip.
        delta: above 0 and below 1.
        replace: neighbours differ by what one client holds, not by whether it contributes: the sum moves by 2 clip.
    """
    if not 0 < delta < 1:
        raise BadArgument("epsilon", f"delta must be above 0 and below 1, got {delta!r}", "delta=1e-5")
    if rounds < 0 or not noise >= 0:
        raise BadArgument("epsilon", f"rounds and noise must be 0 or more, got {rounds!r} and {noise!r}")
    if not rounds:
        return 0.0
    if not noise:
        return math.inf
    return float(library()(noise / math.sqrt(rounds) / (2 if replace else 1), delta))
