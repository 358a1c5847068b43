"""The result of an analysis: which values of a model share which noise, in a form that is fast to apply."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedveil.errors import ModelMismatch
from fedveil.graph.head import Head
from fedveil.graph.known import KnownValues, count_revealed_elements, is_constant
from fedveil.graph.layout import Entry, Inside, Layout, lay_out, look_inside
from fedveil.graph.ledger import Ledger
from fedveil.graph.solve import Integers, Orders, Scales, components, solve_orders, solve_scales
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.tables import POOLED, Piece, Pool, SlotBuilder, Slots, build_pool, count_levels
from fedveil.graph.walk import Walk

KINDS = ("bare", "moved", "signed", "scaled")


@dataclass(frozen=True)
class Axis:
    """A set of channels that share factors, as shown to a user."""

    written_by: tuple[str, ...]
    size: int
    symmetry: Symmetry
    limited_by: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Moves:
    """Order classes that may be swapped, in the form in which new positions are drawn.

    Attributes:
        classes: those that move, sorted by cell.
        cells: the cell of each.
        starts: where in the list each one's cell begins.
        blocks: the block of each; 0 if it has none.
        sizes: the size of its cell.
        families: the family of each block; block 0 is left out.
        first: where each block's family begins, if blocks are sorted by family.
    """

    classes: Integers
    cells: Integers
    starts: Integers
    blocks: Integers
    sizes: Integers
    families: Integers
    first: Integers


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Which layers of a model can be perturbed, and how. `print(plan)` shows it; `shares` tells the coverage.

    Attributes:
        model_name: class of the model.
        axes: the hidden axes with the factors that each allows.
        head: the layer that takes additive noise; None if exposed.
        layout: the tensors that are sent.
        modes: for each module, whether it was in training mode.
        symmetries: for each scale class, the factors that it allows.
        orders: which units may be swapped.
        slots: see `Slots`.
        pieces: for each tensor, its parts and the slots that act on them.
        pool: the small tensors.
        pinned: operations that let no factor through, or tensors that stay bare, and why.
        known_names: parameters whose values clients know beforehand.
    """

    model_name: str
    axes: tuple[Axis, ...]
    head: Head | None
    layout: Layout
    modes: tuple[tuple[str, bool], ...]
    symmetries: Integers
    orders: Orders
    slots: Slots
    pieces: Mapping[str, list[Piece]]
    pool: Pool
    pinned: tuple[tuple[str, str], ...]
    known_names: tuple[str, ...]

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """Fractions of the parameters' values by the strongest perturbation of each; they add up to 1.

        "scaled": multiplied by secret factors, or with additive noise; "signed": multiplied by secret signs; "moved":
        only permuted; "bare": sent as they are.
        """
        counts = np.zeros(len(KINDS), np.int64)
        for entry in self.layout.trainable + self.layout.frozen:
            if entry.name in self._head_names:
                counts[-1] += entry.shape.numel()
                continue
            own = np.zeros(len(KINDS), np.int64)
            for piece in self.pieces[entry.name]:
                own += count_levels(piece, self.slots, self.symmetries)
            own[0] = entry.shape.numel() - own[1:].sum()
            counts += own
        total = max(1, int(counts.sum()))
        return MappingProxyType({kind: float(counts[n] / total) for n, kind in reversed(list(enumerate(KINDS)))})

    @cached_property
    def known(self) -> KnownValues:
        """The values that clients know beforehand, and how much they reveal."""
        names = {entry.name for entry in self.layout.trainable + self.layout.frozen} - self._head_names
        pieces = [piece for name in names for piece in self.pieces[name]]
        known = [piece for name in self.known_names for piece in self.pieces[name]]
        count = count_revealed_elements(pieces, known, self.slots, self.symmetries) if known else 0
        return KnownValues(self.known_names, count / max(1, self.layout.parameters))

    @property
    def _head_names(self) -> set[str | None]:
        """Weight and bias of the head, perturbed by a number that no known value reveals."""
        return {self.head.weight, self.head.bias} if self.head else set()

    @property
    def coverage(self) -> float:
        """The fraction of the parameters' values that a veil can change, 0 to 1."""
        return 1.0 - self.shares["bare"]

    @property
    def cells(self) -> Integers:
        """For each order class, its cell; classes of a cell may be swapped, those of cell 0 stay."""
        return self.orders.cells

    @cached_property
    def large(self) -> tuple[Entry, ...]:
        """The tensors that are not in the pool."""
        pooled = {entry.name for entry in self.pool.entries}
        return tuple(entry for entry in self.layout.entries if entry.name not in pooled)

    @cached_property
    def freedoms(self) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        """For each scale class, 1 if it takes positive factors, else 0; and 1 if it takes signs, else 0."""
        scaled = (self.symmetries & Symmetry.POSITIVE) > 0
        return scaled.astype(np.float64), ((self.symmetries & Symmetry.SIGN) > 0).astype(np.uint64)

    @cached_property
    def moves(self) -> Moves:
        """Order classes that move."""
        orders = self.orders
        moving = np.flatnonzero(orders.kinds)
        classes = moving[np.argsort(orders.cells[moving], kind="stable")]
        cells = orders.cells[classes]
        starts = np.searchsorted(cells, cells)
        sizes = np.bincount(cells)[cells] if len(cells) else cells
        families = orders.families[1:]
        first = np.searchsorted(np.sort(families), families)
        return Moves(classes, cells, starts, orders.blocks[classes], sizes, families, first)

    def __str__(self) -> str:
        from fedveil.graph.describe import describe

        return describe(self)

    def __repr__(self) -> str:
        head = self.head.path or self.head.weight if self.head else "exposed"
        units = sum(axis.size for axis in self.axes if axis.symmetry)
        return f"<Plan of {self.model_name}: coverage {self.coverage:.1%}, head {head}, {units} symmetric units>"


def build_axes(ledger: Ledger, scales: Scales) -> tuple[Axis, ...]:
    """Group scale units into axes: axes that share a class are one."""
    classes = scales.classes
    births = [(where, classes[units.numpy()]) for where, units in ledger.births]
    pairs = [(np.full_like(own, number), len(births) + own) for number, (_, own) in enumerate(births)]
    found = components(len(births) + len(scales.symmetries), pairs)  # of births, then of classes: the first birth
    limits: dict[int, dict[tuple[str, str], None]] = {}
    for limit in ledger.limits:
        for first in np.unique(found[len(births) + classes[limit.members.numpy()]]):
            limits.setdefault(int(first), {})[(limit.where, limit.why)] = None
    axes = []
    for first in dict.fromkeys(found[: len(births)].tolist()):
        numbers = np.flatnonzero(found[: len(births)] == first)
        own = np.unique(np.concatenate([births[n][1] for n in numbers]))
        symmetry = Symmetry(int(np.bitwise_and.reduce(scales.symmetries[own])))
        names = tuple(dict.fromkeys(births[n][0] for n in numbers))
        axes.append(Axis(names, len(own), symmetry, tuple(limits.get(first, {}))))
    return tuple(axes)


def _find_known_names(parameters: Mapping[str, Tensor], layout: Layout, public: Collection[str]) -> tuple[str, ...]:
    """Return the parameters that hold one number throughout, then those that are declared public."""
    names = [entry.name for entry in layout.trainable + layout.frozen]
    declared = [name for name in names if any(name == p or name.startswith(p.rstrip(".") + ".") for p in public)]
    return tuple(dict.fromkeys([*[name for name in names if is_constant(parameters[name])], *sorted(declared)]))


def build_plan(model: nn.Module, walk: Walk, head: Head | None, public: Collection[str] = ()) -> Plan:
    """Turn the constraints that the walk recorded into a plan."""
    ledger = walk.ledger
    scales, orders = solve_scales(ledger), solve_orders(ledger)
    inside, layout = look_inside(model), lay_out(model, frozenset(walk.used))
    builder = SlotBuilder(scales, orders)
    pieces = {e.name: [builder.add(region) for region in ledger.regions.get(e.name, ())] for e in layout.entries}
    pool = build_pool([e for e in layout.entries if e.shape.numel() <= POOLED], pieces, layout.device)
    pins = {(lim.where, lim.why): None for lim in ledger.limits if not lim.symmetry and lim.where != "output"}
    name, axes, slots = type(model).__name__, build_axes(ledger, scales), builder.finish()
    known = _find_known_names(inside.parameters, layout, public)
    return Plan(
        name, axes, head, layout, inside.modes, scales.symmetries, orders, slots, pieces, pool, tuple(pins), known
    )


def check_model(plan: Plan, model: nn.Module) -> Inside:
    """Read a model, or refuse it if it is not the one that was analysed."""
    inside = look_inside(model)
    layout = plan.layout
    fix = "analyse the model again after changing it"
    parameters = layout.trainable + layout.frozen
    for entries, tensors in ((parameters, inside.parameters), (layout.buffers, inside.buffers)):
        for entry in entries:
            tensor = tensors.get(entry.name)
            if tensor is None or tensor.shape != entry.shape or tensor.dtype != layout.dtype:
                found = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                wanted = f"{tuple(entry.shape)} {layout.dtype}"
                raise ModelMismatch(entry.name, f"the plan expects {wanted}, the model has {found}", fix)
    if inside.modes != plan.modes:
        path = next((a[0] for a, b in zip(plan.modes, inside.modes, strict=False) if a != b), plan.model_name)
        raise ModelMismatch(path or plan.model_name, "its mode (train or eval) is not the one analysed", fix)
    return inside
