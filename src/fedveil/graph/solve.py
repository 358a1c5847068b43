"""Solve the recorded constraints: find units that share a factor, may be swapped, or move in blocks.

Two units can be inverses of each other (5 = -7). Each unit is therefore represented by two graph nodes, one for the
unit and one for its inverse. If both are in the same connected component, the factor can only be +1 or -1.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from fedveil.graph.ledger import Ledger
from fedveil.graph.units import Symmetry

Integers = NDArray[np.int64]
Hashes = NDArray[np.uint64]


def lowest_by_label(labels: Integers, values: Integers) -> Integers:
    """Return, for each position, the smallest value at any position with the same label."""
    result: Integers = np.full(int(labels.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(result, labels, values)
    return result[labels]


def components(count: int, pairs: Sequence[tuple[Integers, Integers]]) -> Integers:
    """Return, for each node, the smallest node in its connected component."""
    if not pairs:
        return np.arange(count)
    sources, targets = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    graph = coo_matrix((np.ones(len(sources), np.int8), (sources, targets)), shape=(count, count))
    return lowest_by_label(connected_components(graph, directed=False)[1], np.arange(count))


def renumber(labels: Integers) -> Integers:
    """Renumber labels as 0, 1, 2, ... in ascending order."""
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


@dataclass(frozen=True)
class Scales:
    """Scale units, grouped into classes that share a secret number.

    Attributes:
        classes: the class of each unit; class 0 contains unit 0, which does nothing.
        powers: for each unit, +1 if it equals the number of its class, -1 if it equals that number's inverse.
        symmetries: the symmetry of each class.
    """

    classes: Integers
    powers: Integers
    symmetries: Integers


def solve_scales(ledger: Ledger) -> Scales:
    """Solve the constraints on factors."""
    n = ledger.scales

    def node(references: Tensor) -> Integers:
        indices = references.numpy()
        return np.where(indices > 0, indices, n - indices)  # node u is unit u, and node n + u is its inverse

    pairs = []
    for a, b in ledger.scale_pairs:
        pairs += [(node(a), node(b)), (node(-a), node(-b))]
    roots = components(2 * n, pairs)
    unit_root, inverse_root = roots[:n], roots[n:]
    classes = renumber(np.where(np.arange(n) == 0, 0, np.minimum(unit_root, inverse_root)))
    powers = np.where(unit_root <= inverse_root, 1, -1)
    symmetries = np.full(classes.max() + 1, int(Symmetry.EVERYTHING), np.int64)
    symmetries[0] = 0
    np.bitwise_and.at(symmetries, classes[1:][unit_root[1:] == inverse_root[1:]], int(Symmetry.SIGN))
    for limit in ledger.limits:
        np.bitwise_and.at(symmetries, classes[limit.members.numpy()], int(limit.symmetry))
    return Scales(classes, powers, symmetries)


@dataclass(frozen=True)
class Orders:
    """Order units grouped into classes, classes into cells, and cells into kinds.

    Any permutation within a cell is allowed. Cells of the same kind are at the same position in different blocks (such
    as attention heads) and are swapped only together with the rest of their blocks.

    Attributes:
        classes: the class of each unit; class 0 does not move.
        cells: the cell of each class; cell 0 does not move.
        kinds: the kind of each class; kind 0 does not move. Every tensor uses all classes of a kind in the same way.
        members: the index of each class in its kind: block index times cell size, plus index in the cell.
        blocks: the block of each class; 0 if the class is not in a block.
        families: the family of each block; blocks of the same family may be swapped. Block 0 has family 0.
    """

    classes: Integers
    cells: Integers
    kinds: Integers
    members: Integers
    blocks: Integers
    families: Integers


def mix_hashes(*parts: Hashes | Integers | int) -> Hashes:
    """Combine integers into 64-bit hashes (splitmix64), element by element."""
    state = np.zeros(1, np.uint64)  # an array, because NumPy warns when scalars overflow
    for part in parts:
        state = state + np.asarray(part).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def ranks(labels: Integers) -> Integers:
    """Return, for each position, the number of earlier positions with the same label."""
    by_label = np.argsort(labels, kind="stable")
    ordered, result = labels[by_label], np.empty_like(by_label)
    result[by_label] = np.arange(labels.size) - np.searchsorted(ordered, ordered)
    return result


_Usage = tuple[Integers, Integers]  # for a tensor: the order class of each element, and a value that describes its use


def _hash_uses(result: Hashes, uses: Iterable[_Usage], first_number: int) -> Hashes:
    """Mix uses, numbered from `first_number`, into the hashes of classes; the same uses result in the same hashes."""
    result = result.copy()
    for number, (labels, values) in enumerate(uses, first_number):
        unique_labels, inverse = np.unique(labels, return_inverse=True)
        use_hashes = np.zeros(len(unique_labels), np.uint64)
        np.add.at(use_hashes, inverse, mix_hashes(ranks(labels), values))
        result[unique_labels] = mix_hashes(result[unique_labels], number, use_hashes)
    return result


def _find_uses(ledger: Ledger, classes: Integers) -> Iterator[_Usage]:
    """Yield the uses of order classes in all marks and regions."""
    rank_cache: dict[int, Tensor] = {}

    def rank(order: Tensor) -> Tensor:
        if id(order) not in rank_cache:
            rank_cache[id(order)] = torch.from_numpy(ranks(classes[order.numpy()].ravel()).reshape(order.shape))
        return rank_cache[id(order)]

    for mark in ledger.marks:
        values = mark.values(rank).expand(mark.order.shape).numpy().ravel()
        yield classes[mark.order.numpy()].ravel(), values
    for region in itertools.chain.from_iterable(ledger.regions.values()):
        for factor in region.units.order:
            yield classes[factor.numpy()].ravel(), np.zeros(factor.numel(), np.int64)


def solve_orders(ledger: Ledger) -> Orders:
    """Solve the constraints on permutations."""
    pairs = [(a.numpy().ravel(), b.numpy().ravel()) for a, b in ledger.order_pairs]
    classes = renumber(components(ledger.orders, pairs))
    count = int(classes.max()) + 1
    uses = list(_find_uses(ledger, classes))
    blocks = [(classes[b.children.numpy()], classes[b.parents.numpy()]) for b in ledger.blocks]
    pairs = [(children.ravel(), np.repeat(parents, children.shape[1])) for children, parents in blocks]
    component = components(count, pairs)  # the smallest class connected to each class through blocks
    position = ranks(component)  # index of each class in its component
    by_row: list[_Usage] = []  # uses that distinguish the rows of a block
    by_kind: list[_Usage] = []  # uses that do not distinguish them
    for children, parents in blocks:
        kinds = mix_hashes(position[parents], ranks(parents)).astype(np.int64)
        for use_list, label in ((by_row, np.arange(len(parents))), (by_kind, kinds)):
            use_list += [(children.ravel(), np.repeat(label, children.shape[1])), (parents, label)]
    common, next_number = _hash_uses(np.zeros(count, np.uint64), uses, 1), len(uses) + 1
    cells = renumber(_hash_uses(common, by_row, next_number).view(np.int64))
    cells = np.where(np.arange(count) == 0, 0, cells + 1)
    uses_by_kind = _hash_uses(common, by_kind, next_number)
    return _number_kinds(classes, cells, *_find_families(component, position, uses_by_kind, cells))


def _find_families(component: Integers, position: Integers, uses: Hashes, cells: Integers) -> tuple[Integers, Integers]:
    """Return the block of each class and the family of each block; blocks of a family have the same uses."""
    count = len(component)
    sizes = np.bincount(component, minlength=count)
    block_hashes = np.zeros(count, np.uint64)
    np.add.at(block_hashes, component, mix_hashes(position, uses, lowest_by_label(cells, position)))
    heads = np.flatnonzero((sizes > 1) & (np.arange(count) == component) & (component != component[0]))
    families, counts = np.unique(
        mix_hashes(block_hashes[heads], sizes[heads]), return_inverse=True, return_counts=True
    )[1:]
    family_heads = heads[counts[families] > 1]
    family = renumber(families[counts[families] > 1]) + 1 if len(family_heads) else families[:0]
    block_by_head = np.zeros(count, np.int64)
    block_by_head[family_heads] = np.arange(1, len(family_heads) + 1)
    return block_by_head[component], np.concatenate([[0], family]).astype(np.int64)


def _number_kinds(classes: Integers, cells: Integers, blocks: Integers, families: Integers) -> Orders:
    """Number the kinds, and the classes within each; classes that cannot be swapped with any other do not move."""
    cell_position = lowest_by_label(cells, ranks(blocks))  # the position of the cell's first class within the block
    kinds = renumber(mix_hashes(families[blocks], np.where(blocks > 0, cell_position, -1 - cells)).view(np.int64)) + 1
    kinds[0] = 0
    kinds = renumber(np.where(np.bincount(kinds)[kinds] < 2, 0, kinds))
    block_index = np.concatenate([[0], ranks(families[1:])])  # index of each block in its family
    members = block_index[blocks] * np.bincount(cells)[cells] + ranks(cells)
    is_moving = kinds > 0
    return Orders(classes, np.where(is_moving, cells, 0), kinds, np.where(is_moving, members, 0), blocks, families)
