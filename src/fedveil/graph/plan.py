"""The result of an analysis: which numbers of a model share which noise, in a form that is fast to apply.

All tensors that travel are laid out in one flat vector: trainable parameters first, then frozen ones, then floating
buffers. Each of its elements has two *slots*, its row's and its column's, and a slot knows the factor and the place of
one unit. A veil of the whole model is then one product and one gather::

    veiled = (f[rows] * f[columns]) * flat[arange + shift[rows] + shift[columns]]

with f and shift, a number a slot, drawn anew for every secret.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedveil.errors import ModelMismatch
from fedveil.graph.layout import Inside, Layout, lay_out, look_inside
from fedveil.graph.ledger import Integers, Ledger
from fedveil.graph.slots import Slots, build_slots
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.trace import Head, Trace


@dataclass(frozen=True)
class Axis:
    """A set of channels that share factors, as a user sees it."""

    written_by: tuple[str, ...]
    size: int
    symmetry: Symmetry
    limited_by: tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """What a veil may do to a model. `print(plan)` shows it; `coverage` is the share of parameters it can change.

    Attributes:
        model_name: class of the model.
        axes: the hidden axes with the factors that each allows.
        head: the last Linear, which takes the additive noise; None if it was chosen to be exposed.
        layout: the tensors that travel.
        modes: for each module with a mode that matters, whether it was in training mode.
        symmetries: for each scale class, the factors that it allows.
        cells: for each order class, its cell; classes of a cell trade places, those of cell 0 stay.
        slots: see `Slots`.
        rows: for each element of the flat vector its first slot.
        columns: its second slot.
        pinned: operations that pin an axis, and why.
        coverage: share of the parameters' elements that a veil can change, 0 to 1.
        moved: share of them that a permutation can move.
    """

    model_name: str
    axes: tuple[Axis, ...]
    head: Head | None
    layout: Layout
    modes: tuple[tuple[str, bool], ...]
    symmetries: Integers
    cells: Integers
    slots: Slots
    rows: Tensor
    columns: Tensor
    pinned: tuple[tuple[str, str], ...]
    coverage: float
    moved: float

    @cached_property
    def freedoms(self) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        """For each scale class, 1 if it takes positive factors, else 0; and 1 if it takes signs, else 0."""
        scaled = (self.symmetries & Symmetry.POSITIVE) > 0
        return scaled.astype(np.float64), ((self.symmetries & Symmetry.SIGN) > 0).astype(np.uint64)

    @cached_property
    def cell_order(self) -> tuple[Integers, Integers, Integers]:
        """Order classes sorted by cell, their cells, and the place where each one's cell begins in that list."""
        movable = np.flatnonzero(self.cells)
        classes = movable[np.argsort(self.cells[movable], kind="stable")]
        cells = self.cells[classes]
        return classes, cells, np.searchsorted(cells, cells)

    @cached_property
    def arange(self) -> Tensor:
        """0, 1, 2, ... along the flat vector."""
        return torch.arange(self.layout.total, device=self.layout.device)

    def __str__(self) -> str:
        from fedveil.graph.describe import describe

        return describe(self)

    def __repr__(self) -> str:
        return f"<Plan of {self.model_name}: {len(self.axes)} axes, coverage {self.coverage:.1%}>"


def compress(labels: Integers) -> Integers:
    """Numbers 0, 1, 2, ... for the distinct labels, keeping 0."""
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


@dataclass
class _Group:
    """Births that share a scale class, and the units born there."""

    names: list[str]
    classes: set[int]
    members: set[int]


def build_axes(ledger: Ledger, classes: Integers, symmetries: Integers) -> tuple[Axis, ...]:
    """Scale units in the groups that a user sees: axes that share a class are one."""
    joined: list[_Group] = []
    for birth in ledger.births:
        members = set(birth.members.tolist())
        new = _Group([birth.where], set(classes[birth.members.numpy()].tolist()) - {0}, members)
        for other in [group for group in joined if group.classes & new.classes]:
            joined.remove(other)
            new = _Group(other.names + new.names, other.classes | new.classes, other.members | new.members)
        joined.append(new)
    return tuple(_axis(ledger, symmetries, group) for group in joined)


def _axis(ledger: Ledger, symmetries: Integers, group: _Group) -> Axis:
    """An axis with the operations that keep it from taking more factors; one united with unit 0 is pinned whole."""
    allowed = [int(symmetries[c]) for c in group.classes] or [0]
    symmetry = Symmetry(int(np.bitwise_and.reduce(allowed)))
    limits = [limit for limit in ledger.limits if not group.members.isdisjoint(limit.members.tolist())]
    reasons = {(limit.where, limit.why): None for limit in limits}
    size = len(group.classes) or len(group.members)
    return Axis(tuple(dict.fromkeys(group.names)), size, symmetry, tuple(reasons))


def build_symmetries(ledger: Ledger, classes: Integers) -> Integers:
    """For each scale class, what all its readers let through."""
    allowed = np.full(classes.max() + 1, int(Symmetry.EVERYTHING), np.int64)
    allowed[0] = 0
    for limit in ledger.limits:
        np.bitwise_and.at(allowed, classes[limit.members.numpy()], int(limit.symmetry))
    return allowed


def build_plan(model: nn.Module, trace: Trace) -> Plan:
    """Turn what the walk wrote down into a plan."""
    ledger = trace.ledger
    scale, order = ledger.scale.representatives(), ledger.order.representatives()
    cells = ledger.cells(order)
    classes, members = compress(scale), compress(order)
    by_member = np.zeros(members.max() + 1, np.int64)
    by_member[members] = cells[order]
    sizes = np.bincount(by_member)
    by_member[sizes[by_member] < 2] = 0
    symmetries = build_symmetries(ledger, classes)
    layout = lay_out(model, trace.used)
    slots, rows, columns = build_slots(ledger, layout, classes, members, by_member)
    scaled = torch.from_numpy(symmetries[slots.unit] > 0)
    moving = torch.from_numpy((slots.order > 0) & (slots.stride > 0))
    p = layout.parameters
    row, column = rows[:p].long().cpu(), columns[:p].long().cpu()
    moved = moving[row] | moving[column]
    changed = moved | scaled[row] | scaled[column]
    for entry in layout.trainable + layout.frozen:
        if trace.head and entry.name in (trace.head.weight, trace.head.bias):
            changed[entry.start : entry.stop] = True
    pins = {(lim.where, lim.why): None for lim in ledger.limits if not lim.symmetry and lim.where != "output"}
    return Plan(
        type(model).__name__,
        build_axes(ledger, classes, symmetries),
        trace.head,
        layout,
        look_inside(model).modes,
        symmetries,
        by_member,
        slots,
        rows,
        columns,
        tuple(pins),
        float(changed.double().mean()) if p else 0.0,
        float(moved.double().mean()) if p else 0.0,
    )


def check_model(plan: Plan, model: nn.Module) -> Inside:
    """Read a model, or refuse it if it is not the one that was analysed."""
    inside = look_inside(model)
    layout = plan.layout
    fix = "analyse the model again after changing it"
    for entries, tensors in (
        (layout.trainable + layout.frozen, inside.parameters),
        (layout.buffers, inside.buffers),
    ):
        for entry in entries:
            tensor = tensors.get(entry.name)
            if tensor is None or tensor.shape != entry.shape or tensor.dtype != layout.dtype:
                found = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                wanted = f"{tuple(entry.shape)} {layout.dtype}"
                raise ModelMismatch(entry.name, f"the plan wants {wanted}, the model has {found}", fix)
    if inside.modes != plan.modes:
        path = next((a[0] for a, b in zip(plan.modes, inside.modes, strict=False) if a != b), plan.model_name)
        raise ModelMismatch(path or plan.model_name, "its mode (train or eval) is not the one analysed", fix)
    return inside
