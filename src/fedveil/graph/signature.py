"""Identify how a plan acts on a model's parameters, regardless of how its classes are numbered."""

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedveil.graph.solve import Integers

if TYPE_CHECKING:
    from fedveil.graph.plan import Plan


def identify(plan: "Plan") -> str:
    """Return a hash of the head, of the tensors, and of the factors and permutations that act on each of them."""
    slots, layout = plan.slots, plan.layout
    head = None if plan.head is None else sorted(vars(plan.head).items())
    names = [(entry.name, tuple(entry.shape)) for entry in layout.entries]
    pieces = [(name, sorted(map(repr, plan.pieces[name]))) for name in sorted(plan.pieces)]
    digest = hashlib.sha256(repr((head, names, layout.counters, plan.modes, pieces)).encode())
    scale, order = slots.unit, slots.order
    arrays = (plan.symmetries[scale], slots.power, slots.repeat, slots.position)
    classes = (scale, order, plan.orders.cells[order], plan.orders.kinds[order], plan.orders.blocks[order])
    for array in (*arrays, *map(_renumber, classes)):
        digest.update(np.ascontiguousarray(array, np.int64).tobytes() + b"|")
    return digest.hexdigest()[:16]


def _renumber(classes: Integers) -> NDArray[np.int64]:
    """Number classes by their first occurrence; class 0, which is fixed, stays 0."""
    _, first_indices, index = np.unique(np.append(0, classes), return_index=True, return_inverse=True)
    ranks = np.empty(len(first_indices), np.int64)
    ranks[np.argsort(first_indices)] = np.arange(len(first_indices))
    return ranks[index][1:]
