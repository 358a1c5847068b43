"""Solve the rules' constraints: which units share a factor, which trade places, which move in blocks.

For inverse units (5 = -7), each unit has two nodes, itself and its inverse: a unit in the same component as its own
inverse can only be +1 or -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from fedveil.graph.ledger import Ledger
from fedveil.graph.symmetry import Symmetry

Integers = NDArray[np.int64]
Hashes = NDArray[np.uint64]


def lowest(labels: Integers, values: Integers) -> Integers:
    """For each position, the smallest value among the positions that have its label."""
    found: Integers = np.full(int(labels.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(found, labels, values)
    return found[labels]


def components(count: int, pairs: Sequence[tuple[Integers, Integers]]) -> Integers:
    """The smallest member of each node's component."""
    if not pairs:
        return np.arange(count)
    left, right = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    graph = coo_matrix((np.ones(len(left), np.int8), (left, right)), shape=(count, count))
    return lowest(connected_components(graph, directed=False)[1], np.arange(count))


def compress(labels: Integers) -> Integers:
    """Numbers 0, 1, 2, ... for the distinct labels, keeping 0."""
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


@dataclass(frozen=True)
class Scales:
    """Scale units in classes.

    Attributes:
        classes: of each unit; class 0 is unit 0, which does nothing.
        powers: +1 if the unit is its class's number, -1 if it is the inverse.
        symmetries: for each class, the numbers that it may take.
    """

    classes: Integers
    powers: Integers
    symmetries: Integers

    def of(self, factor: Tensor) -> tuple[Integers, Integers]:
        """Class and power of each element of a scale factor."""
        refs = factor.numpy()
        unit = np.abs(refs)
        return self.classes[unit], self.powers[unit] * np.sign(refs)


def solve_scales(ledger: Ledger) -> Scales:
    """Solve the constraints on factors."""
    n = ledger.scales

    def node(refs: Tensor) -> Integers:
        found = refs.numpy()
        return np.where(found > 0, found, n - found)  # unit u is node u, its inverse node n + u

    pairs = []
    for a, b in ledger.scale_pairs:
        pairs += [(node(a), node(b)), (node(-a), node(-b))]
    first = components(2 * n, pairs)
    own, inverse = first[:n], first[n:]
    classes = compress(np.where(np.arange(n) == 0, 0, np.minimum(own, inverse)))
    powers = np.where(own <= inverse, 1, -1)
    symmetries = np.full(classes.max() + 1, int(Symmetry.EVERYTHING), np.int64)
    symmetries[0] = 0
    np.bitwise_and.at(symmetries, classes[1:][own[1:] == inverse[1:]], int(Symmetry.SIGN))
    for limit in ledger.limits:
        np.bitwise_and.at(symmetries, classes[limit.members.numpy()], int(limit.symmetry))
    return Scales(classes, powers, symmetries)


@dataclass(frozen=True)
class Orders:
    """Order units in classes, classes in cells, cells in kinds.

    Any permutation within a cell is allowed. Classes that move in blocks (the features of a head) are in cells of one
    kind, which trade places as a whole with the rest of their block.

    Attributes:
        classes: of each unit; class 0 does not move.
        cells: of each class; cell 0 does not move.
        kinds: of each class; 0 if it does not move. All classes of a kind occur alike in every tensor.
        members: each class's number in its kind: its block's number times the cell's size, plus its number in the cell.
        blocks: of each class; 0 if it has none.
        families: of each block; blocks of a family trade places. 0 for block 0.
    """

    classes: Integers
    cells: Integers
    kinds: Integers
    members: Integers
    blocks: Integers
    families: Integers

    def of(self, factor: Tensor) -> Integers:
        """The class of each element of an order factor."""
        found: Integers = self.classes[factor.numpy()]
        return found


def mixed(*parts: Hashes | Integers | int) -> Hashes:
    """A 64-bit hash of numbers (splitmix64), element by element."""
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            state = state + np.asarray(part).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


def ranks(labels: Integers) -> Integers:
    """For each position, how many earlier positions have the same label."""
    by_label = np.argsort(labels, kind="stable")
    place = np.arange(labels.size)
    starts = np.flatnonzero(np.diff(labels[by_label], prepend=labels[by_label][:1] - 1))
    out = np.empty_like(place)
    out[by_label] = place - np.repeat(starts, np.diff(np.append(starts, labels.size)))
    return out


class _Signatures:
    """A hash of each order class's uses: classes that are used alike have the same."""

    def __init__(self, classes: Integers) -> None:
        self.classes = classes
        self.found = np.zeros(classes.max() + 1, np.uint64)
        self._number = 0

    def add(self, labels: Integers, values: Integers) -> None:
        """Add a tensor: the class and a value of each of its elements, in order."""
        self._number += 1
        present, inverse = np.unique(labels, return_inverse=True)
        seen = np.zeros(len(present), np.uint64)
        with np.errstate(over="ignore"):
            np.add.at(seen, inverse, mixed(ranks(labels), values))
        self.found[present] = mixed(self.found[present], self._number, seen)

    def copy(self) -> "_Signatures":
        other = _Signatures(self.classes)
        other.found, other._number = self.found.copy(), self._number
        return other


def _uses(ledger: Ledger, classes: Integers) -> _Signatures:
    """The signatures of all marks and regions."""
    known: dict[int, Tensor] = {}

    def rank(order: Tensor) -> Tensor:
        if id(order) not in known:
            known[id(order)] = torch.from_numpy(ranks(classes[order.numpy()].ravel()).reshape(order.shape))
        return known[id(order)]

    uses = _Signatures(classes)
    for mark in ledger.marks:
        values = mark.values(rank).expand(mark.order.shape).numpy().ravel()
        uses.add(classes[mark.order.numpy()].ravel(), values)
    for regions in ledger.regions.values():
        for factor in [factor for region in regions for factor in region.units.order]:
            uses.add(classes[factor.numpy()].ravel(), np.zeros(factor.numel(), np.int64))
    return uses


def solve_orders(ledger: Ledger) -> Orders:
    """Solve the constraints on places."""
    pairs = [(a.numpy().ravel(), b.numpy().ravel()) for a, b in ledger.order_pairs]
    classes = compress(components(ledger.orders, pairs))
    count = int(classes.max()) + 1
    uses = _uses(ledger, classes)
    blocks = [(classes[b.children.numpy()], classes[b.parents.numpy()]) for b in ledger.blocks]
    pairs = [(children.ravel(), np.repeat(parents, children.shape[1])) for children, parents in blocks]
    inside = components(count, pairs)  # classes that share blocks, named by the smallest
    place = ranks(inside)  # of a class among those of its component, by number
    apart, alike = uses, uses.copy()
    for children, parents in blocks:
        rows = np.arange(len(parents))
        for signatures, label in ((apart, rows), (alike, mixed(place[parents], ranks(parents)).astype(np.int64))):
            signatures.add(children.ravel(), np.repeat(label, children.shape[1]))
            signatures.add(parents, label)
    cells = compress(apart.found.view(np.int64))
    cells = np.where(np.arange(count) == 0, 0, cells + 1)
    return _arranged(classes, cells, *_families(inside, place, alike.found, cells))


def _families(inside: Integers, place: Integers, uses: Hashes, cells: Integers) -> tuple[Integers, Integers]:
    """Block of each class, and family of each block: blocks of one family are used alike, class by class."""
    count = len(inside)
    sizes = np.bincount(inside, minlength=count)
    whole = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        np.add.at(whole, inside, mixed(place, uses, lowest(cells, place)))
    heads = np.flatnonzero((sizes > 1) & (np.arange(count) == inside) & (inside != inside[0]))
    families, counts = np.unique(mixed(whole[heads], sizes[heads]), return_inverse=True, return_counts=True)[1:]
    kept = heads[counts[families] > 1]
    family = compress(families[counts[families] > 1]) + 1 if len(kept) else families[:0]
    by_head = np.zeros(count, np.int64)
    by_head[kept] = np.arange(1, len(kept) + 1)
    return by_head[inside], np.concatenate([[0], family]).astype(np.int64)


def _arranged(classes: Integers, cells: Integers, blocks: Integers, families: Integers) -> Orders:
    """Number kinds and their classes; a class without a partner to trade places with does not move."""
    inner = lowest(cells, ranks(blocks))  # the place in its block of the first class of its cell
    kinds = compress(mixed(families[blocks], np.where(blocks > 0, inner, -1 - cells)).view(np.int64)) + 1
    kinds[0] = 0
    kinds = compress(np.where(np.bincount(kinds)[kinds] < 2, 0, kinds))
    number = np.concatenate([[0], ranks(families[1:])])  # of a block within its family
    members = number[blocks] * np.bincount(cells)[cells] + ranks(cells)
    moving = kinds > 0
    return Orders(classes, np.where(moving, cells, 0), kinds, np.where(moving, members, 0), blocks, families)
