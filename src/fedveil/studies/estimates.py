"""Values with their intervals, in one type and one notation."""

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedveil.attacks.scores import Estimate, average
from fedveil.report import NOTHING

__all__ = [
    "Estimate",
    "Outcome",
    "average",
    "combine_broadcasts",
    "furthest",
    "judge_interval",
    "percent",
    "reach",
    "text",
]


class Outcome(enum.Enum):
    """What the interval of an attacker's figure tells."""

    FOUND = "found"
    NOTHING = "nothing found"
    TOO_FEW = "too few trials to tell"


RANK = {Outcome.FOUND: 2, Outcome.TOO_FEW: 1, Outcome.NOTHING: 0}


class Rule(NamedTuple):
    """When an interval tells something.

    Attributes:
        guess: what the best answer reaches that does not look at its input.
        clear: from where on a leak is clear.
        both: figures below the guess are as telling as those above it, as of an AUC; the clear leak there is as far.
    """

    guess: float
    clear: float
    both: bool = False


CHANCE = Rule(0.5, 0.55, both=True)  # of an AUC of membership


def judge_interval(found: Estimate, rule: Rule) -> Outcome:
    """Return what an interval tells about a figure.

    Found: the interval lies above the guess, or, if both sides count, below it. Nothing found: it holds the guess or
    lies below it, and no clear leak. Too few trials: it holds both.

    >>> judge_interval(Estimate(0.6, 0.4, 0.8), CHANCE)
    <Outcome.TOO_FEW: 'too few trials to tell'>
    """
    if found.low > rule.guess or (rule.both and found.high < rule.guess):
        return Outcome.FOUND
    wide = found.high > rule.clear or (rule.both and found.low < 2 * rule.guess - rule.clear)
    return Outcome.TOO_FEW if wide else Outcome.NOTHING


@dataclass(frozen=True)
class Reached:
    """How far one attacker gets.

    Attributes:
        attacker: its name.
        figure: as measured.
        outcome: what the figure's interval tells.
        below: whether it is found below the guess; whoever knows the direction then has 1 - figure.
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
    """Return how far an attacker gets; a single trial has no interval, and tells nothing."""
    outcome = judge_interval(figure, rule) if trials > 1 else Outcome.TOO_FEW
    return Reached(attacker, figure, outcome, outcome is Outcome.FOUND and figure.high < rule.guess)


def furthest(every: Iterable[Reached]) -> Reached | None:
    """Return who gets furthest: of those that find something, then of those with too few trials, then of the rest."""
    return max(every, key=lambda one: (RANK[one.outcome], one.value), default=None)


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


def combine_broadcasts(looks: Sequence[Estimate]) -> Estimate:
    """The same share under several broadcasts as one: the mean, and an interval over broadcasts and over records.

    A half width is the root of Student's, over broadcasts, squared and the mean single one, over records, squared.
    """
    if len(looks) == 1:
        return looks[0]
    over = average([look.value for look in looks])
    single = sum(look.high - look.low for look in looks) / (2 * len(looks))
    reach = math.hypot(over.high - over.value, single)
    return Estimate(over.value, max(0.0, over.value - reach), min(1.0, over.value + reach))
