"""The book in which rules write down which numbers share noise.

Every element of every activation belongs to two *units*: a scale unit (which secret factor multiplies it) and an
order unit (with which others it may trade places). Both are integers, so an activation is described by two integer
tensors of its own shape, and reshaping, slicing or concatenating an activation is the same operation done to its
units. Unit 0 is pinned: factor 1, own place.

A permutation acts on order units. It moves the k-th element of unit u to the k-th element of unit v in every
activation at once, which is a symmetry of the network if every operation uses u and v alike. `mark` records how an
operation uses them; units with equal records form a *cell*, within which any permutation is allowed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.graph.symmetry import Symmetry

Integers = NDArray[np.int64]
Replay = Callable[[Sequence[Tensor]], Tensor]


class Units(NamedTuple):
    """The units of a tensor's elements: two integer tensors of its shape."""

    scale: Tensor
    order: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor described."""
        return self.scale.shape

    def each(self, change: Callable[[Tensor], Tensor]) -> "Units":
        """Both tensors, changed alike."""
        return Units(change(self.scale), change(self.order))


def pinned(shape: Sequence[int]) -> Units:
    """Units of a tensor that no noise touches."""
    zeros = torch.zeros((), dtype=torch.int64).expand(tuple(shape))
    return Units(zeros, zeros)


def spread(units: Units, shape: Sequence[int], dim: int) -> Units:
    """Units of a tensor of `shape` whose `dim` has the 1-d `units` and whose other dims repeat them."""
    view = [1] * len(shape)
    view[dim] = -1
    return units.each(lambda t: t.reshape(view).expand(tuple(shape)))


def ranks(labels: Integers) -> Integers:
    """For each position, how many earlier positions have the same label."""
    by_label = np.argsort(labels, kind="stable")
    place = np.arange(labels.size)
    starts = np.flatnonzero(np.diff(labels[by_label], prepend=labels[by_label][:1] - 1))
    out = np.empty_like(place)
    out[by_label] = place - np.repeat(starts, np.diff(np.append(starts, labels.size)))
    return out


class Classes:
    """Union-find over integers; 0 always stays its own representative."""

    def __init__(self) -> None:
        self._parent = [0]

    def __len__(self) -> int:
        return len(self._parent)

    def grow(self, count: int) -> Tensor:
        """`count` new members, as a 1-d tensor."""
        first = len(self._parent)
        self._parent.extend(range(first, first + count))
        return torch.arange(first, first + count)

    def find(self, member: int) -> int:
        """The representative of `member`."""
        parent = self._parent
        while parent[member] != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    def unite(self, a: Tensor, b: Tensor) -> None:
        """Put each element of `a` in one class with the element of `b` at its place."""
        shape = torch.broadcast_shapes(a.shape, b.shape)  # type: ignore[no-untyped-call]
        a, b = a.expand(shape), b.expand(shape)
        for dim in range(a.dim()):  # a dim along which both are constant by construction needs one look
            if a.stride(dim) == 0 and b.stride(dim) == 0:
                a, b = a.narrow(dim, 0, 1), b.narrow(dim, 0, 1)
        differ = a != b
        pairs = set(zip(a[differ].tolist(), b[differ].tolist(), strict=True))
        for left, right in sorted(pairs):
            low, high = sorted((self.find(left), self.find(right)))
            self._parent[high] = low

    def representatives(self) -> Integers:
        """The representative of every member."""
        return np.array([self.find(member) for member in range(len(self._parent))], dtype=np.int64)


@dataclass(frozen=True)
class Attachment:
    """Ties the elements of a parameter or buffer to a 1-d list of units.

    Attributes:
        units: the list.
        index: for each element its place in the list; broadcastable to the tensor's shape.
        stride: how far apart, in the flat tensor, elements of neighbouring places are.
        power: +1 if the unit's factor multiplies the element, -1 if it divides.
        moves: whether the element moves with its unit.
    """

    units: Units
    index: Tensor
    stride: int
    power: int = 1
    moves: bool = True

    def same_form(self, other: "Attachment") -> bool:
        """Whether both tie the same elements in the same way."""
        mine = (self.stride, self.power, self.moves, self.units.shape)
        theirs = (other.stride, other.power, other.moves, other.units.shape)
        return mine == theirs and torch.equal(self.index, other.index)


@dataclass(frozen=True)
class Limit:
    """An operation that does not let every factor through."""

    members: Tensor
    symmetry: Symmetry
    where: str
    why: str


@dataclass(frozen=True)
class Birth:
    """An operation at whose output new scale units begin."""

    where: str
    members: Tensor


@dataclass(frozen=True)
class Mark:
    """How an operation uses order units: they stay exchangeable if their values, in order of place, are equal."""

    order: Tensor
    values: Callable[[Callable[[Tensor], Tensor]], Tensor]


class Ledger:
    """Units, what unites them, what limits them, and the parameters tied to them."""

    def __init__(self) -> None:
        self.scale = Classes()
        self.order = Classes()
        self.births: list[Birth] = []
        self.limits: list[Limit] = []
        self.marks: list[Mark] = []
        self.attachments: dict[str, tuple[Attachment, ...]] = {}

    def fresh_scale(self, count: int, where: str) -> Tensor:
        """New scale units, named after the operation that writes them."""
        members = self.scale.grow(count)
        self.births.append(Birth(where, members))
        return members

    def fresh(self, count: int, where: str) -> Units:
        """New units: an axis begins."""
        units = Units(self.fresh_scale(count, where), self.order.grow(count))
        self.count(units.order)
        return units

    def unite(self, a: Units, b: Units) -> None:
        """Elements at the same place share their noise from now on."""
        self.scale.unite(a.scale, b.scale)
        self.order.unite(a.order, b.order)

    def limit(self, units: Units, symmetry: Symmetry, where: str, why: str) -> None:
        """Only factors of `symmetry` pass here."""
        members = torch.from_numpy(np.unique(units.scale.numpy()))
        self.limits.append(Limit(members[members > 0], symmetry, where, why))

    def fix_order(self, units: Units) -> None:
        """These elements keep their places."""
        self.order.unite(units.order, torch.zeros_like(units.order))

    def pin(self, units: Units, where: str, why: str) -> None:
        """No noise passes here."""
        self.limit(units, Symmetry.NOTHING, where, why)
        self.fix_order(units)

    def mark(self, order: Tensor, values: Tensor) -> None:
        """Units whose elements have different `values`, in order of place, do not trade places."""
        self.marks.append(Mark(order, lambda _: values))

    def count(self, order: Tensor) -> None:
        """Units that do not occur here, or not equally often, do not trade places."""
        self.mark(order, torch.zeros_like(order))

    def replay(self, operation: Replay, inputs: Sequence[Units], where: str) -> Units:
        """Units after an operation that only moves elements; those it adds (-1) are zeros, free to take any noise."""
        gap = -1
        moved = Units(operation([u.scale for u in inputs]), operation([u.order for u in inputs]))
        gaps = moved.scale == gap
        if gaps.any():
            new = self.fresh(int(gaps.sum()), where)
            moved = Units(moved.scale.masked_scatter(gaps, new.scale), moved.order.masked_scatter(gaps, new.order))

        def origins(rank: Callable[[Tensor], Tensor]) -> Tensor:
            place = operation([rank(u.order) for u in inputs])
            which = operation([torch.full(u.shape, i) for i, u in enumerate(inputs)])
            return place * (len(inputs) + 1) + which

        self.marks.append(Mark(moved.order, origins))
        return moved

    def merge(self, units: Units, dims: Sequence[int]) -> Units:
        """Units after a sum or a mean over `dims`, which stay in the result with size 1."""
        merged = units.each(lambda t: t.amin(tuple(dims), keepdim=True))
        self.unite(units, merged.each(lambda t: t.expand(units.shape)))
        self.marks.append(Mark(units.order, lambda rank: rank(merged.order).expand(units.shape)))
        return merged

    def vector(self, units: Units, dim: int) -> Units:
        """The 1-d units of `dim`, after uniting along all other dims."""
        others = [d for d in range(len(units.shape)) if d != dim % len(units.shape)]
        constant = all(t.stride(d) == 0 or t.shape[d] == 1 for t in units for d in others)
        merged = units if constant else self.merge(units, others)
        flat = merged.each(lambda t: t.movedim(dim, -1)[(0,) * len(others)])
        self.count(flat.order)
        return flat

    def attach(self, name: str, *attachments: Attachment) -> None:
        """Tie the tensor `name` to units; a tensor used twice unites its uses, or is pinned if they differ in form."""
        known = self.attachments.setdefault(name, attachments)
        if known is attachments:
            return
        alike = len(known) == len(attachments)
        if alike and all(a.same_form(b) for a, b in zip(known, attachments, strict=True)):
            for a, b in zip(known, attachments, strict=True):
                self.unite(a.units, b.units)
            return
        for attachment in known + attachments:
            self.pin(attachment.units, name, "it is used in two ways that ask for different noise")

    def cells(self, classes: Integers) -> Integers:
        """For each order unit (by representative), the number of its cell; units of cell 0 stay where they are."""

        def rank(order: Tensor) -> Tensor:
            return torch.from_numpy(ranks(classes[order.numpy()].ravel()).reshape(order.shape))

        cell = np.zeros(len(classes), dtype=np.int64)
        known: dict[tuple[int, int, bytes], int] = {}
        for number, mark in enumerate(self.marks):
            labels = classes[mark.order.numpy()].ravel()
            values = mark.values(rank).expand(mark.order.shape).numpy().ravel()
            by_label = np.argsort(labels, kind="stable")
            starts = np.flatnonzero(np.diff(labels[by_label], prepend=labels[by_label][:1] - 1))
            groups = np.split(values[by_label], starts[1:])
            for unit, group in zip(labels[by_label][starts], groups, strict=True):
                if unit:
                    key = (int(cell[unit]), number, group.tobytes())
                    cell[unit] = known.setdefault(key, len(known) + 1)
        return cell
