"""A confusion matrix as a table whose cells are shaded by their share of the row."""

import math
from collections.abc import Sequence

from fedveil.report.markup import Html, join, note, scrollable, tag
from fedveil.report.numbers import NOTHING, count
from fedveil.report.sections import Matrix

UPRIGHT = 3  # letters; longer labels stand on their side


def _cell(amount: int, total: int, right: bool, label: str) -> Html:
    """A cell; the cube root lets rare mistakes show."""
    shade = math.cbrt(amount / total) if total else 0.0
    kind = ("hit" if right else "miss") if amount else ("hit none" if right else "none")
    style = f"--heat:{shade:.2f}" if amount else None
    return tag("td", {"class": kind, "style": style, "title": label}, f"{amount:,}" if amount or right else "·")


def _row(matrix: Matrix, truth: int) -> Html:
    """The answers given for one true class, and the share that is right."""
    amounts = matrix.counts[truth]
    total = sum(amounts)
    cells = [
        _cell(amount, total, answer == truth, f"{matrix.labels[truth]} answered as {matrix.labels[answer]}: {amount}")
        for answer, amount in enumerate(amounts)
    ]
    share = tag("td", {"class": "share"}, f"{amounts[truth] / total:.1%}" if total else NOTHING)
    return tag("tr", {}, tag("th", {"scope": "row"}, matrix.labels[truth]), *cells, share)


def _head(labels: Sequence[str]) -> Html:
    """The names of the answers."""
    aside = "side" if max(map(len, labels), default=0) > UPRIGHT else None
    names = [tag("th", {"scope": "col", "class": aside}, tag("span", {}, label)) for label in labels]
    corner = tag("th", {"scope": "col", "class": "corner"}, "truth")
    return tag("thead", {}, tag("tr", {}, corner, *names, tag("th", {"scope": "col", "class": "share"}, "right")))


def in_words(matrix: Matrix) -> str:
    """How many answers are right, and the commonest mistake."""
    size = range(len(matrix.labels))
    total = sum(map(sum, matrix.counts))
    if not total:
        return "No answers counted."
    right = sum(matrix.counts[place][place] for place in size)
    said = f"{right / total:.2%} right: {right:,} of {count(total, 'answer')}."
    wrong = [(matrix.counts[truth][answer], truth, answer) for truth in size for answer in size if truth != answer]
    most, truth, answer = max(wrong, default=(0, 0, 0))
    if not most:
        return said
    return (
        f"{said} Commonest mistake: {matrix.labels[truth]} answered as {matrix.labels[answer]}, {count(most, 'time')}."
    )


def heatmap(matrix: Matrix) -> Html:
    """The matrix, with a line that says what it shows."""
    rows = [_row(matrix, truth) for truth in range(len(matrix.labels))]
    summary = in_words(matrix)
    body = tag("table", {"class": "matrix"}, _head(matrix.labels), tag("tbody", {}, *rows))
    keys = "Rows: truth. Columns: answer. Framed: right answers."
    return join(
        [
            tag("p", {"class": "summary"}, summary),
            scrollable(f"Confusion matrix of {matrix.title}. {summary}", body),
            note(keys),
            note(matrix.note),
        ]
    )
