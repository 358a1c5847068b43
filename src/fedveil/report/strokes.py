"""Lines and the marks they carry."""

import math
from collections.abc import Sequence
from itertools import pairwise

from fedveil.report.markup import Html, join, tag
from fedveil.report.numbers import short
from fedveil.report.palette import series_class, series_dash
from fedveil.report.scale import Scale
from fedveil.report.series import Line, Point, finite, pieces, thin
from fedveil.report.words import overlap

UNITS = 1000  # of the inner picture, both ways
COMPARED = 5  # lines before a line that it is compared with
EVERY_MARKED = 12  # points; a longer line has MARKS marks
MARKS = 8
DENSE = 150  # points; a longer line is drawn thinner
SHAPES = (
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0",
    "M0-3.6L3.6 0L0 3.6L-3.6 0Z",
    "M-4-4H4V4H-4Z",
    "M0-4.4L4.2 3.2H-4.2Z",
)
Scales = tuple[Scale, Scale]


def marker_shapes() -> Html:
    """The marks that lines carry, once a page: ring, small diamond, square, triangle."""
    shapes = [
        tag("path", {"id": f"mark-{number}", "d": shape, "class": "solid" if number % 2 else "hollow"})
        for number, shape in enumerate(SHAPES)
    ]
    return tag("svg", {"class": "shapes", "width": 0, "height": 0, "aria-hidden": "true"}, tag("defs", {}, *shapes))


def percent(share: float) -> str:
    """A share of the picture as SVG wants it."""
    return f"{100 * share:.2f}%"


def _path(points: Sequence[Point], scales: Scales) -> str:
    """The line as SVG path data, a part for each run without a gap."""
    across, up = scales
    runs = []
    for run in pieces(points):
        steps = [f"{UNITS * across.place(x):.1f} {UNITS * (1 - up.place(y)):.1f}" for x, y in run]
        runs.append("M" + "L".join(steps) + ("h0" if len(run) == 1 else ""))
    return "".join(runs)


def band_edges(points: Sequence[Point], widths: Sequence[float]) -> list[Point]:
    """The outline of a band: along its upper edge, and back along its lower one; gaps are bridged."""
    known = [(x, y, width) for (x, y), width in zip(points, widths, strict=True) if finite(x) and finite(y)]
    return [(x, y + width) for x, y, width in known] + [(x, y - width) for x, y, width in reversed(known)]


def band(number: int, edges: Sequence[Point], scales: Scales) -> Html:
    """A band around a line."""
    return tag("path", {"class": f"band {series_class(number)}", "d": _path(edges, scales) + "Z"})


def _wiggle(line: Line, scales: Scales, limit: int) -> int:
    """How many times longer than the axis a line is."""
    across, up = scales
    placed = [
        [(across.place(x), up.place(y) / 2) for x, y in run] for run in pieces(thin(line.points, limit, across.log))
    ]
    return max(1, min(30, round(sum(math.dist(*ends) for run in placed for ends in pairwise(run)))))


def dashes(lines: Sequence[Line], scales: Scales, limit: int) -> list[str | None]:
    """The dash pattern of each line.

    A noisy line needs long dashes for the line below it to show, but alone its gaps would look like missing values:
    it is dashed only over another.
    """
    chosen = []
    for number, line in enumerate(lines):
        wiggle = _wiggle(line, scales, limit)
        below = lines[max(0, number - COMPARED) : number]
        alone = wiggle > 1 and not any(overlap(line, other, scales[1]) for other in below)
        chosen.append(None if alone else series_dash(number, wiggle))
    return chosen


def stroke(number: int, line: Line, scales: Scales, limit: int, dash: str | None) -> Html:
    """One line, with the values that the script shows."""
    points = thin(line.points, limit, scales[0].log)
    drawn = [point for point in points if not math.isnan(point[1])]
    attributes = {
        "data-line": str(number),
        "data-name": line.name,
        "class": f"curve {series_class(number)}"
        + (" under" if number == 0 else "")
        + (" dense" if len(drawn) > DENSE else ""),
        "d": _path(points, scales),
        "stroke-dasharray": dash,
        "data-x": " ".join(short(x) for x, _ in drawn),
        "data-y": " ".join(short(y) for _, y in drawn),
    }
    return tag("path", attributes)


def _nearest(points: Sequence[Point], across: Scale, share: float) -> Point:
    """The point that stands nearest to a share of the x axis."""
    return min(points, key=lambda point: abs(across.place(point[0]) - share))


def _marked(drawn: Sequence[Point], across: Scale, shift: float) -> Sequence[Point]:
    """The points that carry a mark: all of a few, else some, evenly by number or along a logarithmic axis."""
    if len(drawn) <= EVERY_MARKED:
        return drawn
    if across.log:
        return list(dict.fromkeys(_nearest(drawn, across, (place + shift) / MARKS) for place in range(MARKS)))
    return [drawn[int((place + shift) * len(drawn) / MARKS)] for place in range(MARKS)]


def marks(number: int, line: Line, scales: Scales) -> Html:
    """Marks along a line, each line's at places of its own, so that lines on one another show both."""
    across, up = scales
    points = _marked(line.drawn, across, shift=(number % 4 + 0.5) / 4)
    shape = {"href": f"#mark-{number % len(SHAPES)}", "class": series_class(number)}
    return join(tag("use", {**shape, "x": percent(across.place(x)), "y": percent(1 - up.place(y))}) for x, y in points)
