"""Curves as inline SVG that keeps its letters' size at every width: places are percentages, lines do not scale."""

from collections.abc import Sequence

from fedveil.report import words
from fedveil.report.markup import Html, join, note, tag
from fedveil.report.numbers import short
from fedveil.report.palette import series_class, series_dash
from fedveil.report.scale import Scale, linear, logarithmic
from fedveil.report.sections import Curves
from fedveil.report.series import Line, Point, clean
from fedveil.report.strokes import SHAPES, UNITS, Scales, band, band_edges, dashes, marks, percent, stroke
from fedveil.report.tables import curve_data


def _scales(lines: Sequence[Line], bands: Sequence[Point], log_x: bool, log_y: bool) -> Scales | None:
    """The axes that hold all values and bands, or None without any."""
    drawn = [point for line in lines for point in line.drawn]
    if not drawn:
        return None
    xs, ys = [x for x, _ in drawn], [y for _, y in (*drawn, *bands)]
    axis = logarithmic if log_x else linear
    across = axis(min(xs), max(xs), wanted=6, outward=False)
    if log_y:
        return across, logarithmic(min(ys), max(ys), wanted=6)
    return across, linear(min(ys), max(ys), wanted=5, outward=True)


def _uprights(across: Scale) -> list[Html]:
    """Upright grid lines, which only a logarithmic x axis needs."""
    places = [percent(across.place(value)) for value, _ in across.ticks] if across.log else []
    return [tag("line", {"class": "grid", "x1": x, "x2": x, "y1": 0, "y2": "100%"}) for x in places]


def _grid(scales: Scales) -> Html:
    """Axes, grid lines and tick labels."""
    across, up = scales
    rows = [
        tag("line", {"class": "grid", "x1": 0, "x2": "100%", "y1": y, "y2": y})
        + tag("text", {"class": "tick up", "x": -10, "y": y, "dy": "0.32em"}, label)
        for y, label in ((percent(1 - up.place(value)), label) for value, label in up.ticks)
    ]
    columns = [
        tag("line", {"class": "axis", "x1": x, "x2": x, "y1": "100%", "y2": "100%", "stroke-width": 1})
        + tag("text", {"class": "tick" + (" odd" if number % 2 else ""), "x": x, "y": "100%", "dy": "1.7em"}, label)
        for number, (x, label) in enumerate((percent(across.place(value)), label) for value, label in across.ticks)
    ]
    base = tag("line", {"class": "axis", "x1": 0, "x2": "100%", "y1": "100%", "y2": "100%"})
    return join([*_uprights(across), *map(Html, rows), *map(Html, columns), base])


def _legend(lines: Sequence[Line], dashed: Sequence[str | None], x_label: str) -> Html:
    """Each line by name, look and last value; the script puts the value under the pointer there."""
    entries = []
    for number, line in enumerate(lines):
        under = " under" if number == 0 else ""
        sample = tag(
            "path",
            {
                "class": "curve" + under,
                "d": "M1 8H39",
                "stroke-dasharray": series_dash(number) if dashed[number] else None,
            },
        )
        mark = tag("use", {"href": f"#mark-{number % len(SHAPES)}", "class": series_class(number), "x": 20, "y": 8})
        swatch = tag(
            "svg", {"class": series_class(number), "width": 40, "height": 16, "aria-hidden": "true"}, sample, mark
        )
        value = short(line.drawn[-1][1]) if line.drawn else "no values"
        entries.append(tag("li", {}, swatch, tag("span", {}, line.name), tag("b", {"class": "value"}, value)))
    at = tag("li", {"class": "at"}, words.at_last(lines, x_label))
    return tag("ul", {"class": "legend"}, *entries, at)


def _plot(curves: Curves, lines: Sequence[Line], scales: Scales, strokes: Sequence[Html]) -> Html:
    """The picture, in a frame that tells the script where its axes end."""
    across, up = scales
    picture = tag(
        "svg",
        {"viewBox": f"0 0 {UNITS} {UNITS}", "preserveAspectRatio": "none", "width": "100%", "height": "100%"},
        *strokes,
    )
    dots = [marks(number, line, scales) for number, line in enumerate(lines) if line.drawn]
    words_of_it = words.alternative(curves, lines, up)
    svg = tag("svg", {"class": "plot", "role": "img", "aria-label": words_of_it}, _grid(scales), picture, *dots)
    widest = max((len(label) for _, label in up.ticks), default=1)
    place = {"class": "frame", "style": f"--left:{widest * 7.2 + 14:.0f}px", "data-x-label": curves.x_label}
    ends = {
        "data-x0": repr(across.low),
        "data-x1": repr(across.high),
        "data-y0": repr(up.low),
        "data-y1": repr(up.high),
    }
    logs = {"data-log-x": "1" if across.log else None, "data-log": "1" if up.log else None}
    return tag("div", {**place, **ends, **logs}, svg)


def chart(curves: Curves, limit: int) -> Html:
    """The curves with legend, axes, remarks and their data; at most about `limit` points a line are drawn."""
    lines = [clean(name, points, log=curves.log_y, log_x=curves.log_x) for name, points in curves.series.items()]
    edges = {name: band_edges(curves.series[name], widths) for name, widths in curves.spread.items()}
    scales = _scales(lines, [point for edge in edges.values() for point in edge], curves.log_x, curves.log_y)
    dashed: Sequence[str | None] = [series_dash(number) for number in range(len(lines))]
    body = tag("p", {"class": "empty"}, "No values to draw.")
    if scales:
        dashed = dashes(lines, scales, limit)
        numbered = [(number, line) for number, line in enumerate(lines) if line.drawn]
        strokes = [stroke(number, line, scales, limit, dashed[number]) for number, line in numbered]
        bands = [band(number, edges[line.name], scales) for number, line in numbered if line.name in edges]
        body = _plot(curves, lines, scales, [*bands, *strokes])
    remarks = [*words.coincidences(lines, scales[1] if scales else None), *words.missing(lines)]
    if any(len(line.points) > limit for line in lines):
        remarks.append("Long lines are thinned to what a screen shows; lows and highs are kept.")
    return tag(
        "figure",
        {"class": "chart"},
        _legend(lines, dashed, curves.x_label),
        tag("p", {"class": "axis-name"}, curves.y_label + (" (logarithmic)" if curves.log_y else "")),
        body,
        tag("p", {"class": "axis-name x"}, curves.x_label + (" (logarithmic)" if curves.log_x else "")),
        note(curves.note),
        note(" ".join(remarks)),
        curve_data(curves, lines),
    )
