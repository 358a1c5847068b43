"""The gradients that clients send, and how the server combines them.

A client turns (y, alpha) into cotangents and uploads one gradient per cotangent; the server sums these *passes* with
secret coefficients::

    G = R o sum_k coefficient_k(secret) pass_k

Notation: y are the outputs of the veiled model, alpha the sum of the head's inputs (plus 1 if it has a bias), r_a the
public direction, I_s the s-th group of outputs, d the head's secret offset from the true one: y_true = y - d alpha r_a.

Squared error has the paper's m + 2 terms. Any other loss has one pass per public *candidate* t: the gradient for d = t.
One of the candidates is d and the others are decoys, so one coefficient is 1 and all others are 0 (docs/losses.md).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedveil.scheme.losses import USERS, Loss, SquaredError, match_targets, per_sample
from fedveil.scheme.messages import PublicHead
from fedveil.scheme.outputs import slope


def cotangents(
    loss: Loss, head: PublicHead | None, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """The cotangent of the outputs, (y, alpha) with a head, per pass; `weights` replace 1 / samples."""
    outputs = outputs.detach()
    if head is None:
        return (slope(loss, outputs, targets) * per_sample(loss, outputs, weights)).unsqueeze(0)
    axis = head.axis
    if axis != -1:
        dense = not isinstance(loss, USERS) and targets.is_floating_point() and targets.dim() == outputs.dim()
        outputs, targets = outputs.movedim(axis, -1), targets.movedim(axis, -1) if dense else targets
    if head.decoys:
        found = _candidate_passes(loss, head, outputs, targets, weights)
    else:
        found = _squared_error_passes(head, outputs, targets, weights)
    return found if axis == -1 else found.movedim(-1, axis + 1)


def _squared_error_passes(head: PublicHead, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Cotangents for (y, alpha) of the m + 2 passes: G^, sigma~_1 ... sigma~_m, beta (paper, Theorem 2).

    The loss is half the squared distance, summed over outputs, averaged over samples (paper, Eq. 6)::

        G^        (delta, 0)                                delta = (y - target) / samples
        sigma~_s  (alpha r_a|I_s, r_a|I_s . delta)
        beta      (0, alpha)
    """
    r_a, m = head.direction, head.groups
    share = per_sample(SquaredError(), outputs, weights)
    y, alpha = torch.split_with_sizes(outputs * share, [len(r_a), 1], -1)
    delta = y - match_targets(y, targets) * share
    rows = [r_a] if m == 1 else [r_a * (head.partition == s) for s in range(m)]
    sigmas = [torch.cat([alpha * row, delta @ row.unsqueeze(1)], -1) for row in rows]
    return torch.stack([F.pad(delta, (0, 1)), *sigmas, F.pad(alpha, (len(r_a), 0))])


def squared_error_coefficients(
    offset: NDArray[np.float64], direction: NDArray[np.float64], partition: NDArray[np.int64]
) -> list[float]:
    """Coefficients of the passes: 1, -d_1 ... -d_m, v with v = |d o r_a|^2 (paper, Sec. 4.3), d the head's offset."""
    r = offset[partition] * direction
    return [1.0, *(-offset).tolist(), float(r @ r)]


def _candidate_passes(loss: Loss, head: PublicHead, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Cotangents for (y, alpha) of the gradient at each candidate t: (delta, -(t o r_a) . delta).

    delta is the derivative of the loss at y - alpha (t o r_a). Classes are on the last axis of outputs; a user's
    function gets them where the model returns them.
    """
    noise = head.noise(outputs)
    y, alpha = torch.split_with_sizes(outputs, [noise.shape[1], 1], -1)
    targets = loss.dense(targets, y)
    rows = noise.view(len(noise), *[1] * (outputs.dim() - 1), -1)
    at = torch.addcmul(y, rows, alpha, value=-1)
    if isinstance(loss, USERS):  # may couple samples, or depend on their number
        own = [loss.gradient(one.movedim(-1, head.axis), targets).movedim(head.axis, -1) for one in at]
        delta = torch.stack(own)
    else:
        delta = loss.gradient(at, targets)
    delta = delta * per_sample(loss, outputs, weights)
    along = delta.reshape(len(noise), -1, noise.shape[1]) @ noise.unsqueeze(2)
    return torch.cat([delta, -along.view(*delta.shape[:-1], 1)], -1)
