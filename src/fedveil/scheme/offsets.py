"""The head's secret offset d: the anchor that determines it, and the decoys that hide it.

Anchoring splits the head's noise into a small secret part and a large public offset (docs/maths.md, "Anchoring").

Decoys are plausible false offsets (docs/losses.md, "How decoys are drawn"). A client can subtract each candidate from
the head that it received, and knows what heads look like: small, with no common direction of their columns. So it has
three estimates of the true offset, weighted means of the columns' votes, each with some error. A decoy is the offset
that would follow from the errors of the same head with its rows and columns shuffled.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedveil.scheme.messages import MOST_DECOYS
from fedveil.scheme.noise import Entropy, Reals

MAX_STEPS = 16
QUANTILE = 0.1
SETTLED = 0.01  # of the square of a small column
TINY = np.finfo(np.float64).tiny
SHUFFLES = MOST_DECOYS
GRID = -28  # the last binary digit of a candidate, relative to the spread of the columns' votes
RIDGE = 0.01  # of the regression's sum of squares, for estimates that nearly agree


def anchor(head: Reals, direction: Reals, partition: NDArray[np.int64], groups: int) -> Reals:
    """Return A(head): m numbers that follow anything added to the head along r_a.

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
    for _ in range(MAX_STEPS):
        away = votes - total[:, None]
        weights, small = column_weights(energy @ (away * away) + beside)
        step = away @ weights / weights.sum()
        total = total + step
        if energy @ (step * step) <= SETTLED * small[0]:
            break
    return total


def column_weights(squares: Reals) -> tuple[Reals, Reals]:
    """Return each column's weight, from their squares along the last axis, and the square of a small column."""
    columns = squares.shape[-1]
    tenth = min(max(1, int(QUANTILE * columns)), columns - 1)
    small: Reals = np.partition(squares, tenth, axis=-1)[..., tenth : tenth + 1]
    return 1 / (squares + small), small


@dataclass(frozen=True, repr=False)
class Fit:
    """A regression over shuffled heads, used for several broadcasts: shuffling is slow, and the result changes slowly.

    Attributes:
        slope: predicts the first estimate's error from the differences between the estimates.
        rest: the residual of each shuffled head; each is used for one decoy.
    """

    slope: Reals
    rest: list[float]


def draw_candidates(
    fits: list[Fit], head: Reals, factors: Reals, rows: Reals, offset: Reals, decoys: int, bias: bool, entropy: Entropy
) -> Reals:
    """Return the offset, rounded, followed by `decoys` others, one per row.

    All are rounded to the same grid: otherwise the offset's last digits, or its position on the line through the
    others, would reveal it.

    Args:
        fits: fits that may be used again; one is taken, and returned if it can be used once more.
        head: V, the head with its factors, a bias as its last column.
        factors: of its columns.
        rows: r_a at the outputs of each group, one row per group, else 0.
        offset: d, which may be any number close to the head's anchor.
        decoys: their number.
        bias: whether the last column is a bias, which is not shuffled.
        entropy: source of random numbers.
    """
    step = _direction(rows, entropy)
    along = rows.T @ step
    try:
        fit = fits.pop()  # so that no other thread uses it
    except IndexError:
        fit = None
    if fit is None or len(fit.rest) < decoys or entropy.for_tests_only:
        fit = _fit_shuffled_heads(head, factors, along, bias, entropy)
    votes = along @ head / (along @ along)
    error, apart, unit = _estimates(votes[None], (head * head).sum(0)[None], factors)
    rest = error - fit.slope @ apart
    moved = (rest - [rest[0], *(fit.rest.pop() for _ in range(decoys))]) * unit
    if np.isfinite(moved).all() and not entropy.for_tests_only:  # the model has not diverged
        fits.append(fit)
    grid = 2.0 ** (np.floor(np.log2(votes.max() - votes.min() + TINY)) + GRID)  # the same for every candidate
    found: Reals = np.round((offset + moved[:, None] * step) / grid) * grid
    return found


def _fit_shuffled_heads(head: Reals, factors: Reals, along: Reals, bias: bool, entropy: Entropy) -> Fit:
    """Regress the first estimate's error on the differences (ridge), over heads with shuffled rows and columns.

    Residuals are leave-one-out: with a head in its own fit, its residual would be too small.
    """
    columns = head.shape[1]
    order = _shuffles(columns, columns - bias, entropy)
    bare = head / factors
    votes = np.take_along_axis(along[_shuffles(len(along), len(along), entropy)] @ bare, order, 1)
    squares = (bare * bare).sum(0)[order] * factors**2
    error, apart, _ = _estimates(votes * (factors / (along @ along)), squares, factors)
    (a, b), (_, c) = apart @ apart.T + RIDGE * SHUFFLES * np.eye(2)
    weights = np.array([[c, -b], [-b, a]]) / (a * c - b * b) @ apart
    slope = weights @ error
    rest = (error - slope @ apart) / (1 - (apart * weights).sum(0))
    return Fit(slope, rest.tolist())


def _estimates(votes: Reals, squares: Reals, factors: Reals) -> tuple[Reals, Reals, Reals]:
    """Return three weighted means of columns' votes: by the anchor's weights, by the head's scale, by equal ones.

    That is, for each head, the first (for the true head its error) and its distances from the others, in units of its
    standard error; and that unit.
    """
    weights = column_weights(squares + TINY)[0]
    weighted = weights * votes / weights.sum(1, keepdims=True)
    unit = np.sqrt((weighted * weighted).sum(1)) + TINY
    error = weighted.sum(1) / unit
    scale = factors**-2.0
    others = np.stack([votes @ (scale / scale.sum()), votes.mean(1)])
    return error, error - others / unit, unit


def _direction(rows: Reals, entropy: Entropy) -> Reals:
    """Draw the direction of R^m along which candidates differ: a random one that keeps the head's column sums.

    Decoys that differ in all m numbers would have to be plausible in all of them; along one direction, m > 1 reveals no
    more than m = 1.
    """
    groups = len(rows)
    if groups == 1:
        return np.ones(1, np.float64)
    scale: Reals = 1 / np.sqrt((rows * rows).sum(1))
    found = entropy.normal(groups)
    sums = scale * rows.sum(1)
    size = sums @ sums
    if size > 1e-12:
        found = found - sums * (sums @ found / size)
    return scale * found


def _shuffles(size: int, moving: int, entropy: Entropy) -> NDArray[np.int64]:
    """Draw random orders of the first `moving` indices, one per row."""
    found = np.tile(np.arange(size), (SHUFFLES, 1))
    found[:, :moving] = np.argsort(entropy.keys(SHUFFLES * moving).reshape(SHUFFLES, moving), axis=1)
    return found
