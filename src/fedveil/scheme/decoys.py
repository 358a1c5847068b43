"""Draw decoys: plausible false offsets, sent with the true one (docs/losses.md, "How decoys are drawn").

A client can subtract each candidate from the head that it received, and knows that heads are usually small and that
their columns have no common direction. It can therefore compute three estimates of the true offset, which are weighted
means of the columns' votes. A decoy is an offset for which these estimates have the same errors as for the same head
with shuffled rows and columns.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedveil.graph.plan import Plan
from fedveil.scheme.broadcast import MAX_DECOYS
from fedveil.scheme.losses import Loss, SquaredError
from fedveil.scheme.noise import TINY, Entropy, NoiseSettings, Reals, column_weights

DEFAULT_DECOYS = 2  # with the true offset, the same number of passes as squared error with one group
NUM_SHUFFLES = MAX_DECOYS  # number of shuffled heads in a fit
GRID_EXPONENT = -28  # exponent of a candidate's last binary digit, relative to the spread of the columns' votes
RIDGE = 0.01  # regularisation per shuffled head, needed if the estimates nearly agree


def count_decoys(noise: NoiseSettings, plan: Plan, loss: Loss) -> int:
    """Return the number of decoys for a model and a loss."""
    if noise.decoys is not None:
        return noise.decoys
    has_paper_terms = isinstance(loss, SquaredError) and not (plan.head and plan.head.is_inner)
    return 0 if has_paper_terms else DEFAULT_DECOYS


@dataclass(frozen=True, repr=False)
class Fit:
    """A regression over shuffled heads, reused for several broadcasts because it is slow and its result changes slowly.

    Attributes:
        coefficients: the coefficients that predict the first estimate's error from the differences between the
            estimates.
        residuals: the residual of each shuffled head; each is used for one decoy.
    """

    coefficients: Reals
    residuals: list[float]


def draw_candidates(
    fits: list[Fit], head: Reals, factors: Reals, rows: Reals, offset: Reals, decoys: int, bias: bool, entropy: Entropy
) -> Reals:
    """Return the rounded offset, followed by `decoys` false offsets, one per row.

    All are rounded to the same grid. Otherwise, the last digits of the true offset, or its position on the line through
    the others, would reveal it.

    Args:
        fits: fits that may be reused. One is removed, and put back if the result is finite.
        head: V, the head multiplied by its factors; a bias is its last column.
        factors: the factors of the head's columns.
        rows: one row per group: r_a at the group's outputs, 0 elsewhere.
        offset: d, any value close to the head's anchor.
        decoys: the number of decoys.
        bias: whether the last column is a bias; a bias is not shuffled.
        entropy: the source of random numbers.
    """
    step = _draw_direction(rows, entropy)
    direction = rows.T @ step
    try:
        fit = fits.pop()  # atomic, so that no other thread uses it
    except IndexError:
        fit = None
    if fit is None or len(fit.residuals) < decoys or entropy.for_tests_only:
        fit = _fit_shuffled_heads(head, factors, direction, bias, entropy)
    votes = direction @ head / (direction @ direction)
    error, differences, standard_error = _compare_estimates(votes[None], (head * head).sum(0)[None], factors)
    residual = error - fit.coefficients @ differences
    deviations = (residual - [residual[0], *(fit.residuals.pop() for _ in range(decoys))]) * standard_error
    if np.isfinite(deviations).all() and not entropy.for_tests_only:  # the model has not diverged
        fits.append(fit)
    grid = 2.0 ** (np.floor(np.log2(votes.max() - votes.min() + TINY)) + GRID_EXPONENT)  # the same for all candidates
    result: Reals = np.round((offset + deviations[:, None] * step) / grid) * grid
    return result


def _fit_shuffled_heads(head: Reals, factors: Reals, direction: Reals, bias: bool, entropy: Entropy) -> Fit:
    """Regress the first estimate's error on the differences (ridge), over heads with shuffled rows and columns.

    Residuals are leave-one-out residuals, because in-sample residuals would be too small.
    """
    columns = head.shape[1]
    order = _draw_orders(columns, columns - bias, entropy)
    unscaled = head / factors
    votes = np.take_along_axis(direction[_draw_orders(len(direction), len(direction), entropy)] @ unscaled, order, 1)
    squares = (unscaled * unscaled).sum(0)[order] * factors**2
    error, differences, _ = _compare_estimates(votes * (factors / (direction @ direction)), squares, factors)
    (a, b), (_, c) = differences @ differences.T + RIDGE * NUM_SHUFFLES * np.eye(2)
    weights = np.array([[c, -b], [-b, a]]) / (a * c - b * b) @ differences
    coefficients = weights @ error
    residual = (error - coefficients @ differences) / (1 - (differences * weights).sum(0))
    return Fit(coefficients, residual.tolist())


def _compare_estimates(votes: Reals, squares: Reals, factors: Reals) -> tuple[Reals, Reals, Reals]:
    """Compare three means of the columns' votes: with the anchor's weights, inverse squared factors and equal weights.

    Return, for each head, the first mean (the estimate's error) and its differences from the other two, in units of its
    standard error, and that standard error.
    """
    weights = column_weights(squares + TINY)[0]
    weighted = weights * votes / weights.sum(1, keepdims=True)
    standard_error = np.sqrt((weighted * weighted).sum(1)) + TINY
    error = weighted.sum(1) / standard_error
    scale = factors**-2.0
    other_means = np.stack([votes @ (scale / scale.sum()), votes.mean(1)])
    return error, error - other_means / standard_error, standard_error


def _draw_direction(rows: Reals, entropy: Entropy) -> Reals:
    """Draw the direction in R^m along which candidates differ: a random direction that preserves the column sums.

    If decoys differed in all m numbers, they would have to be plausible in each of them. Along one direction, m > 1
    reveals no more than m = 1.
    """
    groups = len(rows)
    if groups == 1:
        return np.ones(1, np.float64)
    scale: Reals = 1 / np.sqrt((rows * rows).sum(1))
    result = entropy.normal(groups)
    sums = scale * rows.sum(1)
    size = sums @ sums
    if size > 1e-12:
        result = result - sums * (sums @ result / size)
    return scale * result


def _draw_orders(size: int, num_moving: int, entropy: Entropy) -> NDArray[np.int64]:
    """Draw random permutations of the first `num_moving` indices, one per row."""
    result = np.tile(np.arange(size), (NUM_SHUFFLES, 1))
    result[:, :num_moving] = np.argsort(
        entropy.keys(NUM_SHUFFLES * num_moving).reshape(NUM_SHUFFLES, num_moving), axis=1
    )
    return result
