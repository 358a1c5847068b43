"""Values with their intervals, in one type and one notation."""

import enum
import math
from collections.abc import Sequence

from fedveil.attacks.scores import Estimate, average
from fedveil.report import NOTHING

__all__ = ["Estimate", "Outcome", "average", "judge_interval", "over_broadcasts", "percent", "text"]


class Outcome(enum.Enum):
    """What the interval of an attacker's figure tells."""

    FOUND = "found"
    NOTHING = "nothing found"
    TOO_FEW = "too few trials to tell"


def judge_interval(found: Estimate, guess: float, clear: float, *, both: bool = False) -> Outcome:
    """Return what an interval tells about a figure.

    Found: the interval lies above the guess. Nothing found: it reaches the guess, and ends below a clear leak. Too few
    trials: it holds both. With `both`, figures below the guess are as telling as those above it, as of an AUC, and the
    clear leak below the guess is as far from it.

    Args:
        found: the figure with its interval.
        guess: what the best answer reaches that does not look at its input.
        clear: from where on a leak is clear.
        both: whether figures below the guess count too.

    >>> judge_interval(Estimate(0.6, 0.4, 0.8), 0.5, 0.55)
    <Outcome.TOO_FEW: 'too few trials to tell'>
    """
    if found.low > guess or (both and found.high < guess):
        return Outcome.FOUND
    wide = found.high > clear or (both and found.low < 2 * guess - clear)
    return Outcome.TOO_FEW if wide else Outcome.NOTHING


def text(found: Estimate | None, form: str = ".1f", scale: float = 1.0) -> str:
    """A value with its interval: 0.612 [0.590, 0.634]; a single measurement stands alone.

    >>> text(Estimate(0.612, 0.59, 0.634), ".2f"), text(Estimate(2.0, 2.0, 2.0))
    ('0.61 [0.59, 0.63]', '2.0')
    """
    if found is None:
        return NOTHING
    value, low, high = (f"{scale * number:{form}}" for number in (found.value, found.low, found.high))
    return value if found.low == found.high else f"{value} [{low}, {high}]"


def percent(found: Estimate | None) -> str:
    """A share in per cent: 61.2 [59.0, 63.4]."""
    return text(found, scale=100)


def over_broadcasts(looks: Sequence[Estimate]) -> Estimate:
    """The same share under several broadcasts as one: the mean, and an interval over broadcasts and over records.

    A half width is the root of Student's, over broadcasts, squared and the mean single one, over records, squared.
    """
    if len(looks) == 1:
        return looks[0]
    over = average([look.value for look in looks])
    single = sum(look.high - look.low for look in looks) / (2 * len(looks))
    reach = math.hypot(over.high - over.value, single)
    return Estimate(over.value, max(0.0, over.value - reach), min(1.0, over.value + reach))
