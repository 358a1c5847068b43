"""Remove the noise from clients' updates (paper, Sec. 4.3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import BadArgument, ForeignUpdate, IncompleteUpdate, MisshapenUpdate, NonFiniteUpdate, StaleUpdate
from fedveil.graph.layout import Entry, Layout, flatten, unflatten
from fedveil.graph.tables import POOLED
from fedveil.scheme.cover import Cover
from fedveil.scheme.messages import Update
from fedveil.scheme.secret import Secret
from fedveil.wire import Tensors


@dataclass(frozen=True, eq=False)
class Recovered:
    """The gradient and buffers of plain training.

    Attributes:
        gradients: by parameter name.
        buffers: by name: floating-point ones averaged over clients as in plain FedAvg, counters the largest.
        error: estimated relative error of the whole gradient.
        passes: how many each client sent.
    """

    gradients: Tensors
    buffers: Tensors
    error: float
    passes: int


def recover(secret: Secret, updates: Sequence[Update], weights: Sequence[float] | None = None) -> Recovered:
    """Return the weighted mean of the gradients that clients would have sent for the unmasked model.

    Paper, Sec. 4.3:   G(l) = R(l) o (sum_k w_k G^_k - sum_s gamma_s sum_k w_k sigma~_k,s + v sum_k w_k beta_k)

    Differs from the paper: gamma is replaced by the anchor's d, because clients work on the base. Losses other than
    squared error have one pass per candidate: the result is the one for d.

    Args:
        secret: the round's.
        updates: one per client.
        weights: |D_k| of each client; by default the number of samples of each update.

    Guarantees: equal to plain autograd up to rounding (tests/scheme/test_exactness.py); updates are not changed; if any
      update is refused, nothing is recovered.

    Raises:
        UpdateRefused: an update of another round or model, incomplete, misshapen or not finite; the message says which.
    """
    undo = secret._undo
    if undo is None:
        raise BadArgument("recover", "this secret was not used for a broadcast yet", "perturb(model, secret) first")
    layout, cover = secret.plan.layout, undo.cover
    for position, update in enumerate(updates):
        check_update(secret, position, update)
    shares = _client_shares(updates, weights)
    used = [number for number, coefficient in enumerate(undo.coefficients) if coefficient]
    passes = slice(used[0], used[-1] + 1)  # all, or the one for the true offset among decoys
    sums = _Sums(undo.coefficients[passes], layout)
    gradients: Tensors = {}
    pooled = _pooled(cover, layout.trainable)
    if pooled:
        flat = _mean(pooled, updates, shares, passes)
        flat.mul_(cover.factors[: flat.shape[1]])
        combined = sums.combine(flat)
        back = torch.empty_like(combined).scatter_(0, cover.sources[: len(combined)], combined)
        gradients |= unflatten(back, pooled)
    for entry in layout.trainable:
        if entry.name not in gradients:
            flat = _mean((entry,), updates, shares, passes)
            cover.lift(entry, flat)
            gradients[entry.name] = cover.back(entry, sums.combine(flat)).view(entry.shape)
    # the passes for decoys too, so that a refusal does not reveal the true offset
    finite = all(_finite(update.passes) for update in updates) if secret.decoys else True
    if not (finite and math.isfinite(sums.size)):
        refuse_non_finite(updates)
    if not all(torch.isfinite(update.buffers[e.name]).all() for update in updates for e in layout.buffers):
        refuse_non_finite(updates)
    own = [update.buffers for update in updates]
    if _has_rows(secret):
        own = [{name: t[used[0]] if t.is_floating_point() else t for name, t in each.items()} for each in own]
    gradients = {entry.name: gradients[entry.name] for entry in layout.trainable}
    return Recovered(gradients, _buffers(layout, cover, own, shares), sums.error(), len(undo.coefficients))


def _finite(tensors: Tensors) -> bool:
    """Whether all sums are finite; small tensors are concatenated, because one call for each would be slow."""
    small = [tensor.reshape(-1) for tensor in tensors.values() if tensor.numel() <= POOLED]
    parts = [tensor for tensor in tensors.values() if tensor.numel() > POOLED] + ([torch.cat(small)] if small else [])
    return all(math.isfinite(float(part.sum())) for part in parts)


def _has_rows(secret: Secret) -> bool:
    """Whether buffers have one row per candidate."""
    return secret.plan.head is not None and secret.plan.head.tail == "repeated"


def _pooled(cover: Cover, entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Those entries that are in the pool, where they are neighbours."""
    wanted = {entry.name for entry in entries}
    return tuple(entry for entry in cover.plan.pool.entries if entry.name in wanted)


class _Sums:
    """Sums passes with their coefficients, tensor by tensor, and adds up the sizes of both."""

    def __init__(self, coefficients: Sequence[float], layout: Layout) -> None:
        self._weights = torch.tensor(coefficients, dtype=layout.dtype, device=layout.device)
        self._coefficients, self._eps = np.abs(coefficients), torch.finfo(layout.dtype).eps
        self._squares, self._square = np.zeros(len(coefficients)), 0.0

    def combine(self, passes: Tensor) -> Tensor:
        combined = self._weights @ passes
        size = float(torch.linalg.vector_norm(combined))
        self._squares += torch.linalg.vector_norm(passes, dim=1).double().cpu().numpy() ** 2
        self._square += size * size  # infinite if it overflows
        return combined

    @property
    def size(self) -> float:
        return math.sqrt(self._square)

    def error(self) -> float:
        """The estimated relative error: rounding of the passes, over the size of their sum."""
        terms = float(self._coefficients @ np.sqrt(self._squares))
        return self._eps * (terms / self.size if self.size else 1.0)


def _client_shares(updates: Sequence[Update], weights: Sequence[float] | None) -> list[float]:
    """w_k = |D_k| / |D|."""
    sizes = [float(u.samples) for u in updates] if weights is None else [float(w) for w in weights]
    if len(sizes) != len(updates) or not sizes:
        what = f"{len(updates)} updates and {len(sizes)} weights: there must be one weight per update, at least one"
        raise BadArgument("recover", what)
    if not all(math.isfinite(size) and size >= 0 for size in sizes) or not sum(sizes) > 0:
        raise BadArgument("recover", "weights must be finite, not negative, and not all 0")
    return [size / sum(sizes) for size in sizes]


def _mean(entries: Sequence[Entry], updates: Sequence[Update], shares: Sequence[float], passes: slice) -> Tensor:
    """sum_k w_k times some of client k's passes of some tensors, one row per pass."""
    total: Tensor | None = None
    for update, share in zip(updates, shares, strict=True):
        parts = [update.passes[entry.name][passes].reshape(passes.stop - passes.start, -1) for entry in entries]
        flat = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        if total is None:
            total = flat * share if len(updates) > 1 or len(parts) == 1 else flat
        else:
            total.add_(flat, alpha=share)
    assert total is not None
    return total


def _buffers(layout: Layout, cover: Cover, clients: Sequence[Tensors], shares: Sequence[float]) -> Tensors:
    out: Tensors = {name: torch.stack([own[name] for own in clients]).amax(0) for name in layout.counters}
    if not layout.buffers:
        return out
    weights = torch.tensor(shares, dtype=layout.dtype, device=layout.device)
    pooled = _pooled(cover, layout.buffers)
    if pooled:
        veiled = torch.stack([flatten(own, pooled) for own in clients])
        first = pooled[0].start
        mean = (weights @ veiled) / cover.factors[first:]
        out |= unflatten(torch.empty_like(mean).scatter_(0, cover.sources[first:] - first, mean), pooled)
    for entry in layout.buffers:
        if entry.name not in out:
            veiled = torch.stack([own[entry.name].reshape(-1) for own in clients])
            out[entry.name] = cover.back(entry, cover.divided(entry, weights @ veiled)).view(entry.shape)
    return out


def check_update(secret: Secret, position: int, update: Update) -> None:
    """Refuse an update that cannot belong to this round."""
    assert secret._undo is not None
    client, passes = f"client {position}", len(secret._undo.coefficients)
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
        found = update.passes.get(entry.name)
        if found is not None and found.dim() and found.shape[0] != passes:
            raise IncompleteUpdate(client, f"{entry.name} has {found.shape[0]} passes, not {passes}")
        _check_tensor(client, entry.name, found, (passes, *entry.shape), layout.dtype)
    rows = (passes,) if _has_rows(secret) else ()
    for entry in layout.buffers:
        shape = (*rows, *entry.shape)
        _check_tensor(client, f"buffer {entry.name}", update.buffers.get(entry.name), shape, layout.dtype)
    for name in layout.counters:
        if name not in update.buffers:
            raise IncompleteUpdate(client, f"buffer {name} is missing")


def _check_tensor(client: str, what: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is None:
        raise IncompleteUpdate(client, f"{what} is missing")
    if tensor.shape != shape or tensor.dtype != dtype:
        found = f"{tuple(tensor.shape)} {tensor.dtype}"
        raise MisshapenUpdate(client, f"{what} is {found}, not {tuple(shape)} {dtype}")


def refuse_non_finite(updates: Sequence[Update]) -> None:
    """Name the first tensor with NaN or infinity."""
    for position, update in enumerate(updates):
        buffers = {f"buffer {name}": buffer for name, buffer in update.buffers.items()}
        for what, tensor in (update.passes | buffers).items():
            if not torch.isfinite(tensor).all():
                fix = "drop this client from the round; lower the learning rate if all clients are affected"
                raise NonFiniteUpdate(f"client {position}", f"{what} holds NaN or infinity", fix)
    raise NonFiniteUpdate("all clients", "the sum of finite updates overflows", "lower the learning rate")
