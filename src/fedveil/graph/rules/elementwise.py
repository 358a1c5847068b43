"""Functions of one number, applied to each element: they let some factors through and every permutation."""

from collections.abc import Hashable

import torch
from torch import nn
from torch.nn import functional as F

from fedveil.graph.calls import Call, NoRule, Outcome, rule
from fedveil.graph.ledger import Units, pinned
from fedveil.graph.symmetry import Symmetry

LINEAR: list[Hashable] = [
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d,
    torch.neg, torch.clone, "neg", "clone", "contiguous", "detach", "float", "double", "to", "type_as",
]  # fmt: skip

POSITIVE: list[Hashable] = [
    nn.ReLU, nn.LeakyReLU, F.relu, F.leaky_relu, torch.relu, torch.relu_, torch.abs,
    "relu", "relu_", "abs",
]  # fmt: skip

ODD: list[Hashable] = [
    nn.Tanh, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink,
    F.tanh, F.softsign, F.tanhshrink, F.softshrink, F.hardshrink,
    torch.tanh, torch.sin, torch.asinh, torch.atan, torch.erf, torch.sign,
    "tanh", "tanh_", "sin", "asinh", "atan", "erf", "sign",
]  # fmt: skip

OTHER: list[Hashable] = [
    nn.GELU, nn.SiLU, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.ELU, nn.SELU, nn.CELU, nn.Mish, nn.ReLU6,
    nn.Hardswish, nn.Hardsigmoid,
    F.gelu, F.silu, F.sigmoid, F.logsigmoid, F.softplus, F.elu, F.selu, F.celu, F.mish, F.relu6, F.hardswish,
    F.hardsigmoid, torch.sigmoid, torch.exp, torch.log, torch.sqrt, torch.cos, torch.clamp, torch.square,
    "sigmoid", "exp", "log", "sqrt", "cos", "clamp", "square",
]  # fmt: skip


def through(call: Call, symmetry: Symmetry) -> Units:
    """The units of the only operand, limited to `symmetry`; pinned ones begin nothing new."""
    if len(call.operands) != 1:
        raise NoRule("it has an argument that is a tensor")
    units = call.x.units
    call.limit(units, symmetry)
    return units if symmetry else Units(pinned(units.shape).scale, units.order)


@rule(*LINEAR)
def _(call: Call) -> Outcome:
    return through(call, Symmetry.EVERYTHING)


@rule(*POSITIVE)
def _(call: Call) -> Outcome:
    return through(call, Symmetry.POSITIVE)


@rule(*ODD)
def _(call: Call) -> Outcome:
    return through(call, Symmetry.SIGN)


@rule(*OTHER)
def _(call: Call) -> Outcome:
    return through(call, Symmetry.NOTHING)


@rule(nn.Hardtanh)
def _(call: Call) -> Outcome:
    symmetric = call.module.min_val == -call.module.max_val
    return through(call, Symmetry.SIGN if symmetric else Symmetry.NOTHING)


@rule(F.hardtanh)
def _(call: Call) -> Outcome:
    symmetric = call.argument(1, "min_val", -1.0) == -call.argument(2, "max_val", 1.0)
    return through(call, Symmetry.SIGN if symmetric else Symmetry.NOTHING)
