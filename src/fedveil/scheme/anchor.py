"""Split the head's noise into a small secret part and a large public offset (docs/maths.md, "Anchoring")."""

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
MOST_ROUNDS = 16
QUANTILE = 0.1
SETTLED = 0.01  # of the square of a small column
TINY = np.finfo(np.float64).tiny


def anchor(head: Reals, direction: Reals, partition: NDArray[np.int64], groups: int) -> Reals:
    """A(head): m numbers that follow anything added to the head along r_a.

    A(head + (g o r_a) 1^T) = A(head) + g, for any g with one number per group. Each column votes for g: the multiple of
    r_a, within each group, that fits it best. A starts as the median vote and becomes their weighted mean, repeated
    until it converges. A column's weight is 1 / (its square + that of the column at the lowest tenth) once A is
    subtracted: columns made small by a large factor decide, because alpha is large through them.

    Differs from the paper, which sends the sum of head and noise. benchmarks/anchor.py measures the remaining noise.
    """
    rows = direction[None] if groups == 1 else (partition == np.arange(groups)[:, None]) * direction
    energy = rows @ direction
    votes = (rows @ head) / np.reshape(energy, (-1, 1))
    misfit = head - rows.T @ votes
    beside, columns = (misfit * misfit).sum(0) + TINY, head.shape[1]
    total = np.partition(votes, columns // 2, axis=1)[:, columns // 2]
    for _ in range(MOST_ROUNDS):
        away = votes - total[:, None]
        weights, small = column_weights(energy @ (away * away) + beside)
        step = away @ weights / weights.sum()
        total = total + step
        if energy @ (step * step) <= SETTLED * small[0]:
            break
    return total


def column_weights(squares: Reals) -> tuple[Reals, Reals]:
    """The weight of each column, from their squares along the last axis; and the square of a small column."""
    columns = squares.shape[-1]
    tenth = min(max(1, int(QUANTILE * columns)), columns - 1)
    small: Reals = np.partition(squares, tenth, axis=-1)[..., tenth : tenth + 1]
    return 1 / (squares + small), small
