"""Upright lines with names, whose names keep clear of one another also on a phone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from fedveil.report.markup import Attributes, Html, join, tag
from fedveil.report.numbers import short
from fedveil.report.scale import Scale
from fedveil.report.strokes import percent

LETTER = 6.7 / 320  # about a letter's share of a plot on a phone
BESIDE = 0.015  # of the plot: between a name and the line it stands beside
LEVEL = 19  # pixels that a level of names takes
TRIED = 5  # lines for which one level of names is tried


@dataclass(frozen=True)
class Reference:
    """A line at a share of the axis; its name is anchored as SVG says, on a level above the plot (0 is the lowest)."""

    name: str
    share: float
    anchor: str = "middle"
    level: int = 0

    @property
    def span(self) -> tuple[float, float]:
        """From where to where the name reaches."""
        width = LETTER * len(self.name)
        start = {"start": BESIDE, "middle": -width / 2, "end": -width - BESIDE}[self.anchor]
        return self.share + start, self.share + start + width


def _clear(lines: Sequence[Reference]) -> bool:
    """Whether no name of these lines, from left to right, leaves the plot or touches another name or its line."""
    inside = all(line.span[0] >= -0.04 and line.span[1] <= 1.04 for line in lines)
    return inside and all(
        one.span[1] + BESIDE < min(other.span[0], other.share) and one.share < other.span[0] - BESIDE
        for one, other in pairwise(lines)
    )


def _one_level(lines: Sequence[Reference]) -> list[Reference] | None:
    """The lines with names on one level, all over their lines or all beside them; None if there is no room."""
    beside = product(("start", "end"), repeat=len(lines)) if len(lines) <= TRIED else ()
    found = (
        [Reference(line.name, line.share, anchor) for line, anchor in zip(lines, anchors, strict=True)]
        for anchors in [("middle",) * len(lines), *beside]
    )
    return next((named for named in found if _clear(named)), None)


def _many_levels(lines: Sequence[Reference]) -> list[Reference]:
    """The lines with a level for each name; the outer ones stand higher, so that few lines cross a name."""
    outward = sorted(lines, key=lambda line: abs(line.share - 0.5))
    return [
        Reference(line.name, line.share, "start" if line.share <= 0.5 else "end", level)
        for level, line in enumerate(outward)
    ]


def placed(references: Mapping[str, float], axis: Scale) -> list[Reference]:
    """The references with a place for each name, which tells the value too."""
    lines = sorted(
        (Reference(f"{name} {short(value)}", axis.place(value)) for name, value in references.items()),
        key=lambda line: line.share,
    )
    return _one_level(lines) or _many_levels(lines)


def levels(lines: Sequence[Reference]) -> int:
    """How many levels the names take."""
    return 1 + max((line.level for line in lines), default=-1)


def drawn(lines: Sequence[Reference]) -> Html:
    """The lines, then their names over them."""
    top = levels(lines)
    strokes, names = [], []
    for line in lines:
        x, y = percent(line.share), (top - 1 - line.level) * LEVEL
        shift = {"start": BESIDE, "middle": 0, "end": -BESIDE}[line.anchor]
        flag = y if shift else y + LEVEL - 3
        strokes.append(tag("line", {"class": "reference", "x1": x, "x2": x, "y1": flag, "y2": "100%"}))
        place: Attributes = {"x": percent(line.share + shift), "y": y + LEVEL - 7, "text-anchor": line.anchor}
        names.append(tag("text", {"class": "reference", **place}, line.name))
    return join([*strokes, *names])
