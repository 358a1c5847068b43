"""Parts of tables, charts and sentences that the pages of several studies share."""

from collections.abc import Sequence

from fedveil.report import Interval
from fedveil.studies.estimates import Estimate


def join_words(names: Sequence[str], word: str) -> str:
    """Join names in a sentence.

    >>> join_words(["a", "b", "c"], "and")
    'a, b and c'
    """
    return f" {word} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def display_name(defence: str) -> str:
    """Return the name of a defence in a sentence; for package.module:Class the class."""
    return "no defence" if defence == "plain" else defence.rpartition(":")[2]


def failed_row(name: str, columns: int, said: str = "failed") -> list[str]:
    """Return the row of a defence without figures."""
    return [name, said, *[""] * (columns - 2)]


def mark(name: str, found: Estimate | None, group: str = "", scale: float = 1.0) -> Interval:
    """Return an estimate as a mark of a chart; None is a failure."""
    if found is None:
        return Interval(name, None, group=group, missing="failed")
    return Interval(name, scale * found.value, scale * found.low, scale * found.high, group)
