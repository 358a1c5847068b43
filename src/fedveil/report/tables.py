"""Tables, confusion matrices, and the figures behind a chart."""

import math
import re
from bisect import bisect_left
from collections.abc import Sequence

from markupsafe import Markup

from fedveil.report.scale import NOTHING, align, count, short
from fedveil.report.sections import Curves, Interval, Intervals, Matrix
from fedveil.report.series import Line
from fedveil.report.style import fill, is_failure

NUMERIC = re.compile(r"(?i)[<>≤≥~≈]?\s*[-+\u2212±]?\s*[\d.,]*\d(e[-+]?\d+)?\b.{0,24}")  # a number, then its unit
RANGE = re.compile(r"(.*\S) (\[[^\]]*\]|\([^)]*\))")  # a value, then its interval or another value in brackets
BLANK = frozenset({"", "-", "\u2013", "\u2014", "n/a", "nan", "inf", "not measured"})
DATA_ROWS = 100
UPRIGHT = 3  # letters; longer labels of a matrix stand on their side


def _numeric(cells: Sequence[str]) -> bool:
    """Whether a column holds numbers, apart from blanks and failures."""
    telling = [cell.strip() for cell in cells if cell.strip().lower() not in BLANK and not is_failure(cell)]
    return bool(telling) and all(NUMERIC.fullmatch(cell) for cell in telling)


def _split(cell: str) -> tuple[str, str]:
    """Split a cell into its value and the text in brackets, which is set smaller.

    >>> _split("89.1% [87.7%, 90.4%]"), _split("12.5")
    (('89.1%', '[87.7%, 90.4%]'), ('12.5', ''))
    """
    found = RANGE.fullmatch(cell)
    return (found[1], found[2]) if found else (cell, "")


def grid(label: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """A table in a box that scrolls by itself; the first column names the row."""
    numeric = [_numeric([row[place] for row in rows]) for place in range(len(header))]
    return fill("grid.html", label=label, header=header, rows=rows, numeric=numeric, split=_split)


def matrix(section: Matrix) -> Markup:
    """A confusion matrix, with a line that says what it shows."""
    aside = max(map(len, section.labels), default=0) > UPRIGHT
    return fill("matrix.html", section=section, aside=aside, summary=_describe_matrix(section), NOTHING=NOTHING)


def _describe_matrix(matrix: Matrix) -> str:
    size = range(len(matrix.labels))
    total = sum(map(sum, matrix.counts))
    if not total:
        return "No answers counted."
    right = sum(matrix.counts[place][place] for place in size)
    said = f"{right / total:.2%} right: {right:,} of {count(total, 'answer')}."
    wrong = [(matrix.counts[truth][answer], truth, answer) for truth in size for answer in size if truth != answer]
    most, truth, answer = max(wrong, default=(0, 0, 0))
    mistake = f"{matrix.labels[truth]} answered as {matrix.labels[answer]}, {count(most, 'time')}"
    return f"{said} Most common mistake: {mistake}." if most else said


def _select_evenly(values: Sequence[float], limit: int, log: bool) -> list[float]:
    """At most `limit` of the values, both ends among them; over a logarithmic axis those above zero."""
    if len(values) <= limit:
        return list(values)
    levels = [math.log10(value) for value in values if value > 0] if log else []
    if not levels:
        return [values[round(place * (len(values) - 1) / (limit - 1))] for place in range(limit)]
    step = (levels[-1] - levels[0]) / (limit - 1)
    chosen = {min(bisect_left(levels, levels[0] + place * step), len(levels) - 1) for place in range(limit)}
    return [values[len(values) - len(levels) + index] for index in sorted(chosen)]


def _data_table(title: str, amount: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    return fill("data.html", amount=amount, grid=grid(f"Data of {title}", header, rows))


def _column(numbers: Sequence[float | None]) -> list[str]:
    return align([NOTHING if number is None or math.isnan(number) else short(number) for number in numbers])


def curve_data(curves: Curves, lines: Sequence[Line]) -> Markup:
    """The figures behind a chart, folded; of long lines a selection."""
    every = sorted({x for line in lines for x, _ in line.points if math.isfinite(x)})
    if not every:
        return Markup()
    chosen = _select_evenly(every, DATA_ROWS, curves.log_x)
    columns = [_column([known.get(x) for x in chosen]) for known in (dict(line.points) for line in lines)]
    rows = list(zip(_column(chosen), *columns, strict=True))
    amount = (f"{len(chosen)} of " if len(chosen) < len(every) else "") + count(len(every), "row")
    return _data_table(curves.title, amount, [curves.x_label, *(line.name for line in lines)], rows)


def interval_data(section: Intervals) -> Markup:
    """The figures behind intervals, folded, with the references below."""
    rows = [*section.rows, *(Interval(name, value, group="reference") for name, value in section.references.items())]
    columns = [_column([getattr(row, end) for row in rows]) for end in ("value", "low", "high")]
    cells = [
        [f"{row.group}: {row.name}" if row.group else row.name, row.missing if row.value is None else value, low, high]
        for row, value, low, high in zip(rows, *columns, strict=True)
    ]
    return _data_table(section.title, count(len(rows), "row"), ["entry", section.label, "low", "high"], cells)
