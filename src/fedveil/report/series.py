"""A series made fit to draw: what cannot be drawn becomes a gap, and there are no more points than a screen shows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

LARGEST = 1e300  # beyond this a span between two values may overflow

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A named series. Points that cannot be drawn have y = NaN and are counted by reason.

    `missing`: not finite; `non_positive`: y at or below zero on a logarithmic axis; `non_positive_x`: x so.
    """

    name: str
    points: tuple[Point, ...]
    missing: int
    non_positive: int
    non_positive_x: int = 0

    @cached_property
    def drawn(self) -> tuple[Point, ...]:
        """The points that can be drawn."""
        return tuple(point for point in self.points if not math.isnan(point[1]))


def finite(value: float) -> bool:
    """Whether a value can be placed on an axis."""
    return abs(value) < LARGEST  # False for NaN too


def clean(name: str, points: Sequence[Point], *, log: bool, log_x: bool = False) -> Line:
    """The series with NaN for each y that cannot be drawn, or whose x cannot."""
    kept: list[Point] = []
    missing = non_positive = non_positive_x = 0
    for x, y in ((float(x), float(y)) for x, y in points):
        if not (finite(x) and finite(y)):
            missing += 1
            kept.append((x, math.nan))
        elif log_x and x < 1 / LARGEST:
            non_positive_x += 1
            kept.append((x, math.nan))
        elif log and y < 1 / LARGEST:
            non_positive += 1
            kept.append((x, math.nan))
        else:
            kept.append((x, y))
    return Line(name, tuple(kept), missing, non_positive, non_positive_x)


def _telling(start: int, points: Sequence[Point]) -> set[int]:
    """Of a run of points: the lowest, the highest and the first gap, by index."""
    drawn = [index for index, (_, y) in enumerate(points, start) if not math.isnan(y)]
    gaps = (index for index, (_, y) in enumerate(points, start) if math.isnan(y))
    if not drawn:
        return set(list(gaps)[:1])
    height = {index: points[index - start][1] for index in drawn}
    return {min(drawn, key=height.__getitem__), max(drawn, key=height.__getitem__), *list(gaps)[:1]}


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
        kept |= _telling(start, points[start:end])
    return tuple(points[index] for index in sorted(kept))


def pieces(points: Sequence[Point]) -> list[list[Point]]:
    """The points in runs without a gap."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isnan(point[1]):
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if run]
