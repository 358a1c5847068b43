"""The effect of units on the elements of parameters and buffers.

Each factor of each tensor becomes a few *slots*, one per position along it. A scale slot has the class of one secret
number and its exponent, an order slot the positions of one class of units in this tensor. A secret is then two short
vectors, one number per scale slot and one distance per order slot, whatever the size of the model.

Small tensors are pooled in one flat vector, which is perturbed by one product and one gather; a large one is multiplied
by broadcasting and gathered dim by dim.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.graph.layout import Entry
from fedveil.graph.ledger import Region
from fedveil.graph.solve import Integers, Orders, Scales, ranks
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Dims, compress, factor_along, varying_dims

POOLED = 2**15  # elements of the largest tensor that goes into the pool


@dataclass(frozen=True)
class Spread:
    """A run of slots, one per element of a factor of this shape."""

    first: int
    shape: tuple[int, ...]

    def of(self, slots: Tensor) -> Tensor:
        """Return their values in the factor's shape."""
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
        """Return this part of a tensor's flat elements, which may have leading dims."""
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
        classes: the number of scale classes.
        unit: scale class of each scale slot; 0 is pinned.
        power: +1 or -1, its exponent.
        order: order class of each order slot; 0 does not move.
        origin: index in `table` of the same occurrence of the first class of its kind, in this tensor.
        repeat: how often each class of the kind occurs there.
        place: its index in the tensor's flat elements, along the slot's dims.
        table: indices of each tensor, sorted by kind, class and occurrence.
    """

    classes: int
    unit: Integers
    power: Integers
    order: Integers
    origin: Integers
    repeat: Integers
    place: Integers
    table: Integers

    def factors(self, scale: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the factor of each scale slot, from one number per scale class; for one secret, or one per row."""
        return np.concatenate([scale, 1 / scale], -1)[..., self.unit + self.classes * (self.power < 0)]

    def shifts(self, member: Integers) -> Integers:
        """Return the distance from which each order slot gets its content, from each class's new number in its kind."""
        found: Integers = self.table[self.origin + member[..., self.order] * self.repeat] - self.place
        return found


class SlotBuilder:
    """Collects the slots of all tensors."""

    def __init__(self, scales: Scales, orders: Orders) -> None:
        zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        self._scales, self._orders = scales, orders
        self._scale_columns = [(zero, one)]
        self._order_columns = [(zero,) * 5]
        self._scale_count = self._order_count = 1

    def add(self, region: Region) -> Piece:
        """Return the region with its slots."""
        scale = [spread for spread in map(self._add_scale, region.units.scale) if spread]
        order, used = [], frozenset[int]()
        for factor in region.units.order:
            spread = self._add_order(factor, region, used)
            if spread:
                order.append(spread)
                used |= frozenset(d for d, n in enumerate(spread.shape) if n > 1)
        return Piece(*region.view, tuple(scale), tuple(order))

    def _add_scale(self, factor: Tensor) -> Spread | None:
        unit, power = self._scales.classify(factor)
        unit = np.where(self._scales.symmetries[unit] > 0, unit, 0)
        signed = compress(torch.from_numpy(np.asarray(2 * unit + (power < 0) * (unit > 0))))
        unit, inverse = np.divmod(signed.numpy().ravel(), 2)
        if not unit.any():
            return None
        self._scale_columns.append((unit, 1 - 2 * inverse))
        first, self._scale_count = self._scale_count, self._scale_count + len(unit)
        return Spread(first, tuple(signed.shape))

    def _add_order(self, factor: Tensor, region: Region, used: Dims) -> Spread | None:
        kinds, members = self._orders.kinds, self._orders.members
        label = self._orders.classes[factor.numpy()]
        short = compress(torch.from_numpy(np.asarray(np.where(kinds[label] > 0, label, 0))))
        dims = varying_dims(short) - used
        if not dims or not short.any():
            return None
        position = torch.zeros((1,) * short.dim(), dtype=torch.int64)
        for d in dims:
            position = position + factor_along(torch.arange(short.shape[d]) * region.strides[d], d, short.dim())
        label, place = short.numpy().ravel(), position.expand(short.shape).numpy().ravel()
        count = len(label)
        rank, kind, member = ranks(label), kinds[label], members[label]
        group = np.where(kind == 0, -1 - np.arange(count), kind)  # a fixed position is the only one of its kind
        by_kind = np.lexsort((rank, member, group))
        starts = np.searchsorted(group[by_kind], group)
        repeat = np.where(kind == 0, 0, np.bincount(label)[label])
        origin = self._order_count + starts + np.where(kind == 0, 0, rank)
        self._order_columns.append((np.where(kind == 0, 0, label), origin, repeat, place, place[by_kind]))
        first, self._order_count = self._order_count, self._order_count + count
        return Spread(first, tuple(short.shape))

    def finish(self) -> Slots:
        """Return all slots."""
        unit, power = map(np.concatenate, zip(*self._scale_columns, strict=True))
        columns = map(np.concatenate, zip(*self._order_columns, strict=True))
        return Slots(int(self._scales.classes.max()) + 1, unit, power, *columns)


@dataclass(frozen=True, eq=False)
class Pool:
    """Tensors concatenated in one flat vector.

    Attributes:
        entries: the tensors, with their positions in the pool.
        scale: for each element its scale slots, one row per factor.
        order: its order slots.
        arange: 0, 1, 2, ... along the vector.
    """

    entries: tuple[Entry, ...]
    scale: Tensor
    order: Tensor
    arange: Tensor

    def factors(self, slots: Tensor) -> Tensor:
        """Return the factor of each element."""
        return _combine(slots, self.scale, torch.mul)

    def sources(self, slots: Tensor) -> Tensor:
        """Return the index that each element comes from."""
        return self.arange + _combine(slots, self.order, torch.add)


def _combine(slots: Tensor, sides: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    total = slots.index_select(0, sides[0])
    for side in sides[1:]:
        total = combine(total, slots.index_select(0, side))
    return total


def build_pool(entries: Sequence[Entry], pieces: Mapping[str, list[Piece]], device: torch.device) -> Pool:
    """Put tensors into one flat vector, with the slots of each element."""
    pooled, start = [], 0
    for entry in entries:
        pooled.append(replace(entry, start=start, stop=start + entry.shape.numel()))
        start = pooled[-1].stop
    parts = [(entry, piece) for entry in pooled for piece in pieces.get(entry.name, ())]
    depths = (max([1, *[len(piece.scale) for _, piece in parts]]), max([1, *[len(piece.order) for _, piece in parts]]))
    scale, order = (torch.zeros((depth, start), dtype=torch.int32) for depth in depths)
    for entry, piece in parts:
        for rows, spreads in ((scale, piece.scale), (order, piece.order)):
            for row, spread in zip(rows, spreads, strict=False):
                slots = torch.arange(spread.first, spread.first + torch.Size(spread.shape).numel())
                part = piece.part(row[entry.start : entry.stop])
                part.copy_(slots.reshape(spread.shape).expand(piece.shape))
    return Pool(tuple(pooled), scale.to(device), order.to(device), torch.arange(start, device=device))


def count_all(piece: Piece, spreads: Sequence[Spread], values: Tensor) -> int:
    """Count the elements of a part that have `values` true in all factors; independent dims multiply."""
    groups: list[tuple[frozenset[int], Tensor]] = []
    for spread in spreads:
        own = spread.of(values)
        dims = varying_dims(own)
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
    """Count the elements of a part that are bare, moved, signed, scaled; each once, under the strongest."""
    sized = torch.from_numpy((symmetries[slots.unit] & Symmetry.POSITIVE) > 0)
    free = torch.from_numpy(symmetries[slots.unit] > 0)
    size = torch.Size(piece.shape).numel()
    unscaled = count_all(piece, piece.scale, ~sized)
    unsigned = count_all(piece, piece.scale, ~free)
    still = torch.cat([~free, torch.from_numpy(slots.order == 0)])
    moved = [Spread(spread.first + len(free), spread.shape) for spread in piece.order]
    bare = count_all(piece, [*piece.scale, *moved], still)
    return [bare, unsigned - bare, unscaled - unsigned, size - unscaled]
