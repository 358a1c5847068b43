"""A chart in words, for who cannot see it and for what it cannot show."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

from fedveil.report.numbers import count, short
from fedveil.report.scale import Scale
from fedveil.report.sections import Curves, Interval, Intervals
from fedveil.report.series import Line

SAME = 0.006  # of the axis: about a line's width
AXES = {  # by (log_x, log_y)
    (False, False): "",
    (False, True): ", logarithmic axis",
    (True, False): ", logarithmic x axis",
    (True, True): ", both axes logarithmic",
}


def missing(lines: Sequence[Line]) -> list[str]:
    """A sentence for each thing that the chart leaves out."""
    found = [f"{line.name}: no values." for line in lines if not line.points]
    for line in lines:
        if line.missing:
            found.append(f"{line.name}: {count(line.missing, 'value')} not finite, left out.")
        if line.non_positive:
            what = count(line.non_positive, "value")
            found.append(f"{line.name}: {what} at or below zero, left out of the logarithmic axis.")
        if line.non_positive_x:
            what = count(line.non_positive_x, "point")
            found.append(f"{line.name}: {what} with x at or below zero, left out of the logarithmic x axis.")
    return found


def _gap(one: Line, other: Line, scale: Scale) -> float | None:
    """The largest difference of two lines over the same x if the eye cannot see it, else None."""
    left, right = dict(one.drawn), dict(other.drawn)
    if not left or left.keys() != right.keys():
        return None
    if any(abs(scale.place(left[x]) - scale.place(right[x])) > SAME for x in left):
        return None
    return max(abs(left[x] - right[x]) for x in left)


def overlap(one: Line, other: Line, scale: Scale) -> bool:
    """Whether the eye sees one line where there are two, for at least half of the x that they share."""
    left, right = dict(one.drawn), dict(other.drawn)
    shared = left.keys() & right.keys()
    close = sum(abs(scale.place(left[x]) - scale.place(right[x])) <= SAME for x in shared)
    return bool(shared) and 2 * close >= len(shared)


def coincidences(lines: Sequence[Line], scale: Scale | None) -> list[str]:
    """A sentence for each pair of lines that lie on one another (of the first few lines)."""
    if scale is None:
        return []
    pairs = [(one, other, _gap(one, other, scale)) for one, other in combinations(lines[:6], 2)]
    return [
        f"{one.name} and {other.name} coincide: "
        + ("no difference at all." if gap == 0 else f"largest difference {short(float(f'{gap:.2g}'))}.")
        for one, other, gap in pairs
        if gap is not None
    ]


def _line(line: Line) -> str:
    """One line in a sentence."""
    ys = [y for _, y in line.drawn]
    if not ys:
        return f"{line.name}: nothing to draw."
    span = f"lowest {short(min(ys))}, highest {short(max(ys))}, last {short(ys[-1])}"
    return f"{line.name}: {count(len(ys), 'value')}, {span}."


def alternative(curves: Curves, lines: Sequence[Line], scale: Scale | None) -> str:
    """The chart in a few sentences."""
    opening = f"Line chart{AXES[curves.log_x, curves.log_y]}: {curves.y_label} over {curves.x_label}."
    return " ".join([opening, *map(_line, lines), *coincidences(lines, scale), "The values are in the table below."])


def at_last(lines: Sequence[Line], x_label: str) -> str:
    """Which values a legend shows before the reader points at any."""
    ends = {line.drawn[-1][0] for line in lines if line.drawn}
    only = next(iter(ends)) if len(ends) == 1 else math.nan
    return f"{x_label} = {short(only)}" if len(ends) == 1 else "last values"


def _interval(row: Interval, written: tuple[str, str, str], references: Mapping[str, float]) -> str:
    """One value with its interval in a sentence, with the references that the interval holds."""
    name, (value, low, high) = f"{row.group}, {row.name}" if row.group else row.name, written
    if row.value is None:
        return f"{name}: {row.missing}."
    if row.low is None or row.high is None:
        return f"{name}: {value}."
    held = [reference for reference, place in references.items() if row.low <= place <= row.high]
    return f"{name}: {value}, interval {low} to {high}" + (f", holds {' and '.join(held)}." if held else ".")


def intervals_in_words(section: Intervals, rows: Sequence[Interval], written: Sequence[tuple[str, str, str]]) -> str:
    """The plot in a few sentences; `written` are value, low and high of each row as the plot prints them."""
    lines = ", ".join(f"{name} {short(value)}" for name, value in section.references.items())
    opening = f"Values with intervals: {section.label}." + (f" Reference lines: {lines}." if lines else "")
    said = [_interval(row, texts, section.references) for row, texts in zip(rows, written, strict=True)]
    return " ".join([opening, *said, "The values are in the table below."])
