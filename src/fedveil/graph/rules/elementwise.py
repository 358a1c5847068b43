"""Functions of one number, applied to each element: they let some factors and every permutation through."""

import torch

from fedveil.graph.calls import Activation, Call, NoRule, Outcome, rule
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Units

LINEAR = (
    "neg", "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "lift_fresh", "positive",
    "dropout", "feature_dropout", "native_dropout", "type_as",
)  # fmt: skip
ODD = (
    "tanh", "sin", "asinh", "atan", "erf", "sign", "softshrink", "hardshrink", "sinh", "tan", "asin", "atanh", "erfinv",
)  # fmt: skip
OTHER = (
    "gelu", "silu", "sigmoid", "log_sigmoid", "softplus", "elu", "selu", "celu", "mish", "relu6", "hardswish",
    "hardsigmoid", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "clamp", "clamp_min", "clamp_max",
    "threshold", "alpha_dropout", "feature_alpha_dropout", "erfc", "exp2", "logit", "round", "floor", "ceil", "trunc",
    "nan_to_num", "sinc",
)  # fmt: skip
SYMMETRIES = {
    **dict.fromkeys(("relu", "leaky_relu", "abs", "rrelu"), Symmetry.POSITIVE),
    **dict.fromkeys(ODD, Symmetry.SIGN),
    **dict.fromkeys(OTHER, Symmetry.NOTHING),
}


def through(call: Call, symmetry: Symmetry) -> Units:
    """The units of the only operand, limited to `symmetry`."""
    if len(call.operands) != 1:
        raise NoRule("it has an argument that is a tensor")
    units = call.x.units
    call.limit(units.scale, symmetry)
    return units if symmetry else units.unscaled()


@rule(*SYMMETRIES)
def _(call: Call) -> Outcome:
    return through(call, SYMMETRIES[call.name])


@rule(*LINEAR)
def _(call: Call) -> Outcome:
    if isinstance(call.output, tuple | list):
        return [call.x.units]
    return Activation(call.output, call.x.units, call.x.zero)


@rule("to", "_to_copy")
def convert(call: Call) -> Outcome:
    """To another dtype or device; not to fewer digits, which would round scaled values differently."""
    before, after = call.x.value.dtype, call.output.dtype
    if not before.is_floating_point:
        return Activation(call.output, Units(), call.x.zero)
    if after != before and not after.is_floating_point:
        raise NoRule(f"it turns {before} into {after}")
    if after != before and torch.finfo(after).eps > torch.finfo(before).eps:
        raise NoRule(f"it rounds {before} to {after}")
    return call.x.units


@rule("square", "cos", "cosh")
def even(call: Call) -> Units:
    """An even function: it lets signs through, and its output carries none."""
    call.limit(call.x.units.scale, Symmetry.SIGN)
    return call.x.units.unscaled()


@rule("hardtanh")
def _(call: Call) -> Outcome:
    symmetric = call["min_val"] == -call["max_val"]
    return through(call, Symmetry.SIGN if symmetric else Symmetry.NOTHING)


@rule("pow")
def _(call: Call) -> Outcome:
    exponent = call["exponent"]
    if exponent == 1:
        return call.x.units
    return even(call) if exponent in (2, 4) else through(call, Symmetry.NOTHING)


@rule("prelu", "_prelu_kernel")
def prelu(call: Call) -> Outcome:
    """Positive factors; its own weight keeps its scale and moves with the channels."""
    x, weight = call.x, call["weight"]
    call.limit(x.units.scale, Symmetry.POSITIVE)
    if weight.value.numel() == 1:
        weight.attach(Units())
        return x.units
    channels = frozenset(range(x.value.dim())) - {1}
    order = [call.ledger.merge_order(factor, channels) for factor in x.units.order if factor.shape[1] > 1]
    for factor in order:
        call.ledger.count(factor)
    weight.attach(Units((), tuple(factor.flatten() for factor in order)))
    others = tuple(factor for factor in x.units.order if factor.shape[1] == 1)
    return Units(x.units.scale, (*others, *order))
