"""What a client can work out from values that it knows beforehand.

A new BatchNorm's weight is 1 everywhere, and everybody knows it: what is sent of it is the product of its factors.
Where one of them has a size of its own, that size is then known, and so it is wherever else it was used.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedveil.graph.solve import Integers
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.tables import Piece, Slots, count_all


@dataclass(frozen=True)
class Known:
    """Values that clients know, and what they reveal.

    Attributes:
        names: the parameters whose values are known: those that hold one number throughout, and those declared public.
        share: of all parameters' values, those whose secret factors have a size that follows from known values. Their
            order, if it is secret, stays so.
    """

    names: tuple[str, ...]
    share: float


def constant(values: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Parameters of several elements that hold one number, not 0, throughout: new norms, new layer scales."""
    found = []
    for name, value in values.items():
        flat = value.detach().reshape(-1)
        one = flat[:1]
        if flat.numel() > 1 and bool(one != 0) and bool((flat[:64] == one).all()) and bool((flat == one).all()):
            found.append(name)
    return tuple(found)


def revealed_classes(pieces: Sequence[Piece], slots: Slots, symmetries: Integers) -> set[int]:
    """Scale classes whose size follows from known values: wherever all other sizes in a product are known."""
    sized = (symmetries & Symmetry.POSITIVE) > 0
    products = [p for piece in pieces for p in _products(piece, slots, sized)]
    found: set[int] = set()
    while True:
        new = {next(iter(rest)) for product in products if len(rest := product - found) == 1}
        if not new:
            return found
        found |= new


def _products(piece: Piece, slots: Slots, sized: np.ndarray) -> set[frozenset[int]]:
    """The sets of sized classes that multiply an element of the piece."""
    shape = np.broadcast_shapes(*[spread.shape for spread in piece.scale]) if piece.scale else ()
    unit = torch.from_numpy(slots.unit)
    rows = [spread.of(unit).expand(shape).reshape(-1).numpy() for spread in piece.scale]
    if not rows:
        return set()
    table = np.unique(np.stack(rows, 1), axis=0)
    return {frozenset(int(c) for c in row if sized[c]) for row in table}


def count_exposed(pieces: Sequence[Piece], slots: Slots, symmetries: Integers, found: set[int]) -> Iterator[int]:
    """How many elements of each piece are scaled by sizes that are all known."""
    sized = (symmetries[slots.unit] & Symmetry.POSITIVE) > 0
    hidden = torch.from_numpy(sized & ~np.isin(slots.unit, sorted(found)))
    shown = torch.from_numpy(sized)
    for piece in pieces:
        yield count_all(piece, piece.scale, ~hidden) - count_all(piece, piece.scale, ~shown)
