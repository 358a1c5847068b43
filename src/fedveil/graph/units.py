"""The noise on each element of a tensor, described by axes.

A tensor carries *scale* (its elements are multiplied by secret factors) and *order* (its elements are permuted). Each
is a tuple of *factors*: integer tensors with as many dims as the tensor itself, of size 1 along every dim along which
they are constant. The channels of an (N, C, H, W) activation are one factor of shape (1, C, 1, 1).

An element of a scale factor names a scale unit: 5 multiplies by that unit's secret number, -5 divides by it, 0 does
nothing; an element's scale is the product over all factors. An element of an order factor names an order unit; 0 does
not move.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Dims = frozenset[int]


class Units(NamedTuple):
    """The noise on a tensor."""

    scale: tuple[Tensor, ...] = ()
    order: tuple[Tensor, ...] = ()

    def each(self, change: Callable[[Tensor], Tensor]) -> "Units":
        """Apply `change` to all factors."""
        return Units(tuple(map(change, self.scale)), tuple(map(change, self.order)))


def varying_dims(factor: Tensor) -> Dims:
    """Return the dims along which a factor varies."""
    return frozenset(dim for dim, size in enumerate(factor.shape) if size > 1)


def distinct_dims(value: Tensor) -> Dims:
    """Return the dims along which a tensor's elements may differ: those along which it is not broadcast."""
    return frozenset(d for d in range(value.dim()) if value.shape[d] > 1 and value.stride(d) != 0)


def split_first_dim(value: Tensor, parts: int) -> Tensor:
    """Return a meta tensor with the form of value.unflatten(0, (parts, -1)), which is slow on fake tensors."""
    size = value.shape[0] // parts
    strides = (size * value.stride(0), *value.stride())
    return torch.empty_strided((parts, size, *value.shape[1:]), strides, device="meta")


def compress(factor: Tensor) -> Tensor:
    """Reduce a factor to size 1 along every dim along which it is constant."""
    for dim, size in enumerate(factor.shape):
        if size > 1:
            first = factor.narrow(dim, 0, 1)
            if bool((factor == first).all()):
                factor = first
    return factor


def factor_along(values: Tensor, dim: int, rank: int) -> Tensor:
    """Return 1-d values as a factor that varies along `dim` of a tensor with `rank` dims."""
    return values.reshape([-1 if d == dim else 1 for d in range(rank)])


def align(factor: Tensor, rank: int) -> Tensor:
    """Add leading dims of size 1 to a factor, as broadcasting does."""
    return factor.reshape((1,) * (rank - factor.dim()) + tuple(factor.shape))


def _match_dims(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """Return the runs of dims before and after a reshape that hold the same elements."""
    found, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        first, other, left, right = i, j, old[i], new[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        found.append((range(first, i), range(other, j)))
    if found:  # dims of size 1 are left over
        before, after = found.pop()
        found.append((range(before.start, len(old)), range(after.start, len(new))))
    return found


def reshape_factor(factor: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """Return the factor of a tensor of shape `old` after it was reshaped to `new`."""
    if not old or not new:
        return factor.reshape([1] * len(new))
    wide, sizes = list(factor.shape), [1] * len(new)
    for before, after in _match_dims(old, new):
        if any(factor.shape[d] > 1 for d in before):
            for d in before:
                wide[d] = old[d]
            for d in after:
                sizes[d] = new[d]
    return compress(factor.expand(wide).reshape(sizes))


def first_along(factor: Tensor, dims: Dims) -> Tensor:
    """Return a factor's first element along each of `dims`; the factor itself if it varies along none."""
    for dim in dims & varying_dims(factor):
        factor = factor.narrow(dim, 0, 1)
    return factor
