"""Apply a round's factors and permutation to a model's tensors, and remove them from gradients and buffers.

The pool of small tensors needs one product and one gather; a large tensor is gathered dim by dim and multiplied by
broadcasting, so that no vector of the model's size is needed.
"""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedveil.graph.plan import Entry, Plan, TensorPart, flatten, unflatten
from fedveil.scheme.noise import UnitNoise
from fedveil.wire import Tensors

BLOCK = 2**18  # number of elements processed at a time


class Group(NamedTuple):
    """Tensors that are processed as one vector: several pooled tensors, or a single large one."""

    entries: tuple[Entry, ...]
    pooled: bool


class BufferPool:
    """Memory for large tensors, reused from round to round because allocating pages takes longer than writing them."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device, bool], list[Tensor]] = {}

    def take(self, size: int, dtype: torch.dtype, device: torch.device, *, scratch: bool = False) -> Tensor:
        """Return an uninitialised vector that is not in use; scratch memory is never used for broadcasts."""
        try:
            return self._free[size, dtype, device, scratch].pop()  # atomic, so that no other thread gets it
        except (KeyError, IndexError):
            return _allocate(size, dtype, device)

    def return_memory(self, memory: Tensor, *, scratch: bool = False) -> None:
        """Return memory that is no longer in use to the pool."""
        self._free.setdefault((memory.numel(), memory.dtype, memory.device, scratch), []).append(memory)


def _allocate(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu" or not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)  # cuts page faults by two thirds
    return torch.frombuffer(memory, dtype=dtype)


@dataclass(frozen=True, eq=False, repr=False)
class Transform:
    """The factors and the permutation for one round.

    Attributes:
        plan: the model's plan.
        factors, sources: R and the source index of each element of the pool: flat becomes factors o flat[sources].
        scale: the factor of each scale slot.
        shift: the distance from each order slot to its source.
    """

    plan: Plan
    factors: Tensor
    sources: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def from_noise(cls, plan: Plan, noise: UnitNoise) -> "Transform":
        """Build a transform from noise, on the model's device."""
        layout = plan.layout
        scale = torch.from_numpy(noise.factors).to(layout.device, layout.dtype)
        shift = torch.from_numpy(noise.shifts).to(layout.device)
        return cls(plan, plan.pool.factors(scale), plan.pool.sources(shift), scale, shift)

    def apply(self, tensors: Mapping[str, Tensor], pool: BufferPool) -> tuple[Tensors, Tensor | None]:
        """Perturb all tensors of the layout; return them and the memory used by the large ones."""
        plan = self.plan
        flat = flatten(tensors, plan.pool.entries) if plan.pool.entries else self.factors
        perturbed = unflatten(self.factors * flat.index_select(0, self.sources), plan.pool.entries)
        memory = None
        if plan.large:
            sizes = [entry.shape.numel() for entry in plan.large]
            kind = plan.layout.dtype, plan.layout.device
            memory, scratch = pool.take(sum(sizes), *kind), pool.take(max(sizes), *kind, scratch=True)
            for entry, out in zip(plan.large, torch.split_with_sizes(memory, sizes), strict=True):
                perturbed[entry.name] = self._apply_large(entry, tensors[entry.name], out, scratch)
            pool.return_memory(scratch, scratch=True)
        return {entry.name: perturbed[entry.name] for entry in plan.layout.entries}, memory

    def _apply_large(self, entry: Entry, tensor: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
        """Write a perturbed large tensor to `out`; `scratch` is memory for intermediate results."""
        pieces = self.plan.pieces.get(entry.name, [])
        source = tensor.detach().contiguous().view(-1)
        if sum(torch.Size(piece.shape).numel() for piece in pieces) < len(source):
            out.copy_(source)
        for piece in pieces:
            indices = self._find_indices(piece)
            if indices and piece.contiguous and torch.Size(piece.shape[: indices[0][0]]).numel() == 1:
                self._apply_rows(piece, indices, source, out, scratch)
                continue
            if indices is None:
                part = source.index_select(0, self._find_sources(piece, len(source))).view(piece.shape)
            else:
                part = piece.part(source)
                for dim, index in indices:
                    part = _select(part, dim, index)
            self._multiply(piece, piece.part(out).copy_(part))
        return out.view(entry.shape)

    def _apply_rows(
        self, piece: TensorPart, indices: list[tuple[int, Tensor]], source: Tensor, target: Tensor, scratch: Tensor
    ) -> None:
        """Perturb a few rows at a time, so that they stay in the processor's cache."""
        (row_dim, index), *other_indices = indices
        size, row_size = len(index), torch.Size(piece.shape[row_dim + 1 :]).numel()
        end = piece.offset + size * row_size
        selected, result = source[piece.offset : end].view(size, row_size), target[piece.offset : end]
        step = max(1, BLOCK // row_size)
        for start in range(0, size, step):
            stop = min(size, start + step)
            shape = (*piece.shape[:row_dim], stop - start, *piece.shape[row_dim + 1 :])
            out = result[start * row_size : stop * row_size]
            buffer = scratch[: out.numel()] if other_indices else out
            torch.index_select(selected, 0, index[start:stop], out=buffer.view(-1, row_size))
            part = buffer.view(shape)
            for number, (dim, reordered) in enumerate(other_indices, 1):
                part = _select(part, dim, reordered, out.view(shape) if number == len(other_indices) else None)
            self._multiply(piece, part, row_dim, start)

    def find_factors(self, name: str) -> Tensor:
        """Return R for one tensor, with the tensor's shape."""
        for entry in self.plan.pool.entries:
            if entry.name == name:
                return self.factors[entry.start : entry.stop].view(entry.shape)
        entry = next(entry for entry in self.plan.large if entry.name == name)
        ones = torch.ones(1, entry.shape.numel(), dtype=self.scale.dtype, device=self.scale.device)
        self.multiply(Group((entry,), pooled=False), ones)
        return ones.view(entry.shape)

    def group(self, entries: Sequence[Entry]) -> list[Group]:
        """Divide tensors into groups; the pooled ones must be adjacent in the pool."""
        names = {entry.name for entry in entries}
        pooled = tuple([entry for entry in self.plan.pool.entries if entry.name in names])
        large = [Group((entry,), pooled=False) for entry in self.plan.large if entry.name in names]
        return [Group(pooled, pooled=True), *large] if pooled else large

    def multiply(self, group: Group, rows: Tensor) -> None:
        """Multiply each row of a group's elements by their factors, in place."""
        if group.pooled:
            rows.mul_(self.factors[group.entries[0].start : group.entries[-1].stop])
            return
        for piece in self.plan.pieces.get(group.entries[0].name, []):
            self._multiply(piece, piece.part(rows))

    def divide(self, group: Group, flat: Tensor) -> None:
        """Divide a group's elements by their factors, in place."""
        if group.pooled:
            flat.div_(self.factors[group.entries[0].start : group.entries[-1].stop])
            return
        for piece in self.plan.pieces.get(group.entries[0].name, []):
            part = piece.part(flat)
            for slots in piece.scale:
                part /= slots.select(self.scale)

    def restore_order(self, group: Group, flat: Tensor) -> Tensors:
        """Move a group's elements back to their original positions, and return its tensors."""
        entry = group.entries[0]
        if group.pooled:
            stop = group.entries[-1].stop
            sources = self.sources[entry.start : stop] - entry.start if entry.start else self.sources[:stop]
            return unflatten(torch.empty_like(flat).scatter_(0, sources, flat), group.entries)
        pieces = [piece for piece in self.plan.pieces.get(entry.name, []) if piece.order]
        if len(pieces) == 1 and pieces[0].contiguous and torch.Size(pieces[0].shape).numel() == len(flat):
            return {entry.name: self._restore_piece(pieces[0], flat).view(entry.shape)}
        result = flat.clone() if pieces else flat
        for piece in pieces:
            piece.part(result).copy_(self._restore_piece(piece, flat))
        return {entry.name: result.view(entry.shape)}

    def _multiply(self, piece: TensorPart, part: Tensor, cut_dim: int = -1, start: int = 0) -> None:
        """Multiply by factors in place. If they vary along one dim, multiply whole rows, which is several times faster.

        `part` may begin at `start` along the dim `cut_dim` of the piece, and may have extra leading dims.
        """
        extra_dims = part.dim() - len(piece.shape)
        for slots in piece.scale:
            factor, dims = slots.select(self.scale), [dim for dim, size in enumerate(slots.shape) if size > 1]
            if cut_dim in dims:
                factor = factor.narrow(cut_dim, start, part.shape[extra_dims + cut_dim])
            inner_size = torch.Size(piece.shape[dims[0] + 1 :]).numel() if len(dims) == 1 else 1
            if inner_size > 1 and dims[0] != cut_dim and part.is_contiguous():
                rows = part.view(-1, factor.numel() * inner_size)
                rows.mul_(factor.flatten().repeat_interleave(inner_size))
            else:
                part.mul_(factor)

    def _restore_piece(self, piece: TensorPart, flat: Tensor) -> Tensor:
        """Return the elements of a piece at their original positions, in new memory."""
        indices = self._find_indices(piece)
        part = piece.part(flat)
        if indices is None:
            sources = self._find_sources(piece, len(flat))
            restored = torch.empty_like(flat).index_copy_(0, sources, part.reshape(-1))
            return piece.part(restored)
        for dim, index in indices:
            inverse_index = torch.empty_like(index)
            inverse_index[index] = torch.arange(len(index), device=index.device)
            part = _select(part, dim, inverse_index)
        return part

    def _find_indices(self, piece: TensorPart) -> list[tuple[int, Tensor]] | None:
        """Return the source indices along each permuted dim; None if several dims are permuted jointly."""
        result = []
        for slots in piece.order:
            dims = [d for d, size in enumerate(slots.shape) if size > 1]
            if len(dims) != 1:
                return None
            shift = slots.select(self.shift).flatten()
            index = torch.arange(len(shift), device=shift.device) + shift // piece.strides[dims[0]]
            result.append((dims[0], index))
        return sorted(result, key=lambda pair: pair[0])

    def _find_sources(self, piece: TensorPart, elements: int) -> Tensor:
        """Return the source index of each element of a piece, in a tensor with `elements` elements."""
        index = piece.part(torch.arange(elements, device=self.shift.device))
        for slots in piece.order:
            index = index + slots.select(self.shift)
        return index.flatten()


def _select(part: Tensor, dim: int, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Select indices along a dim, as the rows of a matrix or as its columns (with torch.gather)."""
    outer, inner = part.shape[:dim].numel(), part.shape[dim + 1 :].numel()
    rows = part.reshape(len(index) if outer == 1 else outer, -1)
    target = None if out is None else out.view(rows.shape)
    if outer == 1:
        return torch.index_select(rows, 0, index, out=target).view(part.shape)
    columns = (index.unsqueeze(1) * inner + torch.arange(inner, device=index.device)).flatten()
    return torch.gather(rows, 1, columns.expand(outer, -1), out=target).view(part.shape)
