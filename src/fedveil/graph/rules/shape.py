"""Operations that only move elements, or add zeros: their units move along."""

import operator
from collections.abc import Hashable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from fedveil.graph.calls import Activation, Call, NoRule, Outcome, RawParameter, rule
from fedveil.graph.symmetry import Symmetry

MOVES: list[Hashable] = [
    nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle,
    F.pixel_shuffle, F.pixel_unshuffle, torch.channel_shuffle,
    torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.transpose, torch.permute, torch.movedim,
    torch.cat, torch.concat, torch.stack, torch.chunk, torch.split, torch.narrow, torch.select, torch.unbind,
    torch.flip, torch.roll, torch.swapaxes,
    "flatten", "unflatten", "reshape", "view", "squeeze", "unsqueeze", "transpose", "permute", "movedim", "chunk",
    "split", "narrow", "select", "unbind", "expand", "repeat", "flip", "roll", "t", "view_as", "expand_as",
    "reshape_as", "swapaxes",
]  # fmt: skip


@rule(*MOVES)
def moves(call: Call) -> Outcome:
    """Units move as the elements do."""
    units = [operand.units for operand in call.operands]
    if isinstance(call.output, tuple | list):
        picks = range(len(call.output))
        return [call.ledger.replay(call.replay(pick), units, call.where) for pick in picks]
    return call.ledger.replay(call.replay(), units, call.where)


@rule(operator.getitem)
def item(call: Call) -> Outcome:
    """Slices and single places; an index that is itself a tensor has no rule."""
    if len(call.operands) != 1 or not isinstance(call.args[0], Activation | RawParameter):
        raise NoRule("its index is a tensor")
    return moves(call)


@rule(
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d,
    nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReplicationPad1d, nn.ReplicationPad2d, nn.CircularPad2d,
)  # fmt: skip
def _(call: Call) -> Outcome:
    module = call.module
    constant = hasattr(module, "value")
    mode = "constant" if constant else type(module).__name__[: -len("Pad2d")].lower()
    mode = {"reflection": "reflect", "replication": "replicate"}.get(mode, mode)
    return _pad(call, module.padding, mode, module.value if constant else None)


@rule(F.pad)
def _(call: Call) -> Outcome:
    return _pad(call, call.argument(1, "pad"), call.argument(2, "mode", "constant"), call.argument(3, "value"))


def _pad(call: Call, padding: tuple[int, ...], mode: str, value: float | None) -> Outcome:
    """Added zeros take any noise (gap -1 is filled with new units); another constant takes none (unit 0)."""
    fill = (0.0 if value else -1.0) if mode == "constant" else None
    if fill == 0.0:
        call.limit(call.x.units, Symmetry.NOTHING, "it pads with a constant that is not 0")

    def pad(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return F.pad(tensors[0].contiguous().double(), padding, mode=mode, value=fill).long()

    return call.ledger.replay(pad, [call.x.units], call.where)


@rule(torch.zeros, torch.zeros_like, "new_zeros")
def zeros(call: Call) -> Outcome:
    """Zeros take any noise."""
    shape = call.output.shape
    return call.ledger.fresh(shape.numel(), call.where).each(lambda t: t.reshape(shape))
