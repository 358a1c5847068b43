"""From units to what they do to the elements of parameters and buffers."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.graph.layout import Layout
from fedveil.graph.ledger import Attachment, Integers, Ledger, ranks


@dataclass(frozen=True)
class Slots:
    """One row a (tensor, place along an axis): what its unit's factor and place do to the tensor.

    Attributes:
        unit: scale class of the place; 0 is pinned.
        power: +1 or -1, the factor's exponent.
        order: order class of the place; 0 stays.
        origin: in `table`, the place's occurrence of the first unit of its cell, in this tensor.
        repeat: how often each unit of the cell occurs there.
        place: the place itself.
        stride: distance in the flat vector between neighbouring places; 0 for what does not move.
        table: places of each tensor, sorted by cell, unit and occurrence.
        classes: how many scale classes there are.
    """

    unit: Integers
    power: Integers
    order: Integers
    origin: Integers
    repeat: Integers
    place: Integers
    stride: Integers
    table: Integers
    classes: int

    @cached_property
    def _either(self) -> Integers:
        return self.unit + self.classes * (self.power < 0)

    def factors(self, scale: NDArray[np.float64]) -> NDArray[np.float64]:
        """The factor of each slot, from one a scale class; for one secret, or one a row."""
        return np.concatenate([scale, 1 / scale], -1)[..., self._either]

    def shifts(self, member: Integers) -> Integers:
        """How far away in the flat vector each slot's content comes from, by each order class's new member number."""
        source = self.table[self.origin + member[..., self.order] * self.repeat]
        return (source - self.place) * self.stride


@dataclass
class SlotRows:
    """Slots under construction; slot 0 does nothing."""

    columns: list[list[Integers]]
    table: list[Integers]
    count: int = 1
    offset: int = 1

    @classmethod
    def start(cls) -> "SlotRows":
        """Only slot 0: unit 0, order 0, place 0."""
        zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        return cls([[zero], [one], [zero], [zero], [zero], [zero], [zero]], [zero])

    def add(self, attachment: Attachment, scale: Integers, order: Integers, cells: Integers) -> int:
        """Append an attachment's places; returns the number of its first slot."""
        n = attachment.units.shape[0]
        place = np.arange(n)
        unit = scale[attachment.units.scale.numpy()]
        member = order[attachment.units.order.numpy()]
        rank = ranks(member)
        cell = cells[member]
        fixed = cell == 0
        group = np.where(fixed, -1 - place, cell)  # a place that stays is a cell of its own
        by_cell = np.lexsort((rank, member, group))
        position = np.empty(n, np.int64)
        position[by_cell] = place
        starts = np.searchsorted(group[by_cell], group)
        counts = np.bincount(member, minlength=member.max() + 1)[member] if n else member
        rank = np.where(fixed, 0, rank)
        order_class = np.where(fixed, 0, member)
        stride = np.full(n, attachment.stride if attachment.moves else 0)
        power = np.full(n, attachment.power)
        repeat = np.where(fixed, 0, counts)
        new = (unit, power, order_class, self.offset + starts + rank, repeat, place, stride)
        for column, values in zip(self.columns, new, strict=True):
            column.append(values.astype(np.int64))
        self.table.append(by_cell.astype(np.int64))
        first, self.count, self.offset = self.count, self.count + n, self.offset + n
        return first

    def finish(self, classes: int) -> Slots:
        """All of them."""
        unit, power, order, origin, repeat, place, stride = (np.concatenate(column) for column in self.columns)
        return Slots(unit, power, order, origin, repeat, place, stride, np.concatenate(self.table), classes)


def index_dtype(count: int) -> torch.dtype:
    """The narrowest integer type that index_select takes."""
    return torch.int32 if count < 2**31 else torch.int64


def build_slots(
    ledger: Ledger, layout: Layout, scale: Integers, order: Integers, cells: Integers
) -> tuple[Slots, Tensor, Tensor]:
    """Slots, and for each element of the flat vector its two."""
    slots = SlotRows.start()
    dtype = index_dtype(layout.total)
    sides = torch.zeros((2, layout.total), dtype=dtype)
    for entry in layout.entries:
        for side, attachment in zip(sides, ledger.attachments.get(entry.name, ()), strict=False):
            first = slots.add(attachment, scale, order, cells)
            side[entry.start : entry.stop] = (attachment.index + first).expand(entry.shape).reshape(-1).to(dtype)
    return slots.finish(int(scale.max()) + 1), sides[0].to(layout.device), sides[1].to(layout.device)
