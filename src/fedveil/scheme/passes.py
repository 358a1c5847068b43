"""Each pass of an update without its factors: what the next round's passes will be like, whatever its noise."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedveil.graph.layout import unflatten
from fedveil.scheme.messages import Update
from fedveil.scheme.recover import pooled_of, undo_of
from fedveil.scheme.secret import Secret
from fedveil.wire import Tensors

FADING = 0.5  # of what a row was, per round


@torch.no_grad()
def unmasked_passes(secret: Secret, update: Update) -> Tensors:
    """R times each pass, by name and with one row per pass, where the unmasked model has its elements."""
    cover, layout = undo_of(secret).cover, secret.plan.layout
    found: Tensors = {}
    pooled = pooled_of(cover, layout.trainable)
    rows = len(undo_of(secret).coefficients)
    if pooled:
        flat = torch.cat([update.passes[entry.name].reshape(rows, -1) for entry in pooled], 1)
        size = flat.shape[1]
        flat = flat * cover.factors[:size]
        back = torch.empty_like(flat).scatter_(1, cover.sources[:size].expand(rows, -1), flat)
        for row in range(rows):
            for name, tensor in unflatten(back[row], pooled).items():
                found.setdefault(name, tensor.new_empty((rows, *tensor.shape)))[row] = tensor
    for entry in layout.trainable:
        if entry.name not in found:
            flat = update.passes[entry.name].reshape(rows, -1).clone()
            cover.lift(entry, flat)
            found[entry.name] = torch.stack([cover.back(entry, own) for own in flat]).view(rows, *entry.shape)
    return found


@torch.no_grad()
def unmasked_factors(secret: Secret) -> Tensors:
    """R of each trainable tensor, where the unmasked model has its elements."""
    cover, layout = undo_of(secret).cover, secret.plan.layout
    found: Tensors = {}
    pooled = pooled_of(cover, layout.trainable)
    if pooled:
        size = sum(entry.shape.numel() for entry in pooled)
        factors = cover.factors[:size]
        found |= unflatten(torch.empty_like(factors).scatter_(0, cover.sources[:size], factors), pooled)
    for entry in layout.trainable:
        if entry.name not in found:
            found[entry.name] = cover.back(entry, cover.factors_of(entry.name).reshape(-1)).view(entry.shape)
    return found


def remembered(now: Tensor, last: Tensor | None) -> Tensor:
    """Rows, each enlarged until its largest number is half of what it was: sums of one round may cancel by chance."""
    if last is None:
        return now
    sizes, before = now.abs().flatten(1).amax(1), FADING * last.abs().flatten(1).amax(1)
    grown = torch.where((sizes > 0) & (before > sizes), before / sizes, torch.ones_like(sizes))
    found = now * grown.view(-1, *[1] * (now.dim() - 1))
    return torch.where((sizes > 0).view(-1, *[1] * (now.dim() - 1)), found, FADING * last)


def without_noise(secret: Secret, update: Update, last: Mapping[str, Tensor] | None) -> Tensors:
    """What the passes of the next round will be like, whatever its noise; `last` is what this returned before."""
    powers = _powers(secret, len(undo_of(secret).coefficients))
    found = {}
    for name, own in unmasked_passes(secret, update).items():
        scale = torch.tensor([_head_inputs(secret) ** -power for power in powers], dtype=own.dtype, device=own.device)
        found[name] = remembered(own * scale.view(-1, *[1] * (own.dim() - 1)), last[name] if last else None)
    return found


def pass_sizes(secret: Secret, passes: Mapping[str, Tensor], spread: float) -> dict[str, list[float]]:
    """The largest element of each pass under a secret, by name, if passes are like those of `without_noise`.

    Which unit has which factor decides how much a pass changes from round to round: passes are given more room, the
    more the larger factors may be (`spread`), and terms that follow the sum of the head's inputs more than others. With
    decoys the true pass is another in every round: then every row is given the size of the largest.
    """
    factors, head, found = unmasked_factors(secret), _head_inputs(secret), {}
    for name, own in passes.items():
        rows = (own / factors[name]).abs().flatten(1).amax(1).tolist()
        powers = _powers(secret, len(rows))
        room = spread**0.25
        sizes = [room * size * (head * room) ** power for size, power in zip(rows, powers, strict=True)]
        found[name] = [max(sizes)] * len(sizes) if secret.decoys else sizes
    return found


def _powers(secret: Secret, rows: int) -> list[int]:
    """How often a pass has alpha, the sum of the head's inputs, as a factor: sigma~ once, beta twice (`terms`)."""
    if secret.plan.head is None or secret.decoys or rows == 1:
        return [0] * rows
    return [0, *[1] * (rows - 2), 2]


def _head_inputs(secret: Secret) -> float:
    """How large the factors of the head's inputs are: the root of their mean square; 1 without a head."""
    head = secret.plan.head
    if head is None:
        return 1.0
    return float(undo_of(secret).cover.factors_of(head.weight).double().reciprocal().square().mean().sqrt())


def lifted_rounding(secret: Secret, rounding: Mapping[str, Sequence[float]]) -> float:
    """The norm that errors of so much in each element of each pass can have in the gradient."""
    coefficients = [float(bool(c)) if secret.decoys else abs(c) for c in undo_of(secret).coefficients]
    total = 0.0
    for name, factors in unmasked_factors(secret).items():
        each = sum(c * own for c, own in zip(coefficients, rounding[name], strict=True))
        total = math.hypot(total, each * float(torch.linalg.vector_norm(factors.double())))
    return total
