"""Curves as inline SVG that keeps its letters' size at every width: places are percentages, lines do not scale."""

import math
from collections.abc import Sequence
from itertools import chain, pairwise

from markupsafe import Markup

from fedveil.report.scale import LARGEST, Scale, count, linear, logarithmic, short
from fedveil.report.sections import Curves
from fedveil.report.series import Line, Point, clean, coincidences, describe, gaps, last_label, overlap, pieces, thin
from fedveil.report.style import fill, series_dash
from fedveil.report.tables import curve_data

UNITS = 1000  # of the inner picture, both ways
COMPARED = 5  # lines before a line that it is compared with
EVERY_MARKED = 12  # points; a longer line has MARKS marks
MARKS = 8
NOT_DRAWN: dict[str, object] = {"path": "", "band": "", "last": ""}
DENSE = 150  # points; a longer line is drawn thinner

Scales = tuple[Scale, Scale]
Band = tuple[list[Point], list[Point]]  # lower edge, upper edge: NaN where there is none


def _scales(curves: Curves, lines: Sequence[Line], bands: Sequence[Band]) -> Scales | None:
    drawn = [point for line in lines for point in line.drawn]
    if not drawn:
        return None
    xs = [x for x, _ in drawn]
    ys = [y for _, y in (*drawn, *chain(*chain(*bands))) if not math.isnan(y)]
    if curves.log_x:
        across = logarithmic(min(xs), max(xs), wanted=6, outward=False)
    else:
        whole = max(xs) > min(xs) and all(x.is_integer() for x in xs)  # no tick at half a round
        across = linear(min(xs), max(xs), wanted=6, outward=False, least=1.0 if whole else 0.0)
    if curves.log_y:
        return across, logarithmic(min(ys), max(ys), wanted=6)
    return across, linear(min(ys), max(ys), wanted=5, outward=True)


def _path(points: Sequence[Point], scales: Scales) -> str:
    """The line as SVG path data, a part for each run without a gap."""
    across, up = scales
    runs = []
    for run in pieces(points):
        steps = [f"{UNITS * across.place(x):.1f} {UNITS * (1 - up.place(y)):.1f}" for x, y in run]
        runs.append("M" + "L".join(steps) + ("h0" if len(run) == 1 else ""))
    return "".join(runs)


def _band(curves: Curves, line: Line) -> Band:
    """Both edges of the band around a line, if it has one."""
    ends = curves.bands.get(line.name) or [(math.nan, math.nan)] * len(line.points)
    least = 1 / LARGEST if curves.log_y else -LARGEST
    edges = [
        (x, low, high) if low >= least and not math.isnan(y) else (x, math.nan, math.nan)
        for (x, y), (low, high) in zip(line.points, ends, strict=True)
    ]
    return [(x, low) for x, low, _ in edges], [(x, high) for x, _, high in edges]


def _outline(band: Band, scales: Scales, limit: int) -> str:
    """A band as SVG path data: for each run along its upper edge, and back along its lower one."""
    lower, upper = ([thin(run, limit, scales[0].log) for run in pieces(edge)] for edge in band)
    return "".join(_path([*above, *reversed(below)], scales) + "Z" for below, above in zip(lower, upper, strict=True))


def _wiggle(line: Line, scales: Scales, limit: int) -> int:
    """Return the length of a line in lengths of the axis."""
    across, up = scales
    runs = pieces(thin(line.points, limit, across.log))
    placed = [[(across.place(x), up.place(y) / 2) for x, y in run] for run in runs]
    return max(1, min(30, round(sum(math.dist(*ends) for run in placed for ends in pairwise(run)))))


def _dash(number: int, lines: Sequence[Line], scales: Scales, limit: int) -> str | None:
    """The dash pattern of a line.

    A noisy line needs long dashes for the line below it to show, but alone its gaps would look like missing values:
    it is dashed only over another.
    """
    line, below = lines[number], lines[max(0, number - COMPARED) : number]
    wiggle = _wiggle(line, scales, limit)
    alone = wiggle > 1 and not any(overlap(line, other, scales[1]) for other in below)
    return None if alone else series_dash(number, wiggle)


def _mark_points(drawn: Sequence[Point], across: Scale, shift: float) -> Sequence[Point]:
    """The points that carry a mark: all of a few, else some, evenly by number or along a logarithmic axis."""
    if len(drawn) <= EVERY_MARKED:
        return drawn
    shares = [(place + shift) / MARKS for place in range(MARKS)]
    if not across.log:
        return [drawn[int(share * len(drawn))] for share in shares]
    return list(dict.fromkeys(min(drawn, key=lambda point: abs(across.place(point[0]) - share)) for share in shares))


def _stroke(number: int, line: Line, scales: Scales, limit: int) -> dict[str, object]:
    """Return the path and marks of a line, and the values that the script shows; marks are shifted for each line."""
    across, up = scales
    points = thin(line.points, limit, across.log)
    drawn = [point for point in points if not math.isnan(point[1])]
    marked = _mark_points(line.drawn, across, shift=(number % 4 + 0.5) / 4)
    return {
        "path": _path(points, scales),
        "dense": len(drawn) > DENSE,
        "xs": " ".join(short(x) for x, _ in drawn),
        "ys": " ".join(short(y) for _, y in drawn),
        "last": short(line.drawn[-1][1]),
        "marks": [(across.place(x), 1 - up.place(y)) for x, y in marked],
    }


def _remarks(curves: Curves, lines: Sequence[Line], bands: Sequence[Band], limit: int) -> list[str]:
    found = gaps(lines)
    for line, (lower, _) in zip(lines, bands, strict=True):
        lost = sum(math.isnan(low) for _, low in lower) - sum(math.isnan(y) for _, y in line.points)
        if lost and line.name in curves.bands:
            found.append(f"{line.name}: band left out at {count(lost, 'point')}, where it reaches zero.")
    if any(len(line.points) > limit for line in lines):
        found.append("Long lines are thinned to what a screen shows; lows and highs are kept.")
    return found


def chart(curves: Curves, limit: int) -> Markup:
    """The curves with legend, axes, remarks and their data; at most about `limit` points per line are drawn."""
    lines = [clean(name, points, log=curves.log_y, log_x=curves.log_x) for name, points in curves.series.items()]
    bands = [_band(curves, line) for line in lines]
    scales = _scales(curves, lines, bands)
    drawn: list[dict[str, object]] = []
    for number, line in enumerate(lines):
        look: dict[str, object] = {"name": line.name, "number": number, "swatch": series_dash(number)} | NOT_DRAWN
        if scales and line.drawn:
            dash = _dash(number, lines, scales, limit)
            look |= _stroke(number, line, scales, limit) | {"dash": dash, "swatch": dash and look["swatch"]}
            look["band"] = _outline(bands[number], scales, limit)
        drawn.append(look)
    same = coincidences(lines, scales[1]) if scales else []
    return fill(
        "curves.html",
        curves=curves,
        lines=drawn,
        scales=scales,
        units=UNITS,
        at=last_label(lines, curves.x_label),
        words=describe(curves, lines, same),
        remarks=" ".join([*same, *_remarks(curves, lines, bands, limit)]),
        data=curve_data(curves, lines),
    )
