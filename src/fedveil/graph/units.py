"""The noise on each element of a tensor, described along its dims.

A tensor carries *scale* (its elements are multiplied by secret factors) and *order* (its elements are permuted). Each
is a tuple of *factors*: integer tensors with the same number of dims as the tensor, and of size 1 along every dim in
which they are constant. The channels of an (N, C, H, W) activation are one factor of shape (1, C, 1, 1).

An element of a scale factor names a scale unit: 5 multiplies by that unit's secret number, -5 divides by it, 0 does
nothing; an element's scale is the product over all factors. An element of an order factor names an order unit; unit
0 does not move.
"""

from collections.abc import Callable, Sequence
from enum import IntFlag
from typing import NamedTuple

import torch
from torch import Tensor

Dims = frozenset[int]


class Symmetry(IntFlag):
    """The factors that an operation commutes with; ``a & b`` are those that both let through.

    NOTHING allows only 1, SIGN {+1, -1}, POSITIVE every positive number, EVERYTHING every number except 0.
    """

    NOTHING = 0
    SIGN = 1
    POSITIVE = 2
    EVERYTHING = 3

    @property
    def words(self) -> str:
        """The symmetry as shown to users."""
        return ("pinned", "signs", "positive", "any")[self]


class Units(NamedTuple):
    """The noise on a tensor; a tensor of zeros (`zero`) may carry any noise."""

    scale: tuple[Tensor, ...] = ()
    order: tuple[Tensor, ...] = ()
    zero: bool = False

    def each(self, change: Callable[[Tensor], Tensor]) -> "Units":
        """Apply `change` to all factors."""
        return Units(tuple(map(change, self.scale)), tuple(map(change, self.order)), self.zero)


def varying_dims(factor: Tensor) -> Dims:
    """Return the dims along which a factor varies."""
    return frozenset(dim for dim, size in enumerate(factor.shape) if size > 1)


def distinct_dims(value: Tensor) -> Dims:
    """Return the dims along which a tensor's elements may differ: those along which it is not broadcast."""
    return frozenset(d for d in range(value.dim()) if value.shape[d] > 1 and value.stride(d) != 0)


def split_first_dim(value: Tensor, parts: int) -> Tensor:
    """Return a meta tensor laid out as value.unflatten(0, (parts, -1)), which is slow on fake tensors."""
    size = value.shape[0] // parts
    strides = (size * value.stride(0), *value.stride())
    return torch.empty_strided((parts, size, *value.shape[1:]), strides, device="meta")


def compress(factor: Tensor) -> Tensor:
    """Reduce a factor to size 1 along every dim along which it is constant."""
    for dim in sorted(varying_dims(factor), key=factor.stride().__getitem__):  # expanded dims first: they cost nothing
        first = factor.narrow(dim, 0, 1)
        if factor.stride()[dim] == 0 or bool((factor == first).all()):
            factor = first
    return factor


def factor_along(values: Tensor, dim: int, rank: int) -> Tensor:
    """Return 1-d values as a factor that varies along `dim` of a tensor with `rank` dims."""
    return values.reshape([-1 if d == dim else 1 for d in range(rank)])


def align(factor: Tensor, rank: int) -> Tensor:
    """Add leading dims of size 1 to a factor, as broadcasting does."""
    return factor.reshape((1,) * (rank - factor.dim()) + tuple(factor.shape))


def reshape_factor(factor: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """Return the factor of a tensor after it is reshaped from `old` to `new`."""
    return compress(factor.expand(old).reshape(new))


def first_along(factor: Tensor, dims: Dims) -> Tensor:
    """Return a factor's first element along each of `dims`; the factor itself if it varies along none of them."""
    for dim in dims & varying_dims(factor):
        factor = factor.narrow(dim, 0, 1)
    return factor
