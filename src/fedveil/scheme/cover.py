"""A secret's factors and places, applied to a model's tensors.

The pool of small tensors is one product and one gather; a large tensor is gathered dim by dim and multiplied by
broadcasting, so that no vector of the model's size is ever formed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.graph.layout import Entry, flatten, unflatten
from fedveil.graph.plan import Plan
from fedveil.graph.tables import Piece

Tensors = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Cover:
    """What a secret does to each tensor.

    Attributes:
        plan: of the model.
        factors: R along the pool: the veiled pool is factors o flat[sources].
        sources: see factors.
        scale: the factor of each scale slot.
        shift: how far away each order slot's content comes from.
    """

    plan: Plan
    factors: Tensor
    sources: Tensor
    scale: Tensor
    shift: Tensor

    def __repr__(self) -> str:
        return "<Cover, redacted>"

    def veil(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """All tensors of the layout, covered."""
        plan = self.plan
        flat = flatten(tensors, plan.pool.entries) if plan.pool.entries else self.factors
        veiled = unflatten(self.factors * flat.index_select(0, self.sources), plan.pool.entries)
        for entry in plan.large:
            veiled[entry.name] = self._veil_large(entry, tensors[entry.name])
        return {entry.name: veiled[entry.name] for entry in plan.layout.entries}

    def _veil_large(self, entry: Entry, tensor: Tensor) -> Tensor:
        pieces = self.plan.pieces.get(entry.name, [])
        source = tensor.detach().contiguous().view(-1)
        if len(pieces) == 1 and _whole(pieces[0], entry):
            return self._scaled(pieces[0], self._gathered(pieces[0], source)).view(entry.shape)
        result = source.clone()
        for piece in pieces:
            piece.part(result).copy_(self._scaled(piece, self._gathered(piece, source)))
        return result.view(entry.shape)

    def lift(self, entry: Entry, passes: Tensor) -> None:
        """Multiply passes (rows, elements) of a large tensor's gradient by its factors, in place."""
        for piece in self.plan.pieces.get(entry.name, []):
            self._scaled(piece, piece.part(passes))

    def back(self, entry: Entry, flat: Tensor) -> Tensor:
        """A large tensor's elements, moved back to where they came from."""
        pieces = [piece for piece in self.plan.pieces.get(entry.name, []) if piece.order]
        if not pieces:
            return flat
        if len(pieces) == 1 and _whole(pieces[0], entry):
            return self._returned(pieces[0], flat).view(-1)
        result = flat.clone()
        for piece in pieces:
            piece.part(result).copy_(self._returned(piece, flat))
        return result

    def divided(self, entry: Entry, flat: Tensor) -> Tensor:
        """A large buffer's elements, without their factors."""
        result = flat.clone()
        for piece in self.plan.pieces.get(entry.name, []):
            part = piece.part(result)
            for spread in piece.scale:
                part /= spread.of(self.scale)
        return result

    def _scaled(self, piece: Piece, part: Tensor) -> Tensor:
        """Multiply in place."""
        for spread in piece.scale:
            part.mul_(spread.of(self.scale))
        return part

    def _gathered(self, piece: Piece, flat: Tensor) -> Tensor:
        """The elements of a piece from the places where they come from, in new memory."""
        indices = self._indices(piece)
        if indices is None:
            return flat.index_select(0, self._places(piece)).view(piece.shape)
        part = piece.part(flat)
        if not indices:
            return part.clone(memory_format=torch.contiguous_format)
        for dim, index in indices:
            part = part.index_select(dim, index)
        return part

    def _returned(self, piece: Piece, flat: Tensor) -> Tensor:
        """The elements of a piece, put back to where they came from, in new memory."""
        indices = self._indices(piece)
        part = piece.part(flat)
        if indices is None:
            moved = torch.empty_like(flat).index_copy_(0, self._places(piece), part.reshape(-1))
            return piece.part(moved)
        for dim, index in indices:
            back = torch.empty_like(index)
            back[index] = torch.arange(len(index), device=index.device)
            part = part.index_select(dim, back)
        return part

    def _indices(self, piece: Piece) -> list[tuple[int, Tensor]] | None:
        """For each dim that moves by itself, where each place along it comes from; None if dims move jointly."""
        found = []
        for spread in piece.order:
            dims = [d for d, size in enumerate(spread.shape) if size > 1]
            if len(dims) != 1:
                return None
            shift = spread.of(self.shift).flatten()
            places = torch.arange(len(shift), device=shift.device) + shift // piece.strides[dims[0]]
            found.append((dims[0], places))
        return sorted(found, key=lambda pair: pair[0])

    def _places(self, piece: Piece) -> Tensor:
        """For each element of a piece the place in the tensor that it comes from."""
        place = torch.full((1,) * len(piece.shape), piece.offset, device=self.shift.device)
        for dim, (size, step) in enumerate(zip(piece.shape, piece.strides, strict=True)):
            view = [1] * len(piece.shape)
            view[dim] = -1
            place = place + torch.arange(size, device=place.device).reshape(view) * step
        for spread in piece.order:
            place = place + spread.of(self.shift)
        return place.flatten()


def _whole(piece: Piece, entry: Entry) -> bool:
    """Whether a piece is all of its tensor, in the same order."""
    steps, contiguous = 1, []
    for size in reversed(piece.shape):
        contiguous.append(steps)
        steps *= size
    wanted = tuple(reversed(contiguous))
    fits = all(n == 1 or a == b for n, a, b in zip(piece.shape, piece.strides, wanted, strict=True))
    return piece.offset == 0 and steps == entry.shape.numel() and fits


def make_cover(plan: Plan, factors: NDArray[np.float64], shifts: NDArray[np.int64]) -> Cover:
    """From the numbers of a secret."""
    layout = plan.layout
    scale = torch.from_numpy(factors).to(layout.device, layout.dtype)
    shift = torch.from_numpy(shifts).to(layout.device)
    return Cover(plan, plan.pool.factors(scale), plan.pool.sources(shift), scale, shift)
