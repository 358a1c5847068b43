"""The constraints that rules record: which values share noise, and what limits it.

Rules only add constraints: equal units, factors that an operation does not commute with, fixed positions, blocks of
units that are permuted together. `solve.py` solves them after the walk over the model.

A permutation acts on order units. It moves the k-th element of unit u to the k-th element of unit v in every tensor at
once, which is a symmetry of the network if every operation treats u and v alike. A `Mark` records how an operation uses
units; a `Block` that some of them (the features of a head, the channels of a group) move only as a whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Dims, Units, first_along, varying_dims

Rank = Callable[[Tensor], Tensor]
FACTORS = {Symmetry.NOTHING: "no factor", Symmetry.SIGN: "only signs", Symmetry.POSITIVE: "only positive factors"}


class Limit(NamedTuple):
    """An operation that does not commute with every factor."""

    members: Tensor
    symmetry: Symmetry
    where: str
    why: str


class Mark(NamedTuple):
    """How an operation uses order units: units stay exchangeable if their values, in order of position, are equal."""

    order: Tensor
    values: Callable[[Rank], Tensor]


class Block(NamedTuple):
    """Rows of order units that stay together; each row has a parent unit, which moves with the row."""

    children: Tensor
    parents: Tensor


@dataclass(frozen=True)
class Region:
    """A part of a parameter or buffer, as a strided view of its flat elements, and the noise on it."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    units: Units

    def sort_dims(self) -> "Region":
        """Return the same elements with the largest stride first: a transposed view is the same region."""
        dims = sorted(range(len(self.shape)), key=lambda d: (-self.strides[d], d))
        shape, strides = (tuple(values[d] for d in dims) for values in (self.shape, self.strides))
        return Region(self.offset, shape, strides, self.units.each(lambda factor: factor.permute(dims)))

    @property
    def view(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Offset, shape and strides."""
        return self.offset, self.shape, self.strides


@dataclass
class Ledger:
    """Units, the constraints on them, and the tensors of the model that carry them.

    `births` are the tensors of the model at which new scale units begin, with these units.
    """

    scales: int = 1
    orders: int = 1
    scale_pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    order_pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    births: list[tuple[str, Tensor]] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    regions: dict[str, list[Region]] = field(default_factory=dict)

    # New units.

    def fresh_scale(self, shape: Sequence[int], where: str) -> Tensor:
        """Create scale units, named after the tensor of the model at which they begin."""
        count = torch.Size(shape).numel()
        units = torch.arange(self.scales, self.scales + count)
        self.scales += count
        self.births.append((where, units))
        return units.reshape(tuple(shape))

    def fresh_order(self, shape: Sequence[int]) -> Tensor:
        """Create order units."""
        count = torch.Size(shape).numel()
        units = torch.arange(self.orders, self.orders + count).reshape(tuple(shape))
        self.orders += count
        self.count(units)
        return units

    # Scale.

    def limit(self, factors: Sequence[Tensor], symmetry: Symmetry, where: str, why: str | None = None) -> None:
        """Allow only factors of `symmetry`."""
        if symmetry == Symmetry.EVERYTHING:
            return
        for factor in factors:
            members = torch.from_numpy(np.unique(factor.abs().numpy()))
            reason = why or f"it lets {FACTORS[symmetry]} through"
            self.limits.append(Limit(members[members > 0], symmetry, where, reason))

    def note(self, where: str, why: str) -> None:
        """Record that a tensor gets no noise."""
        self.limits.append(Limit(torch.empty(0, dtype=torch.int64), Symmetry.NOTHING, where, why))

    def unite_scale(self, a: Tensor, b: Tensor, where: str, why: str) -> None:
        """Make factors equal element by element; an element without a factor in one has none in the other."""
        if a is b:
            return
        a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
        for alone in (b[(a == 0) & (b != 0)], a[(b == 0) & (a != 0)]):
            if alone.numel():
                self.limit([alone], Symmetry.NOTHING, where, why)
        both = (a != 0) & (b != 0) & (a != b)
        if both.any():
            self.scale_pairs.append((a[both], b[both]))

    def merge_scale(self, factor: Tensor, dims: Dims, where: str) -> Tensor:
        """Make a factor constant along `dims`, because an operation sums over them."""
        first = first_along(factor, dims)
        self.unite_scale(factor, first, where, "it adds up elements of which some carry no factor")
        return first

    def agree_scale(self, a: Sequence[Tensor], b: Sequence[Tensor], where: str, why: str) -> tuple[Tensor, ...]:
        """Make two products of factors equal and return the common product.

        Factors of only one side are paired with one another, or limited to 1; products of many factors may have more
        solutions than this finds.
        """
        left = [x for x in a if not any(x is y for y in b)]
        right = [y for y in b if not any(y is x for x in a)]
        same = [x for x in a if any(x is y for y in b)]
        while left and right:
            x = left.pop(0)
            y = min(right, key=lambda other: len(varying_dims(other) ^ varying_dims(x)))
            right = [other for other in right if other is not y]
            self.unite_scale(x, y, where, why)
            same.append(min(x, y, key=Tensor.numel))
        rest = left or right
        if len(rest) == 2 and varying_dims(rest[0]) == varying_dims(rest[1]):
            self.unite_scale(rest[0], -rest[1], where, why)
        else:
            self.limit(rest, Symmetry.NOTHING, where, why)
        return tuple(same)

    # Order.

    def count(self, order: Tensor) -> None:
        """Forbid swaps of units that occur here in different numbers."""
        self.marks.append(Mark(order, lambda _: torch.zeros_like(order)))

    def fix(self, *factors: Tensor) -> None:
        """Forbid all permutations of these factors."""
        self.order_pairs += [(factor, torch.zeros_like(factor)) for factor in factors]

    def fix_along(self, factors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Fix the factors that vary along `dims` and return the others."""
        self.fix(*[factor for factor in factors if varying_dims(factor) & dims])
        return tuple(factor for factor in factors if not varying_dims(factor) & dims)

    def unite_order(self, a: Tensor, b: Tensor) -> None:
        """Make order factors equal element by element."""
        if a is b:
            return
        a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
        differ = a != b
        if differ.any():
            self.order_pairs.append((a[differ], b[differ]))

    def merge_order(self, factor: Tensor, dims: Dims) -> Tensor:
        """Make an order factor constant along `dims`: its elements move together."""
        first = first_along(factor, dims)
        self.unite_order(factor, first)
        return first

    def move(self, operation: Callable[[Sequence[Tensor]], Tensor], factors: Sequence[Tensor]) -> Tensor:
        """Apply an operation that only moves elements to order factors."""
        after = operation(factors)
        if len(factors) == 1 and torch.equal(after.flatten(), factors[0].flatten()):
            return after

        def origins(rank: Rank) -> Tensor:
            position = operation([rank(f) for f in factors])
            which = operation([torch.full(f.shape, i) for i, f in enumerate(factors)])
            return position * (len(factors) + 1) + which

        self.marks.append(Mark(after, origins))
        return after

    def fold(self, factors: Sequence[Tensor], dims: Dims) -> list[Tensor]:
        """Return order factors after a sum over `dims`, as far as they remain."""
        return [folded for factor in factors if (folded := self._fold(factor, dims)) is not None]

    def _fold(self, factor: Tensor, dims: Dims) -> Tensor | None:
        """Return an order factor after a sum over `dims`; None if nothing remains.

        Elements along `dims` form one block per remaining position; the result holds the blocks' parents.
        """
        inner = varying_dims(factor) & dims
        if not inner:
            return factor
        outer = sorted(varying_dims(factor) - inner)
        if not outer:
            self.count(factor)
            return None
        parents = self.fresh_order(first_along(factor, dims).shape)
        rows = factor.permute(*outer, *[d for d in range(factor.dim()) if d not in outer])
        self.blocks.append(Block(rows.reshape(parents.numel(), -1), parents.flatten()))
        return parents

    def agree_order(
        self, a: Sequence[Tensor], distinct_a: Dims, b: Sequence[Tensor], distinct_b: Dims
    ) -> tuple[Tensor, ...]:
        """Give two tensors of an element-wise operation the same order and return that of the result.

        `distinct` are the dims along which a tensor's elements may differ; along the others it is broadcast, and moving
        the other tensor does not change it.
        """
        left = [(factor, self._fold(factor, dims - distinct_b)) for factor in a if (dims := varying_dims(factor))]
        right = [(factor, self._fold(factor, dims - distinct_a)) for factor in b if (dims := varying_dims(factor))]
        waiting = [(factor, seen) for factor, seen in right if seen is not None and varying_dims(factor) & distinct_a]
        result = [factor for factor, _ in right if not varying_dims(factor) & distinct_a]
        for factor, seen in left:
            if seen is None or not varying_dims(factor) & distinct_b:
                result.append(factor)
                continue
            own = varying_dims(seen)
            fits = [pair for pair in waiting if _are_nested(own, varying_dims(pair[1]))]
            if not fits:
                self.fix(factor)
                continue
            other, view = max(fits, key=lambda pair: len(varying_dims(pair[1]) & own))
            waiting = [pair for pair in waiting if pair[0] is not other]
            self.unite_order(seen, view)
            if factor is seen and other is view:
                result.append(min(factor, other, key=Tensor.numel))
            else:  # the one with the inner positions
                result.append(other if factor is seen else factor)
        self.fix(*[factor for factor, _ in waiting])
        return tuple(result)

    # The model's own tensors.

    def attach(self, name: str, region: Region) -> None:
        """Record the noise on a part of the tensor `name`; a part used twice has the same noise in both uses."""
        known = self.regions.setdefault(name, [])
        region = region.sort_dims()
        for number, old in enumerate(known):
            if old.view == region.view:
                why = "it is used in two ways that ask for different noise"
                scale = self.agree_scale(old.units.scale, region.units.scale, name, why)
                everywhere = frozenset(range(len(old.shape)))
                order = self.agree_order(old.units.order, everywhere, region.units.order, everywhere)
                known[number] = Region(*old.view, Units(scale, order))
                return
        overlapping = [old for old in known if _overlap(old, region)]
        for other in [*overlapping, region] if overlapping else []:
            self.pin(other.units, name, "parts of it that overlap are used in different ways")
        known.append(region)

    def pin(self, units: Units, where: str, why: str) -> None:
        """Allow no noise."""
        self.limit(units.scale, Symmetry.NOTHING, where, why)
        self.fix(*units.order)


def _are_nested(a: Dims, b: Dims) -> bool:
    return bool(a & b) and (a <= b or b <= a)


def _overlap(a: Region, b: Region) -> bool:
    """Return whether two views may share an element; in doubt, True."""
    if a.strides != b.strides:
        ends = [r.offset + sum((n - 1) * s for n, s in zip(r.shape, r.strides, strict=True)) for r in (a, b)]
        return not (ends[0] < b.offset or ends[1] < a.offset)
    sizes = {s: (n, m) for n, m, s in zip(a.shape, b.shape, a.strides, strict=True) if max(n, m) > 1}
    if len(sizes) < sum(max(n, m) > 1 for n, m in zip(a.shape, b.shape, strict=True)):
        return True
    rest_a, rest_b = a.offset, b.offset
    for stride in sorted(sizes, reverse=True):
        inner = sum((max(sizes[s]) - 1) * s for s in sizes if s < stride)
        first_a, rest_a = divmod(rest_a, stride)
        first_b, rest_b = divmod(rest_b, stride)
        if max(rest_a, rest_b) + inner >= stride:
            return True
        if first_a + sizes[stride][0] <= first_b or first_b + sizes[stride][1] <= first_a:
            return False
    return True
