"""A self-contained HTML page of results, and its sections: plain values, validated so that rendering never fails."""

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedveil.errors import BadArgument
from fedveil.lookup import lazily

if TYPE_CHECKING:
    from fedveil.report.page import render as render
    from fedveil.report.page import write as write
else:
    __getattr__ = lazily(__name__, {"render": "page", "write": "page"})  # rendering is imported on first use

NOTHING = "\u2013"  # a dash in place of a missing number
LARGEST = 1e300  # beyond this, the span between two values may overflow


def finite(value: float) -> bool:
    """Return whether a value has a position on an axis."""
    return abs(value) < LARGEST  # False for NaN too


def count(number: int, noun: str) -> str:
    """Format a number with its noun.

    >>> count(1, "value"), count(2000, "value")
    ('1 value', '2,000 values')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _refuse_if(wrong: bool, where: str, what: str, fix: str = "") -> None:
    if wrong:
        raise BadArgument(where, what, fix)


@dataclass(frozen=True)
class Curves:
    """Lines over a common x axis. Later lines are dashed and drawn over earlier ones: pass the reference first.

    Values that cannot be drawn (NaN, infinity, zero or less on a logarithmic axis) leave a gap, and the page says so.
    `bands` gives a line a band: (low, high) for each of its points. On a logarithmic y axis a band is left out where it
    reaches zero, and the page says so.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log_y: bool = False
    note: str = ""
    log_x: bool = False
    bands: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"Curves {self.title!r}"
        for name, ends in self.bands.items():
            points = len(self.series.get(name, ()))
            _refuse_if(len(ends) != points, where, f"{name!r} has {points} points, but its band has {len(ends)}")
            for low, high in ends:
                what = f"the band of {name!r} must be finite, low before high, got {low} to {high}"
                _refuse_if(not (finite(low) and finite(high) and low <= high), where, what)


@dataclass(frozen=True)
class Table:
    """Rows of text under a header. Numeric columns are right-aligned; cells that begin with "failed" stand out."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows, start=1):
            what = f"row {number} has {len(row)} cells, but the header has {len(self.header)}"
            _refuse_if(len(row) != len(self.header), f"Table {self.title!r}", what)


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix: a row for each true class, a column for each predicted class."""

    title: str
    labels: Sequence[str]
    counts: Sequence[Sequence[int]]
    note: str = ""

    def __post_init__(self) -> None:
        size, where = len(self.labels), f"Matrix {self.title!r}"
        square = [len(row) for row in self.counts] == [size] * size
        _refuse_if(not square, where, f"{size} labels need {size} rows of {size} counts")
        _refuse_if(any(count < 0 for row in self.counts for count in row), where, "a count is below zero")


@dataclass(frozen=True)
class Picture:
    """A small picture. `data` has one byte per pixel and channel (1 for grey, 3 for RGB), row by row from the top."""

    width: int
    height: int
    channels: int
    data: bytes
    caption: str = ""

    def __post_init__(self) -> None:
        size = f"{self.width} x {self.height} pixels of {self.channels} channels"
        fix = "pass array.tobytes() of a uint8 array of shape (height, width, channels)"
        wrong = self.channels not in (1, 3) or self.width < 1 or self.height < 1
        _refuse_if(wrong, "Picture", f"{size}: sides must be at least 1, channels 1 or 3", fix)
        given = type(self.data).__name__
        _refuse_if(not isinstance(self.data, bytes), "Picture", f"data must be bytes, got {given}", fix)
        wanted = self.width * self.height * self.channels
        _refuse_if(len(self.data) != wanted, "Picture", f"{size} need {wanted} bytes, got {len(self.data)}", fix)

    def to_png(self) -> bytes:
        r"""Return the picture as a PNG file (https://www.w3.org/TR/png-3), without row filters.

        >>> Picture(2, 1, 1, bytes([0, 255])).to_png()[:16]
        b'\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR'
        """
        stride = self.width * self.channels
        rows = (b"\0" + self.data[start : start + stride] for start in range(0, len(self.data), stride))
        colour = 0 if self.channels == 1 else 2  # PNG's colour types for grey and RGB
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, colour, 0, 0, 0)
        chunks = {b"IHDR": header, b"IDAT": zlib.compress(b"".join(rows), 9), b"IEND": b""}
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in chunks.items()
        )


@dataclass(frozen=True)
class Pictures:
    """A grid of pictures: rows (label, one picture per column), such as "original" over "recovered"; None is blank."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Picture | None]]]
    note: str = ""

    def __post_init__(self) -> None:
        for label, cells in self.rows:
            what = f"row {label!r} has {len(cells)} pictures for {len(self.columns)} columns"
            fix = "pass None for a cell without a picture"
            _refuse_if(len(cells) != len(self.columns), f"Pictures {self.title!r}", what, fix)


@dataclass(frozen=True)
class Interval:
    """A value and its interval; both may be None. Without a value, `missing` says why; "failed..." stands out."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    group: str = ""
    missing: str = "not measured"

    def __post_init__(self) -> None:
        where = f"Interval {self.name!r}" + (f" of group {self.group!r}" if self.group else "")
        for what, number in (("value", self.value), ("low", self.low), ("high", self.high)):
            infinite = number is not None and not finite(number)
            _refuse_if(infinite, where, f"{what} is {number}", 'pass None, and missing="failed: ..." to say why')
        ends = [end for end in (self.low, self.high) if end is not None]
        _refuse_if(len(ends) == 1, where, f"half an interval: {self.low} to {self.high}", "pass both ends or neither")
        _refuse_if(ends != sorted(ends), where, f"low {self.low} is above high {self.high}", "pass the lower end first")
        _refuse_if(self.value is None and bool(ends), where, "an interval without a value", "pass None as low and high")


@dataclass(frozen=True)
class Intervals:
    """Values with their intervals, one per row, grouped in the given order, with named reference lines.

    Entries with the same name look alike in every group. The axis includes all numbers, and `low` and `high` if given.
    """

    title: str
    label: str
    rows: Sequence[Interval]
    references: Mapping[str, float]
    low: float | None = None
    high: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        where = f"Intervals {self.title!r}"
        for name, value in (*self.references.items(), ("low", self.low), ("high", self.high)):
            infinite = value is not None and not finite(value)
            _refuse_if(infinite, where, f"{name} is {value}", "pass a finite number, or leave it out")
        reverse = self.low is not None and self.high is not None and self.low >= self.high
        _refuse_if(reverse, where, f"low {self.low} is not below high {self.high}", "pass the lower limit first")


@dataclass(frozen=True)
class Beside:
    """Sections side by side, or one below the other on a phone."""

    title: str
    parts: Sequence[Matrix | Table | Curves | Pictures | Intervals]
    note: str = ""


@dataclass(frozen=True)
class Facts:
    """Names and their values, such as a configuration."""

    title: str
    facts: Mapping[str, str]
    note: str = ""


@dataclass(frozen=True)
class Text:
    """Paragraphs."""

    title: str
    paragraphs: Sequence[str]


Section = Curves | Table | Matrix | Pictures | Intervals | Beside | Facts | Text


@dataclass(frozen=True)
class Page:
    """The content of a page.

    Attributes:
        title: what was run.
        verdict: the result in one sentence; readers of a link preview may see nothing else.
        sections: the content, in order.
        command: the command that recreates the page.
        lead: description of what was run, below the verdict.
        result: the main result in a few words, for the title of the browser tab.
    """

    title: str
    verdict: str
    sections: Sequence[Section]
    command: str
    lead: str = ""
    result: str = ""
