"""Sums and products of tensors."""

import operator

import torch

from fedveil.graph.calls import Activation, Call, NoRule, Outcome, RawParameter, Traced, rule
from fedveil.graph.ledger import Units, pinned
from fedveil.graph.symmetry import Symmetry


def _two(call: Call) -> tuple[object, object]:
    left, right = call.argument(0, "input"), call.argument(1, "other")
    for side in (left, right):
        if not isinstance(side, Activation | RawParameter | int | float):
            raise NoRule(f"it has an operand of type {type(side).__name__}")
    return left, right


@rule(
    operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub, torch.subtract,
    "add", "add_", "sub", "sub_", "__add__", "__radd__",
)  # fmt: skip
def add(call: Call) -> Outcome:
    """Both terms share their noise; a constant that is not 0 pins the scale."""
    left, right = _two(call)
    if not isinstance(left, Activation | RawParameter):
        left, right = right, left
    assert isinstance(left, Activation | RawParameter)
    if isinstance(right, Activation | RawParameter):
        units, others = call.broadcast(left), call.broadcast(right)
        for term, other in ((units, others), (others, units)):
            if not term.scale.any():
                call.limit(other, Symmetry.NOTHING, "it adds a tensor that carries no factors")
        call.ledger.unite(units, others)
        return units
    if right == 0:
        return left.units
    call.limit(left.units, Symmetry.NOTHING, "it adds a constant")
    return Units(pinned(left.units.shape).scale, left.units.order)


def _plain_factor(call: Call, factor: Traced) -> bool:
    """Whether the factor carries no scale, or can be made to."""
    if isinstance(factor, RawParameter) or factor.value.numel() == 1:
        call.limit(factor.units, Symmetry.NOTHING, "a factor of a product keeps its scale")
        return True
    return not factor.units.scale.any()


def _scaled(call: Call, x: Traced, factor: Traced) -> Units:
    units = call.broadcast(x)
    if factor.value.numel() > 1:
        call.ledger.order.unite(units.order, call.broadcast(factor).order)
    return units


@rule(operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_")
def multiply(call: Call) -> Outcome:
    """A number, or a tensor without scale, lets everything through; two scaled tensors pin each other."""
    left, right = _two(call)
    if not (isinstance(left, Activation | RawParameter) and isinstance(right, Activation | RawParameter)):
        return call.x.units
    for x, factor in ((left, right), (right, left)):
        if not isinstance(x, RawParameter) and _plain_factor(call, factor):
            return _scaled(call, x, factor)
    for side in (left, right):
        call.limit(side.units, Symmetry.NOTHING, "it multiplies two tensors")
    units = call.broadcast(left)
    call.ledger.order.unite(units.order, call.broadcast(right).order)
    return Units(pinned(units.shape).scale, units.order)


@rule(operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_")
def divide(call: Call) -> Outcome:
    """A number, or a tensor without scale, lets everything through."""
    left, right = _two(call)
    if call.kwargs.get("rounding_mode"):
        raise NoRule("it rounds")
    if isinstance(left, int | float):
        raise NoRule("its divisor is the tensor")
    assert isinstance(left, Activation | RawParameter)
    if not isinstance(right, Activation | RawParameter):
        return left.units
    if not _plain_factor(call, right):
        raise NoRule("it divides by a tensor that carries noise")
    return _scaled(call, left, right)
