"""The gradients that clients send, and how the server combines them.

A client turns (y, alpha) into cotangents and uploads one gradient per cotangent; the server sums these *passes* with
secret coefficients::

    G = R o sum_k coefficient_k(secret) pass_k

Notation: y are the outputs of the veiled model, alpha the sum of the head's inputs (plus 1 if it has a bias), r_a the
public direction, I_s the s-th group of outputs, d the head's secret offset from the true one: y_true = y - d alpha r_a.

Squared error has the paper's m + 2 terms. Any other loss has one pass per public *candidate* t: the gradient for d = t.
Either one of the candidates is d and the others are decoys: then one coefficient is 1, all others 0. Or the candidates
are nodes of an interval in which d lies: then the coefficients are those of the polynomial through them
(docs/losses.md).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedveil.scheme.losses import (
    USERS,
    CrossEntropy,
    Loss,
    SquaredError,
    classes_last,
    match_targets,
    per_sample,
)
from fedveil.scheme.messages import PublicHead
from fedveil.scheme.outputs import slope


def cotangents(
    loss: Loss, head: PublicHead | None, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """The cotangent of the outputs, (y, alpha) with a head, per pass; `weights` replace 1 / samples."""
    outputs = outputs.detach()
    if head is None:
        delta = slope(loss, outputs, targets)
        return (delta * per_sample(loss, outputs, weights)).unsqueeze(0)
    axis = head.axis
    if axis != -1:
        outputs, targets = outputs.movedim(axis, -1), classes_last(targets, outputs.dim(), axis)
    if len(head.candidates):
        found = candidate_passes(loss, outputs, targets, head.noise(outputs), weights, axis)
    else:
        found = squared_error_passes(outputs, targets, head.direction, head.partition, head.groups, weights)
    return found if axis == -1 else found.movedim(-1, axis + 1)


def squared_error_passes(
    outputs: Tensor,
    targets: Tensor,
    direction: Tensor,
    partition: Tensor,
    groups: int,
    weights: Tensor | None = None,
) -> Tensor:
    """Cotangents for (y, alpha) of the m + 2 passes: G^, sigma~_1 ... sigma~_m, beta (paper, Theorem 2).

    The loss is half the squared distance, summed over outputs, averaged over samples (paper, Eq. 6)::

        G^        (delta, 0)                                delta = (y - target) / samples
        sigma~_s  (alpha r_a|I_s, r_a|I_s . delta)
        beta      (0, alpha)
    """
    share = per_sample(SquaredError(), outputs, weights)
    y, alpha = torch.split_with_sizes(outputs * share, [direction.shape[0], 1], -1)
    delta = y - match_targets(y, targets) * share
    rows = [direction] if groups == 1 else [direction * (partition == s) for s in range(groups)]
    sigmas = [torch.cat([alpha * row, delta @ row.unsqueeze(1)], -1) for row in rows]
    return torch.stack([F.pad(delta, (0, 1)), *sigmas, F.pad(alpha, (direction.shape[0], 0))])


def squared_error_coefficients(
    offset: NDArray[np.float64], direction: NDArray[np.float64], partition: NDArray[np.int64]
) -> list[float]:
    """Coefficients of the passes: 1, -d_1 ... -d_m, v with v = |d o r_a|^2 (paper, Sec. 4.3), d the head's offset."""
    r = offset[partition] * direction
    return [1.0, *(-offset).tolist(), float(r @ r)]


def span(loss: Loss, direction: NDArray[np.float64]) -> float:
    """The largest distance that r_a adds between what a loss compares: logits, or an output and its target."""
    if isinstance(loss, CrossEntropy):
        return float(direction.max() - direction.min())
    return float(np.abs(direction).max())


def candidate_passes(
    loss: Loss, outputs: Tensor, targets: Tensor, noise: Tensor, weights: Tensor | None = None, axis: int = -1
) -> Tensor:
    """Cotangents for (y, alpha) of the gradient at each candidate t: (delta, -(t o r_a) . delta).

    delta is the derivative of the loss at y - alpha (t o r_a). Row j of `noise` is t_j o r_a. Classes are on the last
    axis of outputs; a user's function gets them on `axis`, as the model returns them.
    """
    y, alpha = torch.split_with_sizes(outputs, [noise.shape[1], 1], -1)
    targets = loss.dense(targets, y)
    rows = noise.view(len(noise), *[1] * (outputs.dim() - 1), -1)
    at = torch.addcmul(y, rows, alpha, value=-1)
    moved = at.movedim(-1, axis + 1) if isinstance(loss, USERS) and axis != -1 else at
    if isinstance(loss, USERS):  # may couple samples, or depend on their number
        delta = torch.stack([loss.gradient(one, targets) for one in moved])
    else:
        delta = loss.gradient(moved, targets)
    if moved is not at:
        delta = delta.movedim(axis + 1, -1)
    delta = delta * per_sample(loss, outputs, weights)
    along = delta.reshape(len(noise), -1, noise.shape[1]) @ noise.unsqueeze(2)
    return torch.cat([delta, -along.view(*delta.shape[:-1], 1)], -1)
