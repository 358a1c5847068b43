"""What a loss asks of a client, and what it gives to a server.

A client turns (y, alpha) into cotangents and uploads the gradient for each of them; the server adds these *passes*
with secret coefficients::

    G = R o sum_k coefficient_k(secret) pass_k

Notation: y are the outputs of the veiled model, alpha the sum of the head's inputs (plus 1 if it has a bias), r_a the
public direction, I_s the s-th group of outputs.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedveil.errors import BadArgument

LOSSES = ("squared_error",)


def check_loss(loss: str) -> None:
    """Refuse a loss that is not known."""
    if loss not in LOSSES:
        known = ", ".join(f'"{name}"' for name in LOSSES)
        raise BadArgument("draw_secret", f"there is no loss {loss!r}", f"use one of {known}")


def match_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Targets in the outputs' shape; (n,) and (n, 1) mean the same."""
    if targets.shape == outputs.shape and targets.dtype == outputs.dtype:
        return targets
    samples, wanted = outputs.shape[0], tuple(outputs.shape)
    if targets.dim() and targets.shape[0] == samples and targets.numel() == outputs.numel():
        return targets.reshape(wanted).to(outputs.dtype)
    classes = targets.shape == outputs.shape[:1] and not targets.is_floating_point()
    fix = f"torch.nn.functional.one_hot(targets, {wanted[-1]})" if classes else f"targets of shape {wanted}"
    raise BadArgument("targets", f"shape is {tuple(targets.shape)}, the model's outputs have {wanted}", fix)


def per_sample(outputs: Tensor, weights: Tensor | None) -> Tensor | float:
    """The weight of each sample, to multiply outputs with: 1 / samples unless given."""
    if weights is None:
        return 1 / outputs.shape[0]
    return weights.to(outputs).reshape(-1, *[1] * (outputs.dim() - 1))


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

    `weights` are the samples' weights in place of 1 / samples.
    """
    share = per_sample(outputs, weights)
    y, alpha = torch.split_with_sizes(outputs.detach() * share, [direction.shape[0], 1], -1)
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
