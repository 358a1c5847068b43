"""Values with their intervals, a row each, over one axis with reference lines.

Names and values are text in a CSS grid, so that they wrap, and on a phone stand above their row. The rest is SVG.
"""

import math
from collections.abc import Mapping, Sequence

from fedveil.report.markup import Attributes, Html, join, note, tag
from fedveil.report.numbers import NOTHING, aligned, short
from fedveil.report.palette import COLOURS, series_class
from fedveil.report.references import LEVEL, Reference, drawn, levels, placed
from fedveil.report.scale import Scale, linear
from fedveil.report.sections import Interval, Intervals
from fedveil.report.strokes import SHAPES, percent
from fedveil.report.tables import failed, interval_data
from fedveil.report.words import intervals_in_words

HEIGHT = 30  # pixels of a row; its middle is at half of them
CAP = 5  # pixels from the middle to the end of a whisker's cap
Written = tuple[str, str, str]  # value, low, high


def _gathered(rows: Sequence[Interval]) -> list[Interval]:
    """The rows, those of a group together; groups stand in the order of their first rows."""
    order = list(dict.fromkeys(row.group for row in rows))
    return sorted(rows, key=lambda row: order.index(row.group))


def _looks(rows: Sequence[Interval]) -> dict[str, int]:
    """A number for each name: it chooses colour and mark."""
    return {name: number for number, name in enumerate(dict.fromkeys(row.name for row in rows))}


def axis_of(section: Intervals) -> Scale:
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


def _written(rows: Sequence[Interval], axis: Scale) -> list[Written]:
    """Value, low and high of each row, to about a thousandth of the axis, their points below one another."""
    decimals = max(0, 3 - math.ceil(math.log10(axis.high - axis.low) - 1e-9))
    numbers = [number for row in rows for number in (row.value, row.low, row.high)]
    cells = iter(aligned([NOTHING if number is None else short(round(number, decimals) + 0.0) for number in numbers]))
    return list(zip(cells, cells, cells, strict=True))


def _mark(number: int, x: str | int, y: int) -> Html:
    """The mark of an entry, larger than a curve's; names that share a colour differ in shape."""
    shape = (number + number // COLOURS) % len(SHAPES)
    size = 1.6 if shape % 2 else 1.25  # the solid ones are drawn small
    return tag("svg", {"x": x, "y": y}, tag("use", {"href": f"#mark-{shape}", "transform": f"scale({size})"}))


def _track(row: Interval, number: int, axis: Scale) -> Html:
    """The whisker and the mark of a row."""
    middle, parts = HEIGHT // 2, []
    if row.low is not None and row.high is not None:
        low, high = percent(axis.place(row.low)), percent(axis.place(row.high))
        ends = [(low, high, middle, middle), *((x, x, middle - CAP, middle + CAP) for x in (low, high))]
        parts = [tag("line", {"x1": x1, "x2": x2, "y1": y1, "y2": y2}) for x1, x2, y1, y2 in ends]
    if row.value is not None:
        parts.append(_mark(number, percent(axis.place(row.value)), middle))
    return tag("svg", {"class": f"track {series_class(number)}", "height": HEIGHT}, *parts)


def _value(row: Interval, written: Written) -> Html:
    """What is printed beside a row."""
    if row.value is None:
        kind = "failed" if failed(row.missing) else "unmeasured"
        return tag("div", {"class": "value"}, tag("span", {"class": kind}, row.missing))
    value, low, high = written
    ends = tag("span", {"class": "whole"}, f"[{low}, {high}]") if row.low is not None else ""
    return tag("div", {"class": "value"}, tag("b", {}, value), " ", ends)


def _rows(rows: Sequence[Interval], written: Sequence[Written], axis: Scale, looks: Mapping[str, int]) -> list[Html]:
    """The cells of the grid, row after row: group (if there are any), name, track, value; a rule between groups."""
    grouped, cells, before = any(row.group for row in rows), [], None
    for row, texts in zip(rows, written, strict=True):
        fresh = row.group != before
        if grouped and fresh and before is not None:
            cells.append(tag("div", {"class": "rule"}))
        if grouped:
            cells.append(tag("div", {"class": "group"}, row.group if fresh else ""))
        cells += [tag("div", {"class": "name"}, row.name), _track(row, looks[row.name], axis), _value(row, texts)]
        before = row.group
    return cells


def _ladder(axis: Scale, references: Sequence[Reference]) -> Html:
    """What lies behind all rows: grid, axis, ticks, references."""
    top = levels(references) * LEVEL
    ticks = []
    for number, (value, label) in enumerate(axis.ticks):
        x, odd = percent(axis.place(value)), " odd" if number % 2 else ""
        ticks.append(tag("line", {"class": "grid", "x1": x, "x2": x, "y1": top, "y2": "100%"}))
        ticks.append(tag("text", {"class": f"tick{odd}", "x": x, "y": "100%", "dy": "1.7em"}, label))
    base = tag("line", {"class": "axis", "x1": 0, "x2": "100%", "y1": "100%", "y2": "100%"})
    return tag("svg", {"class": "ladder"}, *ticks, base, drawn(references))


def _legend(rows: Sequence[Interval], looks: Mapping[str, int]) -> Html:
    """The look of each name, where rows share one."""
    if len(looks) == len(rows):
        return Html()
    entries = []
    for name, number in looks.items():
        stroke = tag("line", {"x1": 1, "x2": 27, "y1": 8, "y2": 8})
        swatch: Attributes = {
            "class": f"track {series_class(number)}",
            "width": 28,
            "height": 16,
            "aria-hidden": "true",
        }
        entries.append(tag("li", {}, tag("svg", swatch, stroke, _mark(number, 14, 8)), tag("span", {}, name)))
    return tag("ul", {"class": "legend"}, *entries)


def intervals(section: Intervals) -> Html:
    """The plot with legend, axis, remark and its data."""
    if not section.rows:
        return join([tag("p", {"class": "empty"}, "No values to draw."), note(section.note)])
    rows, looks, axis = _gathered(section.rows), _looks(section.rows), axis_of(section)
    references, written = placed(section.references, axis), _written(rows, axis)
    shape = {
        "class": "rows" + (" grouped" if any(row.group for row in rows) else ""),
        "style": f"--top:{levels(references) * LEVEL}px",
        "role": "img",
        "aria-label": intervals_in_words(section, rows, written),
    }
    label = tag("p", {"class": "axis-name"}, section.label)
    return tag(
        "figure",
        {"class": "intervals"},
        _legend(rows, looks),
        tag("div", shape, _ladder(axis, references), *_rows(rows, written, axis, looks), label),
        note(section.note),
        interval_data(section),
    )
