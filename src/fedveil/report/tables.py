"""Tables, facts, and the figures behind a chart."""

import math
import re
from bisect import bisect_left
from collections.abc import Sequence

from fedveil.report.markup import Html, join, note, scrollable, tag
from fedveil.report.numbers import NOTHING, aligned, count, short
from fedveil.report.sections import Curves, Facts, Interval, Intervals, Table
from fedveil.report.series import Line

NUMERIC = re.compile(
    r"[<>≤≥~≈]?\s*[-+\u2212±]?\s*[\d.,]*\d(e[-+]?\d+)?\b.{0,24}", re.IGNORECASE
)  # a number, then its unit
BLANK = frozenset({"", "-", "\u2013", "\u2014", "n/a", "nan", "inf", "not measured"})
DATA_ROWS = 100


def _numeric(cells: Sequence[str]) -> bool:
    """Whether a column holds numbers, apart from blanks and failures."""
    telling = [cell.strip() for cell in cells if cell.strip().lower() not in BLANK and not failed(cell)]
    return bool(telling) and all(NUMERIC.fullmatch(cell) for cell in telling)


def failed(cell: str) -> bool:
    """Whether a cell tells of a failure."""
    return cell.strip().lower().startswith("failed")


def _classes(cell: str, numeric: bool) -> str | None:
    """How a cell looks, as classes."""
    return " ".join(["number"] * numeric + ["failed"] * failed(cell)) or None


def grid(label: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """A table in a box that scrolls by itself; the first column names the row."""
    numeric = [_numeric([row[place] for row in rows]) for place in range(len(header))]
    head = [
        tag("th", {"scope": "col", "class": "number" if right else None}, name)
        for name, right in zip(header, numeric, strict=True)
    ]
    body = []
    for row in rows:
        cells = [
            tag(
                "td" if place else "th",
                {"scope": None if place else "row", "class": _classes(cell, numeric[place])},
                cell,
            )
            for place, cell in enumerate(row)
        ]
        body.append(tag("tr", {}, *cells))
    return scrollable(label, tag("table", {}, tag("thead", {}, tag("tr", {}, *head)), tag("tbody", {}, *body)))


def table(section: Table) -> Html:
    """A table with its remark."""
    if not section.rows:
        return join([tag("p", {"class": "empty"}, "No rows."), note(section.note)])
    return join([grid(section.title, section.header, section.rows), note(section.note)])


def facts(section: Facts) -> Html:
    """Names and values, a pair a line."""
    pairs = [tag("div", {}, tag("dt", {}, name), tag("dd", {}, str(value))) for name, value in section.facts.items()]
    return join([tag("dl", {"class": "facts"}, *pairs), note(section.note)])


def _evenly(values: Sequence[float], limit: int) -> list[float]:
    """At most `limit` of the values, both ends among them."""
    if len(values) <= limit:
        return list(values)
    return [values[round(place * (len(values) - 1) / (limit - 1))] for place in range(limit)]


def _evenly_by_decade(values: Sequence[float], limit: int) -> list[float]:
    """At most `limit` of the values above zero, evenly over a logarithmic axis, both ends among them."""
    levels = [math.log10(value) for value in values if value > 0]
    if len(values) <= limit or not levels:
        return _evenly(values, limit)
    step = (levels[-1] - levels[0]) / (limit - 1)
    chosen = {min(bisect_left(levels, levels[0] + place * step), len(levels) - 1) for place in range(limit)}
    return [values[len(values) - len(levels) + index] for index in sorted(chosen)]


def _folded(title: str, amount: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """A table that opens when asked to."""
    return tag(
        "details", {}, tag("summary", {}, "Data", tag("span", {}, amount)), grid(f"Data of {title}", header, rows)
    )


def curve_data(curves: Curves, lines: Sequence[Line]) -> Html:
    """The figures behind a chart, folded; of long lines a selection."""
    values = [dict(line.points) for line in lines]
    every = sorted({x for line in lines for x, _ in line.points if math.isfinite(x)})
    if not every:
        return Html()
    chosen = (_evenly_by_decade if curves.log_x else _evenly)(every, DATA_ROWS)
    columns = [
        aligned([NOTHING if math.isnan(known.get(x, math.nan)) else short(known[x]) for x in chosen])
        for known in values
    ]
    rows = list(zip(aligned([short(x) for x in chosen]), *columns, strict=True))
    amount = (f"{len(chosen)} of " if len(chosen) < len(every) else "") + count(len(every), "row")
    return _folded(curves.title, amount, [curves.x_label, *(line.name for line in lines)], rows)


def interval_data(section: Intervals) -> Html:
    """The figures behind intervals, folded, with the references below."""
    rows = [*section.rows, *(Interval(name, value, group="reference") for name, value in section.references.items())]
    columns = [
        aligned([NOTHING if number is None else short(number) for number in column])
        for column in ([row.value for row in rows], [row.low for row in rows], [row.high for row in rows])
    ]
    cells = [
        [f"{row.group}: {row.name}" if row.group else row.name, row.missing if row.value is None else value, low, high]
        for row, value, low, high in zip(rows, *columns, strict=True)
    ]
    return _folded(section.title, count(len(rows), "row"), ["entry", section.label, "low", "high"], cells)
