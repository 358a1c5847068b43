"""Lines ready to draw, thinned to what a screen shows, and described in words for those who cannot see them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby, pairwise

from fedveil.report.scale import LARGEST, Scale, count, finite, short
from fedveil.report.sections import Curves

SAME = 0.006  # of the axis: about a line's width
AXES = ("", ", logarithmic axis", ", logarithmic x axis", ", both axes logarithmic")  # by 2 * log_x + log_y

Point = tuple[float, float]
Reason = tuple[str, str]  # why something is not drawn: of what, and what is said of it


@dataclass(frozen=True)
class Line:
    """A named series. Points that cannot be drawn have y = NaN and are counted by reason."""

    name: str
    points: tuple[Point, ...]
    left_out: Counter[Reason]

    @cached_property
    def drawn(self) -> tuple[Point, ...]:
        """The points that can be drawn."""
        return tuple(point for point in self.points if not math.isnan(point[1]))


def _reason(x: float, y: float, log: bool, log_x: bool) -> Reason | None:
    if not (finite(x) and finite(y)):
        return "value", "not finite, left out"
    if log_x and x < 1 / LARGEST:
        return "point", "with x at or below zero, left out of the logarithmic x axis"
    if log and y < 1 / LARGEST:
        return "value", "at or below zero, left out of the logarithmic axis"
    return None


def clean(name: str, points: Sequence[Point], *, log: bool, log_x: bool = False) -> Line:
    """Replace each y by NaN if it, or its x, cannot be drawn."""
    reasons = [_reason(x, y, log, log_x) for x, y in points]
    kept = ((float(x), math.nan if why else float(y)) for (x, y), why in zip(points, reasons, strict=True))
    return Line(name, tuple(kept), Counter(why for why in reasons if why))


def _extreme_indices(start: int, points: Sequence[Point]) -> set[int]:
    """Return the indices of the lowest and the highest point of a run, and of its first gap."""
    heights = {index: y for index, (_, y) in enumerate(points, start)}
    gaps = [index for index, y in heights.items() if math.isnan(y)]
    drawn = [index for index, y in heights.items() if not math.isnan(y)]
    ends = {choose(drawn, key=heights.__getitem__) for choose in (min, max) if drawn}
    return {*ends, *gaps[:1]}


def _log_starts(points: Sequence[Point], bins: int) -> list[int]:
    """Where at most `bins` bins begin: each spans some points or some way of a logarithmic x axis, the less of both."""
    way, level, ways = 0.0, math.nan, []
    for x, y in points:
        if not math.isnan(y):
            before, level = level, math.log10(x)
            way += 0.0 if math.isnan(before) else abs(level - before)
        ways.append(way)
    share = [(index / len(points) + far / (way or 1.0)) / 2 for index, far in enumerate(ways)]
    numbers = [-1, *(int(bins * part) for part in share)]
    return [index for index, (before, number) in enumerate(pairwise(numbers)) if number != before]


def thin(points: Sequence[Point], limit: int, log_x: bool = False) -> tuple[Point, ...]:
    """At most about `limit` points that draw the same picture: lowest and highest of each bin, both ends, gaps.

    >>> thin([(x, x % 7) for x in range(1000)], 8)[:4]
    ((0, 0), (6, 6), (251, 6), (252, 0))
    """
    if len(points) <= limit:
        return tuple(points)
    bins = max(1, limit // 2)
    starts = _log_starts(points, bins) if log_x else range(0, len(points), math.ceil(len(points) / bins))
    kept = {0, len(points) - 1}
    for start, end in pairwise([*starts, len(points)]):
        kept |= _extreme_indices(start, points[start:end])
    return tuple(points[index] for index in sorted(kept))


def pieces(points: Sequence[Point]) -> list[list[Point]]:
    """The points in runs without a gap."""
    return [list(run) for gap, run in groupby(points, lambda point: math.isnan(point[1])) if not gap]


def gaps(lines: Sequence[Line]) -> list[str]:
    """A sentence for each thing that the chart leaves out."""
    empty = [f"{line.name}: no values." for line in lines if not line.points]
    reasons = [(line.name, *why, amount) for line in lines for why, amount in line.left_out.items()]
    return [*empty, *(f"{name}: {count(amount, what)} {said}." for name, what, said, amount in reasons)]


def _differences(one: Line, other: Line, scale: Scale) -> list[tuple[float, bool]]:
    """Return the difference of two lines at each shared x, and whether it is too small to be seen."""
    left, right = dict(one.drawn), dict(other.drawn)
    pairs = [(left[x], right[x]) for x in left.keys() & right.keys()]
    return [(abs(a - b), abs(scale.place(a) - scale.place(b)) <= SAME) for a, b in pairs]


def overlap(one: Line, other: Line, scale: Scale) -> bool:
    """Whether two lines look like one for at least half of the x that they share."""
    found = _differences(one, other, scale)
    return bool(found) and 2 * sum(close for _, close in found) >= len(found)


def coincidences(lines: Sequence[Line], scale: Scale) -> list[str]:
    """A sentence for each pair of lines that lie on one another (of the first few lines)."""
    said = []
    for one, other in combinations(lines[:6], 2):
        found = _differences(one, other, scale)
        if found and len(found) == len(one.drawn) == len(other.drawn) and all(close for _, close in found):
            gap = max(difference for difference, _ in found)
            size = f"largest difference {short(float(f'{gap:.2g}'))}" if gap else "no difference at all"
            said.append(f"{one.name} and {other.name} coincide: {size}.")
    return said


def _describe(line: Line) -> str:
    ys = [y for _, y in line.drawn]
    if not ys:
        return f"{line.name}: nothing to draw."
    span = f"lowest {short(min(ys))}, highest {short(max(ys))}, last {short(ys[-1])}"
    return f"{line.name}: {count(len(ys), 'value')}, {span}."


def describe(curves: Curves, lines: Sequence[Line], same: Sequence[str]) -> str:
    """The chart in a few sentences; `same` says which lines coincide."""
    opening = f"Line chart{AXES[2 * curves.log_x + curves.log_y]}: {curves.y_label} over {curves.x_label}."
    return " ".join([opening, *map(_describe, lines), *same, "The values are in the table below."])


def last_label(lines: Sequence[Line], x_label: str) -> str:
    """Which values a legend shows before the reader points at any."""
    ends = {line.drawn[-1][0] for line in lines if line.drawn}
    return f"{x_label} = {short(ends.pop())}" if len(ends) == 1 else "last values"
