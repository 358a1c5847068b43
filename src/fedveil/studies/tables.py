"""What the pages of several attacks have in common."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fedveil.report import Interval, Section
from fedveil.studies.estimates import Estimate, Outcome, Reached, furthest

Presented = tuple[Sequence[str], list[list[str]], str, list[Section]]  # header, rows and note of the table; sections
ADAPTIVE = (
    'SPN is our re-implementation. "own labels" is an adaptive attacker that fits the noise of the veil\'s final layer '
    'with its own labels, "sketches stacked" one that adds up DBCL\'s sketches of six rounds. The models of the other '
    "defences need no cleaning."
)
VERDICT = 160  # characters, about two lines
SHORT = 0.2  # of the way from a guess to the strongest attacker: so far behind it, another one falls short


class Furthest(NamedTuple):
    """The attacker that gets furthest, and what published attacks reach."""

    strongest: Reached
    published: float


class Said(NamedTuple):
    """Verdicts in which {found} are figures by defence, {top} that without a defence, and {guess} is a guess.

    `weak` where nothing is found, `few` where there are too few trials to tell, in both cases under no defence.
    """

    verdict: str
    weak: str
    few: str


def furthest_of(every: Sequence[Reached], published: Sequence[Reached]) -> Furthest | None:
    """Return who gets furthest of all, beside the published ones; without any, they are all published."""
    one, known = furthest(every), furthest(published)
    return Furthest(one, (known or one).value) if one else None


def fitting(*sentences: str) -> str:
    """The first sentence that is short enough for a verdict, else the last."""
    return next((one for one in sentences if len(one) <= VERDICT), sentences[-1])


def join_words(names: Sequence[str], word: str) -> str:
    """Names in a sentence.

    >>> join_words(["a", "b", "c"], "and")
    'a, b and c'
    """
    return f" {word} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def display_name(defence: str) -> str:
    """A defence in a sentence; of package.module:Class the class."""
    return "no defence" if defence == "plain" else defence.rpartition(":")[2]


def one_line(found: Mapping[str, Furthest], guess: float, form: Callable[[float], str], said: Said) -> str:
    """The verdict on an attack in one sentence: how far the strongest attacker gets under each defence.

    What published attacks reach stands beside it where they fall short. If nobody finds anything, not even without a
    defence, there is nothing to say about defences. `form` writes a figure.
    """
    if not found:
        return "Nothing is known: the attack failed under every defence."
    outcomes = {one.strongest.outcome for one in found.values()}
    if "plain" in found and Outcome.FOUND not in outcomes:
        words = said.few if Outcome.TOO_FEW in outcomes else said.weak
        return words.format(top=form(found["plain"].strongest.figure.value), guess=form(guess))
    beside = "" if "plain" in found else "; no undefended federation was attacked"
    every = [
        ", ".join(
            f"{form(one.strongest.value)} ({display_name(name)}{_note(one, guess, form, full)})"
            for name, one in found.items()
        )
        for full in (True, False)
    ]
    return fitting(*(said.verdict.format(found=words, guess=form(guess)) + f"{beside}." for words in every))


def _note(found: Furthest, guess: float, form: Callable[[float], str], full: bool) -> str:
    """What stands beside a figure: what it cannot tell, its direction, and, in full, what published attacks reach."""
    one = found.strongest
    if one.outcome is Outcome.TOO_FEW:
        return "; too few trials"
    below = f"; 1 - {form(one.figure.value)}, below chance" if one.below else ""
    short = full and one.value - found.published > SHORT * (one.value - guess)
    return below + (f"; as published {form(found.published)}" if short else "")


def failed_row(name: str, columns: int, said: str = "failed") -> list[str]:
    """The row of a defence without figures."""
    return [name, said, *[""] * (columns - 2)]


def mark(name: str, found: Estimate | None, group: str = "", scale: float = 1.0) -> Interval:
    """An estimate as a mark of a chart; None has failed."""
    if found is None:
        return Interval(name, None, group=group, missing="failed")
    return Interval(name, scale * found.value, scale * found.low, scale * found.high, group)
