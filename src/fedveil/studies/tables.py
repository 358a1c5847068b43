"""What the pages of several attacks have in common."""

from collections.abc import Sequence

from fedveil.report import Interval, Section
from fedveil.studies.estimates import Estimate

Presented = tuple[Sequence[str], list[list[str]], str, list[Section]]  # header, rows and note of the table; sections
ADAPTIVE = (
    'SPN is our re-implementation. "own labels" is an adaptive attacker that fits the noise of the veil\'s final layer '
    'with its own labels, "sketches stacked" one that adds up DBCL\'s sketches of six rounds. The models of the other '
    "defences need no cleaning."
)


def failed_row(name: str, columns: int, said: str = "failed") -> list[str]:
    """The row of a defence without figures."""
    return [name, said, *[""] * (columns - 2)]


def mark(name: str, found: Estimate | None, group: str = "", scale: float = 1.0) -> Interval:
    """An estimate as a mark of a chart; None has failed."""
    if found is None:
        return Interval(name, None, group=group, missing="failed")
    return Interval(name, scale * found.value, scale * found.low, scale * found.high, group)
