"""Operations that only move elements, repeat them, or add zeros: units move along with their elements."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fedveil.graph.calls import Activation, Call, NoRule, Outcome, Traced, rule, tensor
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Dims, Units, compressed, reshaped, varying, widened

GAP = torch.iinfo(torch.int64).min  # marks places that padding adds


def moved(call: Call, units: Units, operation: Callable[[Tensor], Tensor]) -> Units:
    """Each factor after an operation that moves elements of one tensor."""
    order = [call.ledger.moved(lambda given: operation(given[0]), [factor]) for factor in units.order]
    return Units(tuple(map(operation, units.scale)), tuple(order))


def kept(call: Call, units: Units) -> Outcome:
    """Keep the units, and whether the tensor is all zeros."""
    return Activation(call.output, units, call.x.zero)


@rule(
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel",
    "squeeze_copy", "unsqueeze_copy", "view_copy",
)  # fmt: skip
def reshape(call: Call) -> Outcome:
    """The same elements in the same order."""
    before, after = tuple(call.x.value.shape), tuple(call.output.shape)
    return kept(call, call.x.units.each(lambda factor: reshaped(factor, before, after)))


@rule("transpose", "permute", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "mT", "adjoint")
def permute(call: Call) -> Outcome:
    """Dims trade places."""
    marker = torch.empty(list(range(2, call.rank + 2)), device="meta")  # sizes 2, 3, 4 ... name the dims
    dims = [size - 2 for size in call.on(marker).shape]
    return kept(call, moved(call, call.x.units, lambda factor: factor.permute(dims)))


def dim_moved(call: Call, dim: int, operation: Callable[[Tensor], Tensor]) -> Units:
    """An operation along one dim, which leaves factors alone that are constant along it."""
    return moved(call, call.x.units, lambda factor: operation(factor) if factor.shape[dim] > 1 else factor)


def narrowed(call: Call, dim: int, start: int, size: int) -> Units:
    """Units of a piece along a dim."""
    return dim_moved(call, dim, lambda factor: factor.narrow(dim, start, size))


def _picked(call: Call, dim: int, place: int) -> Units:
    return moved(call, call.x.units, lambda factor: factor.select(dim, place if factor.shape[dim] > 1 else 0))


@rule("slice", "narrow", "slice_copy")
def _(call: Call) -> Outcome:
    return kept(call, dim_moved(call, call.dim(), call.on))


@rule("flip", "roll")
def _(call: Call) -> Outcome:
    if not call["dims"]:
        raise NoRule("it rolls over all dims")
    return kept(call, moved(call, call.x.units, call.on))


@rule("select", "select_copy")
def _(call: Call) -> Outcome:
    return kept(call, _picked(call, call.dim(), call["index"]))


@rule("unbind")
def _(call: Call) -> Outcome:
    return [_picked(call, call.dim(), place) for place in range(len(call.output))]


@rule("split", "chunk", "split_with_sizes", "tensor_split", "unsafe_split", "unsafe_chunk")
def _(call: Call) -> Outcome:
    dim = call.dim()
    sizes = [piece.shape[dim] for piece in call.output]
    starts = [0, *itertools.accumulate(sizes)]
    return [narrowed(call, dim, start, size) for start, size in zip(starts, sizes, strict=False)]


@rule("expand", "expand_as", "broadcast_to", "expand_copy")
def expand(call: Call) -> Outcome:
    """Repeated along dims of size 1, along which factors are constant."""
    return kept(call, call.broadcast(call.x))


@rule("repeat", "tile")
def repeat(call: Call) -> Outcome:
    """Repeated along any dim."""
    times = list(call.get("repeats", "dims"))
    times = [1] * (call.rank - len(times)) + times

    def operation(factor: Tensor) -> Tensor:
        return factor.repeat([n if size > 1 else 1 for n, size in zip(times, factor.shape, strict=True)])

    return kept(call, moved(call, call.broadcast(call.x), operation))


@rule("repeat_interleave")
def _(call: Call) -> Outcome:
    if not isinstance(call["repeats"], int) or call.get("dim") is None:
        raise NoRule("it repeats elements unequally")
    return dim_moved(call, call.dim(), call.on)


@rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "im2col", "unfold")
def replay(call: Call) -> Outcome:
    """Apply the operation itself to the factors in full size, as float64, which every operation supports."""
    if call.name == "im2col" and any(size for size in call["padding"]):
        raise NoRule("it pads with zeros in between")

    def operation(factor: Tensor) -> Tensor:
        return call.on(factor.expand(call.x.value.shape).contiguous().double()).long()

    return moved(call, call.x.units, operation).each(compressed)


def _joined(call: Call, operands: Sequence[Traced], dim: int) -> Activation:
    """Tensors concatenated along `dim`.

    If no tensor's noise changes along `dim`, all share one noise, such as tokens put in front of others. Otherwise each
    keeps its own; zeros get new units.
    """
    ledger = call.ledger
    present = [operand for operand in operands if not operand.zero]
    if not present:
        return Activation(call.output, zero=True)
    flat = all(factor.shape[dim] == 1 for operand in present for kind in operand.units for factor in kind)
    if flat and len(present) == len(operands):
        scale, order = present[0].units
        everywhere = frozenset(range(call.rank)) - {dim}
        for operand in present[1:]:
            why = "it puts together tensors that carry different factors, or one that carries none"
            scale = ledger.agree_scale(scale, operand.units.scale, call.where, why)
            order = ledger.agree_order(order, everywhere, operand.units.order, everywhere)
    else:
        scale, order = (_side_by_side(call, operands, dim, kind) for kind in (0, 1))
    return Activation(call.output, Units(scale, order))


def _side_by_side(call: Call, operands: Sequence[Traced], dim: int, kind: int) -> tuple[Tensor, ...]:
    """One factor that changes along `dim`, from one factor of each operand; `kind` is 0 for scale, 1 for order."""
    ledger = call.ledger
    lists = [list(operand.units[kind]) for operand in operands]
    common = [f for f in lists[0] if f.shape[dim] == 1 and all(any(f is g for g in other) for other in lists[1:])]
    pieces = []
    wide = frozenset().union(*(varying(f) for own in lists for f in own if not any(f is c for c in common))) | {dim}
    for operand, own in zip(operands, lists, strict=True):
        shape, ones = operand.value.shape, [1] * call.rank
        factors = [f for f in own if not any(f is c for c in common)]
        if kind == 0:
            call.limit(factors[1:], Symmetry.NOTHING, "it puts together tensors of which one is a product")
        else:
            ledger.fix(*factors[1:])
        if factors:
            first = factors[0]
        elif operand.zero:
            size = [*ones[:dim], shape[dim], *ones[dim + 1 :]]
            first = ledger.fresh_order(size) if kind else ledger.fresh_scale(size, call.where)
        else:
            first = torch.zeros(ones, dtype=torch.int64)
        pieces.append(widened(first, shape, wide))
    if not any(bool(piece.any()) for piece in pieces):
        return tuple(common)

    def join(given: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(given), dim)

    joined = ledger.moved(join, pieces) if kind else join(pieces)
    return (*common, compressed(joined))


@rule("cat", "concat", "concatenate")
def cat(call: Call) -> Outcome:
    """Side by side along a dim."""
    operands = [tensor(operand) for operand in call["tensors"]]
    operands = [operand for operand in operands if operand.value.dim() == call.rank]
    return _joined(call, operands, call.get("dim", default=0) % call.rank)


@rule("stack")
def stack(call: Call) -> Outcome:
    """Side by side along a new dim."""
    dim = call.get("dim", default=0) % call.rank
    operands: list[Traced] = []
    for operand in map(tensor, call["tensors"]):
        value = operand.value.unsqueeze(dim)
        operands.append(Activation(value, operand.units.each(lambda factor: factor.unsqueeze(dim)), operand.zero))
    return _joined(call, operands, dim)


def mixed_along(call: Call, units: Units, dims: Dims) -> Units:
    """Units after an operation that mixes neighbours along `dims`: one factor along them, and no permutation."""
    return Units(call.merged(units.scale, dims), call.ledger.fix_along(units.order, dims))


@rule("pad", "constant_pad_nd")
def pad(call: Call) -> Outcome:
    """Padding with zeros allows any noise, with another constant none."""
    amounts, mode = list(call["pad"]), call.get("mode", default="constant")
    units, last = call.x.units, call.x.value.dim() - 1
    ends = {last - n: (amounts[2 * n], amounts[2 * n + 1]) for n in range(len(amounts) // 2)}
    ends = {dim: both for dim, both in ends.items() if any(both)}
    if mode == "constant" and call.get("value"):
        return mixed_along(call, call.unscaled(units, "it pads with a constant that is not 0"), frozenset(ends))

    def padded(factor: Tensor) -> Tensor:
        for dim, (before, after) in ends.items():
            if factor.shape[dim] > 1 and mode == "constant":
                factor = F.pad(factor, [0, 0] * (last - dim) + [before, after], value=GAP)
            elif factor.shape[dim] > 1:
                factor = factor.index_select(dim, _pad_index(factor.shape[dim], before, after, mode))
        return factor

    def filled(factor: Tensor, fresh: Callable[[Sequence[int]], Tensor]) -> Tensor:
        after = padded(factor)
        gaps = after == GAP
        return after.masked_scatter(gaps, fresh([int(gaps.sum())])) if gaps.any() else after

    def again(after: Tensor, given: Sequence[Tensor]) -> Tensor:
        found = padded(given[0])
        return torch.where(found == GAP, after, found)

    scale = [filled(factor, partial(call.ledger.fresh_scale, where=call.where)) for factor in units.scale]
    order = []
    for factor in units.order:
        after = filled(factor, call.ledger.fresh_order)
        order.append(call.ledger.moved(partial(again, after), [factor]))
    return kept(call, Units(tuple(scale), tuple(order)))


def _pad_index(size: int, before: int, after: int, mode: str) -> Tensor:
    """For each place after padding, the place it comes from."""
    row = torch.arange(size, dtype=torch.float64).reshape(1, 1, size)
    return F.pad(row, (before, after), mode=mode).long().flatten()


@rule("index_select", "index")
def index(call: Call) -> Outcome:
    """Places along a dim, given by a tensor: all of them share their noise, since any may be chosen."""
    x = call.x
    if call.name == "index_select":
        return _share(call, frozenset({call.dim()}))
    indices = list(call["indices"])
    dims = [d for d, found in enumerate(indices) if found is not None]
    given = [tensor(indices[d]) for d in dims]
    if any(i.value.dtype == torch.bool for i in given):
        raise NoRule("its index is a mask, so the number of selected elements is unknown")
    units = _share(call, frozenset(dims))
    shape = torch.broadcast_shapes(*[tuple(i.value.shape) for i in given])  # type: ignore[no-untyped-call]
    together = dims == list(range(dims[0], dims[-1] + 1))
    rest = [d for d in range(x.value.dim()) if d not in dims]
    ahead = [d for d in rest if d < dims[0]] if together else []
    behind = [d for d in rest if d not in ahead]

    def arranged(factor: Tensor) -> Tensor:
        sizes = [factor.shape[d] for d in ahead] + [1] * len(shape) + [factor.shape[d] for d in behind]
        return factor.reshape(sizes)

    return units.each(arranged)


def _share(call: Call, dims: Dims) -> Units:
    """The same noise along all of `dims`."""
    order = []
    for factor in call.x.units.order:
        if varying(factor) and varying(factor) <= dims:
            call.ledger.fix(factor)
        else:
            order.append(call.ledger.merge_order(factor, dims))
    return Units(call.merged(call.x.units.scale, dims), tuple(order))


@rule("zeros", "zeros_like", "new_zeros", "zero")
def zeros(call: Call) -> Outcome:
    """Zeros may have any noise."""
    return Activation(call.output, zero=True)


@rule("triu", "tril")
def _(call: Call) -> Outcome:
    scale, order = call.x.units
    return Units(scale, call.ledger.fix_along(order, frozenset({call.rank - 1, call.rank - 2})))
