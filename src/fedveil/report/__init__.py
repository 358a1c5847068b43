"""The content of a self-contained HTML page: sections of plain values, validated so that rendering never fails."""

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedveil.errors import BadArgument
from fedveil.lookup import lazy_getattr

if TYPE_CHECKING:
    from fedveil.report.page import render as render
    from fedveil.report.page import write as write
else:
    __getattr__ = lazy_getattr(__name__, {"render": "page", "write": "page"})  # `page` is imported on first use

NOTHING = "\u2013"  # a dash that replaces a missing number
MAX_DRAWABLE = 1e300  # differences between larger values may overflow


def is_finite(value: float) -> bool:
    """Return whether a value can be drawn on an axis."""
    return abs(value) < MAX_DRAWABLE  # also False for NaN


def count(number: int, noun: str) -> str:
    """Format a number with its noun.

    >>> count(1, "value"), count(2000, "value")
    ('1 value', '2,000 values')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _refuse_if(condition: bool, where: str, message: str, fix: str = "") -> None:
    if condition:
        raise BadArgument(where, message, fix)


@dataclass(frozen=True)
class Curves:
    """Lines over a common x axis. Later lines are dashed and drawn over earlier ones, so pass the reference first.

    Values that cannot be drawn (NaN, infinity, or zero or less on a logarithmic axis) leave a gap.
    `bands` maps the name of a line to the band around it: (low, high) for each point. On a logarithmic y axis, a band
    is omitted where it reaches zero. A note on the page lists everything that is omitted.
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
        for name, ends in self.bands.items():
            points = len(self.series.get(name, ()))
            is_valid = len(ends) == points and all(
                is_finite(low) and is_finite(high) and low <= high for low, high in ends
            )
            message = f"the band of {name!r} must have {points} finite pairs, low before high"
            _refuse_if(not is_valid, f"Curves {self.title!r}", message)


@dataclass(frozen=True)
class Table:
    """Rows of text under a header. Numeric columns are right-aligned; cells that begin with "failed" are coloured."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows, start=1):
            message = f"row {number} has {len(row)} cells, but the header has {len(self.header)}"
            _refuse_if(len(row) != len(self.header), f"Table {self.title!r}", message)


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix, with one row per true class and one column per predicted class."""

    title: str
    labels: Sequence[str]
    counts: Sequence[Sequence[int]]
    note: str = ""

    def __post_init__(self) -> None:
        size, where = len(self.labels), f"Matrix {self.title!r}"
        is_square = [len(row) for row in self.counts] == [size] * size
        _refuse_if(not is_square, where, f"{size} labels need {size} rows of {size} counts")
        _refuse_if(any(count < 0 for row in self.counts for count in row), where, "a count is negative")


@dataclass(frozen=True)
class Picture:
    """A small picture. `data` has one byte per pixel and channel (1 for grey, 3 for RGB), row by row from the top."""

    width: int
    height: int
    channels: int
    data: bytes
    caption: str = ""

    def __post_init__(self) -> None:
        expected, size = self.width * self.height * self.channels, len(self.data)
        is_valid = isinstance(self.data, bytes) and self.channels in (1, 3) and min(self.width, self.height) > 0
        message = f"{self.width} x {self.height} pixels of {self.channels} channels need {expected} bytes, got {size}"
        fix = "pass array.tobytes() of a uint8 array of shape (height, width, channels), with 1 or 3 channels"
        _refuse_if(not is_valid or size != expected, "Picture", message, fix)

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
    """A grid of pictures. Each row has a label, such as "original", and one picture per column, or None."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Picture | None]]]
    note: str = ""

    def __post_init__(self) -> None:
        for label, cells in self.rows:
            message = f"row {label!r} has {len(cells)} pictures for {len(self.columns)} columns"
            fix = "pass None for a cell without a picture"
            _refuse_if(len(cells) != len(self.columns), f"Pictures {self.title!r}", message, fix)


@dataclass(frozen=True)
class Interval:
    """A value and its interval, both optional.

    `missing` is shown in place of a missing value, and is highlighted if it begins with "failed".
    """

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    group: str = ""
    missing: str = "not measured"

    def __post_init__(self) -> None:
        where = f"Interval {self.name!r}" + (f" of group {self.group!r}" if self.group else "")
        ends = [end for end in (self.low, self.high) if end is not None]
        message = f"invalid interval: value {self.value}, low {self.low}, high {self.high}"
        has_infinite = not all(is_finite(number) for number in (*ends, self.value or 0.0))
        _refuse_if(has_infinite, where, message, 'pass None, and missing="failed: ..." with the reason')
        is_valid = len(ends) in ((0, 2) if self.value is not None else (0,)) and ends == sorted(ends)
        _refuse_if(not is_valid, where, message, "pass a value with both ends, low before high, or with neither")


@dataclass(frozen=True)
class Intervals:
    """Values with their intervals, one per row, grouped in the given order, with named reference lines.

    Entries with the same name have the same colour and mark in every group. The axis includes all numbers, and also
    `low` and `high` if they are given.
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
        limits = [limit for limit in (self.low, self.high) if limit is not None]
        has_infinite = not all(map(is_finite, (*self.references.values(), *limits)))
        _refuse_if(has_infinite, where, "a reference or a limit is not finite", "pass a finite number, or leave it out")
        is_reversed = len(limits) == 2 and limits[0] >= limits[1]
        _refuse_if(is_reversed, where, f"low {self.low} is not below high {self.high}", "pass the lower limit first")


@dataclass(frozen=True)
class SideBySide:
    """Sections side by side, or below one another on a phone."""

    title: str
    parts: Sequence[Matrix | Table | Curves | Pictures | Intervals]
    note: str = ""


@dataclass(frozen=True)
class Facts:
    """Named values, such as a configuration."""

    title: str
    facts: Mapping[str, str]
    note: str = ""


@dataclass(frozen=True)
class Text:
    """Paragraphs of text."""

    title: str
    paragraphs: Sequence[str]


@dataclass(frozen=True)
class Answers:
    """Questions, each with the paragraphs of its answer."""

    title: str
    answers: Mapping[str, Sequence[str]]


Section = Curves | Table | Matrix | Pictures | Intervals | SideBySide | Facts | Text | Answers


@dataclass(frozen=True)
class Page:
    """The content of a page.

    Attributes:
        title: title of the page, such as the data, model and defence of a run.
        verdict: the result in one sentence, which link previews also show.
        sections: the content, in order.
        command: the command that recreates the page.
        lead: description of the run, shown below the verdict.
        result: the main result in a few words, for the title of the browser tab.
        glossary: explanations of terms. The first use of a term in a section shows its explanation on hover, and the
            section ends with the explanations of its terms.
        refresh: seconds after which the page reloads itself; 0 for never.
        progress: completed fraction, shown as a bar; None for no bar.
    """

    title: str
    verdict: str
    sections: Sequence[Section]
    command: str
    lead: str = ""
    result: str = ""
    glossary: Mapping[str, str] = field(default_factory=dict)
    refresh: int = 0
    progress: float | None = None
