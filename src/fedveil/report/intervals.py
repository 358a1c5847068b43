"""Charts of values with their intervals, one row each, over one axis with reference lines.

Names and values are text in a CSS grid, so that they wrap, and are above their row on a phone. The rest is SVG.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from fedveil.report.axes import NOTHING, ChartAxis, align, count, linear, short
from fedveil.report.markup import fill
from fedveil.report.sections import Interval, Intervals

LEVEL = 19  # height of a level of names in pixels

FormattedRow = tuple[str, str, str]  # value, low, high


class Reference(NamedTuple):
    """A line at a fraction of the axis; its name is beside it, on a level above the plot (0 is the lowest)."""

    name: str
    position: float
    level: int


def place_references(references: Mapping[str, float], axis: ChartAxis) -> list[Reference]:
    """Return the reference lines with a level for each name; the outer ones are higher, so that few lines cross one."""
    positions = {f"{name} {short(value)}": axis.position(value) for name, value in references.items()}
    outward = sorted(positions, key=lambda name: abs(positions[name] - 0.5))
    return [Reference(name, positions[name], level) for level, name in enumerate(outward)]


def build_axis(section: Intervals) -> ChartAxis:
    """Return an axis that ends at a given limit if no number is beyond it, else at the next tick."""
    limits = [limit for limit in (section.low, section.high) if limit is not None]
    measured = [number for row in section.rows for number in (row.value, row.low, row.high) if number is not None]
    numbers = [*measured, *section.references.values(), *limits]
    if not numbers:
        return ChartAxis(0.0, 1.0, False, ())
    axis = linear(min(numbers), max(numbers), wanted=7, outward=True)
    low = section.low if section.low == min(numbers) < max(numbers) else axis.low
    high = section.high if section.high == max(numbers) > min(numbers) else axis.high
    slack = 1e-9 * (high - low)
    return ChartAxis(low, high, False, tuple(tick for tick in axis.ticks if low - slack <= tick[0] <= high + slack))


def _format_rows(rows: Sequence[Interval], axis: ChartAxis) -> list[FormattedRow]:
    """Format value, low and high of each row to about a thousandth of the axis."""
    decimals = max(0, 3 - math.ceil(math.log10(axis.high - axis.low) - 1e-9))
    numbers = [number for row in rows for number in (row.value, row.low, row.high)]
    cells = iter(align([NOTHING if number is None else short(round(number, decimals) + 0.0) for number in numbers]))
    return list(zip(cells, cells, cells, strict=True))


def _table(section: Intervals) -> tuple[str, list[str], list[list[str]]]:
    """Return the size, header and rows of the table behind the chart, with the references at the end."""
    rows = [*section.rows, *(Interval(name, value, group="reference") for name, value in section.references.items())]
    numbers = [[getattr(row, end) for row in rows] for end in ("value", "low", "high")]
    columns = [align([NOTHING if number is None else short(number) for number in own]) for own in numbers]
    cells = [
        [f"{row.group}: {row.name}" if row.group else row.name, row.missing if row.value is None else value, low, high]
        for row, value, low, high in zip(rows, *columns, strict=True)
    ]
    return count(len(rows), "row"), ["entry", section.label, "low", "high"], cells


def draw_intervals(section: Intervals) -> Markup:
    """Draw the chart with legend, axis and its data; rows of a group are together, in the order of their first rows."""
    groups = list(dict.fromkeys(row.group for row in section.rows))
    ordered = sorted(section.rows, key=lambda row: groups.index(row.group))
    axis = build_axis(section)
    rows = list(zip(ordered, _format_rows(ordered, axis), strict=True))
    return fill(
        "intervals.html",
        section=section,
        rows=rows,
        grouped=any(groups),
        looks={name: number for number, name in enumerate(dict.fromkeys(row.name for row in section.rows))},
        axis=axis,
        references=place_references(section.references, axis),
        LEVEL=LEVEL,
        words=f"Values with intervals: {section.label}. They are in the table below.",
        table=_table(section),
    )
