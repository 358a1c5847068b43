"""Line charts, and charts of values with their intervals, as inline SVG.

Text has the same size at every width, because positions are percentages and line widths do not scale. Names and values
of intervals are text in a CSS grid, so that they can wrap and, on a phone, appear above their row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, groupby
from typing import NamedTuple

from markupsafe import Markup

from fedveil.report import MAX_DRAWABLE, NOTHING, Curves, Interval, Intervals, count, is_finite
from fedveil.report.axes import ChartAxis, align, format_number, linear_axis, log_axis
from fedveil.report.markup import COLOURS, fill

UNITS = 1000  # width and height of the viewBox of the plot
MAX_MARKED_POINTS = 12  # lines with at most this many points mark every point; longer lines have MARKS marks
MARKS = 8
DENSE_POINTS = 150  # lines with more points than this are drawn thinner
COINCIDENCE_TOLERANCE = 0.006  # lines closer than this fraction of the axis (about a line width) coincide
DASHES = ((), (7, 5), (1.5, 5), (12, 4, 2, 4), (3, 3), (14, 6))
DATA_ROWS = 100  # maximum number of rows in the table behind a chart
OMITTED = "left out: not finite, or not above zero on a logarithmic axis"

Point = tuple[float, float]
Axes = tuple[ChartAxis, ChartAxis]
Band = tuple[list[Point], list[Point]]  # lower edge, upper edge; NaN where there is no band


@dataclass(frozen=True)
class Line:
    """A named series. Points that cannot be drawn have y = NaN; `num_omitted` counts them."""

    name: str
    points: tuple[Point, ...]
    num_omitted: int

    @cached_property
    def drawable(self) -> tuple[Point, ...]:
        """The points that can be drawn."""
        return tuple(point for point in self.points if not math.isnan(point[1]))


def _make_line(name: str, points: Sequence[Point], curves: Curves) -> Line:
    """Create a line, with y = NaN at points that cannot be drawn."""
    min_x, min_y = (1 / MAX_DRAWABLE if log else -MAX_DRAWABLE for log in (curves.log_x, curves.log_y))
    is_drawable = [is_finite(x) and is_finite(y) and x >= min_x and y >= min_y for x, y in points]
    clean_points = tuple(
        (float(x), float(y) if is_valid else math.nan) for (x, y), is_valid in zip(points, is_drawable, strict=True)
    )
    return Line(name, clean_points, is_drawable.count(False))


def thin(points: Sequence[Point], limit: int) -> tuple[Point, ...]:
    """Return about `limit` points that look the same when drawn: both ends, gaps, and the extremes of each bin.

    >>> thin([(x, x % 7) for x in range(1000)], 8)[:4]
    ((0, 0), (6, 6), (251, 6), (252, 0))
    """
    if len(points) <= limit:
        return tuple(points)
    size, indices = math.ceil(len(points) / max(1, limit // 2)), {0, len(points) - 1}
    for start in range(0, len(points), size):
        heights = {index: y for index, (_, y) in enumerate(points[start : start + size], start)}
        drawable = [index for index, y in heights.items() if not math.isnan(y)]
        indices |= {choose(drawable, key=heights.__getitem__) for choose in (min, max) if drawable}
        indices |= set([index for index, y in heights.items() if math.isnan(y)][:1])  # the first gap
    return tuple(points[index] for index in sorted(indices))


def _split_gaps(points: Sequence[Point]) -> list[list[Point]]:
    """Split points at gaps into runs."""
    return [list(run) for is_gap, run in groupby(points, lambda point: math.isnan(point[1])) if not is_gap]


def _coincidences(lines: Sequence[Line], axis: ChartAxis) -> list[str]:
    """Return a sentence for each pair of lines, among the first six, that cannot be distinguished."""
    sentences = []
    for first, second in combinations(lines[:6], 2):
        first_values, second_values = dict(first.drawable), dict(second.drawable)
        pairs = [(first_values[x], second_values[x]) for x in first_values.keys() & second_values.keys()]
        is_coincident = all(abs(axis.position(a) - axis.position(b)) <= COINCIDENCE_TOLERANCE for a, b in pairs)
        if pairs and is_coincident and len(pairs) == len(first.drawable) == len(second.drawable):
            difference = format_number(float(f"{max(abs(a - b) for a, b in pairs):.2g}"))
            sentences.append(f"{first.name} and {second.name} coincide: largest difference {difference}.")
    return sentences


def _build_axes(curves: Curves, lines: Sequence[Line], bands: Sequence[Band]) -> Axes | None:
    drawable = [point for line in lines for point in line.drawable]
    if not drawable:
        return None
    xs = [x for x, _ in drawable]
    ys = [y for _, y in (*drawable, *chain(*chain(*bands))) if not math.isnan(y)]
    if curves.log_x:
        x_axis = log_axis(min(xs), max(xs), max_intervals=6, extend=False)
    else:
        integers = max(xs) > min(xs) and all(x.is_integer() for x in xs)  # avoid ticks such as half a round
        x_axis = linear_axis(min(xs), max(xs), max_intervals=6, extend=False, min_step=1.0 if integers else 0.0)
    if curves.log_y:
        return x_axis, log_axis(min(ys), max(ys), max_intervals=6)
    return x_axis, linear_axis(min(ys), max(ys), max_intervals=5, extend=True)


def _path(points: Sequence[Point], axes: Axes) -> str:
    """Return a line as SVG path data, with a subpath for each run without a gap."""
    x_axis, y_axis = axes
    runs = []
    for run in _split_gaps(points):
        steps = [f"{UNITS * x_axis.position(x):.1f} {UNITS * (1 - y_axis.position(y)):.1f}" for x, y in run]
        runs.append("M" + "L".join(steps) + ("h0" if len(run) == 1 else ""))
    return "".join(runs)


def _band(curves: Curves, line: Line) -> Band:
    """Return both edges of the band around a line."""
    ends = curves.bands.get(line.name) or [(math.nan, math.nan)] * len(line.points)
    minimum = 1 / MAX_DRAWABLE if curves.log_y else -MAX_DRAWABLE
    edges = [
        (x, low, high) if low >= minimum and not math.isnan(y) else (x, math.nan, math.nan)
        for (x, y), (low, high) in zip(line.points, ends, strict=True)
    ]
    return [(x, low) for x, low, _ in edges], [(x, high) for x, _, high in edges]


def _outline(band: Band, axes: Axes, limit: int) -> str:
    """Return a band as SVG path data: each run goes along its upper edge and back along its lower edge."""
    lower, upper = ([thin(run, limit) for run in _split_gaps(edge)] for edge in band)
    return "".join(
        _path([*upper_run, *reversed(lower_run)], axes) + "Z" for lower_run, upper_run in zip(lower, upper, strict=True)
    )


def _dash(number: int) -> str | None:
    """Return the dash pattern of a series, or None for a solid line; series with the same colour differ in pattern."""
    return " ".join(f"{length:g}" for length in DASHES[(number % COLOURS + number // COLOURS) % len(DASHES)]) or None


def _stroke(number: int, line: Line, axes: Axes, limit: int) -> dict[str, object]:
    """Return the path, values and marks of a line; marks are shifted to avoid overlaps between lines."""
    x_axis, y_axis = axes
    points = thin(line.points, limit)
    drawable = [point for point in points if not math.isnan(point[1])]
    marked_points, shift = line.drawable, (number % 4 + 0.5) / 4
    if len(marked_points) > MAX_MARKED_POINTS:
        marked_points = tuple(
            marked_points[int((index + shift) / MARKS * len(marked_points))] for index in range(MARKS)
        )
    return {
        "path": _path(points, axes),
        "dense": len(drawable) > DENSE_POINTS,
        "xs": " ".join(format_number(x) for x, _ in drawable),
        "ys": " ".join(format_number(y) for _, y in drawable),
        "last": format_number(line.drawable[-1][1]),
        "marks": [(x_axis.position(x), 1 - y_axis.position(y)) for x, y in marked_points],
    }


def _remarks(curves: Curves, lines: Sequence[Line], bands: Sequence[Band], limit: int) -> list[str]:
    """Return sentences that list everything that the chart omits."""
    result = [f"{line.name}: no values." for line in lines if not line.points]
    result += [f"{line.name}: {count(line.num_omitted, 'value')} {OMITTED}." for line in lines if line.num_omitted]
    for line, (lower, _) in zip(lines, bands, strict=True):
        num_omitted = sum(math.isnan(low) for _, low in lower) - sum(math.isnan(y) for _, y in line.points)
        if num_omitted and line.name in curves.bands:
            result.append(f"{line.name}: band left out at {count(num_omitted, 'point')}, where it reaches zero.")
    if any(len(line.points) > limit for line in lines):
        result.append("Long lines are reduced to the points that a screen can show; minima and maxima are kept.")
    return result


def _curve_table(curves: Curves, lines: Sequence[Line]) -> tuple[str, list[str], list[tuple[str, ...]]] | None:
    """Return the size, header and rows of the table behind the chart; for long lines, an evenly spaced selection."""
    positions = sorted({x for line in lines for x, _ in line.points if math.isfinite(x)})
    if not positions:
        return None
    rows = min(len(positions), DATA_ROWS)
    shown_positions = [positions[round(index * (len(positions) - 1) / max(1, rows - 1))] for index in range(rows)]
    numbers = [
        shown_positions,
        *([values.get(x, math.nan) for x in shown_positions] for values in (dict(line.points) for line in lines)),
    ]
    columns = [
        align([NOTHING if math.isnan(number) else format_number(number) for number in column]) for column in numbers
    ]
    size = (f"{len(shown_positions)} of " if len(shown_positions) < len(positions) else "") + count(
        len(positions), "row"
    )
    return size, [curves.x_label, *(line.name for line in lines)], list(zip(*columns, strict=True))


def draw_curves(curves: Curves, limit: int) -> Markup:
    """Draw the curves with a legend, axes, remarks and a data table; each line has about `limit` points."""
    lines = [_make_line(name, points, curves) for name, points in curves.series.items()]
    bands = [_band(curves, line) for line in lines]
    axes = _build_axes(curves, lines, bands)
    drawable: list[dict[str, object]] = []
    for index, line in enumerate(lines):
        attributes: dict[str, object] = {"name": line.name, "number": index, "dash": _dash(index)}
        attributes |= {"path": "", "band": "", "last": ""}
        if axes and line.drawable:
            attributes |= _stroke(index, line, axes, limit) | {"band": _outline(bands[index], axes, limit)}
        drawable.append(attributes)
    coincident = _coincidences(lines, axes[1]) if axes else []
    summary = f"Line chart of {', '.join(curves.series)}: {curves.y_label} over {curves.x_label}."
    ends = {line.drawable[-1][0] for line in lines if line.drawable}
    return fill(
        "curves.html",
        curves=curves,
        lines=drawable,
        axes=axes,
        units=UNITS,
        at=f"{curves.x_label} = {format_number(ends.pop())}" if len(ends) == 1 else "last values",
        words=" ".join([summary, *coincident, "The values are in the table below."]),
        remarks=" ".join([*coincident, *_remarks(curves, lines, bands, limit)]),
        table=_curve_table(curves, lines),
    )


LEVEL_HEIGHT = 19  # height in pixels of one level of reference names

FormattedRow = tuple[str, str, str]  # value, low, high


class Reference(NamedTuple):
    """A reference line: its position as a fraction of the axis, and the level of its name above the plot."""

    name: str
    position: float
    level: int


def place_references(references: Mapping[str, float], axis: ChartAxis) -> list[Reference]:
    """Return the reference lines with a level for each name; outer names are higher, so that few lines cross them."""
    positions = {f"{name} {format_number(value)}": axis.position(value) for name, value in references.items()}
    by_distance = sorted(positions, key=lambda name: abs(positions[name] - 0.5))
    return [Reference(name, positions[name], level) for level, name in enumerate(by_distance)]


def build_axis(section: Intervals) -> ChartAxis:
    """Return an axis that ends at the given limits or, if a number lies beyond a limit, at the next tick."""
    limits = [limit for limit in (section.low, section.high) if limit is not None]
    row_values = [number for row in section.rows for number in (row.value, row.low, row.high) if number is not None]
    numbers = [*row_values, *section.references.values(), *limits]
    if not numbers:
        return ChartAxis(0.0, 1.0, False, ())
    axis = linear_axis(min(numbers), max(numbers), max_intervals=7, extend=True)
    low = section.low if section.low == min(numbers) < max(numbers) else axis.low
    high = section.high if section.high == max(numbers) > min(numbers) else axis.high
    tolerance = 1e-9 * (high - low)
    return ChartAxis(
        low, high, False, tuple(tick for tick in axis.ticks if low - tolerance <= tick[0] <= high + tolerance)
    )


def _format_rows(rows: Sequence[Interval], axis: ChartAxis) -> list[FormattedRow]:
    """Format the value, low and high of each row to about a thousandth of the axis."""
    decimals = max(0, 3 - math.ceil(math.log10(axis.high - axis.low) - 1e-9))
    numbers = [number for row in rows for number in (row.value, row.low, row.high)]
    rounded = [None if number is None else round(number, decimals) + 0.0 for number in numbers]
    cells = iter(align([NOTHING if number is None else format_number(number) for number in rounded]))
    return list(zip(cells, cells, cells, strict=True))


def _interval_table(section: Intervals) -> tuple[str, list[str], list[list[str]]]:
    """Return the size, header and rows of the table behind the chart, with the references at the end."""
    rows = [*section.rows, *(Interval(name, value, group="reference") for name, value in section.references.items())]
    numbers = [[getattr(row, end) for row in rows] for end in ("value", "low", "high")]
    columns = [align([NOTHING if number is None else format_number(number) for number in column]) for column in numbers]
    cells = [
        [f"{row.group}: {row.name}" if row.group else row.name, row.missing if row.value is None else value, low, high]
        for row, value, low, high in zip(rows, *columns, strict=True)
    ]
    return count(len(rows), "row"), ["entry", section.label, "low", "high"], cells


def draw_intervals(section: Intervals) -> Markup:
    """Draw the chart with a legend, an axis and a data table; groups appear in the order of their first rows."""
    groups = list(dict.fromkeys(row.group for row in section.rows))
    ordered_rows = sorted(section.rows, key=lambda row: groups.index(row.group))
    axis = build_axis(section)
    rows = list(zip(ordered_rows, _format_rows(ordered_rows, axis), strict=True))
    return fill(
        "intervals.html",
        section=section,
        rows=rows,
        grouped=any(groups),
        looks={name: index for index, name in enumerate(dict.fromkeys(row.name for row in section.rows))},
        axis=axis,
        references=place_references(section.references, axis),
        LEVEL=LEVEL_HEIGHT,
        words=f"Values with intervals: {section.label}. They are in the table below.",
        table=_interval_table(section),
    )
