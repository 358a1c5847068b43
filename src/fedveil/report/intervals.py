"""Values with their intervals, one row each, over one axis with reference lines.

Names and values are text in a CSS grid, so that they wrap, and on a phone stand above their row. The rest is SVG.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from markupsafe import Markup

from fedveil.report.scale import NOTHING, Scale, align, linear, short
from fedveil.report.sections import Interval, Intervals
from fedveil.report.style import fill
from fedveil.report.tables import interval_data

LETTER = 6.7 / 320  # about a letter's share of a plot on a phone
BESIDE = 0.015  # of the plot: between a name and the line it stands beside
LEVEL = 19  # pixels that a level of names takes
TRIED = 5  # lines for which one level of names is tried

Written = tuple[str, str, str]  # value, low, high


@dataclass(frozen=True)
class Reference:
    """A line at a share of the axis; its name is anchored as SVG says, on a level above the plot (0 is the lowest)."""

    name: str
    share: float
    anchor: str = "middle"
    level: int = 0

    @property
    def shift(self) -> float:
        """How far the name stands from the line, in shares of the axis."""
        return {"start": BESIDE, "middle": 0.0, "end": -BESIDE}[self.anchor]

    @property
    def span(self) -> tuple[float, float]:
        """From where to where the name reaches."""
        width = LETTER * len(self.name)
        start = self.share + self.shift - {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        return start, start + width


def _clear(lines: Sequence[Reference]) -> bool:
    """Whether no name of these lines, from left to right, leaves the plot or touches another name or its line."""
    inside = all(line.span[0] >= -0.04 and line.span[1] <= 1.04 for line in lines)
    return inside and all(
        one.span[1] + BESIDE < min(other.span[0], other.share) and one.share < other.span[0] - BESIDE
        for one, other in pairwise(lines)
    )


def place_references(references: Mapping[str, float], axis: Scale) -> list[Reference]:
    """The references with a place for each name, which tells the value too.

    Names stand on one level, all over their lines or all beside them. If there is no room, each has a level of its own;
    the outer ones stand higher, so that few lines cross a name.
    """
    lines = [Reference(f"{name} {short(value)}", axis.place(value)) for name, value in references.items()]
    lines.sort(key=lambda line: line.share)
    beside = product(("start", "end"), repeat=len(lines)) if len(lines) <= TRIED else ()
    for anchors in [("middle",) * len(lines), *beside]:
        named = [replace(line, anchor=anchor) for line, anchor in zip(lines, anchors, strict=True)]
        if _clear(named):
            return named
    outward = enumerate(sorted(lines, key=lambda line: abs(line.share - 0.5)))
    return [replace(line, anchor="start" if line.share <= 0.5 else "end", level=level) for level, line in outward]


def build_axis(section: Intervals) -> Scale:
    """The axis: it ends at a limit that holds all numbers, else at a tick beyond them."""
    limits = [limit for limit in (section.low, section.high) if limit is not None]
    measured = [number for row in section.rows for number in (row.value, row.low, row.high) if number is not None]
    numbers = [*measured, *section.references.values(), *limits]
    if not numbers:
        return Scale(0.0, 1.0, False, ())
    axis = linear(min(numbers), max(numbers), wanted=7, outward=True)
    low = section.low if section.low == min(numbers) < max(numbers) else axis.low
    high = section.high if section.high == max(numbers) > min(numbers) else axis.high
    slack = 1e-9 * (high - low)
    return Scale(low, high, False, tuple(tick for tick in axis.ticks if low - slack <= tick[0] <= high + slack))


def _format_rows(rows: Sequence[Interval], axis: Scale) -> list[Written]:
    """Value, low and high of each row, to about a thousandth of the axis, their points below one another."""
    decimals = max(0, 3 - math.ceil(math.log10(axis.high - axis.low) - 1e-9))
    numbers = [number for row in rows for number in (row.value, row.low, row.high)]
    cells = iter(align([NOTHING if number is None else short(round(number, decimals) + 0.0) for number in numbers]))
    return list(zip(cells, cells, cells, strict=True))


def _describe_row(row: Interval, written: Written, references: Mapping[str, float]) -> str:
    name, (value, low, high) = f"{row.group}, {row.name}" if row.group else row.name, written
    if row.value is None:
        return f"{name}: {row.missing}."
    if row.low is None or row.high is None:
        return f"{name}: {value}."
    held = [reference for reference, place in references.items() if row.low <= place <= row.high]
    return f"{name}: {value}, interval {low} to {high}" + (f", holds {' and '.join(held)}." if held else ".")


def _describe(section: Intervals, rows: Sequence[tuple[Interval, Written]]) -> str:
    lines = ", ".join(f"{name} {short(value)}" for name, value in section.references.items())
    opening = f"Values with intervals: {section.label}." + (f" Reference lines: {lines}." if lines else "")
    said = [_describe_row(row, written, section.references) for row, written in rows]
    return " ".join([opening, *said, "The values are in the table below."])


def intervals(section: Intervals) -> Markup:
    """The plot with legend, axis, remark and its data: rows of a group together, in the order of their first rows."""
    groups = list(dict.fromkeys(row.group for row in section.rows))
    gathered = sorted(section.rows, key=lambda row: groups.index(row.group))
    axis = build_axis(section)
    rows = list(zip(gathered, _format_rows(gathered, axis), strict=True))
    references = place_references(section.references, axis)
    return fill(
        "intervals.html",
        section=section,
        rows=rows,
        grouped=any(groups),
        looks={name: number for number, name in enumerate(dict.fromkeys(row.name for row in section.rows))},
        axis=axis,
        references=references,
        levels=1 + max((line.level for line in references), default=-1),
        LEVEL=LEVEL,
        words=_describe(section, rows),
        data=interval_data(section),
    )
