"""The result of an analysis: how noise is shared among the values of a model, in a form that is fast to apply.

Each factor of each tensor is stored as *slots*, one per element of the factor. A scale slot contains the class of a
secret number and its exponent; an order slot contains the positions of one class of units in the tensor. A secret then
consists of two short vectors: one number per scale slot and one distance per order slot.

Small tensors are pooled in one flat vector, which is perturbed with one product and one gather; large tensors are
multiplied by broadcasting and gathered dim by dim.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules import module as torch_module

from fedveil.errors import ModelMismatch
from fedveil.graph import coverage
from fedveil.graph.foreign_code import GLOBAL_HOOK, MODULE_HOOK, TENSOR_HOOK, refuse_hooks
from fedveil.graph.head import Head
from fedveil.graph.outputs import Output
from fedveil.graph.solve import Integers, Orders
from fedveil.graph.units import Symmetry

Location = tuple[dict[str, Any], str]


@dataclass(frozen=True)
class ModelState:
    """A model's tensors by name, the dicts that contain each tensor, and the mode (train or eval) of every module.

    Attributes:
        hooks: paths of modules and tensors with backward hooks, each with a description.
    """

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    containers: dict[str, list[Location]]
    modes: tuple[tuple[str, bool], ...]
    hooks: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, model: nn.Module) -> "ModelState":
        """Read a model's state in the order of `named_modules`; a tied tensor is listed under its first name."""
        parameters, buffers, modes = dict[str, Tensor](), dict[str, Tensor](), list[tuple[str, bool]]()
        containers: dict[int, list[Location]] = {}
        containers_by_name: dict[str, list[Location]] = {}
        hooks: list[tuple[str, str]] = []
        if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
            hooks.append(("", GLOBAL_HOOK))
        pending, visited = [("", model)], set[nn.Module]()  # nested generators would take twice as long
        while pending:
            path, module = pending.pop()
            if module in visited:
                continue
            visited.add(module)
            modes.append((path, module.training))
            if module._backward_hooks or module._backward_pre_hooks:
                hooks.append((path, MODULE_HOOK))
            prefix = f"{path}." if path else ""
            for tensors, container in ((parameters, module._parameters), (buffers, module._buffers)):
                for name, tensor in container.items() if container else ():  # most modules have no buffers
                    if tensor is None:
                        continue
                    locations = containers.get(id(tensor))
                    if locations is None:
                        full_name = prefix + name
                        tensors[full_name] = tensor
                        locations = containers[id(tensor)] = containers_by_name[full_name] = []
                        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                            hooks.append((full_name, TENSOR_HOOK))
                    locations.append((container, name))
            if children := module._modules:
                pending += [(prefix + name, child) for name, child in reversed(children.items()) if child is not None]
        return cls(parameters, buffers, containers_by_name, tuple(modes), tuple(hooks))


@dataclass(frozen=True)
class Entry:
    """A tensor in a flat vector; `meta` is a meta tensor of the same shape."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    meta: Tensor


@dataclass(frozen=True)
class Layout:
    """The tensors of a model, in the order in which they appear in a flat vector.

    Attributes:
        trainable: parameters that require gradients.
        frozen: parameters that do not require gradients.
        buffers: floating-point buffers.
        counters: names of the other buffers, which are sent separately.
        unused: names of parameters that forward never reads; they are not sent.
        local: frozen parameters that clients have, so that they are neither perturbed nor sent.
    """

    trainable: tuple[Entry, ...]
    frozen: tuple[Entry, ...]
    buffers: tuple[Entry, ...]
    counters: tuple[str, ...]
    unused: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    local: tuple[Entry, ...] = ()

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All tensors, in the order of the vector."""
        return self.trainable + self.frozen + self.buffers

    @cached_property
    def total(self) -> int:
        """The length of the vector."""
        return sum(entry.shape.numel() for entry in self.entries)

    @cached_property
    def weights(self) -> int:
        """The number of trainable parameter values."""
        return sum(entry.shape.numel() for entry in self.trainable)

    @cached_property
    def parameters(self) -> int:
        """The number of parameter values that are sent, trainable or frozen."""
        return sum(entry.shape.numel() for entry in self.trainable + self.frozen)

    @cached_property
    def name(self) -> str:
        """A short identifier of the architecture: a hash of the names, shapes and dtype of the tensors sent."""
        text = repr((sorted((entry.name, tuple(entry.shape)) for entry in self.entries), str(self.dtype)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def flatten(tensors: Mapping[str, Tensor], entries: tuple[Entry, ...]) -> Tensor:
    """Concatenate the tensors of these entries into one vector."""
    flat: Tensor = _flatten_dense_tensors([tensors[entry.name] for entry in entries])  # type: ignore[no-untyped-call]
    return flat


def unflatten(flat: Tensor, entries: tuple[Entry, ...]) -> dict[str, Tensor]:
    """Return the tensors as views of the vector; the inverse of `flatten`."""
    pieces = _unflatten_dense_tensors(flat, [entry.meta for entry in entries])  # type: ignore[no-untyped-call]
    return {entry.name: piece for entry, piece in zip(entries, pieces, strict=True)}


@dataclass(frozen=True)
class SlotRange:
    """Consecutive slots, one for each element of a factor with this shape."""

    first: int
    shape: tuple[int, ...]

    def select(self, values: Tensor) -> Tensor:
        """Select the values of these slots from the values of all slots; return them in the factor's shape."""
        return values[self.first : self.first + torch.Size(self.shape).numel()].reshape(self.shape)


@dataclass(frozen=True)
class TensorPart:
    """A strided part of a tensor, and the slots that act on it."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    scale: tuple[SlotRange, ...]
    order: tuple[SlotRange, ...]

    @cached_property
    def contiguous(self) -> bool:
        """Whether its elements are contiguous."""
        return torch.empty_strided(self.shape, self.strides, device="meta").is_contiguous()

    def part(self, flat: Tensor) -> Tensor:
        """Return this part of a flattened tensor, which may have extra leading dims."""
        num_leading = flat.dim() - 1
        return flat.as_strided(
            (*flat.shape[:num_leading], *self.shape),
            (*flat.stride()[:num_leading], *self.strides),
            flat.storage_offset() + self.offset,
        )


@dataclass(frozen=True)
class Slots:
    """All slots of a model. Scale slot 0 and order slot 0 do nothing.

    Attributes:
        classes: the number of scale classes.
        unit: the scale class of each scale slot; class 0 is pinned.
        power: the exponent of each scale slot, +1 or -1.
        order: the order class of each order slot; class 0 does not move.
        origin: for each order slot, the index in `table` of the same occurrence for the first class of its kind.
        repeat: for each order slot, the number of times each class of its kind occurs in the tensor.
        position: for each order slot, its index in the flattened tensor, along the slot's dims.
        table: indices into the flattened tensors, sorted by kind, class and occurrence.
    """

    classes: int
    unit: Integers
    power: Integers
    order: Integers
    origin: Integers
    repeat: Integers
    position: Integers
    table: Integers

    def factors(self, scale: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the factor of each scale slot, given one number per scale class; extra leading dims are kept."""
        return np.concatenate([scale, 1 / scale], -1)[..., self.unit + self.classes * (self.power < 0)]

    def shifts(self, member: Integers) -> Integers:
        """Return the distance from each order slot to its source, given the new index of each class within its kind."""
        result: Integers = self.table[self.origin + member[..., self.order] * self.repeat] - self.position
        return result


@dataclass(frozen=True, eq=False)
class Pool:
    """Small tensors, concatenated into one flat vector.

    Attributes:
        entries: the tensors, with their positions in the pool.
        scale: the scale slots of each element, one row per scale factor.
        order: the order slots of each element, one row per order factor.
        arange: the indices 0, 1, 2, ... of the vector.
    """

    entries: tuple[Entry, ...]
    scale: Tensor
    order: Tensor
    arange: Tensor

    @classmethod
    def build(
        cls, entries: Sequence[Entry], pieces: Mapping[str, Sequence[TensorPart]], device: torch.device
    ) -> "Pool":
        """Concatenate tensors into one flat vector, and list the slots of each element."""
        pooled, length = [], 0
        for entry in entries:
            pooled.append(replace(entry, start=length, stop=length + entry.shape.numel()))
            length = pooled[-1].stop
        parts = [(entry, piece) for entry in pooled for piece in pieces.get(entry.name, ())]
        depths = max([1, *[len(p.scale) for _, p in parts]]), max([1, *[len(p.order) for _, p in parts]])
        scale, order = (torch.zeros((depth, length), dtype=torch.int32) for depth in depths)
        for entry, piece in parts:
            for rows, ranges in ((scale, piece.scale), (order, piece.order)):
                for row, slot_range in zip(rows, ranges, strict=False):
                    slots = slot_range.first + torch.arange(torch.Size(slot_range.shape).numel())
                    piece.part(row[entry.start : entry.stop]).copy_(slots.reshape(slot_range.shape).expand(piece.shape))
        return cls(tuple(pooled), scale.to(device), order.to(device), torch.arange(length, device=device))

    def factors(self, slots: Tensor) -> Tensor:
        """Return the factor of each element, given the factor of each scale slot."""
        return reduce(torch.mul, [slots.index_select(0, row) for row in self.scale])

    def sources(self, slots: Tensor) -> Tensor:
        """Return the source index of each element, given the shift of each order slot."""
        return reduce(torch.add, [slots.index_select(0, row) for row in self.order], self.arange)


class Reason(NamedTuple):
    """An operation or tensor that limits the noise, and the reason."""

    where: str
    why: str


@dataclass(frozen=True)
class Axis:
    """A hidden axis as shown to users: a set of channels that share factors."""

    written_by: tuple[str, ...]
    size: int
    symmetry: Symmetry
    limited_by: tuple[Reason, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A description of how the layers of a model can be perturbed. `print(plan)` prints a summary.

    Attributes:
        model_name: the class name of the model.
        axes: the hidden axes, with the factors that each of them allows.
        head: the layer that receives additive noise; None if the head is exposed.
        layout: the tensors that are sent.
        modes: the path of each module, and whether it was in training mode.
        symmetries: for each scale class, the factors that it allows.
        orders: the units that may be swapped.
        slots: the slots of all tensors.
        pieces: for each tensor, its parts and the slots that act on them.
        pool: the small tensors, in one vector.
        pinned: operations that do not commute with any factor, and tensors that are sent unchanged, with reasons.
        known_names: names of parameters whose values clients know in advance.
        form: the form of the inputs for which the model was analysed (`fedveil.graph.inputs.describe_form`).
        output: the choice of the model's predictions; None if there was no choice to make.
    """

    model_name: str
    axes: tuple[Axis, ...]
    head: Head | None
    layout: Layout
    modes: tuple[tuple[str, bool], ...]
    symmetries: Integers
    orders: Orders
    slots: Slots
    pieces: Mapping[str, list[TensorPart]]
    pool: Pool
    pinned: tuple[Reason, ...]
    known_names: tuple[str, ...]
    form: str
    output: Output | None = None

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """The fraction of parameter values per kind of perturbation; each value is counted as its strongest kind.

        "scaled": multiplied by secret factors, or with additive noise; "signed": multiplied by secret signs; "moved":
        only permuted; "bare": sent unchanged. The fractions add up to 1.
        """
        return coverage.measure_shares(self)

    @cached_property
    def known(self) -> coverage.KnownValues:
        """The values that clients know in advance, and how much they reveal."""
        return coverage.measure_known_values(self)

    @property
    def coverage(self) -> float:
        """The fraction of parameter values that a veil can change, from 0 to 1."""
        return 1.0 - self.shares["bare"]

    @property
    def cells(self) -> Integers:
        """The cell of each order class. Classes in a cell may be swapped, but the classes in cell 0 do not move."""
        return self.orders.cells

    @cached_property
    def large(self) -> tuple[Entry, ...]:
        """The tensors that are not in the pool."""
        pooled = {entry.name for entry in self.pool.entries}
        return tuple(entry for entry in self.layout.entries if entry.name not in pooled)

    @cached_property
    def freedoms(self) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        """Two 0/1 arrays: whether each scale class allows positive factors, and whether it allows signs."""
        scaled = (self.symmetries & Symmetry.POSITIVE) > 0
        return scaled.astype(np.float64), ((self.symmetries & Symmetry.SIGN) > 0).astype(np.uint64)

    @cached_property
    def moving(self) -> Integers:
        """The order classes that move, sorted by cell."""
        moving = np.flatnonzero(self.orders.kinds)
        return moving[np.argsort(self.orders.cells[moving], kind="stable")]

    @cached_property
    def signature(self) -> str:
        """A short identifier of how the plan acts on the parameters."""
        from fedveil.graph.signature import identify

        return identify(self)

    def __str__(self) -> str:
        return coverage.describe(self)

    def __repr__(self) -> str:
        head = self.head.path or self.head.weight if self.head else "exposed"
        units = sum(axis.size for axis in self.axes if axis.symmetry)
        return f"<Plan of {self.model_name}: coverage {self.coverage:.1%}, head {head}, {units} symmetric units>"


def check_model(plan: Plan, model: nn.Module) -> ModelState:
    """Return a model's state; refuse a model that differs from the one that was analysed."""
    state, layout = ModelState.read(model), plan.layout
    if state.hooks:
        refuse_hooks(state.hooks, plan.model_name)
    fix = "analyse the model again after changing it"
    parameters = layout.trainable + layout.frozen + layout.local
    for entries, tensors in ((parameters, state.parameters), (layout.buffers, state.buffers)):
        for entry in entries:
            tensor = tensors.get(entry.name)
            if tensor is None or tensor.shape != entry.shape or tensor.dtype != layout.dtype:
                actual = "no such tensor" if tensor is None else f"shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
                expected = f"shape {tuple(entry.shape)} and dtype {layout.dtype}"
                raise ModelMismatch(entry.name, f"the plan expects {expected}, but the model has {actual}", fix)
    if state.modes != plan.modes:
        path = next((a[0] for a, b in zip(plan.modes, state.modes, strict=False) if a != b), plan.model_name)
        raise ModelMismatch(path or plan.model_name, "its mode (train or eval) has changed since the analysis", fix)
    return state
