"""Ranges of the next round's passes, predicted for the fixed-point numbers of secure aggregation."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedveil.scheme.messages import Update
from fedveil.scheme.recover import Recovery
from fedveil.wire import Tensors

FADING = 0.5  # of what a row was, per round


@torch.no_grad()
def _unscale(secret: Recovery, passes: Tensors) -> Tensors:
    """Return R times each pass, by name and with one row per pass, in the order of the true model."""
    transform, found = secret.transform, dict[str, Tensor]()
    for group in transform.group(secret.plan.layout.trainable):
        own = [passes[entry.name] for entry in group.entries]
        flat = torch.cat([rows.reshape(len(rows), -1) for rows in own], 1)
        transform.multiply(group, flat)
        rows = [transform.restore_order(group, row) for row in flat]
        found |= {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return found


def _find_factors(secret: Recovery) -> Tensors:
    """Return R of each trainable tensor, in the order of the true model."""
    layout = secret.plan.layout
    ones = torch.ones(1, dtype=layout.dtype, device=layout.device)
    found = _unscale(secret, {entry.name: ones.expand(1, *entry.shape) for entry in layout.trainable})
    return {name: rows[0] for name, rows in found.items()}


def smooth(now: Tensor, last: Tensor | None) -> Tensor:
    """Enlarge each row until its largest number is at least half of the last: sums of a round may cancel by chance."""
    if last is None:
        return now
    sizes, before = now.abs().flatten(1).amax(1), FADING * last.abs().flatten(1).amax(1)
    grown = torch.where((sizes > 0) & (before > sizes), before / sizes, torch.ones_like(sizes))
    shape = (-1, *[1] * (now.dim() - 1))
    return torch.where((sizes > 0).view(shape), now * grown.view(shape), FADING * last)


def expect_passes(secret: Recovery, update: Update, last: Mapping[str, Tensor] | None) -> Tensors:
    """Predict the next round's passes before its factors are applied; `last` is the previous prediction."""
    scales = [_input_scale(secret) ** -power for power in _alpha_powers(secret)]
    found = {}
    for name, own in _unscale(secret, update.passes).items():
        scale = own.new_tensor(scales).view(-1, *[1] * (own.dim() - 1))
        found[name] = smooth(own * scale, last[name] if last else None)
    return found


def bound_passes(secret: Recovery, passes: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Bound the elements of each pass under a round's noise, by name, from a prediction of `expect_passes`.

    How much a pass changes from round to round depends on which unit has which factor: the larger factors may be, the
    more headroom passes get, and terms that follow the sum of the head's inputs get more than others. With decoys the
    true pass is a different one in every round: then every row gets the bound of the largest.
    """
    factors, head, found = _find_factors(secret), _input_scale(secret), {}
    headroom = secret.multiplicative**0.25
    for name, own in passes.items():
        rows = (own / factors[name]).abs().flatten(1).amax(1).tolist()
        powers = _alpha_powers(secret)
        sizes = [headroom * size * (head * headroom) ** power for size, power in zip(rows, powers, strict=True)]
        found[name] = [max(sizes)] * len(sizes) if secret.decoys else sizes
    return found


def _alpha_powers(secret: Recovery) -> list[int]:
    """Return the power of alpha, the sum of the head's inputs, in each pass: 1 in sigma~, 2 in beta (`passes`)."""
    count = len(secret.coefficients)
    if secret.plan.head is None or secret.decoys:
        return [0] * count
    return [0, *[1] * (count - 2), 2]


def _input_scale(secret: Recovery) -> float:
    """Return the root mean square of the factors of the head's inputs; 1 without a head."""
    head = secret.plan.head
    if head is None:
        return 1.0
    return float(secret.transform.find_factors(head.weight).double().reciprocal().square().mean().sqrt())


def bound_rounding(secret: Recovery, rounding: Mapping[str, Sequence[float]]) -> float:
    """Bound the norm of the gradient error that an error in each element of each pass can cause."""
    coefficients = [float(bool(c)) if secret.decoys else abs(c) for c in secret.coefficients]
    total = 0.0
    for name, factors in _find_factors(secret).items():
        each = sum(c * own for c, own in zip(coefficients, rounding[name], strict=True))
        total = math.hypot(total, each * float(torch.linalg.vector_norm(factors.double())))
    return total
