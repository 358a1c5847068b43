"""Tables, facts, and the figures behind a chart."""

import math
import re
from collections.abc import Sequence

from fedveil.report.markup import Html, join, note, scrollable, tag
from fedveil.report.numbers import NOTHING, aligned, count, short
from fedveil.report.sections import Curves, Facts, Table
from fedveil.report.series import Line

NUMERIC = re.compile(
    r"[<>≤≥~≈]?\s*[-+\u2212±]?\s*[\d.,]*\d(e[-+]?\d+)?\b.{0,24}", re.IGNORECASE
)  # a number, then its unit
BLANK = frozenset({"", "-", "\u2013", "\u2014", "n/a", "nan", "inf"})
DATA_ROWS = 100


def _numeric(cells: Sequence[str]) -> bool:
    """Whether a column holds numbers, apart from blanks and failures."""
    telling = [cell.strip() for cell in cells if cell.strip().lower() not in BLANK and not _failed(cell)]
    return bool(telling) and all(NUMERIC.fullmatch(cell) for cell in telling)


def _failed(cell: str) -> bool:
    """Whether a cell tells of a failure."""
    return cell.strip().lower().startswith("failed")


def _classes(cell: str, numeric: bool) -> str | None:
    """How a cell looks, as classes."""
    return " ".join(["number"] * numeric + ["failed"] * _failed(cell)) or None


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


def curve_data(curves: Curves, lines: Sequence[Line]) -> Html:
    """The figures behind a chart, folded; of long lines a selection."""
    values = [dict(line.points) for line in lines]
    every = sorted({x for line in lines for x, _ in line.points if math.isfinite(x)})
    if not every:
        return Html()
    chosen = _evenly(every, DATA_ROWS)
    columns = [
        aligned([NOTHING if math.isnan(known.get(x, math.nan)) else short(known[x]) for x in chosen])
        for known in values
    ]
    rows = list(zip(aligned([short(x) for x in chosen]), *columns, strict=True))
    amount = (f"{len(chosen)} of " if len(chosen) < len(every) else "") + count(len(every), "row")
    title = tag("summary", {}, "Data", tag("span", {}, amount))
    return tag(
        "details", {}, title, grid(f"Data of {curves.title}", [curves.x_label, *(line.name for line in lines)], rows)
    )
