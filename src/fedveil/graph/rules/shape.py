"""Rules for operations that only move elements, repeat them or add zeros; units move with their elements."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fedveil.graph.calls import Activation, Call, NoRule, Operand, Outcome, as_tensor, rule
from fedveil.graph.units import (
    Dims,
    Symmetry,
    Units,
    compress,
    reshape_along,
    reshape_factor,
    varying_dims,
)


def _move_along(call: Call, dim: int, operation: Callable[[Tensor], Tensor]) -> Units:
    """Apply an operation along one dim; factors that are constant along this dim do not change."""
    return call.ledger.move(call.x.units, lambda factor: operation(factor) if factor.shape[dim] > 1 else factor)


def narrow(call: Call, dim: int, start: int, size: int) -> Units:
    """Return the units of a slice along a dim."""
    return _move_along(call, dim, lambda factor: factor.narrow(dim, start, size))


def _select(call: Call, dim: int, index: int) -> Units:
    return call.ledger.move(call.x.units, lambda factor: factor.select(dim, index if factor.shape[dim] > 1 else 0))


@rule(
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel",
    "squeeze_copy", "unsqueeze_copy", "view_copy",
)  # fmt: skip
def reshape(call: Call) -> Outcome:
    """Reshape a tensor, which preserves the order of its elements."""
    old_shape, new_shape = tuple(call.x.value.shape), tuple(call.value.shape)
    return call.x.units.map(lambda factor: reshape_factor(factor, old_shape, new_shape))


@rule(
    "transpose",
    "permute",
    "t",
    "movedim",
    "moveaxis",
    "swapaxes",
    "swapdims",
    "mT",
    "numpy_T",
    "adjoint",
    "flip",
    "roll",
)
def permute(call: Call) -> Outcome:
    """Permute the dims, or the elements along a dim."""
    if call.name == "roll" and not call["dims"]:
        raise NoRule("it rolls the flattened tensor")
    return call.ledger.move(call.x.units, call.replay)


rule("slice", "narrow", "slice_copy")(lambda call: _move_along(call, call.dim(), call.replay))
rule("select", "select_copy")(lambda call: _select(call, call.dim(), *call.integers("index")))
rule("unbind")(lambda call: [_select(call, call.dim(), index) for index in range(len(call.output))])
rule("expand", "expand_as", "broadcast_to", "expand_copy")(lambda call: call.broadcast(call.x))
# What is read from memory that was never written is undefined, so it may be taken for zeros.
rule(
    "zeros", "zeros_like", "new_zeros", "zero", "empty", "empty_like", "new_empty",
)(lambda call: Units(zero=True))  # fmt: skip


@rule("split", "chunk", "split_with_sizes", "tensor_split", "unsafe_split", "unsafe_chunk")
def _(call: Call) -> Outcome:
    sizes = [piece.shape[call.dim()] for piece in call.output]
    starts = itertools.accumulate([0, *sizes[:-1]])
    return [narrow(call, call.dim(), start, size) for start, size in zip(starts, sizes, strict=True)]


@rule("repeat", "tile")
def repeat(call: Call) -> Outcome:
    """Repeat a tensor along one or more dims."""
    times = call.integers("repeats", "dims")
    times = [1] * (call.rank - len(times)) + times

    def operation(factor: Tensor) -> Tensor:
        return factor.repeat([n if size > 1 else 1 for n, size in zip(times, factor.shape, strict=True)])

    return call.ledger.move(call.broadcast(call.x), operation)


@rule("repeat_interleave")
def _(call: Call) -> Outcome:
    if not isinstance(call["repeats"], int) or call.get("dim") is None:
        raise NoRule("it repeats some elements more often than others")
    return _move_along(call, call.dim(), call.replay)


@rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "im2col", "unfold")
def replay(call: Call) -> Outcome:
    """Apply the operation to the factors, expanded to full size in float64, which all these operations support."""
    if call.name == "im2col" and any(call.integers("padding")):
        raise NoRule("it also pads with zeros")

    def operation(factor: Tensor) -> Tensor:
        return call.replay(factor.expand(call.x.value.shape).contiguous().double()).long()

    return call.ledger.move(call.x.units, operation).map(compress)


def concatenate(call: Call, operands: Sequence[Operand], dim: int) -> Units:
    """Concatenate tensors along `dim`.

    If no tensor's noise varies along `dim`, all tensors share the same noise, for example if a token is prepended to
    a sequence. Otherwise, each tensor keeps its noise, and zeros get new units.
    """
    ledger = call.ledger
    if all(operand.zero for operand in operands):
        return Units(zero=True)
    is_constant = all(
        factor.shape[dim] == 1 for operand in operands for factors in operand.units[:2] for factor in factors
    )
    if is_constant and not any(operand.zero for operand in operands):
        scale, order, _ = operands[0].units
        other_dims = frozenset(range(call.rank)) - {dim}
        for operand in operands[1:]:
            reason = "it concatenates tensors that carry different factors, or a tensor without factors"
            scale = ledger.reconcile_scale(scale, operand.units.scale, call.where, reason)
            order = ledger.reconcile_order(order, other_dims, operand.units.order, other_dims)
    else:
        scale, order = (_join_factors(call, operands, dim, is_order=factors) for factors in (False, True))
    return Units(scale, order)


def _join_factors(call: Call, operands: Sequence[Operand], dim: int, *, is_order: bool) -> tuple[Tensor, ...]:
    """Join scale or order factors, one from each operand, into a factor that varies along `dim`."""
    ledger = call.ledger
    lists = [operand.units.order if is_order else operand.units.scale for operand in operands]
    common = [
        f
        for f in lists[0]
        if f.shape[dim] == 1 and all(any(f is g for g in other_factors) for other_factors in lists[1:])
    ]
    lists = [tuple(f for f in factors_of_operand if not any(f is c for c in common)) for factors_of_operand in lists]
    varying = frozenset({dim}).union(*(varying_dims(f) for factors_of_operand in lists for f in factors_of_operand))
    pieces = []
    for operand, factors in zip(operands, lists, strict=True):
        shape = operand.value.shape
        if is_order:
            ledger.fix(*factors[1:])
        else:
            call.limit(factors[1:], Symmetry.NOTHING, "it concatenates tensors, one of which carries several factors")
        size = [shape[d] if operand.zero and d == dim else 1 for d in range(call.rank)]
        if factors:
            piece = factors[0]
        elif operand.zero:
            piece = ledger.create_order(size) if is_order else ledger.create_scale(size, call.where)
        else:
            piece = torch.zeros(size, dtype=torch.int64)
        pieces.append(piece.expand([shape[d] if d in varying else n for d, n in enumerate(piece.shape)]))
    if not any(bool(piece.any()) for piece in pieces):
        return tuple(common)

    def join(factors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(factors), dim)

    return (*common, compress(ledger.move_order(join, pieces) if is_order else join(pieces)))


@rule("cat", "concat", "concatenate")
def cat(call: Call) -> Outcome:
    """Concatenate along a dim; PyTorch ignores empty 1-d tensors."""
    operands = [operand for operand in call.operands if operand.value.dim() == call.rank]
    return concatenate(call, operands, call.dim(call.rank))


@rule("stack")
def stack(call: Call) -> Outcome:
    """Concatenate along a new dim."""
    dim = call.dim(call.rank)
    parts = [(x.value.unsqueeze(dim), x.units.map(lambda factor: factor.unsqueeze(dim))) for x in call.operands]
    return concatenate(call, [Activation(*part) for part in parts], dim)


def mix_neighbours(call: Call, units: Units, dims: Dims) -> Units:
    """Return the units after mixing neighbours along `dims`, which forbids permutations and unequal factors there."""
    order = []
    for factor in units.order:
        if varying_dims(factor) and varying_dims(factor) <= dims:
            call.ledger.fix(factor)
        else:
            order.append(call.ledger.merge_order(factor, dims))
    return Units(call.merge_scale(units.scale, dims), tuple(order))


@rule("pad", "constant_pad_nd")
def pad(call: Call) -> Outcome:
    """Pad with zeros, which may carry any noise, or with another constant, which carries none."""
    amounts, mode = call.integers("pad"), str(call.get("mode") or "constant")
    units, last_dim = call.x.units, call.x.value.dim() - 1
    widths = {last_dim - n: (amounts[2 * n], amounts[2 * n + 1]) for n in range(len(amounts) // 2)}
    widths = {dim: pair for dim, pair in widths.items() if any(pair)}
    if mode == "constant" and call.get("value"):
        return mix_neighbours(call, call.drop_scale(units, "it pads with a constant that is not 0"), frozenset(widths))

    def widen(factor: Tensor, create_units: Callable[[Sequence[int]], Tensor]) -> Callable[[Tensor], Tensor]:
        index = torch.arange(factor.numel()).reshape(factor.shape)  # the source index of each element
        for dim in [dim for dim in widths if factor.shape[dim] > 1]:
            row = torch.arange(1, factor.shape[dim] + 1, dtype=torch.float64).reshape(1, 1, -1)
            source = F.pad(row, widths[dim], mode=mode).long().flatten() - 1  # -1 for added zeros
            index = index.index_select(dim, source.clamp(min=0))
            index = index.masked_fill(reshape_along(source < 0, dim, factor.dim()), -1)
        new_units = create_units([int((index < 0).sum())]) if (index < 0).any() else index.new_empty(0)
        index[index < 0] = factor.numel() + torch.arange(len(new_units))
        return lambda values: torch.cat([values.flatten(), new_units])[index]

    create_scale = partial(call.ledger.create_scale, where=call.where)
    moves = [(Units(order=(factor,)), widen(factor, call.ledger.create_order)) for factor in units.order]
    order = tuple(
        factor for factor_units, operation in moves for factor in call.ledger.move(factor_units, operation).order
    )
    return Units(tuple(widen(factor, create_scale)(factor) for factor in units.scale), order, units.zero)


@rule("index_select", "index")
def index(call: Call) -> Outcome:
    """Select elements with index tensors. All elements share the same noise, because any of them may be selected."""
    if call.name == "index_select":
        return share(call, call.x.units, frozenset({call.dim()}))
    indices = {
        dim: as_tensor(argument) for dim, argument in enumerate(call.sequence("indices")) if argument is not None
    }
    if any(i.value.dtype == torch.bool for i in indices.values()):
        return _select_true(call, *indices.popitem(), others=indices)
    zeros = torch.zeros((1,) * max(i.value.dim() for i in indices.values()), dtype=torch.int64)
    key = tuple(zeros if dim in indices else slice(None) for dim in range(call.x.value.dim()))
    return share(call, call.x.units, frozenset(indices)).map(lambda factor: factor[key])


def _select_true(call: Call, first: int, mask: Operand, others: Mapping[int, Operand]) -> Units:
    """Select the elements for which a mask is true; the dims that it covers, from `first`, become one."""
    if others or any(mask.units[:2]):
        raise NoRule("its index is a mask that carries noise, or one of several indices")
    covered = range(first, first + mask.value.dim())
    key = tuple(0 if dim in covered[1:] else slice(None) for dim in range(call.x.value.dim()))
    return share(call, call.x.units, frozenset(covered)).map(lambda factor: factor[key])


def share(call: Call, units: Units, dims: Dims) -> Units:
    """Make units equal along `dims`, and return them; zeros remain zeros."""
    shared = mix_neighbours(call, units, dims)
    return Units(shared.scale, shared.order, units.zero)


@rule("triu", "tril")
def _(call: Call) -> Outcome:
    units = call.x.units
    return Units(units.scale, call.ledger.fix_along(units.order, frozenset({call.rank - 1, call.rank - 2})))
