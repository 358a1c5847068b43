"""Operations that only move elements, repeat them, or add zeros: units move along with their elements."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fedveil.graph.calls import Activation, Call, NoRule, Outcome, Traced, rule, tensor
from fedveil.graph.rules.pool import mixed_along
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Units, compressed, reshaped, varying, widened


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
    rank = call.x.value.dim()
    if call.name == "transpose" or call.name.startswith("swap"):
        dims = list(range(rank))
        names = [name for name in call.arguments if name.startswith(("dim", "axis"))]
        a, b = (call.arguments[name] % rank for name in names)
        dims[a], dims[b] = b, a
    elif call.name == "permute":
        dims = [d % rank for d in call["dims"]]
    elif call.name in ("movedim", "moveaxis"):
        dims = _moved_dims(call, rank)
    else:
        dims = [*range(rank - 2), *reversed(range(max(0, rank - 2), rank))]
    return kept(call, moved(call, call.x.units, lambda factor: factor.permute(dims)))


def _moved_dims(call: Call, rank: int) -> list[int]:
    source, target = call["source"], call["destination"]
    marker = torch.empty(list(range(2, rank + 2)), device="meta")  # sizes 2, 3, 4 ... name the dims
    return [size - 2 for size in marker.movedim(source, target).shape]


def dim_moved(
    call: Call, units: Units, dim: int, operation: Callable[[Tensor], Tensor], constant: Callable[[Tensor], Tensor]
) -> Units:
    """An operation along one dim: `operation` on factors that change along it, `constant` on the others."""
    return moved(call, units, lambda factor: operation(factor) if factor.shape[dim] > 1 else constant(factor))


def _same(factor: Tensor) -> Tensor:
    return factor


@rule("slice", "narrow", "flip", "roll", "slice_copy")
def along_a_dim(call: Call) -> Outcome:
    """Some elements along a dim, or all in another order."""
    x = call.x
    if call.name in ("flip", "roll"):
        dims = call["dims"]
        rank = x.value.dim()
        if not dims:
            raise NoRule("it rolls over all dims")

        def operation(factor: Tensor) -> Tensor:
            for number, dim in enumerate(dims):
                if factor.shape[dim] > 1:
                    shift = None if call.name == "flip" else call["shifts"][number]
                    factor = torch.flip(factor, (dim % rank,)) if shift is None else torch.roll(factor, shift, dim)
            return factor

        return kept(call, moved(call, x.units, operation))
    dim = call.dim()
    if call.name == "narrow":
        first, length, step = call["start"], call["length"], 1
        return kept(call, dim_moved(call, x.units, dim, lambda factor: factor.narrow(dim, int(first), length), _same))
    start, end, step = call.get("start"), call.get("end"), call.get("step", default=1)

    def cut(factor: Tensor) -> Tensor:
        place = [slice(None)] * factor.dim()
        place[dim] = slice(start, end, step)
        return factor[tuple(place)]

    return kept(call, dim_moved(call, x.units, dim, cut, _same))


@rule("select", "select_copy")
def select(call: Call) -> Outcome:
    """One place along a dim."""
    return kept(call, _picked(call, call.dim(), call["index"]))


@rule("split", "chunk", "split_with_sizes", "tensor_split", "unsafe_split", "unsafe_chunk", "unbind")
def split(call: Call) -> Outcome:
    """Pieces along a dim."""
    dim, start, found = call.dim(), 0, []
    for piece in call.output:
        if call.name == "unbind":
            found.append(_picked(call, dim, start))
            start += 1
        else:
            size = piece.shape[dim]
            found.append(dim_moved(call, call.x.units, dim, _narrow(dim, start, size), _same))
            start += size
    return found


def _narrow(dim: int, start: int, size: int) -> Callable[[Tensor], Tensor]:
    return lambda factor: factor.narrow(dim, start, size)


def _picked(call: Call, dim: int, place: int) -> Units:
    """Units at one place along a dim."""
    return dim_moved(
        call, call.x.units, dim, lambda factor: factor.select(dim, place), lambda factor: factor.squeeze(dim)
    )


@rule("expand", "expand_as", "broadcast_to", "expand_copy")
def expand(call: Call) -> Outcome:
    """Repeated along dims of size 1, along which factors are constant."""
    return kept(call, call.broadcast(call.x))


@rule("repeat", "tile")
def repeat(call: Call) -> Outcome:
    """Repeated along any dim."""
    times = list(call.get("repeats", "dims"))
    times = [1] * (call.rank - len(times)) + times
    units = call.broadcast(call.x)

    def operation(factor: Tensor) -> Tensor:
        return factor.repeat([n if size > 1 else 1 for n, size in zip(times, factor.shape, strict=True)])

    return kept(call, moved(call, units, operation))


@rule("repeat_interleave")
def _(call: Call) -> Outcome:
    times, dim = call["repeats"], call.get("dim")
    if not isinstance(times, int) or dim is None:
        raise NoRule("it repeats elements unequally")
    dim %= call.x.value.dim()
    again = lambda factor: factor.repeat_interleave(times, dim)  # noqa: E731
    return dim_moved(call, call.x.units, dim, again, _same)


@rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "im2col", "unfold")
def replay(call: Call) -> Outcome:
    """Apply the operation itself to the factors in full size, as float64, which every operation supports."""
    shape = call.x.value.shape
    rest = {name: value for name, value in call.arguments.items() if value is not call.x}
    if call.name == "im2col" and any(size for size in call["padding"]):
        raise NoRule("it pads with zeros in between")

    def operation(factor: Tensor) -> Tensor:
        out: Tensor = call.run(factor.expand(shape).contiguous().double(), **rest)
        return out.long()

    units = moved(call, call.x.units, operation)
    return units.each(compressed)


def _joined(call: Call, operands: Sequence[Traced], dim: int) -> Units:
    """Units of tensors concatenated along `dim`.

    If no tensor's noise changes along `dim`, all share one noise, such as tokens put in front of others. Otherwise each
    keeps its own; zeros get new units.
    """
    ledger, shapes = call.ledger, [operand.value.shape for operand in operands]
    present = [operand for operand in operands if not operand.zero]
    if not present:
        return Units()
    flat = all(factor.shape[dim] == 1 for operand in present for kind in operand.units for factor in kind)
    if flat and (len(present) == len(operands)):
        scale, order = present[0].units
        everywhere = frozenset(range(call.rank)) - {dim}
        for operand in present[1:]:
            why = "it puts together tensors that carry different factors, or one that carries none"
            scale = ledger.agree_scale(scale, operand.units.scale, call.where, why)
            order = ledger.agree_order(order, everywhere, operand.units.order, everywhere)
        return Units(scale, order)
    return Units(_side_by_side(call, operands, shapes, dim, 0), _side_by_side(call, operands, shapes, dim, 1))


def _side_by_side(
    call: Call, operands: Sequence[Traced], shapes: Sequence[torch.Size], dim: int, kind: int
) -> tuple[Tensor, ...]:
    """One factor that changes along `dim`, from one factor of each operand."""
    ledger = call.ledger
    lists = [list(operand.units[kind]) for operand in operands]
    common = [f for f in lists[0] if f.shape[dim] == 1 and all(any(f is g for g in other) for other in lists[1:])]
    pieces = []
    wide = frozenset().union(*(varying(f) for own in lists for f in own if not any(f is c for c in common))) | {dim}
    for operand, own, shape in zip(operands, lists, shapes, strict=True):
        factors = [f for f in own if not any(f is c for c in common)]
        first, rest = (factors[0], factors[1:]) if factors else (None, [])
        if rest and kind == 0:
            ledger.limit(rest, Symmetry.NOTHING, call.where, "it puts together tensors of which one is a product")
        for factor in rest if kind else ():
            ledger.fix(factor)
        if first is None and operand.zero:
            size = [shape[dim] if d == dim else 1 for d in range(len(shape))]
            first = ledger.fresh_scale(size, call.where) if kind == 0 else ledger.fresh_order(size)
        if first is None:
            first = torch.zeros([1] * len(shape), dtype=torch.int64)
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
    dim = call.get("dim", default=0) % call.rank
    units = _joined(call, operands, dim)
    return Activation(call.output, units, all(operand.zero for operand in operands))


@rule("stack")
def stack(call: Call) -> Outcome:
    """Side by side along a new dim."""
    dim = call.get("dim", default=0) % call.rank
    operands: list[Traced] = []
    for operand in map(tensor, call["tensors"]):
        value = operand.value.unsqueeze(dim)
        operands.append(Activation(value, operand.units.each(lambda factor: factor.unsqueeze(dim)), operand.zero))
    units = _joined(call, operands, dim)
    return Activation(call.output, units, all(operand.zero for operand in operands))


@rule("pad", "constant_pad_nd")
def pad(call: Call) -> Outcome:
    """Padding with zeros allows any noise, with another constant none."""
    x, amounts, value = call.x, list(call["pad"]), call.get("value")
    mode = call.get("mode", default="constant")
    rank = x.value.dim()
    dims = {rank - 1 - n // 2 for n in range(len(amounts)) if amounts[n]}
    units = x.units
    if mode == "constant" and value:
        units = mixed_along(call, call.unscaled(units, "it pads with a constant that is not 0"), frozenset(dims))
        return units
    per_dim = {rank - 1 - n: (amounts[2 * n], amounts[2 * n + 1]) for n in range(len(amounts) // 2)}

    def operation(factor: Tensor, fill: int) -> Tensor:
        for dim, (before, after) in per_dim.items():
            if factor.shape[dim] > 1 and (before or after):
                ends = [0, 0] * (rank - 1 - dim) + [before, after]
                if mode == "constant":
                    factor = F.pad(factor, ends, value=fill)
                else:
                    index = _pad_index(factor.shape[dim], before, after, mode)
                    factor = factor.index_select(dim, index)
        return factor

    gap = torch.iinfo(torch.int64).min
    scale = []
    for factor in units.scale:
        after = operation(factor, gap)
        holes = after == gap
        if holes.any():
            after = after.masked_scatter(holes, call.ledger.fresh_scale([int(holes.sum())], call.where))
        scale.append(after)
    order = []
    for factor in units.order:
        after = operation(factor, -1)
        holes = after == -1
        if holes.any():
            new = call.ledger.fresh_order([int(holes.sum())])
            after = after.masked_scatter(holes, new)
            call.ledger.moved(partial(_padded, operation, after), [factor])
        else:
            after = call.ledger.moved(lambda given: operation(given[0], -1), [factor])
        order.append(after)
    return Activation(call.output, Units(tuple(scale), tuple(order)), x.zero)


def _padded(operation: Callable[[Tensor, int], Tensor], after: Tensor, given: Sequence[Tensor]) -> Tensor:
    """A factor after padding: `after` fills the new places."""
    found = operation(given[0], -1)
    return torch.where(found == -1, after, found)


def _pad_index(size: int, before: int, after: int, mode: str) -> Tensor:
    """For each place after padding, the place it comes from."""
    row = torch.arange(size, dtype=torch.float64).reshape(1, 1, size)
    return F.pad(row, (before, after), mode=mode).long().flatten()


@rule("index_select", "index")
def index(call: Call) -> Outcome:
    """Places along a dim, given by a tensor: all of them share their noise, since any may be chosen."""
    x = call.x
    if call.name == "index_select":
        return _share(call, x.units, {call.dim()})
    indices = list(call["indices"])
    dims = [d for d, found in enumerate(indices) if found is not None]
    given = [tensor(indices[d]) for d in dims]
    if any(i.value.dtype == torch.bool for i in given):
        raise NoRule("its index is a mask, so the number of selected elements is unknown")
    units = _share(call, x.units, set(dims))
    shape = torch.broadcast_shapes(*[tuple(i.value.shape) for i in given])  # type: ignore[no-untyped-call]
    together = dims == list(range(dims[0], dims[-1] + 1))
    rest = [d for d in range(x.value.dim()) if d not in dims]
    ahead = [d for d in rest if d < dims[0]] if together else []
    behind = [d for d in rest if d not in ahead]

    def arranged(factor: Tensor) -> Tensor:
        sizes = [factor.shape[d] for d in ahead] + [1] * len(shape) + [factor.shape[d] for d in behind]
        return factor.reshape(sizes)

    return units.each(arranged)


def _share(call: Call, units: Units, dims: set[int]) -> Units:
    """The same noise along all of `dims`."""
    chosen = frozenset(dims)
    scale = tuple(call.ledger.merge_scale(factor, chosen, call.where) for factor in units.scale)
    order = []
    for factor in units.order:
        inside = varying(factor) & chosen
        if inside == varying(factor) and inside:
            call.ledger.fix(factor)
        else:
            order.append(call.ledger.merge_order(factor, chosen))
    return Units(scale, tuple(order))


@rule("zeros", "zeros_like", "new_zeros", "zero")
def zeros(call: Call) -> Outcome:
    """Zeros may have any noise."""
    return Activation(call.output, Units(), zero=True)


@rule("triu", "tril")
def _(call: Call) -> Outcome:
    units = call.x.units
    rank = call.x.value.dim()
    for factor in units.order:
        if factor.shape[-1] > 1 or factor.shape[-2] > 1:
            call.ledger.fix(factor)
    order = tuple(f for f in units.order if not varying(f) & {rank - 1, rank - 2})
    return Units(units.scale, order)
