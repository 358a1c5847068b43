"""Sums, products and choices of tensors, element by element."""

from torch import Tensor

from fedveil.graph.calls import Activation, Call, NoRule, Outcome, Stored, Traced, rule, tensor
from fedveil.graph.rules.elementwise import even
from fedveil.graph.rules.shape import narrowed
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Units

MOST_FACTORS = 4  # of a product; further ones are limited to 1


def _is_tensor(argument: object) -> bool:
    return isinstance(argument, Activation | Stored)


def meet(call: Call, a: Traced, b: Traced) -> tuple[Tensor, ...]:
    """Make the elements of two tensors move alike; returns how the result moves."""
    left, right = call.broadcast(a), call.broadcast(b)
    return call.ledger.agree_order(left.order, call.differs(a), right.order, call.differs(b))


def total(call: Call, a: Traced, b: Traced) -> Units:
    """A sum: both terms share their noise; zeros may have any."""
    if a.zero or b.zero:
        return call.broadcast(b if a.zero else a)
    left, right = call.broadcast(a), call.broadcast(b)
    why = "it adds tensors that carry different factors, or one that carries none"
    if not left.scale or not right.scale:
        why = "it adds a tensor that carries no factors"
    return Units(call.ledger.agree_scale(left.scale, right.scale, call.where, why), meet(call, a, b))


@rule("add", "sub", "rsub", "subtract", "__radd__")
def add(call: Call) -> Outcome:
    """Both terms share their noise; a constant other than 0 limits the scale to 1."""
    a, b = call["self"], call["other"]
    if _is_tensor(a) and _is_tensor(b):
        units = total(call, a, b)
        return Activation(call.output, units, a.zero and b.zero) if a.zero or b.zero else units
    x, constant = (a, b) if _is_tensor(a) else (b, a)
    if constant == 0:
        return call.broadcast(x)
    return call.unscaled(call.broadcast(x), "it adds a constant")


def product(call: Call, a: Traced, b: Traced, inverse: bool = False) -> Units | Activation:
    """The factors of both; a parameter's come last, because they are dropped first."""
    if a.zero or (b.zero and not inverse):
        return Activation(call.output, Units(), zero=True)
    left, right = call.broadcast(a), call.broadcast(b)
    other = tuple(-factor for factor in right.scale) if inverse else right.scale
    scale = (*other, *left.scale) if isinstance(a, Stored) else (*left.scale, *other)
    call.limit(scale[MOST_FACTORS:], Symmetry.NOTHING, "it multiplies many tensors")
    return Units(scale[:MOST_FACTORS], meet(call, a, b))


@rule("mul", "multiply")
def multiply(call: Call) -> Outcome:
    """A number lets everything through; a tensor times itself loses its signs."""
    a, b = call["self"], call["other"]
    if a is b:
        return even(call)
    if _is_tensor(a) and _is_tensor(b):
        return product(call, a, b)
    return call.broadcast(a if _is_tensor(a) else b)


@rule("div", "true_divide", "divide")
def divide(call: Call) -> Outcome:
    """Divides the factors too."""
    if call.get("rounding_mode"):
        raise NoRule("it rounds")
    a, b = tensor(call["self"]), call["other"]
    return product(call, a, b, inverse=True) if _is_tensor(b) else call.broadcast(a)


@rule("reciprocal")
def _(call: Call) -> Outcome:
    return Units(tuple(-factor for factor in call.x.units.scale), call.x.units.order)


def _chosen(call: Call, mask: Traced, units: Units) -> Units:
    """Only permutations that leave the mask unchanged are allowed."""
    everywhere, order = frozenset(range(call.rank)), call.broadcast(mask).order
    return Units(units.scale, call.ledger.agree_order(units.order, everywhere, order, call.differs(mask)))


@rule("where")
def _(call: Call) -> Outcome:
    mask, a, b = call["condition"], call["self"], call["other"]
    if not _is_tensor(a) and not _is_tensor(b):
        return _chosen(call, mask, Units())
    if _is_tensor(a) and _is_tensor(b):
        return _chosen(call, mask, total(call, a, b))
    x, constant = (a, b) if _is_tensor(a) else (b, a)
    units = call.broadcast(x)
    return _chosen(call, mask, units if constant == 0 else call.unscaled(units, "it puts a constant in"))


@rule("masked_fill")
def _(call: Call) -> Outcome:
    units, value = call.broadcast(call["self"]), call["value"]
    if _is_tensor(value) or value != 0:
        units = call.unscaled(units, "it puts a constant in")
    return _chosen(call, call["mask"], units)


@rule("maximum", "minimum")
def maximum(call: Call) -> Outcome:
    """Both share their noise, which must be positive."""
    units = total(call, call["self"], call["other"])
    call.limit(units.scale, Symmetry.POSITIVE)
    return units


@rule("addcmul")
def _(call: Call) -> Outcome:
    scaled = product(call, call["tensor1"], call["tensor2"])
    return total(call, call["self"], Activation(call.output, scaled) if isinstance(scaled, Units) else scaled)


@rule("lerp")
def _(call: Call) -> Outcome:
    between, weight = Activation(call.output, total(call, call["self"], call["end"])), call["weight"]
    if not _is_tensor(weight):
        return between.units
    why = "a weight between two tensors keeps its scale"
    call.limit(call.broadcast(weight).scale, Symmetry.NOTHING, why)
    return Units(between.units.scale, meet(call, between, weight))


@rule("glu")
def glu(call: Call) -> Outcome:
    """One half times the sigmoid of the other, which lets no factor through and moves with the first."""
    dim, size = call.dim(), call.output.shape[call.dim()]
    value, gate = (narrowed(call, dim, start, size) for start in (0, size))
    return product(call, Activation(call.output, value), Activation(call.output, call.unscaled(gate)))
