"""The secret of a broadcast, and the form of the updates that answer it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fedveil.errors import ForeignUpdate, IncompleteUpdate, MisshapenUpdate, NonFiniteUpdate, StaleUpdate
from fedveil.graph.plan import Plan
from fedveil.scheme.messages import Update
from fedveil.scheme.transform import Transform
from fedveil.wire import Tensors

MOST_SAMPLES = 2**53  # counted exactly in float64
DROP = "drop this client from the round; lower the learning rate if all clients are affected"
Form = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True, eq=False, repr=False)
class Recovery:
    """The secret that recovers the gradient from updates that answer one broadcast.

    Attributes:
        plan: of the model.
        round: the broadcast's name.
        transform: the factors and the permutation.
        coefficients: of the clients' passes; 0 for decoys.
        decoys: whether passes are for the true offset and decoys, one each.
        counters: shapes and dtypes of integer buffers, by name.
        memory: of the broadcast's large tensors.
    """

    plan: Plan
    round: str
    transform: Transform
    coefficients: list[float]
    decoys: bool
    counters: dict[str, Form]
    memory: Tensor | None


def has_rows(secret: Recovery) -> bool:
    """Whether buffers have one row per candidate."""
    return secret.plan.head is not None and secret.plan.head.tail == "repeated"


class _Forms(NamedTuple):
    """Shapes and dtypes that an update must have, by name."""

    passes: dict[str, Form]
    buffers: dict[str, Form]


def _find_forms(secret: Recovery) -> _Forms:
    layout = secret.plan.layout
    passes = (len(secret.coefficients),)
    rows = passes if has_rows(secret) else ()
    return _Forms(
        {entry.name: (torch.Size((*passes, *entry.shape)), layout.dtype) for entry in layout.trainable},
        {entry.name: (torch.Size((*rows, *entry.shape)), layout.dtype) for entry in layout.buffers} | secret.counters,
    )


def blank_update(secret: Recovery) -> Update:
    """Return an update of this round on the meta device, as of one record."""
    forms = _find_forms(secret)
    passes, buffers = (
        {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in own.items()}
        for own in (forms.passes, forms.buffers)
    )
    return Update(secret.round, secret.plan.layout.name, 1, passes, buffers)


def check_updates(secret: Recovery, updates: Sequence[Update], first: int = 0) -> None:
    """Refuse updates that cannot belong to this round; names the client, counted from `first`."""
    forms = _find_forms(secret)
    for position, update in enumerate(updates, first):
        _check_update(secret, forms, position, update)


def _check_update(secret: Recovery, forms: _Forms, position: int, update: Update) -> None:
    client, layout = f"client {position}", secret.plan.layout
    if not isinstance(update, Update):
        raise MisshapenUpdate(client, f"its update is {type(update).__name__}, not an Update")
    if type(update.model) is not str or update.model != layout.name:
        fix = "clients and server must build the same architecture"
        raise ForeignUpdate(client, f"its update is for model {_shorten(update.model)}, not {layout.name}", fix)
    if type(update.round) is not str or update.round != secret.round:
        what = f"its update is for round {_shorten(update.round)}, not {secret.round[:8]}"
        raise StaleUpdate(client, what, "aggregate only answers to this round's broadcast")
    if type(update.samples) is not int or not 1 <= update.samples <= MOST_SAMPLES:
        count = update.samples if type(update.samples) in (int, bool) and abs(update.samples) < 10**20 else None
        text = type(update.samples).__name__ if count is None else str(count)
        raise IncompleteUpdate(client, f"its update counts {text} samples, not 1 to 2^53")
    _check_tensors(client, "", update.passes, forms.passes, layout.device)
    _check_tensors(client, "buffer ", update.buffers, forms.buffers, layout.device)


def _shorten(text: str) -> str:
    """Return the beginning of a client's text, without characters that a terminal obeys."""
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
                raise NonFiniteUpdate(f"client {position}", f"{what} holds NaN or infinity", DROP)
