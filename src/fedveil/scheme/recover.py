"""Recover the gradient from clients' updates (paper, Sec. 4.3), and refuse invalid updates."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from fedveil.checks import suspend_autocast
from fedveil.errors import BadArgument, ForeignUpdate, IncompleteUpdate, MisshapenUpdate, NonFiniteUpdate, StaleUpdate
from fedveil.graph.plan import Layout, Plan, flatten
from fedveil.scheme.broadcast import Update, select_row
from fedveil.scheme.result import Aggregate
from fedveil.scheme.transform import Group, Transform
from fedveil.wire import Tensors

MAX_FLOAT = sys.float_info.max
MAX_SAMPLES = 2**53  # integers up to this value are exact in float64
DROP_FIX = "drop this client from the round; lower the learning rate if all clients are affected"
MIN_RATIO = 0.5  # minimum ratio of a row's maximum to that of the previous round
TensorSpec = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True, eq=False, repr=False)
class Recovery:
    """The secret needed to recover the gradient from the replies to one broadcast.

    Attributes:
        plan: the model's plan.
        round: the name of the broadcast.
        transform: the factors and the permutation.
        coefficients: the coefficient of each pass; 0 for decoys.
        decoys: whether there are decoys, with one pass for the true offset and one for each decoy.
        counters: the shapes and dtypes of integer buffers, by name.
        multiplicative: the bound on the factors.
        memory: the memory that contains the broadcast's large tensors.
    """

    plan: Plan
    round: str
    transform: Transform
    coefficients: list[float]
    decoys: bool
    counters: dict[str, TensorSpec]
    multiplicative: float
    memory: Tensor | None

    @property
    def has_rows(self) -> bool:
        """Whether buffers have one row per candidate."""
        return self.plan.head is not None and self.plan.head.tail == "repeated"

    def template(self) -> Update:
        """Return an update for this round on the meta device, with a sample count of 1."""
        passes, buffers = (
            {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in specs.items()}
            for specs in self.tensor_specs()
        )
        return Update(self.round, self.plan.layout.name, 1, passes, buffers)

    def tensor_specs(self) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
        """Return the shapes and dtypes that an update's passes and buffers must have."""
        layout, passes = self.plan.layout, (len(self.coefficients),)
        rows = passes if self.has_rows else ()
        return (
            {entry.name: (torch.Size((*passes, *entry.shape)), layout.dtype) for entry in layout.trainable},
            {entry.name: (torch.Size((*rows, *entry.shape)), layout.dtype) for entry in layout.buffers} | self.counters,
        )


def check_updates(secret: Recovery, updates: Sequence[Update], first_index: int = 0) -> None:
    """Refuse updates that cannot belong to this round; errors contain the client's index, from `first_index`."""
    layout, (passes, buffers) = secret.plan.layout, secret.tensor_specs()
    for position, update in enumerate(updates, first_index):
        client = f"client {position}"
        if not isinstance(update, Update):
            raise MisshapenUpdate(client, f"its reply must be an Update, got {type(update).__name__}")
        if type(update.model) is not str or update.model != layout.name:
            fix = "build the same architecture on clients and server"
            raise ForeignUpdate(client, f"its update is for model {_shorten(update.model)}, not {layout.name}", fix)
        if type(update.round) is not str or update.round != secret.round:
            message = f"its update is for round {_shorten(update.round)}, not {secret.round[:8]}"
            raise StaleUpdate(client, message, "aggregate only replies to this round's broadcast")
        if type(update.samples) is not int or not 1 <= update.samples <= MAX_SAMPLES:
            raise IncompleteUpdate(client, "its number of samples is not an integer from 1 to 2^53")
        check_tensors(client, "pass", update.passes, passes, layout.device)
        check_tensors(client, "buffer", update.buffers, buffers, layout.device)


def _shorten(text: str) -> str:
    """Return the first characters of a client's text, with control characters escaped."""
    return ascii(text[:16])[1:-1] if isinstance(text, str) else type(text).__name__


def check_tensors(
    client: str, kind: str, tensors: Mapping[str, Tensor], expected: Mapping[str, TensorSpec], device: torch.device
) -> None:
    """Refuse a client's tensors that are missing, misshapen or unexpected, without reading their values."""
    if not isinstance(tensors, dict):
        raise MisshapenUpdate(client, f"each {kind} must be in a dict, got {type(tensors).__name__}")
    for name, (shape, dtype) in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise IncompleteUpdate(client, f"{kind} {name} is missing")
        if type(tensor) is not Tensor and type(tensor) is not Parameter:
            raise MisshapenUpdate(client, f"{kind} {name} must be a tensor, got {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.device != device:
            form = "nested" if tensor.is_nested else f"{tensor.layout} on {tensor.device}"
            raise MisshapenUpdate(client, f"{kind} {name} must be {torch.strided} on {device}, got {form}")
        if tensor.shape != shape or tensor.dtype is not dtype:
            form = f"shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
            raise MisshapenUpdate(client, f"{kind} {name} must have shape {tuple(shape)} and dtype {dtype}, got {form}")
    if len(tensors) > len(expected):
        unexpected = next(name for name in tensors if name not in expected)
        text = ascii(unexpected[:80]) if isinstance(unexpected, str) else type(unexpected).__name__
        raise MisshapenUpdate(client, f"{kind} {text} is unexpected")


def refuse_non_finite(client: str, update: Update) -> None:
    """Refuse an update that contains NaN or infinity."""
    check_finite(client, "pass", update.passes)
    check_finite(client, "buffer", update.buffers)


def check_finite(client: str, kind: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a client's tensors if any of them contains NaN or infinity."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise NonFiniteUpdate(client, f"{kind} {name} contains NaN or infinity", DROP_FIX)


def are_overflow_safe(tensors: Iterable[Tensor]) -> bool:
    """Return whether all elements are finite and small enough that squares and products with factors are finite too."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floats:
        return True
    limit = math.sqrt(min(torch.finfo(dtype).max for dtype in {tensor.dtype for tensor in floats}))
    return float(torch.stack(torch._foreach_norm(floats)).max()) <= limit


def select_floats(tensors: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the floating-point tensors that are not empty."""
    result = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor) and tensor.numel()}
    return {name: tensor for name, tensor in result.items() if tensor.is_floating_point()}


def find_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first floating-point tensor that contains NaN or infinity; None if all are finite.

    Elements are examined only if the norm of a tensor is not finite, so the check usually takes a few microseconds.
    """
    if not tensors:
        return None
    with torch.no_grad():
        norms = torch.stack(torch._foreach_norm(list(tensors.values()))).tolist()
    if math.isfinite(sum(norms)):
        return None
    return next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None)


def bound_magnitudes(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return the largest magnitude in each tensor, as a one-element list."""
    return {name: [float(tensor.abs().max()) if tensor.numel() else 0.0] for name, tensor in tensors.items()}


def smooth(current: Tensor, previous: Tensor | None) -> Tensor:
    """Scale up each row whose maximum is less than half the previous one, because sums may cancel by chance."""
    if previous is None:
        return current
    sizes, minimum = current.abs().flatten(1).amax(1), MIN_RATIO * previous.abs().flatten(1).amax(1)
    growth = torch.where((sizes > 0) & (minimum > sizes), minimum / sizes, torch.ones_like(sizes))
    shape = (-1, *[1] * (current.dim() - 1))
    return torch.where((sizes > 0).view(shape), current * growth.view(shape), MIN_RATIO * previous)


@suspend_autocast()
@torch.no_grad()
def recover(secret: Recovery, updates: Sequence[Update], weights: Sequence[float] | None = None) -> Aggregate:
    """Return the weighted mean of the gradients that clients would have sent for the true model.

    Paper, Sec. 4.3:   G(l) = R(l) o (sum_k w_k G^_k - sum_s gamma_s sum_k w_k sigma~_k,s + v sum_k w_k beta_k)

    This differs from the paper in two ways. gamma is replaced by the anchor's d, because clients use the base. Losses
    other than squared error have one pass per candidate, and the result is the pass for d.

    Args:
        secret: the round's secret.
        updates: one update per client.
        weights: |D_k| of each client; by default, the number of samples in each update.

    Guarantees: the result equals the gradient of plain autograd up to rounding (tests/scheme/test_exactness.py).
      Updates are not changed. If any update is refused, nothing is recovered. Any object passed as an update is either
      refused or yields a finite result (tests/scheme/test_recover.py).

    Raises:
        BadArgument: the weights are invalid.
        UpdateRefused: an update is for another round or model, incomplete, misshapen or not finite.
    """
    if not isinstance(updates, list | tuple):
        message = f"updates must be a list, got {type(updates).__name__}"
        raise BadArgument("recover", message, "pass a list with one update per client")
    check_updates(secret, updates)
    shares = _client_shares(updates, weights)
    nonzero = [index for index, coefficient in enumerate(secret.coefficients) if coefficient]
    passes = range(nonzero[0], nonzero[-1] + 1)  # all passes, or only the true offset's pass if there are decoys
    gradients, sums = _sum_passes(secret, updates, shares, passes)
    # also check the passes for decoys, so that a refusal does not reveal the true offset
    tensors_to_check = [
        (*(update.passes.values() if secret.decoys else ()), *update.buffers.values()) for update in updates
    ]
    if not sums.finite or not all(map(are_overflow_safe, tensors_to_check)):
        _refuse_overflow(secret, updates, shares)
    buffers = _recover_buffers(secret, updates, shares, nonzero[0])
    return Aggregate(gradients, buffers, sums.error(), _count_bytes(secret))


def _count_bytes(secret: Recovery) -> dict[str, float]:
    """Return the sizes of a broadcast and an update in bytes, not counting names and shapes."""
    plan, layout, passes = secret.plan, secret.plan.layout, len(secret.coefficients)
    itemsize = layout.dtype.itemsize
    buffers = itemsize * (layout.total - layout.parameters) + 8 * len(layout.counters)
    bytes_down, bytes_up = itemsize * layout.parameters + buffers, itemsize * layout.weights * passes + buffers
    if plan.head:
        # direction, partition, offset and candidates
        bytes_down += (itemsize + 8) * plan.head.outputs + 8 + 8 * passes
    return {"bytes_down": bytes_down, "bytes_up": bytes_up}


def _sum_passes(
    secret: Recovery, updates: Sequence[Update], shares: Sequence[float], passes: range
) -> tuple[Tensors, "_PassSums"]:
    """Return the gradients recovered from these passes, and the norms of the terms."""
    layout, transform = secret.plan.layout, secret.transform
    coefficients = [1.0] * len(passes) if secret.decoys else secret.coefficients[passes.start : passes.stop]
    sums = _PassSums(coefficients, layout)
    gradients: Tensors = {}
    for group in transform.group(layout.trainable):
        rows = _average(group, updates, shares, passes)
        transform.multiply(group, rows)
        gradients |= transform.restore_order(group, sums.combine(rows))
    return {entry.name: gradients[entry.name] for entry in layout.trainable}, sums


def _average(group: Group, updates: Sequence[Update], shares: Sequence[float], passes: range) -> Tensor:
    """Return the weighted mean of the clients' passes for a group of tensors, with one row per pass."""
    total: Tensor | None = None
    for update, share in zip(updates, shares, strict=True):
        tensors = [update.passes[entry.name][passes.start : passes.stop] for entry in group.entries]
        parts = [rows.reshape(len(passes), -1) for rows in tensors]
        flat = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        if total is None:
            total = flat * share if len(updates) > 1 or len(parts) == 1 else flat
        else:
            total.add_(flat, alpha=share)
    assert total is not None
    return total


def _recover_buffers(secret: Recovery, updates: Sequence[Update], shares: Sequence[float], row: int) -> Tensors:
    """Recover the buffers; for buffers with one row per candidate, only the given row."""
    layout, transform = secret.plan.layout, secret.transform
    clients = [select_row(update.buffers, row) if secret.has_rows else update.buffers for update in updates]
    out: Tensors = {name: torch.stack([client[name] for client in clients]).amax(0) for name in layout.counters}
    if not layout.buffers:
        return out
    weights = torch.tensor(shares, dtype=layout.dtype, device=layout.device)
    for group in transform.group(layout.buffers):
        mean = weights @ torch.stack([flatten(client, group.entries) for client in clients])
        transform.divide(group, mean)
        out |= transform.restore_order(group, mean)
    return out


class _PassSums:
    """Sums of passes, multiplied by their coefficients, and the norms of the passes and of the sums."""

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
        """Return the estimated relative error: the rounding error of the passes divided by the norm of their sum.

        The result is capped at the largest float, which matters only if passes cancel to 300 digits.
        """
        if not self._size:
            return self._eps
        size = min(self._size, MAX_FLOAT)
        terms = sum(c * (min(part, MAX_FLOAT) / size) for c, part in zip(self._coefficients, self._sizes, strict=True))
        return min(self._eps * terms, MAX_FLOAT)


def _norm(values: Tensor) -> float:
    """Return the Euclidean norm, which is finite if all elements are, even if their squares overflow."""
    size = float(torch.linalg.vector_norm(values))
    if math.isfinite(size):
        return size
    largest = float(values.abs().max())
    if not math.isfinite(largest):
        return math.inf
    return min(largest * float(torch.linalg.vector_norm(values.double() / largest)), MAX_FLOAT)


def _refuse_overflow(secret: Recovery, updates: Sequence[Update], shares: Sequence[float]) -> None:
    """Refuse updates that are not finite or that overflow when the noise is removed, even in passes for decoys.

    The error names a client whose update alone overflows or, if there is none, the client with the largest update.
    """
    for position, update in enumerate(updates):
        refuse_non_finite(f"client {position}", update)
    if _is_finite(secret, updates, shares):
        return
    overflowing = [position for position, update in enumerate(updates) if not _is_finite(secret, [update], [1.0])]
    tensors = [[*update.passes.values(), *update.buffers.values()] for update in updates]
    sizes = [math.hypot(*(_norm(t) for t in tensor if t.is_floating_point())) for tensor in tensors]
    position = overflowing[0] if overflowing else sizes.index(max(sizes))
    message = f"its values are finite, but overflow {secret.plan.layout.dtype} when the noise is removed"
    raise NonFiniteUpdate(f"client {position}", message, DROP_FIX)


def _is_finite(secret: Recovery, updates: Sequence[Update], shares: Sequence[float]) -> bool:
    """Return whether all results are finite: the gradient (with decoys, for each candidate) and all buffers."""
    count = len(secret.coefficients)
    parts = [range(number, number + 1) for number in range(count)] if secret.decoys else [range(count)]
    rows = [_recover_buffers(secret, updates, shares, row) for row in range(count if secret.has_rows else 1)]
    sums_are_finite = all(_sum_passes(secret, updates, shares, part)[1].finite for part in parts)
    return sums_are_finite and all(bool(buffer.isfinite().all()) for row in rows for buffer in row.values())


def _client_shares(updates: Sequence[Update], weights: Sequence[float] | None) -> list[float]:
    """Return w_k = |D_k| / |D|, given weights as a list, tuple, vector or any other sequence of numbers."""
    counts = [update.samples for update in updates] if weights is None else weights
    try:
        count = len(counts)
        numbers = np.asarray(counts if count == len(updates) else [])  # not read if their count is wrong
    except Exception as error:  # an invalid object may raise any exception
        raise BadArgument("recover", f"cannot read weights: {type(error).__name__}", "pass numbers") from error
    if count != len(updates) or not count:
        message = f"got {len(updates)} updates and {count} weights"
        raise BadArgument("recover", message, "pass at least one update, and one weight per update")
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
        raise BadArgument("recover", "weights must be a list of numbers")
    sizes = [float(size) for size in numbers.tolist()]
    if not all(size >= 0 for size in sizes) or not 0 < sum(sizes) < math.inf:
        raise BadArgument("recover", "weights must be nonnegative and not all 0, with a finite sum")
    return [size / sum(sizes) for size in sizes]
