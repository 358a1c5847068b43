"""Sums, products and choices of tensors, element by element."""

from torch import Tensor

from fedveil.graph.calls import Activation, Call, NoRule, Outcome, StateTensor, Traced, rule
from fedveil.graph.rules.elementwise import apply_even
from fedveil.graph.rules.shape import narrow
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Units

MAX_FACTORS = 4  # of a product; further ones are limited to 1


def agree_order(call: Call, a: Traced, b: Traced) -> tuple[Tensor, ...]:
    """Give two operands the same order and return that of the result."""
    left, right = call.broadcast(a), call.broadcast(b)
    return call.ledger.agree_order(left.order, call.distinct_dims(a), right.order, call.distinct_dims(b))


def add_tensors(call: Call, a: Traced, b: Traced) -> Units:
    """Return the units of a sum: both terms share their noise; zeros may have any."""
    if a.zero or b.zero:
        return call.broadcast(b if a.zero else a)
    left, right = call.broadcast(a), call.broadcast(b)
    why = "it adds tensors that carry different factors, or one that carries none"
    if not left.scale or not right.scale:
        why = "it adds a tensor that carries no factors"
    return Units(call.ledger.agree_scale(left.scale, right.scale, call.where, why), agree_order(call, a, b))


def _combine(call: Call, a: object, b: object, why: str) -> Units:
    """Return the units of a sum of two tensors, or of a tensor and a number; only 0 commutes with factors."""
    if isinstance(a, Traced) and isinstance(b, Traced):
        return add_tensors(call, a, b)
    x, constant = (a, b) if isinstance(a, Traced) else (b, a)
    units = call.broadcast(x) if isinstance(x, Traced) else Units()
    return units if constant == 0 else call.drop_scale(units, why)


@rule("add", "sub", "rsub", "subtract", "__radd__")
def add(call: Call) -> Outcome:
    """Let both terms share their noise; a constant other than 0 limits the scale to 1."""
    a, b = call["self"], call["other"]
    units = _combine(call, a, b, "it adds a constant")
    if isinstance(a, Traced) and isinstance(b, Traced):
        return Activation(call.value, units, a.zero and b.zero)
    return units


def multiply_tensors(call: Call, a: Traced, b: Traced, inverse: bool = False) -> Activation:
    """Multiply the factors of both; a parameter's come last, because they are dropped first."""
    if a.zero or (b.zero and not inverse):
        return Activation(call.value, zero=True)
    left, right = call.broadcast(a), call.broadcast(b)
    other = tuple(-factor for factor in right.scale) if inverse else right.scale
    scale = (*other, *left.scale) if isinstance(a, StateTensor) else (*left.scale, *other)
    call.limit(scale[MAX_FACTORS:], Symmetry.NOTHING, "it multiplies many tensors")
    return Activation(call.value, Units(scale[:MAX_FACTORS], agree_order(call, a, b)))


@rule("mul", "multiply")
def multiply(call: Call) -> Outcome:
    """Multiply by a number, which commutes with everything, or by a tensor; a square loses its signs."""
    a, b = call["self"], call["other"]
    if a is b:
        return apply_even(call)
    if isinstance(a, Traced) and isinstance(b, Traced):
        return multiply_tensors(call, a, b)
    return call.broadcast(call.x)


@rule("div", "true_divide", "divide")
def divide(call: Call) -> Outcome:
    """Divide the factors too."""
    if call.get("rounding_mode"):
        raise NoRule("it rounds")
    a, b = call.tensor("self"), call["other"]
    return multiply_tensors(call, a, b, inverse=True) if isinstance(b, Traced) else call.broadcast(a)


@rule("reciprocal")
def _(call: Call) -> Outcome:
    return Units(tuple(-factor for factor in call.x.units.scale), call.x.units.order)


def _choose(call: Call, mask: Traced, units: Units) -> Units:
    """Allow only permutations that leave the mask unchanged."""
    everywhere, order = frozenset(range(call.rank)), call.broadcast(mask).order
    return Units(units.scale, call.ledger.agree_order(units.order, everywhere, order, call.distinct_dims(mask)))


@rule("where")
def _(call: Call) -> Outcome:
    units = _combine(call, call["self"], call["other"], "it inserts a constant")
    return _choose(call, call.tensor("condition"), units)


@rule("masked_fill")
def _(call: Call) -> Outcome:
    value = 1 if isinstance(call["value"], Traced) else call["value"]
    return _choose(call, call.tensor("mask"), _combine(call, call["self"], value, "it inserts a constant"))


@rule("maximum", "minimum")
def maximum(call: Call) -> Outcome:
    """Let both tensors share their noise, which must be positive."""
    units = add_tensors(call, call.tensor("self"), call.tensor("other"))
    call.limit(units.scale, Symmetry.POSITIVE)
    return units


@rule("addcmul")
def _(call: Call) -> Outcome:
    product = multiply_tensors(call, call.tensor("tensor1"), call.tensor("tensor2"))
    return add_tensors(call, call.tensor("self"), product)


@rule("lerp")
def _(call: Call) -> Outcome:
    between, weight = Activation(call.value, add_tensors(call, call.tensor("self"), call.tensor("end"))), call["weight"]
    if not isinstance(weight, Traced):
        return between.units
    call.limit(call.broadcast(weight).scale, Symmetry.NOTHING, "the weight of an interpolation takes no factor")
    return Units(between.units.scale, agree_order(call, between, weight))


@rule("glu")
def glu(call: Call) -> Outcome:
    """Multiply one half by the sigmoid of the other, which takes no factor and moves with the first."""
    dim, size = call.dim(), call.value.shape[call.dim()]
    value, gate = (narrow(call, dim, start, size) for start in (0, size))
    return multiply_tensors(call, Activation(call.value, value), Activation(call.value, call.drop_scale(gate)))
