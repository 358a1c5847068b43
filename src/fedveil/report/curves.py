"""Line charts as inline SVG. Text keeps its size at every width: positions are percentages, and lines do not scale."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, groupby

from markupsafe import Markup

from fedveil.report.axes import LARGEST, NOTHING, ChartAxis, align, count, finite, linear, logarithmic, short
from fedveil.report.markup import COLOURS, fill
from fedveil.report.sections import Curves

UNITS = 1000  # width and height of the inner picture
EVERY_MARKED = 12  # points; a longer line has MARKS marks
MARKS = 8
DENSE = 150  # points; a longer line is drawn thinner
SAME = 0.006  # of the axis: about the width of a line
DASHES = ((), (7, 5), (1.5, 5), (12, 4, 2, 4), (3, 3), (14, 6))
DATA_ROWS = 100  # of the table behind a chart
LEFT_OUT = "left out: not finite, or not above zero on a logarithmic axis"

Point = tuple[float, float]
Axes = tuple[ChartAxis, ChartAxis]
Band = tuple[list[Point], list[Point]]  # lower edge, upper edge: NaN where there is none


@dataclass(frozen=True)
class Line:
    """A named series. Points that cannot be drawn have y = NaN and are counted."""

    name: str
    points: tuple[Point, ...]
    left_out: int

    @cached_property
    def drawn(self) -> tuple[Point, ...]:
        """The points that can be drawn."""
        return tuple(point for point in self.points if not math.isnan(point[1]))


def _make_line(name: str, points: Sequence[Point], curves: Curves) -> Line:
    """Replace each y by NaN if it, or its x, cannot be drawn."""
    least_x, least_y = (1 / LARGEST if log else -LARGEST for log in (curves.log_x, curves.log_y))
    fits = [finite(x) and finite(y) and x >= least_x and y >= least_y for x, y in points]
    kept = tuple((float(x), float(y) if fit else math.nan) for (x, y), fit in zip(points, fits, strict=True))
    return Line(name, kept, fits.count(False))


def _extreme_indices(start: int, points: Sequence[Point]) -> set[int]:
    """Return the indices of the lowest and the highest point of a bin, and of its first gap."""
    heights = {index: y for index, (_, y) in enumerate(points, start)}
    gaps = [index for index, y in heights.items() if math.isnan(y)]
    drawn = [index for index, y in heights.items() if not math.isnan(y)]
    ends = {choose(drawn, key=heights.__getitem__) for choose in (min, max) if drawn}
    return {*ends, *gaps[:1]}


def thin(points: Sequence[Point], limit: int) -> tuple[Point, ...]:
    """Return about `limit` points that draw the same picture: both ends, gaps, lowest and highest of each bin.

    >>> thin([(x, x % 7) for x in range(1000)], 8)[:4]
    ((0, 0), (6, 6), (251, 6), (252, 0))
    """
    if len(points) <= limit:
        return tuple(points)
    size, kept = math.ceil(len(points) / max(1, limit // 2)), {0, len(points) - 1}
    for start in range(0, len(points), size):
        kept |= _extreme_indices(start, points[start : start + size])
    return tuple(points[index] for index in sorted(kept))


def _split_gaps(points: Sequence[Point]) -> list[list[Point]]:
    """Split points into runs without a gap."""
    return [list(run) for gap, run in groupby(points, lambda point: math.isnan(point[1])) if not gap]


def _coincidences(lines: Sequence[Line], axis: ChartAxis) -> list[str]:
    """Return a sentence for each pair of the first lines that cannot be told apart."""
    sentences = []
    for one, other in combinations(lines[:6], 2):
        left, right = dict(one.drawn), dict(other.drawn)
        pairs = [(left[x], right[x]) for x in left.keys() & right.keys()]
        close = all(abs(axis.position(a) - axis.position(b)) <= SAME for a, b in pairs)
        if pairs and close and len(pairs) == len(one.drawn) == len(other.drawn):
            gap = max(abs(a - b) for a, b in pairs)
            sentences.append(f"{one.name} and {other.name} coincide: largest difference {short(float(f'{gap:.2g}'))}.")
    return sentences


def _build_axes(curves: Curves, lines: Sequence[Line], bands: Sequence[Band]) -> Axes | None:
    drawn = [point for line in lines for point in line.drawn]
    if not drawn:
        return None
    xs = [x for x, _ in drawn]
    ys = [y for _, y in (*drawn, *chain(*chain(*bands))) if not math.isnan(y)]
    if curves.log_x:
        across = logarithmic(min(xs), max(xs), wanted=6, outward=False)
    else:
        integers = max(xs) > min(xs) and all(x.is_integer() for x in xs)  # no tick at half a round
        across = linear(min(xs), max(xs), wanted=6, outward=False, least=1.0 if integers else 0.0)
    if curves.log_y:
        return across, logarithmic(min(ys), max(ys), wanted=6)
    return across, linear(min(ys), max(ys), wanted=5, outward=True)


def _path(points: Sequence[Point], axes: Axes) -> str:
    """Return a line as SVG path data, a part for each run without a gap."""
    across, up = axes
    runs = []
    for run in _split_gaps(points):
        steps = [f"{UNITS * across.position(x):.1f} {UNITS * (1 - up.position(y)):.1f}" for x, y in run]
        runs.append("M" + "L".join(steps) + ("h0" if len(run) == 1 else ""))
    return "".join(runs)


def _band(curves: Curves, line: Line) -> Band:
    """Return both edges of the band around a line."""
    ends = curves.bands.get(line.name) or [(math.nan, math.nan)] * len(line.points)
    least = 1 / LARGEST if curves.log_y else -LARGEST
    edges = [
        (x, low, high) if low >= least and not math.isnan(y) else (x, math.nan, math.nan)
        for (x, y), (low, high) in zip(line.points, ends, strict=True)
    ]
    return [(x, low) for x, low, _ in edges], [(x, high) for x, _, high in edges]


def _outline(band: Band, axes: Axes, limit: int) -> str:
    """Return a band as SVG path data: each run along its upper edge and back along its lower one."""
    lower, upper = ([thin(run, limit) for run in _split_gaps(edge)] for edge in band)
    return "".join(_path([*above, *reversed(below)], axes) + "Z" for below, above in zip(lower, upper, strict=True))


def _dash(number: int) -> str | None:
    """Return the dash pattern of a series; None is solid. Series that share a colour differ in dash."""
    return " ".join(f"{length:g}" for length in DASHES[(number % COLOURS + number // COLOURS) % len(DASHES)]) or None


def _mark_points(drawn: Sequence[Point], shift: float) -> Sequence[Point]:
    """Return the points with a mark: all of a short line, else some, evenly by number."""
    if len(drawn) <= EVERY_MARKED:
        return drawn
    return [drawn[int((index + shift) / MARKS * len(drawn))] for index in range(MARKS)]


def _stroke(number: int, line: Line, axes: Axes, limit: int) -> dict[str, object]:
    """Return the path and marks of a line, and the values that the script shows; marks are shifted for each line."""
    across, up = axes
    points = thin(line.points, limit)
    drawn = [point for point in points if not math.isnan(point[1])]
    marked = _mark_points(line.drawn, shift=(number % 4 + 0.5) / 4)
    return {
        "path": _path(points, axes),
        "dense": len(drawn) > DENSE,
        "xs": " ".join(short(x) for x, _ in drawn),
        "ys": " ".join(short(y) for _, y in drawn),
        "last": short(line.drawn[-1][1]),
        "marks": [(across.position(x), 1 - up.position(y)) for x, y in marked],
    }


def _remarks(curves: Curves, lines: Sequence[Line], bands: Sequence[Band], limit: int) -> list[str]:
    """Return a sentence for everything that the chart leaves out."""
    found = [f"{line.name}: no values." for line in lines if not line.points]
    found += [f"{line.name}: {count(line.left_out, 'value')} {LEFT_OUT}." for line in lines if line.left_out]
    for line, (lower, _) in zip(lines, bands, strict=True):
        lost = sum(math.isnan(low) for _, low in lower) - sum(math.isnan(y) for _, y in line.points)
        if lost and line.name in curves.bands:
            found.append(f"{line.name}: band left out at {count(lost, 'point')}, where it reaches zero.")
    if any(len(line.points) > limit for line in lines):
        found.append("Long lines are thinned to what a screen shows; lows and highs are kept.")
    return found


def _table(curves: Curves, lines: Sequence[Line]) -> tuple[str, list[str], list[tuple[str, ...]]] | None:
    """Return the size, header and rows of the table behind the chart: an even selection of long lines."""
    every = sorted({x for line in lines for x, _ in line.points if math.isfinite(x)})
    if not every:
        return None
    rows = min(len(every), DATA_ROWS)
    chosen = [every[round(index * (len(every) - 1) / max(1, rows - 1))] for index in range(rows)]
    numbers = [chosen, *([known.get(x, math.nan) for x in chosen] for known in (dict(line.points) for line in lines))]
    columns = [align([NOTHING if math.isnan(number) else short(number) for number in own]) for own in numbers]
    amount = (f"{len(chosen)} of " if len(chosen) < len(every) else "") + count(len(every), "row")
    return amount, [curves.x_label, *(line.name for line in lines)], list(zip(*columns, strict=True))


def draw_curves(curves: Curves, limit: int) -> Markup:
    """Draw the curves with legend, axes, remarks and their data; about `limit` points per line are drawn."""
    lines = [_make_line(name, points, curves) for name, points in curves.series.items()]
    bands = [_band(curves, line) for line in lines]
    axes = _build_axes(curves, lines, bands)
    drawn: list[dict[str, object]] = []
    for number, line in enumerate(lines):
        look: dict[str, object] = {"name": line.name, "number": number, "dash": _dash(number)}
        look |= {"path": "", "band": "", "last": ""}
        if axes and line.drawn:
            look |= _stroke(number, line, axes, limit) | {"band": _outline(bands[number], axes, limit)}
        drawn.append(look)
    same = _coincidences(lines, axes[1]) if axes else []
    opening = f"Line chart of {', '.join(curves.series)}: {curves.y_label} over {curves.x_label}."
    ends = {line.drawn[-1][0] for line in lines if line.drawn}
    return fill(
        "curves.html",
        curves=curves,
        lines=drawn,
        axes=axes,
        units=UNITS,
        at=f"{curves.x_label} = {short(ends.pop())}" if len(ends) == 1 else "last values",
        words=" ".join([opening, *same, "The values are in the table below."]),
        remarks=" ".join([*same, *_remarks(curves, lines, bands, limit)]),
        table=_table(curves, lines),
    )
