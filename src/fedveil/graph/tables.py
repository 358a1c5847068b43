"""From units to what they do to the elements of parameters and buffers.

Each factor of each tensor becomes a few *slots*, one per place along it. A scale slot has the class of one secret
number and its exponent, an order slot the places of one class of units in this tensor. A secret is then two short
vectors, one number per scale slot and one distance per order slot, whatever the size of the model.

Small tensors are pooled in one flat vector, which is masked by one product and one gather; a large one is multiplied by
broadcasting and gathered dim by dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.graph.layout import Entry
from fedveil.graph.ledger import Region
from fedveil.graph.solve import Integers, Orders, Scales, ranks
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import along, compressed, varying

POOLED = 2**15  # elements of the largest tensor that goes into the pool


@dataclass(frozen=True)
class Spread:
    """A run of slots, one per element of a factor of this shape."""

    first: int
    shape: tuple[int, ...]

    def of(self, slots: Tensor) -> Tensor:
        """Their values in the factor's shape."""
        return slots[self.first : self.first + torch.Size(self.shape).numel()].reshape(self.shape)


@dataclass(frozen=True)
class Piece:
    """A strided part of a tensor with the slots that act on it."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    scale: tuple[Spread, ...]
    order: tuple[Spread, ...]

    def part(self, flat: Tensor) -> Tensor:
        """This part of a tensor's flat elements, which may have dims in front."""
        ahead = flat.dim() - 1
        return flat.as_strided(
            (*flat.shape[:ahead], *self.shape),
            (*flat.stride()[:ahead], *self.strides),
            flat.storage_offset() + self.offset,
        )


@dataclass(frozen=True)
class Slots:
    """All slots of a model. Slot 0 of either kind does nothing.

    Attributes:
        unit: scale class of each scale slot; 0 is pinned.
        power: +1 or -1, its exponent.
        order: order class of each order slot; 0 does not move.
        origin: index in `table` of the same occurrence of the first class of its kind, in this tensor.
        repeat: how often each class of the kind occurs there.
        place: its place in the tensor's flat elements, along its own dims.
        table: places of each tensor, sorted by kind, class and occurrence.
        classes: the number of scale classes.
    """

    unit: Integers
    power: Integers
    order: Integers
    origin: Integers
    repeat: Integers
    place: Integers
    table: Integers
    classes: int

    def factors(self, scale: NDArray[np.float64]) -> NDArray[np.float64]:
        """The factor of each scale slot, from one number per scale class; for one secret, or one per row."""
        return np.concatenate([scale, 1 / scale], -1)[..., self.unit + self.classes * (self.power < 0)]

    def shifts(self, member: Integers) -> Integers:
        """The distance from which each order slot gets its content, from each order class's new number in its kind."""
        found: Integers = self.table[self.origin + member[..., self.order] * self.repeat] - self.place
        return found


@dataclass
class SlotRows:
    """Slots under construction."""

    scales: Scales
    orders: Orders
    scale_columns: list[tuple[Integers, Integers]] = field(
        default_factory=lambda: [(np.zeros(1, np.int64), np.ones(1, np.int64))]
    )
    order_columns: list[tuple[Integers, ...]] = field(default_factory=lambda: [(np.zeros(1, np.int64),) * 4])
    table: list[Integers] = field(default_factory=lambda: [np.zeros(1, np.int64)])
    scale_count: int = 1
    order_count: int = 1

    def piece(self, region: Region) -> Piece:
        """The region with its slots."""
        scale = [s for s in map(self._scale, region.units.scale) if s]
        order, covered = [], frozenset[int]()
        for factor in region.units.order:
            found = self._order(factor, region, covered)
            if found:
                order.append(found)
                covered |= frozenset(d for d, n in enumerate(found.shape) if n > 1)
        return Piece(*region.place, tuple(scale), tuple(order))

    def _scale(self, factor: Tensor) -> Spread | None:
        unit, power = self.scales.of(factor)
        unit = np.where(self.scales.symmetries[unit] > 0, unit, 0)
        whole = compressed(torch.from_numpy(np.asarray(2 * unit + (power < 0) * (unit > 0))))
        unit, power = (whole // 2).numpy().ravel(), np.where((whole % 2).numpy().ravel() > 0, -1, 1)
        if not unit.any():
            return None
        self.scale_columns.append((unit, power))
        first, self.scale_count = self.scale_count, self.scale_count + len(unit)
        return Spread(first, tuple(whole.shape))

    def _order(self, factor: Tensor, region: Region, covered: frozenset[int]) -> Spread | None:
        kinds, members = self.orders.kinds, self.orders.members
        label = self.orders.of(factor)
        label = np.where(kinds[label] > 0, label, 0)
        if not label.any():
            return None
        short = compressed(torch.from_numpy(np.asarray(label)))
        dims = varying(short) - covered
        if not dims:
            return None
        place = torch.zeros((1,) * short.dim(), dtype=torch.int64)
        for d in dims:
            place = place + along(torch.arange(short.shape[d]) * region.strides[d], d, short.dim())
        label, position = short.numpy().ravel(), place.expand(short.shape).numpy().ravel()
        count = len(label)
        rank, kind, member = ranks(label), kinds[label], members[label]
        group = np.where(kind == 0, -1 - np.arange(count), kind)  # a fixed place is a kind of its own
        by_kind = np.lexsort((rank, member, group))
        starts = np.searchsorted(group[by_kind], group)
        repeat = np.where(kind == 0, 0, np.bincount(label)[label])
        origin = self.order_count + starts + np.where(kind == 0, 0, rank)
        self.order_columns.append((np.where(kind == 0, 0, label), origin, repeat, position))
        self.table.append(position[by_kind])
        first, self.order_count = self.order_count, self.order_count + count
        return Spread(first, tuple(short.shape))

    def finish(self) -> Slots:
        """All of them."""
        unit, power = (np.concatenate(column) for column in zip(*self.scale_columns, strict=True))
        order, origin, repeat, place = (np.concatenate(column) for column in zip(*self.order_columns, strict=True))
        table = np.concatenate(self.table)
        classes = int(self.scales.classes.max()) + 1
        return Slots(unit, power, order, origin, repeat, place, table, classes)


@dataclass(frozen=True, eq=False)
class Pool:
    """Tensors concatenated in one flat vector.

    Attributes:
        entries: the tensors, with their places in the pool.
        scale: for each element its scale slots, one row per factor.
        order: its order slots.
        arange: 0, 1, 2, ... along the vector.
    """

    entries: tuple[Entry, ...]
    scale: Tensor
    order: Tensor
    arange: Tensor

    def factors(self, slots: Tensor) -> Tensor:
        """The factor of each element."""
        return _combined(slots, self.scale, torch.mul)

    def sources(self, slots: Tensor) -> Tensor:
        """The place that each element comes from."""
        return self.arange + _combined(slots, self.order, torch.add)


def _combined(slots: Tensor, sides: Tensor, combine: object) -> Tensor:
    total = slots.index_select(0, sides[0])
    for side in sides[1:]:
        total = combine(total, slots.index_select(0, side))  # type: ignore[operator]
    return total


def build_pool(entries: Sequence[Entry], pieces: dict[str, list[Piece]], device: torch.device) -> Pool:
    """Put tensors into one flat vector, with the slots of each element."""
    moved, start = [], 0
    for entry in entries:
        size = entry.shape.numel()
        moved.append(Entry(entry.name, entry.shape, start, start + size, entry.like))
        start += size
    every = [piece for entry in moved for piece in pieces.get(entry.name, ())]
    depth = [max([1, *map(len, kind)]) for kind in ([p.scale for p in every], [p.order for p in every])]
    sides = [torch.zeros((count, start), dtype=torch.int32) for count in depth]
    for entry in moved:
        for piece in pieces.get(entry.name, ()):
            for side, spreads in zip(sides, (piece.scale, piece.order), strict=True):
                for row, spread in zip(side, spreads, strict=False):
                    slots = torch.arange(spread.first, spread.first + torch.Size(spread.shape).numel())
                    part = piece.part(row[entry.start : entry.stop])
                    part.copy_(slots.reshape(spread.shape).expand(piece.shape))
    scale, order = (side.to(device) for side in sides)
    return Pool(tuple(moved), scale, order, torch.arange(start, device=device))


def count_all(piece: Piece, spreads: Sequence[Spread], values: Tensor) -> int:
    """How many elements of a part have `values` true in all factors; independent dims multiply."""
    groups: list[tuple[frozenset[int], Tensor]] = []
    for spread in spreads:
        own = spread.of(values)
        dims = varying(own)
        for other, known in [group for group in groups if group[0] & dims]:
            groups = [group for group in groups if group[0] is not other]
            own, dims = own & known, dims | other
        groups.append((dims, own))
    total = 1
    for dim, size in enumerate(piece.shape):
        total *= 1 if any(dim in dims for dims, _ in groups) else size
    for _, own in groups:
        total *= int(own.sum())
    return total


def count_levels(piece: Piece, slots: Slots, symmetries: Integers) -> list[int]:
    """How many elements of a part are bare, moved, signed, scaled; each counts once, under the strongest."""
    sized = torch.from_numpy((symmetries[slots.unit] & Symmetry.POSITIVE) > 0)
    free = torch.from_numpy(symmetries[slots.unit] > 0)
    size = torch.Size(piece.shape).numel()
    unscaled = count_all(piece, piece.scale, ~sized)
    unsigned = count_all(piece, piece.scale, ~free)
    still = torch.cat([~free, torch.from_numpy(slots.order == 0)])
    moved = [Spread(spread.first + len(free), spread.shape) for spread in piece.order]
    bare = count_all(piece, [*piece.scale, *moved], still)
    return [bare, unsigned - bare, unscaled - unsigned, size - unscaled]
