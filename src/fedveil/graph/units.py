"""Describe the noise on each element of a tensor.

Noise consists of *scale* (elements are multiplied by secret factors) and *order* (elements are permuted). Both are
tuples of *factors*: integer tensors with as many dims as the tensor, and with size 1 in every dim along which they are
constant. For example, noise on the channels of an activation (N, C, H, W) has shape (1, C, 1, 1).

Each element of a scale factor is the index of a scale unit: 5 multiplies by the secret number of unit 5, -5 divides by
it, and 0 does nothing. An element of the tensor is multiplied by the product over all scale factors. Each element of an
order factor is the index of an order unit; unit 0 does not move.
"""

from collections.abc import Callable, Sequence
from enum import IntFlag
from typing import NamedTuple

import torch
from torch import Tensor

Dims = frozenset[int]


class Symmetry(IntFlag):
    """The factors that an operation commutes with; ``a & b`` contains the factors that are in both a and b.

    NOTHING contains only 1, SIGN contains +1 and -1, POSITIVE contains all positive numbers, and EVERYTHING contains
    all numbers except 0.
    """

    NOTHING = 0
    SIGN = 1
    POSITIVE = 2
    EVERYTHING = 3

    @property
    def words(self) -> str:
        """The name of this symmetry as shown to users."""
        return ("pinned", "signs", "positive", "any")[self]


class Units(NamedTuple):
    """The noise on a tensor; if `zero` is true, the tensor contains only zeros and may carry any noise."""

    scale: tuple[Tensor, ...] = ()
    order: tuple[Tensor, ...] = ()
    zero: bool = False

    def map(self, function: Callable[[Tensor], Tensor]) -> "Units":
        """Return the units with `function` applied to every factor."""
        return Units(tuple(map(function, self.scale)), tuple(map(function, self.order)), self.zero)


def varying_dims(factor: Tensor) -> Dims:
    """Return the dims along which a factor varies."""
    return frozenset(dim for dim, size in enumerate(factor.shape) if size > 1)


def distinct_dims(value: Tensor) -> Dims:
    """Return the dims along which a tensor's elements may differ: those along which it is not broadcast."""
    return frozenset(d for d in range(value.dim()) if value.shape[d] > 1 and value.stride(d) != 0)


def split_first_dim(value: Tensor, parts: int) -> Tensor:
    """Return a meta tensor with the layout of value.unflatten(0, (parts, -1)), which is slow for fake tensors."""
    size = value.shape[0] // parts
    strides = (size * value.stride(0), *value.stride())
    return torch.empty_strided((parts, size, *value.shape[1:]), strides, device="meta")


def compress(factor: Tensor) -> Tensor:
    """Reduce a factor to size 1 in every dim along which it is constant."""
    for dim in sorted(varying_dims(factor), key=factor.stride().__getitem__):  # start with expanded dims
        constant = factor.narrow(dim, 0, 1)
        if factor.stride()[dim] == 0 or bool((factor == constant).all()):
            factor = constant
    return factor


def reshape_along(values: Tensor, dim: int, rank: int) -> Tensor:
    """Reshape 1-D values so that they broadcast along `dim` of a tensor with `rank` dims."""
    return values.reshape([-1 if d == dim else 1 for d in range(rank)])


def align(factor: Tensor, rank: int) -> Tensor:
    """Add leading dims of size 1 to a factor, as broadcasting does."""
    return factor.reshape((1,) * (rank - factor.dim()) + tuple(factor.shape))


def reshape_factor(factor: Tensor, old_shape: Sequence[int], new_shape: Sequence[int]) -> Tensor:
    """Return the factor of a tensor after the tensor is reshaped from `old` to `new`."""
    return compress(factor.expand(old_shape).reshape(new_shape))


def first_along(factor: Tensor, dims: Dims) -> Tensor:
    """Return the first elements of a factor along `dims`, or the factor itself if it varies along none of them."""
    for dim in dims & varying_dims(factor):
        factor = factor.narrow(dim, 0, 1)
    return factor
