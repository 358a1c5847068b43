"""Lifting the noise from what clients sent (paper, Sec. 4.3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.errors import (
    BadArgument,
    ForeignUpdate,
    IncompleteUpdate,
    MisshapenUpdate,
    NonFiniteUpdate,
    StaleUpdate,
)
from fedveil.graph.layout import Layout, flatten, unflatten
from fedveil.scheme.messages import Tensors, Update
from fedveil.scheme.nodes import Spectrum, polynomials, transform
from fedveil.scheme.secret import How, Secret, Sent


@dataclass(frozen=True, eq=False)
class Recovered:
    """What plain training would have had.

    Attributes:
        gradients: by parameter name.
        buffers: by name: floating ones averaged over clients as plain FedAvg does, counters the largest.
        error: estimated relative error of the whole gradient.
        passes: how many each client sent.
        spectrum: for a loss by nodes, how fast its coefficients fell.
    """

    gradients: Tensors
    buffers: Tensors
    error: float
    passes: int
    spectrum: Spectrum | None = None


def recover(secret: Secret, updates: Sequence[Update], weights: Sequence[float] | None = None) -> Recovered:
    """Return the weighted mean of the gradients that clients would have sent for the model without its veil.

    Paper, Sec. 4.3:   G(l) = R(l) o (sum_k w_k G^_k - sum_s gamma_s sum_k w_k sigma~_k,s + v sum_k w_k beta_k)

    Differs from the paper: gamma is replaced by the anchor's d, because clients worked on the centred head. Losses
    other than squared error have one pass a node, and the sum is their polynomial's value at d.

    Args:
        secret: the round's.
        updates: one a client.
        weights: |D_k| of each client; by default the number of samples that each update was made of.

    Guarantees: equal to plain autograd up to rounding (tests/scheme/test_exactness.py); updates are not changed; if
      any update is refused, nothing is.

    Raises:
        UpdateRefused: an update of another round or model, incomplete, misshapen or not finite; says which.
    """
    sent = secret._sent
    if sent is None:
        raise BadArgument("recover", "this secret has covered no broadcast yet", "perturb(model, secret) first")
    layout = secret.plan.layout
    coefficients = sent.how.coefficients
    for position, update in enumerate(updates):
        check_update(secret, position, update)
    shares = client_shares(updates, weights)
    passes = _mean(layout, updates, shares, len(coefficients)).mul_(sent.factors[: layout.weights])
    combined = torch.tensor(coefficients, dtype=layout.dtype, device=layout.device) @ passes
    sizes = torch.linalg.vector_norm(passes, dim=1).tolist()
    total = float(torch.linalg.vector_norm(combined))
    if not math.isfinite(total):
        refuse_non_finite(updates)
    eps = torch.finfo(layout.dtype).eps
    spectrum = None
    if sent.how.place is None:
        terms = sum(abs(c) * size for c, size in zip(coefficients, sizes, strict=True))
        error = eps * (terms / total if total else 1.0)
    else:
        spectrum = _spectrum(sent.how, passes, total, eps * max(sizes))
        error = spectrum.error(sent.how.place)
    gradients = torch.empty_like(combined).scatter_(0, sent.sources[: layout.weights], combined)
    buffers = _buffers(layout, sent, updates, shares)
    return Recovered(unflatten(gradients, layout.trainable), buffers, error, len(coefficients), spectrum)


def _spectrum(how: How, passes: Tensor, total: float, floor: float) -> Spectrum:
    """Sizes of the passes' Chebyshev coefficients over that of the gradient."""
    assert how.place is not None
    count, total = len(passes), total or 1.0
    terms = torch.from_numpy(transform(count)).to(passes) @ passes
    ending = torch.from_numpy(polynomials(count, how.place)[-4:]).to(passes) @ terms[-4:]
    sizes = torch.linalg.vector_norm(terms, dim=1) / total
    return Spectrum(tuple(sizes.tolist()), floor / total, how.shift, float(ending.norm()) / total)


def client_shares(updates: Sequence[Update], weights: Sequence[float] | None) -> list[float]:
    """w_k = |D_k| / |D|."""
    sizes = [float(u.samples) for u in updates] if weights is None else [float(w) for w in weights]
    if len(sizes) != len(updates) or not sizes:
        raise BadArgument("recover", f"{len(updates)} updates and {len(sizes)} weights: want one each, at least one")
    if not all(math.isfinite(size) and size >= 0 for size in sizes) or not sum(sizes) > 0:
        raise BadArgument("recover", "weights must be finite, none below 0, not all 0")
    return [size / sum(sizes) for size in sizes]


def _mean(layout: Layout, updates: Sequence[Update], shares: Sequence[float], count: int) -> Tensor:
    """sum_k w_k times client k's passes, `count` rows."""
    total: Tensor | None = None
    for update, share in zip(updates, shares, strict=True):
        flat = torch.cat([update.passes[e.name].reshape(count, -1) for e in layout.trainable], 1)
        if len(updates) > 1:
            flat.mul_(share)
        total = flat if total is None else total.add_(flat)
    assert total is not None
    return total


def _buffers(layout: Layout, sent: Sent, updates: Sequence[Update], shares: Sequence[float]) -> Tensors:
    out: Tensors = {name: torch.stack([u.buffers[name] for u in updates]).amax(0) for name in layout.counters}
    if layout.buffers:
        first = layout.parameters
        veiled = torch.stack([flatten(u.buffers, layout.buffers) for u in updates])
        if not torch.isfinite(veiled).all():
            refuse_non_finite(updates)
        mean = torch.tensor(shares, dtype=layout.dtype, device=layout.device) @ veiled
        plain = torch.empty_like(mean).scatter_(0, sent.sources[first:] - first, mean / sent.factors[first:])
        out |= unflatten(plain, layout.buffers)
    return out


def check_update(secret: Secret, position: int, update: Update) -> None:
    """Refuse an update that cannot belong to this round."""
    assert secret._sent is not None
    client, passes = f"client {position}", len(secret._sent.how.coefficients)
    layout = secret.plan.layout
    if update.model != layout.name:
        fix = "clients and server must build the same architecture"
        raise ForeignUpdate(client, f"its update is for model {update.model}, not {layout.name}", fix)
    if update.round != secret.round:
        what = f"its update is for round {update.round[:8]}, not {secret.round[:8]}"
        raise StaleUpdate(client, what, "aggregate only answers to this round's broadcast")
    if not isinstance(update.samples, int) or update.samples < 1:
        raise IncompleteUpdate(client, f"its update counts {update.samples!r} samples, not 1 or more")
    for entry in layout.trainable:
        _check_passes(client, entry.name, update.passes.get(entry.name), (passes, *entry.shape), layout.dtype)
    for entry in layout.buffers:
        _check_tensor(client, f"buffer {entry.name}", update.buffers.get(entry.name), entry.shape, layout.dtype)
    for name in layout.counters:
        if name not in update.buffers:
            raise IncompleteUpdate(client, f"buffer {name} is missing")


def _check_passes(client: str, name: str, found: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if found is not None and found.dim() and found.shape[0] != shape[0]:
        raise IncompleteUpdate(client, f"{name} has {found.shape[0]} passes, not {shape[0]}")
    _check_tensor(client, name, found, shape, dtype)


def _check_tensor(client: str, what: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is None:
        raise IncompleteUpdate(client, f"{what} is missing")
    if tensor.shape != shape or tensor.dtype != dtype:
        found = f"{tuple(tensor.shape)} {tensor.dtype}"
        raise MisshapenUpdate(client, f"{what} is {found}, not {tuple(shape)} {dtype}")


def refuse_non_finite(updates: Sequence[Update]) -> None:
    """Name the first tensor with NaN or infinity."""
    for position, update in enumerate(updates):
        named = list(update.passes.items())
        named += [(f"buffer {name}", t) for name, t in update.buffers.items()]
        for what, tensor in named:
            if not torch.isfinite(tensor).all():
                fix = "leave this client out of the round; lower the learning rate if all clients are affected"
                raise NonFiniteUpdate(f"client {position}", f"{what} holds NaN or infinity", fix)
    raise NonFiniteUpdate("all clients", "the sum of finite updates overflows", "lower the learning rate")
