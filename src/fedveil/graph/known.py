"""Inferences that a client can draw from values that it knows beforehand.

A new BatchNorm's weight is known to be 1 everywhere, so its perturbed value is the product of its factors. Once all but
one of them are known, so is the last, here and wherever else it is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.graph.solve import Integers
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.tables import Piece, Slots, count_all


@dataclass(frozen=True)
class KnownValues:
    """Values that clients know, and how much they reveal.

    Attributes:
        names: the parameters with known values: those that hold one number throughout, and those declared public.
        share: fraction of the parameters' values that known ones reveal: the sizes of all their factors (or, where only
            signs are secret, the signs) follow from known values. Positions, and signs of factors that have a size,
            stay secret; a public tensor of distinct values reveals positions too.
    """

    names: tuple[str, ...]
    share: float


def is_constant(value: Tensor) -> bool:
    """Return whether all of several elements are equal and not 0, as in new norms and new layer scales."""
    flat = value.detach().reshape(-1)
    one = flat[:1]
    return flat.numel() > 1 and bool(one != 0) and bool((flat[:64] == one).all()) and bool((flat == one).all())


def _find_revealed_classes(pieces: Sequence[Piece], slots: Slots, symmetries: Integers, part: Symmetry) -> set[int]:
    """Return the scale classes whose size (or sign) follows from known values: all others in a product are known."""
    secret = (symmetries & part) > 0
    products = [p for piece in pieces for p in _products(piece, slots, secret)]
    found: set[int] = set()
    while True:
        new = {next(iter(rest)) for product in products if len(rest := product - found) == 1}
        if not new:
            return found
        found |= new


def _products(piece: Piece, slots: Slots, secret: NDArray[np.bool_]) -> set[frozenset[int]]:
    """Return the sets of secret classes that multiply an element of the piece, however often a class occurs."""
    if not piece.scale:
        return set()
    unit = torch.from_numpy(slots.unit)
    rows = np.broadcast_arrays(*[spread.of(unit).numpy() for spread in piece.scale])
    table = np.unique(np.stack([row.ravel() for row in rows], 1), axis=0)
    return {frozenset(int(c) for c in row if secret[c]) for row in table}


def count_revealed_elements(pieces: Sequence[Piece], known: Sequence[Piece], slots: Slots, symmetries: Integers) -> int:
    """Count the elements of the pieces whose factors known values reveal."""
    sized, signed = ((symmetries[slots.unit] & part) > 0 for part in (Symmetry.POSITIVE, Symmetry.SIGN))
    open_size, open_sign = (
        secret & ~np.isin(slots.unit, sorted(_find_revealed_classes(known, slots, symmetries, part)))
        for secret, part in ((sized, Symmetry.POSITIVE), (signed, Symmetry.SIGN))
    )

    def count(excluded: NDArray[np.bool_]) -> int:
        return sum(count_all(piece, piece.scale, torch.from_numpy(~excluded)) for piece in pieces)

    scaled = count(open_size) - count(sized)  # elements with factors of some size, all of them revealed
    only_signed = count(sized | open_sign) - count(sized | signed)
    return scaled + only_signed
