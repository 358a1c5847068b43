"""Functions of one number, applied to each element: they commute with some factors and every permutation."""

import torch

from fedveil.graph import operations
from fedveil.graph.calls import Call, NoRule, Outcome, as_state, rule
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Units

LINEAR = (
    "neg", "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "lift_fresh", "positive",
    "dropout", "feature_dropout", "native_dropout", "type_as",
)  # fmt: skip
SYMMETRIES = {
    **dict.fromkeys(operations.POSITIVE, Symmetry.POSITIVE),
    **dict.fromkeys(operations.ODD, Symmetry.SIGN),
    **dict.fromkeys(operations.OTHER, Symmetry.NOTHING),
}


def _apply(call: Call, symmetry: Symmetry) -> Units:
    """Return the units of the only operand, limited to `symmetry`."""
    if len(call.operands) != 1:
        raise NoRule("it has an argument that is a tensor")
    call.limit(call.x.units.scale, symmetry)
    return call.x.units if symmetry else Units((), call.x.units.order)


@rule(*SYMMETRIES)
def _(call: Call) -> Outcome:
    return _apply(call, SYMMETRIES[call.name])


@rule(*LINEAR)
def _(call: Call) -> Outcome:
    return [call.x.units] if isinstance(call.output, tuple | list) else call.activation(call.x.units)


@rule("to", "_to_copy")
def convert(call: Call) -> Outcome:
    """Convert to another dtype or device; not to fewer digits, which would round scaled values differently."""
    before, after = call.x.value.dtype, call.value.dtype
    if not before.is_floating_point:
        return call.activation(Units())
    if after != before and not after.is_floating_point:
        raise NoRule(f"it turns {before} into {after}")
    if after != before and torch.finfo(after).eps > torch.finfo(before).eps:
        raise NoRule(f"it rounds {before} to {after}")
    return call.x.units


@rule(*operations.EVEN)
def apply_even(call: Call) -> Units:
    """Apply an even function: it commutes with signs, and its output carries none."""
    call.limit(call.x.units.scale, Symmetry.SIGN)
    return Units((), call.x.units.order)


@rule("hardtanh")
def _(call: Call) -> Outcome:
    low, high = call["min_val"], call["max_val"]
    symmetric = isinstance(low, int | float) and -low == high
    return _apply(call, Symmetry.SIGN if symmetric else Symmetry.NOTHING)


@rule("pow")
def _(call: Call) -> Outcome:
    exponent = call["exponent"]
    if exponent == 1:
        return call.x.units
    return apply_even(call) if exponent in (2, 4) else _apply(call, Symmetry.NOTHING)


@rule("prelu", "_prelu_kernel")
def prelu(call: Call) -> Outcome:
    """Let positive factors through; its own weight takes no factor and moves with the channels."""
    units, weight = call.x.units, as_state(call["weight"])
    call.limit(units.scale, Symmetry.POSITIVE)
    if weight.value.numel() == 1:
        weight.attach(Units())
        return units
    others = frozenset(range(call.x.value.dim())) - {1}
    order = call.merge_order([factor for factor in units.order if factor.shape[1] > 1], others)
    weight.attach(Units((), tuple(factor.flatten() for factor in order)))
    return Units(units.scale, (*[factor for factor in units.order if factor.shape[1] == 1], *order))
