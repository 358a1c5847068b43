"""A series made fit to draw: what cannot be drawn becomes a gap, and there are no more points than a screen shows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

LARGEST = 1e300  # beyond this a span between two values may overflow

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A named series. Points that cannot be drawn have y = NaN; `missing` and `non_positive` count them by reason."""

    name: str
    points: tuple[Point, ...]
    missing: int
    non_positive: int

    @cached_property
    def drawn(self) -> tuple[Point, ...]:
        """The points that can be drawn."""
        return tuple(point for point in self.points if not math.isnan(point[1]))


def _finite(value: float) -> bool:
    """Whether a value can be placed on an axis."""
    return abs(value) < LARGEST  # False for NaN too


def clean(name: str, points: Sequence[Point], *, log: bool) -> Line:
    """The series with NaN for each y that cannot be drawn."""
    kept: list[Point] = []
    missing = non_positive = 0
    for x, y in ((float(x), float(y)) for x, y in points):
        if not (_finite(x) and _finite(y)):
            missing += 1
            kept.append((x, math.nan))
        elif log and y < 1 / LARGEST:
            non_positive += 1
            kept.append((x, math.nan))
        else:
            kept.append((x, y))
    return Line(name, tuple(kept), missing, non_positive)


def _telling(start: int, points: Sequence[Point]) -> set[int]:
    """Of a run of points: the lowest, the highest and the first gap, by index."""
    drawn = [index for index, (_, y) in enumerate(points, start) if not math.isnan(y)]
    gaps = (index for index, (_, y) in enumerate(points, start) if math.isnan(y))
    if not drawn:
        return set(list(gaps)[:1])
    height = {index: points[index - start][1] for index in drawn}
    return {min(drawn, key=height.__getitem__), max(drawn, key=height.__getitem__), *list(gaps)[:1]}


def thin(points: Sequence[Point], limit: int) -> tuple[Point, ...]:
    """At most about `limit` points that draw the same picture: lowest and highest of each bin, both ends, gaps.

    >>> thin([(x, x % 7) for x in range(1000)], 8)[:4]
    ((0, 0), (6, 6), (251, 6), (252, 0))
    """
    if len(points) <= limit:
        return tuple(points)
    size = math.ceil(len(points) / max(1, limit // 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        kept |= _telling(start, points[start : start + size])
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
