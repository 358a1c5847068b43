"""Remove the noise from clients' updates (paper, Sec. 4.3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import (
    BadArgument,
    ForeignUpdate,
    IncompleteUpdate,
    MisshapenUpdate,
    NonFiniteUpdate,
    StaleUpdate,
)
from fedveil.graph.layout import Entry, Layout, flatten, unflatten
from fedveil.graph.tables import POOLED
from fedveil.scheme.cover import Cover
from fedveil.scheme.messages import Tensors, Update
from fedveil.scheme.nodes import Spectrum, polynomials, transform
from fedveil.scheme.secret import How, Secret


@dataclass(frozen=True, eq=False)
class Recovered:
    """The gradient and buffers of plain training.

    Attributes:
        gradients: by parameter name.
        buffers: by name: floating-point ones averaged over clients as in plain FedAvg, counters the largest.
        error: estimated relative error of the whole gradient.
        passes: how many each client sent.
        spectrum: for a loss by nodes, how fast its coefficients decay.
    """

    gradients: Tensors
    buffers: Tensors
    error: float
    passes: int
    spectrum: Spectrum | None = None


def recover(secret: Secret, updates: Sequence[Update], weights: Sequence[float] | None = None) -> Recovered:
    """Return the weighted mean of the gradients that clients would have sent for the unmasked model.

    Paper, Sec. 4.3:   G(l) = R(l) o (sum_k w_k G^_k - sum_s gamma_s sum_k w_k sigma~_k,s + v sum_k w_k beta_k)

    Differs from the paper: gamma is replaced by the anchor's d, because clients work on the base. Losses other than
    squared error have one pass per candidate: the result is the one for d or, with nodes, the polynomial through all
    of them at d.

    Args:
        secret: the round's.
        updates: one per client.
        weights: |D_k| of each client; by default the number of samples of each update.

    Guarantees: equal to plain autograd up to rounding (tests/scheme/test_exactness.py); updates are not changed; if any
      update is refused, nothing is recovered.

    Raises:
        UpdateRefused: an update of another round or model, incomplete, misshapen or not finite; the message says which.
    """
    sent = secret._sent
    if sent is None:
        raise BadArgument("recover", "this secret was not used for a broadcast yet", "perturb(model, secret) first")
    layout, cover = secret.plan.layout, sent.cover
    for position, update in enumerate(updates):
        check_update(secret, position, update)
    shares = client_shares(updates, weights)
    passes = needed_passes(sent.how.coefficients)
    coefficients = sent.how.coefficients[passes]
    weighted = torch.tensor(coefficients, dtype=layout.dtype, device=layout.device)
    sums = _Sums(sent.how, len(coefficients))
    gradients: Tensors = {}
    pooled = _pooled(cover, layout)
    if pooled:
        flat = _mean(pooled, updates, shares, passes)
        flat.mul_(cover.factors[: flat.shape[1]])
        combined = weighted @ flat
        sums.add(flat, combined)
        back = torch.empty_like(combined).scatter_(0, cover.sources[: len(combined)], combined)
        gradients |= unflatten(back, pooled)
    for entry in layout.trainable:
        if entry.name not in gradients:
            flat = _mean((entry,), updates, shares, passes)
            cover.lift(entry, flat)
            combined = weighted @ flat
            sums.add(flat, combined)
            gradients[entry.name] = cover.back(entry, combined).view(entry.shape)
    if secret.decoys:
        _check_all_passes(updates)
    if not math.isfinite(sums.total):
        refuse_non_finite(updates)
    eps = torch.finfo(layout.dtype).eps
    error, spectrum = sums.error(coefficients, eps)
    if not all(torch.isfinite(update.buffers[e.name]).all() for update in updates for e in layout.buffers):
        refuse_non_finite(updates)
    buffers = _buffers(layout, cover, _own_buffers(secret, updates), shares)
    gradients = {entry.name: gradients[entry.name] for entry in layout.trainable}
    return Recovered(gradients, buffers, error, len(sent.how.coefficients), spectrum)


def needed_passes(coefficients: Sequence[float]) -> slice:
    """The passes that are used: all, or the one for the true offset among decoys."""
    used = [number for number, coefficient in enumerate(coefficients) if coefficient]
    return slice(used[0], used[-1] + 1)


def _check_all_passes(updates: Sequence[Update]) -> None:
    """Refuse passes that are not finite, including those for decoys, so that a refusal does not reveal the true one."""
    for update in updates:
        if not all(math.isfinite(float(part.sum())) for part in _gathered(update.passes)):
            refuse_non_finite(updates)


def _gathered(tensors: Tensors) -> list[Tensor]:
    """Large tensors, and all small ones concatenated, because one call per small tensor would be slow."""
    small = [tensor.reshape(-1) for tensor in tensors.values() if tensor.numel() <= POOLED]
    return [tensor for tensor in tensors.values() if tensor.numel() > POOLED] + ([torch.cat(small)] if small else [])


def _own_buffers(secret: Secret, updates: Sequence[Update]) -> list[Tensors]:
    """Each client's buffers; if they have one row per candidate, that of the true one."""
    assert secret._sent is not None
    if not _has_rows(secret):
        return [update.buffers for update in updates]
    place = secret._sent.how.coefficients.index(1.0)
    return [
        {name: value[place] if value.is_floating_point() else value for name, value in update.buffers.items()}
        for update in updates
    ]


def _has_rows(secret: Secret) -> bool:
    """Whether buffers have one row per candidate."""
    head = secret.plan.head
    return head is not None and head.tail == "repeated"


def _pooled(cover: Cover, layout: Layout) -> tuple[Entry, ...]:
    """The trainable tensors at the front of the pool."""
    wanted = {entry.name for entry in layout.trainable}
    return tuple(entry for entry in cover.plan.pool.entries if entry.name in wanted)


class _Sums:
    """Sizes of the passes and of their sum, added up tensor by tensor."""

    def __init__(self, how: How, count: int) -> None:
        self._how = how
        self._squares = np.zeros(count)
        self._total = 0.0
        self._terms = np.zeros(count)
        self._ending = 0.0

    def add(self, passes: Tensor, combined: Tensor) -> None:
        """Add a tensor."""
        self._squares += _squares(passes)
        self._total += float(_squares(combined.unsqueeze(0))[0])
        if self._how.place is not None:
            count = len(passes)
            terms = torch.from_numpy(transform(count)).to(passes) @ passes
            ending = torch.from_numpy(polynomials(count, self._how.place)[-4:]).to(passes) @ terms[-4:]
            self._terms += _squares(terms)
            self._ending += float(_squares(ending.unsqueeze(0))[0])

    @property
    def total(self) -> float:
        """The size of the gradient."""
        return math.sqrt(self._total) if self._total >= 0 else math.nan

    def error(self, coefficients: Sequence[float], eps: float) -> tuple[float, Spectrum | None]:
        """The estimated relative error, and for a loss by nodes the sizes of its Chebyshev coefficients."""
        sizes, total = np.sqrt(self._squares), self.total
        if self._how.place is None:
            terms = float(np.abs(coefficients) @ sizes)
            return eps * (terms / total if total else 1.0), None
        total = total or 1.0
        found = tuple((np.sqrt(self._terms) / total).tolist())
        spectrum = Spectrum(found, float(eps * sizes.max() / total), self._how.shift, math.sqrt(self._ending) / total)
        return spectrum.error(self._how.place), spectrum


def _squares(rows: Tensor) -> NDArray[np.float64]:
    """The sum of squares of each row."""
    sizes: NDArray[np.float64] = torch.linalg.vector_norm(rows, dim=1).double().cpu().numpy()
    return sizes**2


def client_shares(updates: Sequence[Update], weights: Sequence[float] | None) -> list[float]:
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
    names = {entry.name for entry in layout.buffers}
    pooled = tuple(entry for entry in cover.plan.pool.entries if entry.name in names)
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
    rows = (passes,) if _has_rows(secret) else ()
    for entry in layout.buffers:
        shape = (*rows, *entry.shape)
        _check_tensor(client, f"buffer {entry.name}", update.buffers.get(entry.name), shape, layout.dtype)
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
                fix = "drop this client from the round; lower the learning rate if all clients are affected"
                raise NonFiniteUpdate(f"client {position}", f"{what} holds NaN or infinity", fix)
    raise NonFiniteUpdate("all clients", "the sum of finite updates overflows", "lower the learning rate")
