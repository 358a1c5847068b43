"""Linear, convolutions and Embedding: a new axis begins at the output, the input's axis is divided out."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.graph.calls import Call, NoRule, Outcome, RawParameter, rule
from fedveil.graph.ledger import Attachment, Units, spread


def along(dim: int, shape: torch.Size, units: Units, power: int = 1, moves: bool = True) -> Attachment:
    """Ties dimension `dim` of a tensor of `shape` to `units`."""
    view = [1] * len(shape)
    view[dim] = -1
    return Attachment(units, torch.arange(shape[dim]).reshape(view), shape[dim + 1 :].numel(), power, moves)


def _bias(call: Call, name: str | None, units: Units) -> None:
    if name:
        call.ledger.attach(name, Attachment(units, torch.arange(units.shape[0]), 1))


def _linear(call: Call, weight: Tensor, weight_name: str, bias_name: str | None) -> Units:
    inputs = call.ledger.vector(call.x.units, -1)
    outputs = call.ledger.fresh(weight.shape[0], weight_name)
    rows, columns = along(0, weight.shape, outputs), along(1, weight.shape, inputs, power=-1)
    call.ledger.attach(weight_name, rows, columns)
    _bias(call, bias_name, outputs)
    return spread(outputs, call.output.shape, -1)


@rule(nn.Linear)
def _(call: Call) -> Outcome:
    bias = call.tensor_name("bias") if call.module.bias is not None else None
    return _linear(call, call.module.weight, call.tensor_name("weight"), bias)


def parameter(argument: object) -> RawParameter:
    """The argument, if it is a parameter of the model as it stands."""
    if isinstance(argument, RawParameter):
        return argument
    raise NoRule("its weight is not a parameter as it stands, but computed")


def _functional(call: Call) -> tuple[RawParameter, str | None]:
    weight = parameter(call.argument(1, "weight"))
    bias = call.argument(2, "bias")
    return weight, None if bias is None else parameter(bias).name


@rule(F.linear)
def _(call: Call) -> Outcome:
    weight, bias = _functional(call)
    return _linear(call, weight.value, weight.name, bias)


def _ties_order(groups: int, inputs: int) -> bool:
    return groups == inputs > 1


def _grouped(units: Units, groups: int, members: int) -> Tensor:
    """For each (row, column) of a grouped weight, the place of its channel: `members` rows a group share columns."""
    channels = torch.arange(units.shape[0]).reshape(groups, 1, -1)
    return channels.expand(-1, members, -1).reshape(groups * members, -1)


def _outputs(call: Call, inputs: Units, count: int, groups: int, name: str) -> Units:
    """The output's units: a depthwise convolution keeps the input's order, a grouped one keeps to its groups."""
    ledger = call.ledger
    if _ties_order(groups, inputs.shape[0]):
        order = inputs.order.repeat_interleave(count // groups)
        ledger.count(order)
        return Units(ledger.fresh_scale(count, name), order)
    outputs = ledger.fresh(count, name)
    if groups > 1:
        for units in (inputs, outputs):
            ledger.mark(units.order, torch.arange(groups).repeat_interleave(units.shape[0] // groups))
    return outputs


def _convolution(
    call: Call, weight: Tensor, weight_name: str, bias_name: str | None, groups: int, transposed: bool
) -> Units:
    """The weight is (outputs, inputs / groups, ...), or (inputs, outputs / groups, ...) if transposed."""
    dim = call.x.value.dim() - (weight.dim() - 2) - 1
    inputs = call.ledger.vector(call.x.units, dim)
    count = weight.shape[1] * groups if transposed else weight.shape[0]
    outputs = _outputs(call, inputs, count, groups, weight_name)
    first, second = (inputs, outputs) if transposed else (outputs, inputs)
    sign = -1 if transposed else 1
    shape = weight.shape
    index = _grouped(second, groups, shape[0] // groups).reshape(shape[0], shape[1], *[1] * (len(shape) - 2))
    tied = _ties_order(groups, inputs.shape[0])
    call.ledger.attach(
        weight_name,
        along(0, shape, first, power=sign),
        Attachment(second, index, shape[2:].numel(), power=-sign, moves=not tied),
    )
    _bias(call, bias_name, outputs)
    return spread(outputs, call.output.shape, dim)


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def _(call: Call) -> Outcome:
    bias = call.tensor_name("bias") if call.module.bias is not None else None
    weight, name = call.module.weight, call.tensor_name("weight")
    return _convolution(call, weight, name, bias, call.module.groups, call.module.transposed)


@rule(F.conv1d, F.conv2d, F.conv3d)
def _(call: Call) -> Outcome:
    weight, bias = _functional(call)
    groups = call.argument(6, "groups", 1)
    return _convolution(call, weight.value, weight.name, bias, groups, transposed=False)


@rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _(call: Call) -> Outcome:
    weight, bias = _functional(call)
    groups = call.argument(6, "groups", 1)
    return _convolution(call, weight.value, weight.name, bias, groups, transposed=True)


def _embedding(call: Call, weight: Tensor, name: str, max_norm: float | None, sparse: bool) -> Units:
    if max_norm is not None:
        raise NoRule("max_norm changes the weight in forward")
    if sparse:
        raise NoRule("its gradient is sparse")
    outputs = call.ledger.fresh(weight.shape[1], name)
    call.ledger.attach(name, along(1, weight.shape, outputs))
    return spread(outputs, call.output.shape, -1)


@rule(nn.Embedding)
def _(call: Call) -> Outcome:
    module = call.module
    return _embedding(call, module.weight, call.tensor_name("weight"), module.max_norm, module.sparse)


@rule(F.embedding)
def _(call: Call) -> Outcome:
    weight = parameter(call.argument(1, "weight"))
    max_norm, sparse = call.argument(3, "max_norm"), call.argument(6, "sparse", False)
    return _embedding(call, weight.value, weight.name, max_norm, sparse)
