"""Ranges of the next round's passes, predicted for the fixed-point numbers of secure aggregation."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedveil.graph.layout import unflatten
from fedveil.scheme.messages import Update
from fedveil.scheme.recover import select_pooled
from fedveil.scheme.recovery import Recovery
from fedveil.wire import Tensors

FADING = 0.5  # of what a row was, per round


@torch.no_grad()
def _unscale_passes(secret: Recovery, update: Update) -> Tensors:
    """Return R times each pass, by name and with one row per pass, in the order of the true model."""
    transform, layout = secret.transform, secret.plan.layout
    found: Tensors = {}
    pooled = select_pooled(secret.plan, layout.trainable)
    rows = len(secret.coefficients)
    if pooled:
        flat = torch.cat([update.passes[entry.name].reshape(rows, -1) for entry in pooled], 1)
        size = flat.shape[1]
        flat = flat * transform.factors[:size]
        back = torch.empty_like(flat).scatter_(1, transform.sources[:size].expand(rows, -1), flat)
        for row in range(rows):
            for name, tensor in unflatten(back[row], pooled).items():
                found.setdefault(name, tensor.new_empty((rows, *tensor.shape)))[row] = tensor
    for entry in layout.trainable:
        if entry.name not in found:
            flat = update.passes[entry.name].reshape(rows, -1).clone()
            transform.multiply(entry, flat)
            found[entry.name] = torch.stack([transform.restore_order(entry, own) for own in flat]).view(
                rows, *entry.shape
            )
    return found


@torch.no_grad()
def _find_factors(secret: Recovery) -> Tensors:
    """Return R of each trainable tensor, in the order of the true model."""
    transform, layout = secret.transform, secret.plan.layout
    found: Tensors = {}
    pooled = select_pooled(secret.plan, layout.trainable)
    if pooled:
        size = sum(entry.shape.numel() for entry in pooled)
        factors = transform.factors[:size]
        found |= unflatten(torch.empty_like(factors).scatter_(0, transform.sources[:size], factors), pooled)
    for entry in layout.trainable:
        if entry.name not in found:
            found[entry.name] = transform.restore_order(entry, transform.find_factors(entry.name).reshape(-1)).view(
                entry.shape
            )
    return found


def smooth(now: Tensor, last: Tensor | None) -> Tensor:
    """Enlarge each row until its largest number is at least half of the last: sums of a round may cancel by chance."""
    if last is None:
        return now
    sizes, before = now.abs().flatten(1).amax(1), FADING * last.abs().flatten(1).amax(1)
    grown = torch.where((sizes > 0) & (before > sizes), before / sizes, torch.ones_like(sizes))
    found = now * grown.view(-1, *[1] * (now.dim() - 1))
    return torch.where((sizes > 0).view(-1, *[1] * (now.dim() - 1)), found, FADING * last)


def expect_passes(secret: Recovery, update: Update, last: Mapping[str, Tensor] | None) -> Tensors:
    """Predict the next round's passes before its factors are applied; `last` is the previous prediction."""
    powers = _alpha_powers(secret, len(secret.coefficients))
    found = {}
    for name, own in _unscale_passes(secret, update).items():
        scale = torch.tensor([_input_scale(secret) ** -power for power in powers], dtype=own.dtype, device=own.device)
        found[name] = smooth(own * scale.view(-1, *[1] * (own.dim() - 1)), last[name] if last else None)
    return found


def bound_passes(secret: Recovery, passes: Mapping[str, Tensor], spread: float) -> dict[str, list[float]]:
    """Bound the elements of each pass under a round's noise, by name, from a prediction of `expect_passes`.

    How much a pass changes from round to round depends on which unit has which factor: the larger factors may be
    (`spread`), the more headroom passes get, and terms that follow the sum of the head's inputs get more than others.
    With decoys the true pass is a different one in every round: then every row gets the bound of the largest.
    """
    factors, head, found = _find_factors(secret), _input_scale(secret), {}
    for name, own in passes.items():
        rows = (own / factors[name]).abs().flatten(1).amax(1).tolist()
        powers = _alpha_powers(secret, len(rows))
        headroom = spread**0.25
        sizes = [headroom * size * (head * headroom) ** power for size, power in zip(rows, powers, strict=True)]
        found[name] = [max(sizes)] * len(sizes) if secret.decoys else sizes
    return found


def _alpha_powers(secret: Recovery, rows: int) -> list[int]:
    """Return the power of alpha, the sum of the head's inputs, in each pass: 1 in sigma~, 2 in beta (`terms`)."""
    if secret.plan.head is None or secret.decoys or rows == 1:
        return [0] * rows
    return [0, *[1] * (rows - 2), 2]


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
