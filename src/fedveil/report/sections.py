"""What a page is made of: plain values, checked when they are made, so that a page never fails late."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedveil.errors import BadArgument
from fedveil.report.scale import finite

CHANNELS = (1, 3)  # of a picture: grey, red-green-blue


@dataclass(frozen=True)
class Curves:
    """Lines over a common x axis. A later line is drawn dashed over an earlier one: give the reference first.

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
            if len(ends) != points:
                raise BadArgument(where, f"{name!r} has {points} points and a band of {len(ends)}")
            for low, high in ends:
                if not (finite(low) and finite(high) and low <= high):
                    what = f"the band of {name!r} must be finite, low before high, got {low} to {high}"
                    raise BadArgument(where, what)


@dataclass(frozen=True)
class Table:
    """Rows of text under a header. Columns of numbers are aligned right; a cell that begins with "failed" is marked."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows, start=1):
            if len(row) != len(self.header):
                what = f"row {number} has {len(row)} cells, the header has {len(self.header)}"
                raise BadArgument(f"Table {self.title!r}", what)


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix: a row for each true class, a column for each answer."""

    title: str
    labels: Sequence[str]
    counts: Sequence[Sequence[int]]
    note: str = ""

    def __post_init__(self) -> None:
        size = len(self.labels)
        if len(self.counts) != size or any(len(row) != size for row in self.counts):
            raise BadArgument(f"Matrix {self.title!r}", f"{size} labels need {size} rows of {size} counts")
        if any(count < 0 for row in self.counts for count in row):
            raise BadArgument(f"Matrix {self.title!r}", "a count is below zero")


@dataclass(frozen=True)
class Picture:
    """A small picture: `data` holds one byte per channel (1 grey, 3 red-green-blue), row by row from the top."""

    width: int
    height: int
    channels: int
    data: bytes
    caption: str = ""

    def __post_init__(self) -> None:
        size = f"{self.width} x {self.height} pixels of {self.channels} channels"
        fix = "data = array.tobytes() of an array of uint8 with shape (height, width, channels)"
        if self.channels not in CHANNELS or self.width < 1 or self.height < 1:
            allowed = " or ".join(map(str, CHANNELS))
            raise BadArgument("Picture", f"{size}: sides must be at least 1, channels {allowed}", fix)
        if not isinstance(self.data, bytes):
            raise BadArgument("Picture", f"data must be bytes, got {type(self.data).__name__}", fix)
        wanted = self.width * self.height * self.channels
        if len(self.data) != wanted:
            raise BadArgument("Picture", f"{size} need {wanted} bytes, got {len(self.data)}", fix)


@dataclass(frozen=True)
class Pictures:
    """A grid of pictures: rows (label, one picture per column), such as "original" over "recovered"; None: blank."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Picture | None]]]
    note: str = ""

    def __post_init__(self) -> None:
        for label, cells in self.rows:
            if len(cells) != len(self.columns):
                what = f"row {label!r} has {len(cells)} pictures, there are {len(self.columns)} columns"
                raise BadArgument(f"Pictures {self.title!r}", what, "give None for a cell without a picture")


@dataclass(frozen=True)
class Interval:
    """A value and its interval (None: without one). Without a value, `missing` says why; "failed..." is marked."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    group: str = ""
    missing: str = "not measured"

    def __post_init__(self) -> None:
        where = f"Interval {self.name!r}" + (f" of group {self.group!r}" if self.group else "")
        for what, number in (("value", self.value), ("low", self.low), ("high", self.high)):
            if number is not None and not finite(number):
                raise BadArgument(where, f"{what} is {number}", 'give None, and missing="failed: ..." to say why')
        if (self.low is None) != (self.high is None):
            raise BadArgument(where, f"half an interval: {self.low} to {self.high}", "give both ends or neither")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise BadArgument(where, f"low {self.low} is above high {self.high}", "give the lower end first")
        if self.value is None and self.low is not None:
            raise BadArgument(where, "an interval without a value", "give low and high as None too")


@dataclass(frozen=True)
class Intervals:
    """Values with their intervals, one row each, gathered by group in the order given, beside named reference lines.

    Entries of one name look the same in every group. The axis holds all numbers, and `low` and `high` where given.
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
            if value is not None and not finite(value):
                raise BadArgument(where, f"{name} is {value}", "give a finite number, or leave it out")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise BadArgument(where, f"low {self.low} is not below high {self.high}", "give the lower limit first")


@dataclass(frozen=True)
class Beside:
    """Parts side by side, on a phone one under the other."""

    title: str
    parts: Sequence[Matrix | Table | Curves | Pictures | Intervals]
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


Section = Curves | Table | Matrix | Pictures | Intervals | Beside | Facts | Text
