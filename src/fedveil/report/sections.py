"""What a page is made of: plain values, checked when they are made, so that a page never fails late."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedveil.errors import BadArgument


@dataclass(frozen=True)
class Curves:
    """Lines over a common x axis. A later line is drawn dashed over an earlier one: give the reference first.

    Values that cannot be drawn (NaN, infinity, zero or less on a logarithmic axis) leave a gap, and the page says so.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log_y: bool = False
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text under a header. Columns of numbers are aligned right; a cell that begins with "failed" is marked."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse rows of another length than the header."""
        for number, row in enumerate(self.rows, start=1):
            if len(row) != len(self.header):
                raise BadArgument(
                    f"Table {self.title!r}", f"row {number} has {len(row)} cells, the header has {len(self.header)}"
                )


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix: a row for each true class, a column for each answer."""

    title: str
    labels: Sequence[str]
    counts: Sequence[Sequence[int]]
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse counts that are not square, and counts below zero."""
        size = len(self.labels)
        if len(self.counts) != size or any(len(row) != size for row in self.counts):
            raise BadArgument(f"Matrix {self.title!r}", f"{size} labels need {size} rows of {size} counts")
        if any(count < 0 for row in self.counts for count in row):
            raise BadArgument(f"Matrix {self.title!r}", "a count is below zero")


@dataclass(frozen=True)
class Beside:
    """Parts side by side, on a phone one under the other."""

    title: str
    parts: Sequence[Matrix | Table | Curves]
    note: str = ""


@dataclass(frozen=True)
class Facts:
    """Names and their values, as of a configuration."""

    title: str
    facts: Mapping[str, str]
    note: str = ""


@dataclass(frozen=True)
class Text:
    """Paragraphs."""

    title: str
    paragraphs: Sequence[str]


Section = Curves | Table | Matrix | Beside | Facts | Text
