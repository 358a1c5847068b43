"""Remove the noise from clients' updates (paper, Sec. 4.3)."""

import math
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from typing import NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import (
    BadArgument,
    NonFiniteUpdate,
    UpdateRefused,
)
from fedveil.graph.layout import Entry, Layout, flatten, unflatten
from fedveil.graph.plan import Plan
from fedveil.graph.tables import POOLED
from fedveil.scheme.messages import Update
from fedveil.scheme.recovery import DROP, Recovery, check_updates, has_rows, refuse_non_finite
from fedveil.scheme.result import Aggregate
from fedveil.wire import Tensors

T = TypeVar("T")
LARGEST = sys.float_info.max


@torch.no_grad()
def recover(secret: Recovery, updates: Sequence[Update], weights: Sequence[float] | None = None) -> Aggregate:
    """Return the weighted mean of the gradients that clients would have sent for the true model.

    Paper, Sec. 4.3:   G(l) = R(l) o (sum_k w_k G^_k - sum_s gamma_s sum_k w_k sigma~_k,s + v sum_k w_k beta_k)

    Differs from the paper: gamma is replaced by the anchor's d, because clients work on the base. Losses other than
    squared error have one pass per candidate: the result is the one for d.

    Args:
        secret: of the round.
        updates: one per client.
        weights: |D_k| of each client; by default the number of samples of each update.

    Guarantees: equal to plain autograd up to rounding (tests/scheme/test_exactness.py); updates are not changed; if any
      update is refused, nothing is recovered. Whatever stands in place of an update is refused or gives a finite
      result (tests/scheme/test_garbage.py).

    Raises:
        BadArgument: weights that cannot be used.
        UpdateRefused: an update of another round or model, incomplete, misshapen or not finite; the message says which.
    """
    layout = secret.plan.layout
    if not isinstance(updates, list | tuple):
        what = f"updates must be a list, got {type(updates).__name__}"
        raise BadArgument("recover", what, "pass a list with one update per client")
    check_updates(secret, updates)
    shares = _client_shares(updates, weights)
    used = [number for number, coefficient in enumerate(secret.coefficients) if coefficient]
    passes = slice(used[0], used[-1] + 1)  # all, or the one for the true offset among decoys
    gradients, sums = _sum_passes(secret, updates, shares, passes)
    # the passes for decoys too, so that a refusal does not reveal the true offset
    if not sums.finite or (secret.decoys and not all(_is_moderate(update.passes) for update in updates)):
        _check_passes(secret, updates, shares)
    floats = [{entry.name: update.buffers[entry.name] for entry in layout.buffers} for update in updates]
    if not all(_is_moderate(own) for own in floats):
        _check_buffers(secret, updates, shares)
    buffers = _recover_buffers(secret, [update.buffers for update in updates], shares, used[0])
    return Aggregate(gradients, buffers, sums.error(), _count_bytes(secret))


def recover_each(recover_one: Callable[[T], Aggregate], updates: Sequence[T]) -> list[Aggregate | UpdateRefused]:
    """Recover each update separately; in place of one that is refused, return the error that names its client."""
    found: list[Aggregate | UpdateRefused] = []
    for position, update in enumerate(updates):
        try:
            found.append(recover_one(update))
        except UpdateRefused as error:
            found.append(type(error)(f"client {position}", error.what, error.fix))
    return found


def _count_bytes(secret: Recovery) -> dict[str, float]:
    """Return the bytes of a broadcast and of an update, without names and shapes."""
    plan, layout, passes = secret.plan, secret.plan.layout, len(secret.coefficients)
    item = layout.dtype.itemsize
    buffers = item * (layout.total - layout.parameters) + 8 * len(layout.counters)
    down, up = item * layout.parameters + buffers, item * layout.weights * passes + buffers
    if plan.head:
        down += (item + 8) * plan.head.outputs + 8 + 8 * passes  # direction, partition, offset, candidates
    return {"bytes_down": down, "bytes_up": up}


def _sum_passes(
    secret: Recovery, updates: Sequence[Update], shares: Sequence[float], passes: slice
) -> tuple[Tensors, "_Sums"]:
    """Return the gradients that some of the passes give, and the sizes of their terms."""
    layout, transform = secret.plan.layout, secret.transform
    coefficients = [1.0] * (passes.stop - passes.start) if secret.decoys else secret.coefficients[passes]
    sums = _Sums(coefficients, layout)
    gradients: Tensors = {}
    pooled = select_pooled(secret.plan, layout.trainable)
    if pooled:
        flat = _average(pooled, updates, shares, passes)
        flat.mul_(transform.factors[: flat.shape[1]])
        combined = sums.combine(flat)
        back = torch.empty_like(combined).scatter_(0, transform.sources[: len(combined)], combined)
        gradients |= unflatten(back, pooled)
    for entry in layout.trainable:
        if entry.name not in gradients:
            flat = _average((entry,), updates, shares, passes)
            transform.multiply(entry, flat)
            gradients[entry.name] = transform.restore_order(entry, sums.combine(flat)).view(entry.shape)
    return {entry.name: gradients[entry.name] for entry in layout.trainable}, sums


def _is_moderate(tensors: Tensors) -> bool:
    """Whether no number is NaN, infinite, or so large that its square overflows: then no factor makes it overflow.

    Small tensors are concatenated, because one call for each would be slow.
    """
    small = [tensor.reshape(-1) for tensor in tensors.values() if tensor.numel() <= POOLED]
    parts = [tensor for tensor in tensors.values() if tensor.numel() > POOLED] + ([torch.cat(small)] if small else [])
    return all(float(torch.linalg.vector_norm(part)) <= math.sqrt(torch.finfo(part.dtype).max) for part in parts)


def _check_passes(secret: Recovery, updates: Sequence[Update], shares: Sequence[float]) -> None:
    """Refuse passes that are not finite, or overflow once the noise is removed; those for decoys as the true one."""
    refuse_non_finite(updates)
    count = len(secret.coefficients)
    parts = [slice(number, number + 1) for number in range(count)] if secret.decoys else [slice(0, count)]

    def fits(some: Sequence[Update], weights: Sequence[float]) -> bool:
        return all(_sum_passes(secret, some, weights, part)[1].finite for part in parts)

    if not fits(updates, shares):
        alone = [position for position, update in enumerate(updates) if not fits([update], [1.0])]
        _refuse_overflow(secret, "gradient", alone, [update.passes for update in updates])


def _check_buffers(secret: Recovery, updates: Sequence[Update], shares: Sequence[float]) -> None:
    """Refuse buffers that are not finite, or overflow once the noise is removed, in any row."""
    refuse_non_finite(updates)
    rows = range(len(secret.coefficients) if has_rows(secret) else 1)

    def fits(some: Sequence[Update], weights: Sequence[float]) -> bool:
        made = [_recover_buffers(secret, [update.buffers for update in some], weights, row) for row in rows]
        return all(bool(buffer.isfinite().all()) for buffers in made for buffer in buffers.values())

    if not fits(updates, shares):
        alone = [position for position, update in enumerate(updates) if not fits([update], [1.0])]
        names = [entry.name for entry in secret.plan.layout.buffers]
        _refuse_overflow(secret, "buffers", alone, [{name: u.buffers[name] for name in names} for u in updates])


def _refuse_overflow(secret: Recovery, what: str, alone: Sequence[int], clients: Sequence[Tensors]) -> NoReturn:
    """Name the client that overflows by itself, or else the one with the largest numbers."""
    sizes = [math.hypot(*(_norm(tensor) for tensor in tensors.values())) for tensors in clients]
    position = alone[0] if alone else sizes.index(max(sizes))
    text = f"{what}: its finite numbers overflow {secret.plan.layout.dtype} once the noise is removed"
    raise NonFiniteUpdate(f"client {position}", text, DROP)


def select_pooled(plan: Plan, entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return those entries that are in the pool, where they are neighbours."""
    wanted = {entry.name for entry in entries}
    return tuple(entry for entry in plan.pool.entries if entry.name in wanted)


class _Sums:
    """Sums passes with their coefficients, tensor by tensor, and adds up the sizes of both."""

    def __init__(self, coefficients: Sequence[float], layout: Layout) -> None:
        self._weights = torch.tensor(coefficients, dtype=layout.dtype, device=layout.device)
        self._coefficients, self._eps = [abs(c) for c in coefficients], torch.finfo(layout.dtype).eps
        self._sizes, self._size, self.finite = [0.0] * len(coefficients), 0.0, True

    def combine(self, passes: Tensor) -> Tensor:
        combined = self._weights @ passes
        size = _norm(combined)
        self.finite = self.finite and math.isfinite(size)
        self._size = math.hypot(self._size, size)
        sizes = torch.linalg.vector_norm(passes, dim=1).tolist()
        if not all(map(math.isfinite, sizes)):
            sizes = [_norm(row) for row in passes]
        self._sizes = list(map(math.hypot, self._sizes, sizes))
        return combined

    def error(self) -> float:
        """Return the estimated relative error: rounding of the passes over the size of their sum.

        Only passes that cancel to 300 digits would give more, and then no digit of the sum is known anyway.
        """
        if not self._size:
            return self._eps
        size = min(self._size, LARGEST)
        terms = sum(c * (min(own, LARGEST) / size) for c, own in zip(self._coefficients, self._sizes, strict=True))
        return min(self._eps * terms, LARGEST)


def _norm(values: Tensor) -> float:
    """Return the Euclidean norm; finite if all numbers are, even where their squares overflow."""
    size = float(torch.linalg.vector_norm(values))
    if math.isfinite(size):
        return size
    largest = float(values.abs().max())
    if not math.isfinite(largest):
        return math.inf
    return min(largest * float(torch.linalg.vector_norm(values.double() / largest)), LARGEST)


def _client_shares(updates: Sequence[Update], weights: Sequence[float] | None) -> list[float]:
    """Return w_k = |D_k| / |D|."""
    sizes = [float(update.samples) for update in updates] if weights is None else _read_weights(weights, len(updates))
    if len(sizes) != len(updates) or not sizes:
        what = f"{len(updates)} updates and {len(sizes)} weights: there must be one weight per update, at least one"
        raise BadArgument("recover", what)
    if not all(size >= 0 for size in sizes) or not 0 < sum(sizes) < math.inf:
        raise BadArgument("recover", "weights must be finite, as their sum, not negative, and not all 0")
    return [size / sum(sizes) for size in sizes]


def _read_weights(weights: Sequence[float], count: int) -> list[float]:
    """Read weights from a list, a tuple, a vector or another sequence of numbers."""
    try:
        if isinstance(weights, Tensor | np.ndarray):
            weights = weights.tolist()
        if isinstance(weights, str | bytes) or not isinstance(weights, Sequence):
            raise TypeError(type(weights).__name__)
        if len(weights) != count:  # before any of them is looked at
            return [0.0] * len(weights)
        if not all(isinstance(weight, Real) and not isinstance(weight, bool) for weight in weights):
            raise TypeError("not a number")
        return [float(weight) for weight in weights]
    except Exception as error:  # whatever garbage makes of the above
        raise BadArgument("recover", f"weights cannot be used: {type(error).__name__}", "one number each") from error


def _average(entries: Sequence[Entry], updates: Sequence[Update], shares: Sequence[float], passes: slice) -> Tensor:
    """Return sum_k w_k times some of client k's passes of some tensors, one row per pass."""
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


def _recover_buffers(secret: Recovery, clients: Sequence[Tensors], shares: Sequence[float], row: int) -> Tensors:
    """Recover buffers; of those with one row per candidate, one row."""
    layout, transform = secret.plan.layout, secret.transform
    if has_rows(secret):
        clients = [{name: t[row] if t.is_floating_point() else t for name, t in own.items()} for own in clients]
    out: Tensors = {name: torch.stack([own[name] for own in clients]).amax(0) for name in layout.counters}
    if not layout.buffers:
        return out
    weights = torch.tensor(shares, dtype=layout.dtype, device=layout.device)
    pooled = select_pooled(secret.plan, layout.buffers)
    if pooled:
        perturbed = torch.stack([flatten(own, pooled) for own in clients])
        first = pooled[0].start
        mean = (weights @ perturbed) / transform.factors[first:]
        out |= unflatten(torch.empty_like(mean).scatter_(0, transform.sources[first:] - first, mean), pooled)
    for entry in layout.buffers:
        if entry.name not in out:
            perturbed = torch.stack([own[entry.name].reshape(-1) for own in clients])
            out[entry.name] = transform.restore_order(entry, transform.divide(entry, weights @ perturbed)).view(
                entry.shape
            )
    return out
