"""Remove the noise from clients' updates (paper, Sec. 4.3)."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from fedveil.errors import BadArgument, ForeignUpdate, IncompleteUpdate, MisshapenUpdate, NonFiniteUpdate, StaleUpdate
from fedveil.graph.layout import Entry, Layout, flatten, unflatten
from fedveil.graph.tables import POOLED
from fedveil.scheme.cover import Cover
from fedveil.scheme.messages import Update
from fedveil.scheme.secret import Form, Secret, Undo
from fedveil.wire import Tensors

LARGEST = sys.float_info.max
MOST_SAMPLES = 2**53  # counted exactly in float64
_DROP = "drop this client from the round; lower the learning rate if all clients are affected"


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


@torch.no_grad()
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
      update is refused, nothing is recovered. Whatever stands in place of an update is refused or gives a finite
      result (tests/scheme/test_garbage.py).

    Raises:
        BadArgument: weights or a secret that cannot be used.
        UpdateRefused: an update of another round or model, incomplete, misshapen or not finite; the message says which.
    """
    undo, layout = undo_of(secret), secret.plan.layout
    if not isinstance(updates, list | tuple):
        raise BadArgument("recover", f"updates are {type(updates).__name__}", "a list with one update per client")
    wanted = _wanted(secret)
    for position, update in enumerate(updates):
        _check_update(secret, wanted, position, update)
    shares = _client_shares(updates, weights)
    used = [number for number, coefficient in enumerate(undo.coefficients) if coefficient]
    passes = slice(used[0], used[-1] + 1)  # all, or the one for the true offset among decoys
    gradients, sums = _lifted(secret, updates, shares, passes)
    # the passes for decoys too, so that a refusal does not reveal the true offset
    if not sums.finite or (secret.decoys and not all(_moderate(update.passes) for update in updates)):
        _judge_passes(secret, updates, shares)
    floats = [{entry.name: update.buffers[entry.name] for entry in layout.buffers} for update in updates]
    if not all(_moderate(own) for own in floats):
        _judge_buffers(secret, updates, shares)
    buffers = _buffers(secret, [update.buffers for update in updates], shares, used[0])
    return Recovered(gradients, buffers, sums.error(), len(undo.coefficients))


def undo_of(secret: Secret) -> Undo:
    """What removes the noise of a broadcast."""
    if not isinstance(secret, Secret):
        raise BadArgument("recover", f"the secret is {type(secret).__name__}", "draw_secret(plan)")
    if secret._undo is None:
        raise BadArgument("recover", "this secret was not used for a broadcast yet", "perturb(model, secret) first")
    return secret._undo


def _lifted(
    secret: Secret, updates: Sequence[Update], shares: Sequence[float], passes: slice
) -> tuple[Tensors, "_Sums"]:
    """The gradients that some of the passes give, and the sizes of what was summed."""
    undo, layout = undo_of(secret), secret.plan.layout
    cover = undo.cover
    coefficients = [1.0] * (passes.stop - passes.start) if secret.decoys else undo.coefficients[passes]
    sums = _Sums(coefficients, layout)
    gradients: Tensors = {}
    pooled = pooled_of(cover, layout.trainable)
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
    return {entry.name: gradients[entry.name] for entry in layout.trainable}, sums


def _moderate(tensors: Tensors) -> bool:
    """Whether no number is NaN, infinite, or so large that its square overflows: then no factor makes it overflow.

    Small tensors are concatenated, because one call for each would be slow.
    """
    small = [tensor.reshape(-1) for tensor in tensors.values() if tensor.numel() <= POOLED]
    parts = [tensor for tensor in tensors.values() if tensor.numel() > POOLED] + ([torch.cat(small)] if small else [])
    return all(float(torch.linalg.vector_norm(part)) <= math.sqrt(torch.finfo(part.dtype).max) for part in parts)


def _judge_passes(secret: Secret, updates: Sequence[Update], shares: Sequence[float]) -> None:
    """Refuse passes that are not finite, or overflow once the noise is removed; those for decoys as the true one."""
    refuse_non_finite(updates)
    count = len(undo_of(secret).coefficients)
    parts = [slice(number, number + 1) for number in range(count)] if secret.decoys else [slice(0, count)]

    def fits(some: Sequence[Update], weights: Sequence[float]) -> bool:
        return all(_lifted(secret, some, weights, part)[1].finite for part in parts)

    if not fits(updates, shares):
        alone = [position for position, update in enumerate(updates) if not fits([update], [1.0])]
        _refuse_overflow(secret, "gradient", alone, [update.passes for update in updates])


def _judge_buffers(secret: Secret, updates: Sequence[Update], shares: Sequence[float]) -> None:
    """Refuse buffers that are not finite, or overflow once the noise is removed, in any row."""
    refuse_non_finite(updates)
    rows = range(len(undo_of(secret).coefficients) if _has_rows(secret) else 1)

    def fits(some: Sequence[Update], weights: Sequence[float]) -> bool:
        made = [_buffers(secret, [update.buffers for update in some], weights, row) for row in rows]
        return all(bool(buffer.isfinite().all()) for buffers in made for buffer in buffers.values())

    if not fits(updates, shares):
        alone = [position for position, update in enumerate(updates) if not fits([update], [1.0])]
        names = [entry.name for entry in secret.plan.layout.buffers]
        _refuse_overflow(secret, "buffers", alone, [{name: u.buffers[name] for name in names} for u in updates])


def _refuse_overflow(secret: Secret, what: str, alone: Sequence[int], clients: Sequence[Tensors]) -> NoReturn:
    """Name the client that overflows by itself, or else the one with the largest numbers."""
    sizes = [math.hypot(*(_norm(tensor) for tensor in tensors.values())) for tensors in clients]
    position = alone[0] if alone else sizes.index(max(sizes))
    text = f"{what}: its finite numbers overflow {secret.plan.layout.dtype} once the noise is removed"
    raise NonFiniteUpdate(f"client {position}", text, _DROP)


def _has_rows(secret: Secret) -> bool:
    """Whether buffers have one row per candidate."""
    return secret.plan.head is not None and secret.plan.head.tail == "repeated"


def pooled_of(cover: Cover, entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Those entries that are in the pool, where they are neighbours."""
    wanted = {entry.name for entry in entries}
    return tuple(entry for entry in cover.plan.pool.entries if entry.name in wanted)


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
        """The estimated relative error: rounding of the passes, over the size of their sum; at most the largest float.

        Only passes that cancel to 300 digits would give more, and then no digit of the sum is known anyway.
        """
        if not self._size:
            return self._eps
        size = min(self._size, LARGEST)
        terms = sum(c * (min(own, LARGEST) / size) for c, own in zip(self._coefficients, self._sizes, strict=True))
        return min(self._eps * terms, LARGEST)


def _norm(values: Tensor) -> float:
    """The Euclidean norm; finite if all numbers are, even where their squares overflow."""
    size = float(torch.linalg.vector_norm(values))
    if math.isfinite(size):
        return size
    largest = float(values.abs().max())
    if not math.isfinite(largest):
        return math.inf
    return min(largest * float(torch.linalg.vector_norm(values.double() / largest)), LARGEST)


def _client_shares(updates: Sequence[Update], weights: Sequence[float] | None) -> list[float]:
    """w_k = |D_k| / |D|."""
    sizes = [float(update.samples) for update in updates] if weights is None else _weights(weights, len(updates))
    if len(sizes) != len(updates) or not sizes:
        what = f"{len(updates)} updates and {len(sizes)} weights: there must be one weight per update, at least one"
        raise BadArgument("recover", what)
    if not all(size >= 0 for size in sizes) or not 0 < sum(sizes) < math.inf:
        raise BadArgument("recover", "weights must be finite, as their sum, not negative, and not all 0")
    return [size / sum(sizes) for size in sizes]


def _weights(weights: Sequence[float], count: int) -> list[float]:
    """Weights as floats, in a list, a tuple, a vector or another sequence of numbers."""
    try:
        if isinstance(weights, Tensor | np.ndarray):
            weights = weights.tolist()
        if isinstance(weights, str | bytes) or not isinstance(weights, Sequence):
            raise TypeError(type(weights).__name__)
        if len(weights) != count:  # before any of them is looked at
            return [0.0] * len(weights)
        if not all(isinstance(weight, Real) and not isinstance(weight, bool) for weight in weights):
            raise TypeError("what is no number")
        return [float(weight) for weight in weights]
    except Exception as error:  # whatever garbage makes of the above
        raise BadArgument("recover", f"weights cannot be used: {type(error).__name__}", "one number each") from error


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


def _buffers(secret: Secret, clients: Sequence[Tensors], shares: Sequence[float], row: int) -> Tensors:
    """Buffers without their noise; of those with one row per candidate, one row."""
    layout, cover = secret.plan.layout, undo_of(secret).cover
    if _has_rows(secret):
        clients = [{name: t[row] if t.is_floating_point() else t for name, t in own.items()} for own in clients]
    out: Tensors = {name: torch.stack([own[name] for own in clients]).amax(0) for name in layout.counters}
    if not layout.buffers:
        return out
    weights = torch.tensor(shares, dtype=layout.dtype, device=layout.device)
    pooled = pooled_of(cover, layout.buffers)
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


class _Wanted(NamedTuple):
    """Shapes and dtypes that an update must have, by name."""

    passes: dict[str, Form]
    buffers: dict[str, Form]


def _wanted(secret: Secret) -> _Wanted:
    layout, undo = secret.plan.layout, undo_of(secret)
    passes = (len(undo.coefficients),)
    rows = passes if _has_rows(secret) else ()
    return _Wanted(
        {entry.name: (torch.Size((*passes, *entry.shape)), layout.dtype) for entry in layout.trainable},
        {entry.name: (torch.Size((*rows, *entry.shape)), layout.dtype) for entry in layout.buffers} | undo.counters,
    )


def blank_update(secret: Secret) -> Update:
    """An update of this round, of one record, whose tensors have no numbers."""
    wanted = _wanted(secret)
    passes, buffers = (
        {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in forms.items()}
        for forms in (wanted.passes, wanted.buffers)
    )
    return Update(secret.round, secret.plan.layout.name, 1, passes, buffers)


def check_update(secret: Secret, position: int, update: Update) -> None:
    """Refuse an update that cannot belong to this round."""
    undo_of(secret)
    _check_update(secret, _wanted(secret), position, update)


def _check_update(secret: Secret, wanted: _Wanted, position: int, update: Update) -> None:
    client, layout = f"client {position}", secret.plan.layout
    if not isinstance(update, Update):
        raise MisshapenUpdate(client, f"its update is {type(update).__name__}, not an Update")
    if type(update.model) is not str or update.model != layout.name:
        fix = "clients and server must build the same architecture"
        raise ForeignUpdate(client, f"its update is for model {_shown(update.model)}, not {layout.name}", fix)
    if type(update.round) is not str or update.round != secret.round:
        what = f"its update is for round {_shown(update.round)}, not {secret.round[:8]}"
        raise StaleUpdate(client, what, "aggregate only answers to this round's broadcast")
    if type(update.samples) is not int or not 1 <= update.samples <= MOST_SAMPLES:
        count = update.samples if type(update.samples) in (int, bool) and abs(update.samples) < 10**20 else None
        text = type(update.samples).__name__ if count is None else str(count)
        raise IncompleteUpdate(client, f"its update counts {text} samples, not 1 to 2^53")
    _check_tensors(client, "", update.passes, wanted.passes, layout.device)
    _check_tensors(client, "buffer ", update.buffers, wanted.buffers, layout.device)


def _shown(text: str) -> str:
    """The beginning of a client's text, without characters that a terminal obeys."""
    return ascii(text[:16])[1:-1] if isinstance(text, str) else type(text).__name__


def _check_tensors(client: str, kind: str, found: Tensors, wanted: dict[str, Form], device: torch.device) -> None:
    """Refuse tensors that are missing, misshapen or not asked for; looks at none of their values."""
    if not isinstance(found, dict):
        raise MisshapenUpdate(client, f"its {kind or 'passes '}are {type(found).__name__}, not a dict")
    for name, (shape, dtype) in wanted.items():
        tensor = found.get(name)
        if tensor is None:
            raise IncompleteUpdate(client, f"{kind}{name} is missing")
        if type(tensor) is not Tensor and type(tensor) is not Parameter:
            raise MisshapenUpdate(client, f"{kind}{name} is {type(tensor).__name__}, not a tensor")
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.device != device:
            form = "nested" if tensor.is_nested else f"{tensor.layout} on {tensor.device}"
            raise MisshapenUpdate(client, f"{kind}{name} is {form}, not {torch.strided} on {device}")
        if tensor.shape != shape or tensor.dtype is not dtype:
            if not kind and tensor.dim() and tensor.shape[0] != shape[0]:
                raise IncompleteUpdate(client, f"{name} has {tensor.shape[0]} passes, not {shape[0]}")
            form = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise MisshapenUpdate(client, f"{kind}{name} is {form}, not {tuple(shape)} {dtype}")
    if len(found) > len(wanted):
        strange = next(name for name in found if name not in wanted)
        text = ascii(strange[:80]) if isinstance(strange, str) else type(strange).__name__
        raise MisshapenUpdate(client, f"{kind or 'pass '}{text} was not asked for")


def refuse_non_finite(updates: Sequence[Update], first: int = 0) -> None:
    """Refuse NaN and infinity: names the tensor, and the client, counted from `first`."""
    for position, update in enumerate(updates, first):
        buffers = {f"buffer {name}": buffer for name, buffer in update.buffers.items()}
        for what, tensor in (update.passes | buffers).items():
            if not torch.isfinite(tensor).all():
                raise NonFiniteUpdate(f"client {position}", f"{what} holds NaN or infinity", _DROP)
