"""Operations on each channel by itself."""

from collections.abc import Hashable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.graph.calls import Call, NoRule, Outcome, rule
from fedveil.graph.ledger import Attachment, Units, spread
from fedveil.graph.symmetry import Symmetry

MAXIMUM: dict[Hashable, int] = {
    nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3,
    F.max_pool1d: 1, F.max_pool2d: 2, F.max_pool3d: 3, torch.max_pool1d: 1, torch.max_pool2d: 2,
    nn.AdaptiveMaxPool1d: 1, nn.AdaptiveMaxPool2d: 2, nn.AdaptiveMaxPool3d: 3,
    F.adaptive_max_pool1d: 1, F.adaptive_max_pool2d: 2, F.adaptive_max_pool3d: 3,
}  # fmt: skip

AVERAGE: dict[Hashable, int] = {
    nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3, F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3,
    nn.AdaptiveAvgPool1d: 1, nn.AdaptiveAvgPool2d: 2, nn.AdaptiveAvgPool3d: 3,
    F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3,
}  # fmt: skip


def _channelwise(call: Call, spatial: int, symmetry: Symmetry) -> Units:
    if not isinstance(call.output, Tensor):
        raise NoRule("it returns indices")
    dim = call.x.value.dim() - spatial - 1
    units = call.ledger.vector(call.x.units, dim)
    call.limit(units, symmetry)
    return spread(units, call.output.shape, dim)


@rule(*MAXIMUM)
def _(call: Call) -> Outcome:
    return _channelwise(call, MAXIMUM[call.key], Symmetry.POSITIVE)


@rule(*AVERAGE)
def _(call: Call) -> Outcome:
    return _channelwise(call, AVERAGE[call.key], Symmetry.EVERYTHING)


@rule(nn.Upsample, F.interpolate)
def _(call: Call) -> Outcome:
    return _channelwise(call, call.x.value.dim() - 2, Symmetry.EVERYTHING)


@rule(nn.PReLU)
def prelu(call: Call) -> Outcome:
    """Positive factors; its own weight keeps its scale and moves with the channels."""
    call.limit(call.x.units, Symmetry.POSITIVE)
    weight = call.module.weight
    if weight.numel() == 1:
        return call.x.units
    units = call.ledger.vector(call.x.units, 1)
    unscaled = Units(torch.zeros_like(units.scale), units.order)
    call.ledger.attach(call.tensor_name("weight"), Attachment(unscaled, torch.arange(weight.numel()), 1))
    return spread(units, call.output.shape, 1)


@rule(torch.mean, torch.sum, "mean", "sum")
def reduction(call: Call) -> Outcome:
    """The elements that are added share their noise."""
    units, dims, keep = call.x.units, call.argument(1, "dim"), call.argument(2, "keepdim", False)
    rank = len(units.shape)
    chosen = range(rank) if dims is None else ([dims] if isinstance(dims, int) else list(dims))
    merged = call.ledger.merge(units, [d % rank for d in chosen])
    return merged if keep else merged.each(lambda t: t.reshape(call.output.shape))
