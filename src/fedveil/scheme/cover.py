"""A secret's factors and places, applied to a model's tensors.

The pool of small tensors takes one product and one gather; a large tensor is gathered dim by dim and multiplied by
broadcasting, so that no vector of the model's size is needed.
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
from fedveil.scheme.memory import cache_of
from fedveil.wire import Tensors

BLOCK = 2**18  # elements processed at a time


@dataclass(frozen=True, eq=False)
class Cover:
    """What a secret does to each tensor.

    Attributes:
        plan: of the model.
        factors, sources: R along the pool, and where its content comes from: it becomes factors o flat[sources].
        scale: the factor of each scale slot.
        shift: the distance from which each order slot gets its content.
    """

    plan: Plan
    factors: Tensor
    sources: Tensor
    scale: Tensor
    shift: Tensor

    def __repr__(self) -> str:
        return "<Cover, redacted>"

    def veil(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """All tensors of the layout, masked."""
        plan = self.plan
        flat = flatten(tensors, plan.pool.entries) if plan.pool.entries else self.factors
        veiled = unflatten(self.factors * flat.index_select(0, self.sources), plan.pool.entries)
        if plan.large:
            sizes = [entry.shape.numel() for entry in plan.large]
            cache, kind = cache_of(plan), (plan.layout.dtype, plan.layout.device)
            rooms, (scratch,) = cache.masked.take(sizes, *kind), cache.unmasked.take([max(sizes)], *kind)
            for entry, room in zip(plan.large, rooms, strict=True):
                veiled[entry.name] = self._veil_large(entry, tensors[entry.name], room, scratch)
        return {entry.name: veiled[entry.name] for entry in plan.layout.entries}

    def _veil_large(self, entry: Entry, tensor: Tensor, room: Tensor, scratch: Tensor) -> Tensor:
        """A large tensor, masked, in the memory of `room`; intermediate steps use `scratch`."""
        pieces = self.plan.pieces.get(entry.name, [])
        source = tensor.detach().contiguous().view(-1)
        if sum(torch.Size(piece.shape).numel() for piece in pieces) < len(source):
            room.copy_(source)
        for piece in pieces:
            indices = self._indices(piece)
            if indices and _contiguous(piece) and torch.Size(piece.shape[: indices[0][0]]).numel() == 1:
                self._veil_rows(piece, indices, source, room, scratch)
                continue
            if indices is None:
                part = source.index_select(0, self._places(piece)).view(piece.shape)
            else:
                part = piece.part(source)
                for dim, index in indices:
                    part = _taken(part, dim, index)
            self._scaled(piece, piece.part(room).copy_(part))
        return room.view(entry.shape)

    def _veil_rows(
        self, piece: Piece, indices: list[tuple[int, Tensor]], source: Tensor, room: Tensor, scratch: Tensor
    ) -> None:
        """Process some rows at a time, so that they stay in the processor's cache."""
        (first, index), *others = indices
        size, inner = len(index), torch.Size(piece.shape[first + 1 :]).numel()
        end = piece.offset + size * inner
        given, result = source[piece.offset : end].view(size, inner), room[piece.offset : end]
        step = max(1, BLOCK // inner)
        for start in range(0, size, step):
            stop = min(size, start + step)
            shape = (*piece.shape[:first], stop - start, *piece.shape[first + 1 :])
            out = result[start * inner : stop * inner]
            here = scratch[: out.numel()] if others else out
            torch.index_select(given, 0, index[start:stop], out=here.view(-1, inner))
            part = here.view(shape)
            for number, (dim, places) in enumerate(others, 1):
                part = _taken(part, dim, places, out.view(shape) if number == len(others) else None)
            self._scaled(piece, part, first, start)

    def factors_of(self, name: str) -> Tensor:
        """R for one tensor, in its shape."""
        for entry in self.plan.pool.entries:
            if entry.name == name:
                return self.factors[entry.start : entry.stop].view(entry.shape)
        entry = next(entry for entry in self.plan.large if entry.name == name)
        ones = torch.ones(1, entry.shape.numel(), dtype=self.scale.dtype, device=self.scale.device)
        self.lift(entry, ones)
        return ones.view(entry.shape)

    def lift(self, entry: Entry, passes: Tensor) -> None:
        """Multiply passes (rows, elements) of a large tensor's gradient by its factors, in place."""
        for piece in self.plan.pieces.get(entry.name, []):
            self._scaled(piece, piece.part(passes))

    def back(self, entry: Entry, flat: Tensor) -> Tensor:
        """A large tensor's elements, moved back to where they came from."""
        pieces = [piece for piece in self.plan.pieces.get(entry.name, []) if piece.order]
        if not pieces:
            return flat
        if len(pieces) == 1 and _contiguous(pieces[0]) and torch.Size(pieces[0].shape).numel() == len(flat):
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

    def _scaled(self, piece: Piece, part: Tensor, cut: int = -1, start: int = 0) -> None:
        """Multiply in place; by whole rows if a middle dim changes, several times faster than broadcasting.

        `part` may begin at `start` along the dim `cut` of the piece, and have more leading dims.
        """
        ahead = part.dim() - len(piece.shape)
        for spread in piece.scale:
            factor, dims = spread.of(self.scale), [dim for dim, size in enumerate(spread.shape) if size > 1]
            if cut in dims:
                factor = factor.narrow(cut, start, part.shape[ahead + cut])
            behind = torch.Size(piece.shape[dims[0] + 1 :]).numel() if len(dims) == 1 else 1
            if behind > 1 and dims[0] != cut and part.is_contiguous():
                rows = part.view(-1, factor.numel() * behind)
                rows.mul_(factor.flatten().repeat_interleave(behind))
            else:
                part.mul_(factor)

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
            part = _taken(part, dim, back)
        return part

    def _indices(self, piece: Piece) -> list[tuple[int, Tensor]] | None:
        """For each dim that moves separately, the source of each place along it; None if dims move jointly."""
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
        """The source in the tensor of each element of a piece."""
        place = torch.full((1,) * len(piece.shape), piece.offset, device=self.shift.device)
        for dim, (size, step) in enumerate(zip(piece.shape, piece.strides, strict=True)):
            view = [1] * len(piece.shape)
            view[dim] = -1
            place = place + torch.arange(size, device=place.device).reshape(view) * step
        for spread in piece.order:
            place = place + spread.of(self.shift)
        return place.flatten()


def _taken(part: Tensor, dim: int, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Select places along a dim, as rows of a matrix, or as its columns by torch.gather."""
    ahead, inner = part.shape[:dim].numel(), part.shape[dim + 1 :].numel()
    rows = part.reshape(len(index) if ahead == 1 else ahead, -1)
    room = None if out is None else out.view(rows.shape)
    if ahead == 1:
        return torch.index_select(rows, 0, index, out=room).view(part.shape)
    columns = (index.unsqueeze(1) * inner + torch.arange(inner, device=index.device)).flatten()
    return torch.gather(rows, 1, columns.expand(ahead, -1), out=room).view(part.shape)


def _contiguous(piece: Piece) -> bool:
    """Whether the elements of a piece are contiguous."""
    step = 1
    for size, stride in zip(reversed(piece.shape), reversed(piece.strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def make_cover(plan: Plan, factors: NDArray[np.float64], shifts: NDArray[np.int64]) -> Cover:
    """The cover for a secret's factors and shifts, one per slot of the plan."""
    layout = plan.layout
    scale = torch.from_numpy(factors).to(layout.device, layout.dtype)
    shift = torch.from_numpy(shifts).to(layout.device)
    return Cover(plan, plan.pool.factors(scale), plan.pool.sources(shift), scale, shift)
