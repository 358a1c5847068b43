"""Record constraints on the noise: which values share it, and which operations limit it.

Rules only add constraints: units that are equal, factors that an operation does not commute with, fixed positions, and
blocks of units that are permuted together. `solve.py` solves them once all operations have been visited.

A permutation acts on order units. It moves the k-th element of unit u to the k-th element of unit v in every tensor at
once, which is a symmetry of the network if every operation treats u and v in the same way. A `Mark` records how an
operation uses units; a `Block` records that units, such as the channels of a group, only move together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedveil.graph.units import Dims, Symmetry, Units, first_along, varying_dims

Rank = Callable[[Tensor], Tensor]
FACTORS = {Symmetry.NOTHING: "no factor", Symmetry.SIGN: "only signs", Symmetry.POSITIVE: "only positive factors"}


class Limit(NamedTuple):
    """A limit on factors, imposed by an operation that does not commute with all of them."""

    members: Tensor
    symmetry: Symmetry
    where: str
    reason: str


class Mark(NamedTuple):
    """A use of order units by an operation; units can be swapped only if their values are equal at every position."""

    order: Tensor
    values: Callable[[Rank], Tensor]


class Block(NamedTuple):
    """Rows of order units that stay together; each row moves with its parent unit."""

    children: Tensor
    parents: Tensor


class StridedView(NamedTuple):
    """A strided view of a tensor, defined by the arguments of `Tensor.as_strided`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """The index just past the view's last element."""
        return self.offset + 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))

    def overlaps(self, other: "StridedView") -> bool:
        """Return whether the two views share an element."""
        if self.end <= other.offset or other.end <= self.offset:
            return False
        flat = torch.zeros(max(self.end, other.end), dtype=torch.bool)
        flat.as_strided(*self).fill_(True)
        return bool(flat.as_strided(*other).any())


class Region(NamedTuple):
    """A part of a parameter or buffer, and the noise on it."""

    view: StridedView
    units: Units


@dataclass
class Ledger:
    """All units, the constraints on them, and the model's tensors that carry them.

    Attributes:
        scales, orders: the numbers of scale and order units so far, including unit 0, which does nothing.
        scale_pairs, order_pairs: pairs of units that must be equal.
        scale_origins: the tensors and operations at which scale units begin, each with its units.
        limits, marks, blocks: the other constraints.
        regions: the noise on each tensor of the model.
        element_units: the units of each parameter that is used element by element.
    """

    scales: int = 1
    orders: int = 1
    scale_pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    order_pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    scale_origins: list[tuple[str, Tensor]] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    regions: dict[str, list[Region]] = field(default_factory=dict)
    element_units: dict[str, Units] = field(default_factory=dict)

    # Create units.

    def create_scale(self, shape: Sequence[int], where: str) -> Tensor:
        """Create scale units that begin at `where`, the name of a tensor or operation."""
        count = torch.Size(shape).numel()
        units = torch.arange(self.scales, self.scales + count)
        self.scales += count
        self.scale_origins.append((where, units))
        return units.reshape(tuple(shape))

    def create_order(self, shape: Sequence[int]) -> Tensor:
        """Create order units."""
        count = torch.Size(shape).numel()
        units = torch.arange(self.orders, self.orders + count).reshape(tuple(shape))
        self.orders += count
        self.require_equal_counts(units)
        return units

    # Constrain scale units.

    def limit(self, factors: Sequence[Tensor], symmetry: Symmetry, where: str, reason: str | None = None) -> None:
        """Allow only factors that `symmetry` contains."""
        if symmetry == Symmetry.EVERYTHING:
            return
        for factor in factors:
            members = torch.from_numpy(np.unique(factor.abs().numpy()))
            reason = reason or f"it lets {FACTORS[symmetry]} through"
            self.limits.append(Limit(members[members > 0], symmetry, where, reason))

    def unite_scale(self, a: Tensor, b: Tensor, where: str, reason: str) -> None:
        """Make two factors equal element by element; where only one of them has a unit, limit that unit to 1."""
        if a is b:
            return
        a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
        is_unpaired = (a == 0) != (b == 0)
        if is_unpaired.any():
            self.limit([(a + b)[is_unpaired]], Symmetry.NOTHING, where, reason)
        is_unequal = (a != b) & ~is_unpaired
        if is_unequal.any():
            self.scale_pairs.append((a[is_unequal], b[is_unequal]))

    def merge_scale(self, factor: Tensor, dims: Dims, where: str) -> Tensor:
        """Make a factor constant along `dims`, because an operation sums over them."""
        first = first_along(factor, dims)
        self.unite_scale(factor, first, where, "it sums elements, some of which carry no factor")
        return first

    def reconcile_scale(self, a: Sequence[Tensor], b: Sequence[Tensor], where: str, reason: str) -> tuple[Tensor, ...]:
        """Make two products of factors equal and return the common product.

        Factors that occur on only one side are paired with each other or limited to 1. For products of many
        factors, this may be stricter than necessary.
        """
        only_a = [x for x in a if not any(x is y for y in b)]
        only_b = [y for y in b if not any(y is x for x in a)]
        common = [x for x in a if any(x is y for y in b)]
        while only_a and only_b:
            x = only_a.pop(0)
            y = min(only_b, key=lambda candidate: len(varying_dims(candidate) ^ varying_dims(x)))
            only_b = [candidate for candidate in only_b if candidate is not y]
            self.unite_scale(x, y, where, reason)
            common.append(min(x, y, key=Tensor.numel))
        unpaired = only_a or only_b
        if len(unpaired) == 2 and varying_dims(unpaired[0]) == varying_dims(unpaired[1]):
            self.unite_scale(unpaired[0], -unpaired[1], where, reason)
        else:
            self.limit(unpaired, Symmetry.NOTHING, where, reason)
        return tuple(common)

    # Constrain order units.

    def require_equal_counts(self, order: Tensor) -> None:
        """Forbid swapping units that do not occur the same number of times in this factor."""
        self.marks.append(Mark(order, lambda _: torch.zeros_like(order)))

    def fix(self, *factors: Tensor) -> None:
        """Forbid all permutations of these factors."""
        self.order_pairs += [(factor, torch.zeros_like(factor)) for factor in factors]

    def fix_along(self, factors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Fix the factors that vary along `dims` and return the others."""
        self.fix(*[factor for factor in factors if varying_dims(factor) & dims])
        return tuple(factor for factor in factors if not varying_dims(factor) & dims)

    def unite_order(self, a: Tensor, b: Tensor) -> None:
        """Make two order factors equal element by element."""
        if a is b:
            return
        a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
        differs = a != b
        if differs.any():
            self.order_pairs.append((a[differs], b[differs]))

    def merge_order(self, factor: Tensor, dims: Dims) -> Tensor:
        """Make an order factor constant along `dims`, so that elements along them move together."""
        first = first_along(factor, dims)
        self.unite_order(factor, first)
        return first

    def move(self, units: Units, operation: Callable[[Tensor], Tensor]) -> Units:
        """Apply an operation to a tensor's factors; the operation must only move elements."""
        order = tuple(self.move_order(lambda factors: operation(factors[0]), [factor]) for factor in units.order)
        return Units(tuple(map(operation, units.scale)), order, units.zero)

    def move_order(self, operation: Callable[[Sequence[Tensor]], Tensor], factors: Sequence[Tensor]) -> Tensor:
        """Apply an operation to order factors, one from each operand; the operation must only move elements."""
        moved = operation(factors)
        if len(factors) == 1 and torch.equal(moved.flatten(), factors[0].flatten()):
            return moved

        def origins(rank: Rank) -> Tensor:
            position = operation([rank(f) for f in factors])
            operand = operation([torch.full(f.shape, i) for i, f in enumerate(factors)])
            return position * (len(factors) + 1) + operand

        self.marks.append(Mark(moved, origins))
        return moved

    def fold(self, factors: Sequence[Tensor], dims: Dims) -> list[Tensor]:
        """Return the order factors that remain after a sum over `dims`."""
        return [folded for factor in factors if (folded := self._fold(factor, dims)) is not None]

    def _fold(self, factor: Tensor, dims: Dims) -> Tensor | None:
        """Return an order factor after a sum over `dims`; None if nothing remains.

        The elements along `dims` form one block per remaining position; the result contains the blocks' parents.
        """
        summed_dims = varying_dims(factor) & dims
        if not summed_dims:
            return factor
        remaining_dims = sorted(varying_dims(factor) - summed_dims)
        if not remaining_dims:
            self.require_equal_counts(factor)
            return None
        parents = self.create_order(first_along(factor, dims).shape)
        rows = factor.permute(*remaining_dims, *[d for d in range(factor.dim()) if d not in remaining_dims])
        self.blocks.append(Block(rows.reshape(parents.numel(), -1), parents.flatten()))
        return parents

    def reconcile_order(
        self, a: Sequence[Tensor], distinct_a: Dims, b: Sequence[Tensor], distinct_b: Dims
    ) -> tuple[Tensor, ...]:
        """Give both operands of an element-wise operation the same order and return the order of the result.

        `distinct_a` and `distinct_b` are the dims along which the elements of each operand may differ. Along all other
        dims an operand is broadcast, so permuting the other operand does not affect it.
        """
        folded_a = [(factor, self._fold(factor, dims - distinct_b)) for factor in a if (dims := varying_dims(factor))]
        folded_b = [(factor, self._fold(factor, dims - distinct_a)) for factor in b if (dims := varying_dims(factor))]
        unmatched = [
            (factor, folded) for factor, folded in folded_b if folded is not None and varying_dims(factor) & distinct_a
        ]
        result = [factor for factor, _ in folded_b if not varying_dims(factor) & distinct_a]
        for factor, folded in folded_a:
            if folded is None or not varying_dims(factor) & distinct_b:
                result.append(factor)
                continue
            dims_of_folded = varying_dims(folded)
            candidates = [
                pair
                for pair in unmatched
                if dims_of_folded <= varying_dims(pair[1]) or dims_of_folded >= varying_dims(pair[1])
            ]
            if not candidates:
                self.fix(factor)
                continue
            other, other_folded = max(candidates, key=lambda pair: len(varying_dims(pair[1]) & dims_of_folded))
            unmatched = [pair for pair in unmatched if pair[0] is not other]
            self.unite_order(folded, other_folded)
            if factor is folded and other is other_folded:
                result.append(min(factor, other, key=Tensor.numel))
            else:  # keep the factor that varies along more dims
                result.append(other if factor is folded else factor)
        self.fix(*[factor for factor, _ in unmatched])
        return tuple(result)

    # Assign units to the model's tensors.

    def attach(self, name: str, layout: Tensor, offset: int, units: Units) -> None:
        """Record the noise on a part of the tensor `name`, with the shape and strides of `layout`.

        A part that is used twice carries the same noise both times, even if one of the uses transposes it.
        """
        dims = sorted(range(layout.dim()), key=lambda d: (-layout.stride()[d], d))
        view = StridedView(tuple(layout.shape[d] for d in dims), tuple(layout.stride()[d] for d in dims), offset)
        units, regions = units.map(lambda factor: factor.permute(dims)), self.regions.setdefault(name, [])
        for index, (other_view, other_units) in enumerate(regions):
            if other_view == view:
                reason = "it is used in two ways that need different noise"
                scale = self.reconcile_scale(other_units.scale, units.scale, name, reason)
                all_dims = frozenset(range(len(dims)))
                order = self.reconcile_order(other_units.order, all_dims, units.order, all_dims)
                regions[index] = Region(view, Units(scale, order))
                return
        overlapping = [other_units for other_view, other_units in regions if view.overlaps(other_view)]
        for other_units in [*overlapping, units] if overlapping else []:
            self.pin(other_units, name, "overlapping parts of it are used in different ways")
        regions.append(Region(view, units))

    def pin(self, units: Units, where: str, reason: str) -> None:
        """Forbid all noise on these units."""
        self.limit(units.scale, Symmetry.NOTHING, where, reason)
        self.fix(*units.order)
