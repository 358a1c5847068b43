"""Values with their intervals, in one type and one notation."""

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedveil.attacks.scores import Estimate as Estimate
from fedveil.attacks.scores import average as average
from fedveil.report import NOTHING


class Outcome(enum.Enum):
    """Conclusion from the interval of an attacker's figure."""

    FOUND = "found"
    NOTHING = "nothing found"
    TOO_FEW = "too few trials to tell"


RANK = {Outcome.FOUND: 2, Outcome.TOO_FEW: 1, Outcome.NOTHING: 0}


class Rule(NamedTuple):
    """Thresholds by which an interval is judged.

    Attributes:
        guess: the figure of the best constant answer.
        clear: the figure from which on a leak is clear.
        both: whether figures below the guess count as those above it, as for an AUC.
    """

    guess: float
    clear: float
    both: bool = False


CHANCE = Rule(0.5, 0.55, both=True)  # of an AUC of membership


def judge_interval(found: Estimate, rule: Rule) -> Outcome:
    """Judge the interval of a figure.

    Found: the interval lies above the guess, or, if both sides count, below it. Nothing found: it includes the guess or
    lies below it, and includes no clear leak. Too few trials: it includes both.

    >>> judge_interval(Estimate(0.6, 0.4, 0.8), CHANCE)
    <Outcome.TOO_FEW: 'too few trials to tell'>
    """
    if found.low > rule.guess or (rule.both and found.high < rule.guess):
        return Outcome.FOUND
    wide = found.high > rule.clear or (rule.both and found.low < 2 * rule.guess - rule.clear)
    return Outcome.TOO_FEW if wide else Outcome.NOTHING


@dataclass(frozen=True)
class Reached:
    """The figure of one attacker.

    Attributes:
        attacker: name of the attacker.
        figure: the measured figure.
        outcome: conclusion from its interval.
        below: whether it lies below the guess; an attacker that reverses its answers then has 1 - figure.
    """

    attacker: str
    figure: Estimate
    outcome: Outcome
    below: bool = False

    @property
    def value(self) -> float:
        """The figure, in the direction in which something is found."""
        return 1 - self.figure.value if self.below else self.figure.value


def reach(attacker: str, figure: Estimate, rule: Rule, trials: int = 2) -> Reached:
    """Judge the figure of an attacker; a single trial has no interval, and allows no conclusion."""
    outcome = judge_interval(figure, rule) if trials > 1 else Outcome.TOO_FEW
    return Reached(attacker, figure, outcome, outcome is Outcome.FOUND and figure.high < rule.guess)


def furthest(every: Iterable[Reached]) -> Reached | None:
    """Return the strongest attacker: of those that find something, else of those with too few trials, else of all."""
    return max(every, key=lambda one: (RANK[one.outcome], one.value), default=None)


def text(found: Estimate | None, form: str = ".1f", scale: float = 1.0) -> str:
    """Format a value with its interval: 0.612 [0.590, 0.634]; a single measurement has none.

    >>> text(Estimate(0.612, 0.59, 0.634), ".2f"), text(Estimate(2.0, 2.0, 2.0))
    ('0.61 [0.59, 0.63]', '2.0')
    """
    if found is None:
        return NOTHING
    value, low, high = (f"{scale * number:{form}}" for number in (found.value, found.low, found.high))
    return value if found.low == found.high else f"{value} [{low}, {high}]"


def percent(found: Estimate | None) -> str:
    """Format a fraction in per cent: 61.2 [59.0, 63.4]."""
    return text(found, scale=100)


def combine_broadcasts(looks: Sequence[Estimate]) -> Estimate:
    """Combine the same fraction under several broadcasts: the mean, and an interval over broadcasts and records.

    The half width is the root of the sum of two squares: of Student's half width over broadcasts, and of the mean half
    width over records.
    """
    if len(looks) == 1:
        return looks[0]
    over = average([look.value for look in looks])
    single = sum(look.high - look.low for look in looks) / (2 * len(looks))
    reach = math.hypot(over.high - over.value, single)
    return Estimate(over.value, max(0.0, over.value - reach), min(1.0, over.value + reach))
