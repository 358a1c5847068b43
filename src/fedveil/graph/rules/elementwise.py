"""Rules for element-wise functions, sums, products and selections, which commute with every permutation."""

import torch
from torch import Tensor

from fedveil.graph.calls import Activation, Call, NoRule, Operand, Outcome, StateTensor, as_state, as_tensor, rule
from fedveil.graph.units import Symmetry, Units

# Functions of a single number, grouped by the factors that they commute with.
POSITIVE = {"relu", "leaky_relu", "abs", "rrelu"}
ODD = {
    "tanh", "sin", "asinh", "atan", "erf", "sign", "softshrink", "hardshrink", "sinh", "tan", "asin", "atanh",
    "erfinv",
}  # fmt: skip
EVEN = {"square", "cos", "cosh"}
OTHER_FUNCTIONS = {
    "gelu", "silu", "sigmoid", "log_sigmoid", "softplus", "elu", "selu", "celu", "mish", "relu6", "hardswish",
    "hardsigmoid", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "clamp", "clamp_min", "clamp_max",
    "threshold", "alpha_dropout", "feature_alpha_dropout", "erfc", "exp2", "logit", "round", "floor", "ceil",
    "trunc", "nan_to_num", "sinc",
}  # fmt: skip
LINEAR = (
    "neg", "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "lift_fresh", "positive",
    "dropout", "feature_dropout", "native_dropout", "type_as",
)  # fmt: skip
SYMMETRIES = {
    **dict.fromkeys(POSITIVE, Symmetry.POSITIVE),
    **dict.fromkeys(ODD, Symmetry.SIGN),
    **dict.fromkeys(OTHER_FUNCTIONS, Symmetry.NOTHING),
}
MAX_FACTORS = 4  # maximum number of factors in a product; any others are limited to 1

# These do not couple samples.
ELEMENTWISE = POSITIVE | ODD | EVEN | OTHER_FUNCTIONS | {
    "hardtanh", "neg", "pow", "add", "sub", "mul", "div", "clone", "contiguous", "alias", "_to_copy", "to", "type_as",
}  # fmt: skip

# Element-wise in-place operations, after which views of the same memory still carry the same noise. A graph with other
# in-place operations is rewritten without them.
IN_PLACE = {"add", "sub", "neg", "hardtanh", "detach", "dropout", "feature_dropout"} | POSITIVE | ODD | OTHER_FUNCTIONS


# Functions of one tensor.


def _apply(call: Call, symmetry: Symmetry) -> Units:
    """Return the units of the only operand, limited to `symmetry`."""
    if len(call.operands) != 1:
        raise NoRule("it has a second tensor argument")
    call.limit(call.x.units.scale, symmetry)
    return call.x.units if symmetry else Units((), call.x.units.order)


rule(*SYMMETRIES)(lambda call: _apply(call, SYMMETRIES[call.name]))
rule(*LINEAR)(lambda call: call.pack(call.x.units))


@rule("to", "_to_copy")
def convert(call: Call) -> Outcome:
    """Convert to another dtype or device, but not to lower precision, which would round scaled values differently."""
    old_dtype, new_dtype = call.x.value.dtype, call.value.dtype
    if not old_dtype.is_floating_point:
        return call.x.units
    if new_dtype != old_dtype and not new_dtype.is_floating_point:
        raise NoRule(f"it converts {old_dtype} to {new_dtype}")
    if torch.finfo(new_dtype).eps > torch.finfo(old_dtype).eps:
        raise NoRule(f"it rounds {old_dtype} to {new_dtype}")
    return call.x.units


def apply_even(call: Call) -> Units:
    """Apply an even function: the input may carry signs, and the output carries none."""
    call.limit(call.x.units.scale, Symmetry.SIGN)
    return Units((), call.x.units.order)


rule(*EVEN)(apply_even)


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
    """Allow positive factors; the weight cannot be scaled and is permuted along with the channels."""
    units, weight = call.x.units, as_state(call["weight"])
    call.limit(units.scale, Symmetry.POSITIVE)
    if weight.value.numel() == 1:
        weight.attach(Units())
        return units
    other_dims = frozenset(range(call.x.value.dim())) - {1}
    order = call.merge_order([factor for factor in units.order if factor.shape[1] > 1], other_dims)
    weight.attach(Units((), tuple(factor.flatten() for factor in order)))
    return Units(units.scale, (*[factor for factor in units.order if factor.shape[1] == 1], *order))


# Functions of several tensors.


def reconcile_order(call: Call, a: Operand, b: Operand) -> tuple[Tensor, ...]:
    """Give both operands the same order and return the order of the result."""
    a_units, b_units = call.broadcast(a), call.broadcast(b)
    return call.ledger.reconcile_order(a_units.order, call.distinct_dims(a), b_units.order, call.distinct_dims(b))


def add_tensors(call: Call, a: Operand, b: Operand) -> Units:
    """Return the units of a sum. Both terms must carry the same noise, unless one of them is zero."""
    if a.zero or b.zero:
        return call.broadcast(b if a.zero else a)
    a_units, b_units = call.broadcast(a), call.broadcast(b)
    reason = "it adds tensors that carry different factors, or a tensor without factors"
    if not a_units.scale or not b_units.scale:
        reason = "it adds a tensor without factors"
    return Units(
        call.ledger.reconcile_scale(a_units.scale, b_units.scale, call.where, reason), reconcile_order(call, a, b)
    )


def _combine(call: Call, a: object, b: object, reason: str) -> Units:
    """Return the units of a sum of two tensors, or of a tensor and a number, which must be 0 to allow factors."""
    if isinstance(a, Operand) and isinstance(b, Operand):
        return add_tensors(call, a, b)
    x, constant = (a, b) if isinstance(a, Operand) else (b, a)
    units = call.broadcast(x) if isinstance(x, Operand) else Units()
    return units if constant == 0 else call.drop_scale(units, reason)


rule("add", "sub", "rsub", "subtract", "__radd__")(
    lambda call: _combine(call, call["self"], call["other"], "it adds a constant")
)


def multiply_tensors(call: Call, a: Operand, b: Operand, inverse: bool = False) -> Units:
    """Multiply the factors of both operands. A parameter's factors come last, because excess factors are dropped."""
    if a.zero or (b.zero and not inverse):
        return Units(zero=True)
    a_units, b_units = call.broadcast(a), call.broadcast(b)
    b_scale = tuple(-factor for factor in b_units.scale) if inverse else b_units.scale
    scale = (*b_scale, *a_units.scale) if isinstance(a, StateTensor) else (*a_units.scale, *b_scale)
    call.limit(scale[MAX_FACTORS:], Symmetry.NOTHING, "it multiplies too many tensors")
    return Units(scale[:MAX_FACTORS], reconcile_order(call, a, b))


@rule("mul", "multiply")
def _(call: Call) -> Outcome:
    a, b = call["self"], call["other"]
    if a is b:  # a square carries no signs
        return apply_even(call)
    return multiply_tensors(call, a, b) if isinstance(a, Operand) and isinstance(b, Operand) else call.broadcast(call.x)


@rule("div", "true_divide", "divide")
def _(call: Call) -> Outcome:
    if call.get("rounding_mode"):
        raise NoRule("it rounds")
    a, b = call.tensor("self"), call["other"]
    return multiply_tensors(call, a, b, inverse=True) if isinstance(b, Operand) else call.broadcast(a)


rule("reciprocal")(lambda call: Units(tuple(-factor for factor in call.x.units.scale), call.x.units.order))


def _apply_mask(call: Call, mask: Operand, units: Units) -> Units:
    """Allow only permutations that leave the mask unchanged."""
    all_dims, order = frozenset(range(call.rank)), call.broadcast(mask).order
    return Units(units.scale, call.ledger.reconcile_order(units.order, all_dims, order, call.distinct_dims(mask)))


@rule("where")
def _(call: Call) -> Outcome:
    units = _combine(call, call["self"], call["other"], "it inserts a constant")
    return _apply_mask(call, call.tensor("condition"), units)


@rule("masked_fill")
def _(call: Call) -> Outcome:
    value = 1 if isinstance(call["value"], Operand) else call["value"]
    return _apply_mask(call, call.tensor("mask"), _combine(call, call["self"], value, "it inserts a constant"))


@rule("index_put")
def _(call: Call) -> Outcome:
    """Insert one value, or one row, wherever a mask is true."""
    values, indices = call.tensor("values"), call.sequence("indices")
    mask = as_tensor(indices[0])
    mask_dims = frozenset(range(mask.value.dim()))
    rows = values.value.dim() <= call.rank - len(mask_dims)
    if len(indices) > 1 or mask.value.dtype != torch.bool or not rows or any(mask.units[:2]):
        raise NoRule("it inserts different values at computed positions")
    units = add_tensors(call, call.tensor("self"), values)
    return Units(units.scale, call.ledger.reconcile_order(units.order, frozenset(range(call.rank)), (), mask_dims))


@rule("maximum", "minimum")
def maximum(call: Call) -> Outcome:
    """Require both tensors to have the same factors, which must be positive."""
    units = add_tensors(call, call.tensor("self"), call.tensor("other"))
    call.limit(units.scale, Symmetry.POSITIVE)
    return units


@rule("addcmul")
def _(call: Call) -> Outcome:
    product = multiply_tensors(call, call.tensor("tensor1"), call.tensor("tensor2"))
    return add_tensors(call, call.tensor("self"), Activation(call.value, product))


@rule("lerp")
def _(call: Call) -> Outcome:
    units, weight = add_tensors(call, call.tensor("self"), call.tensor("end")), call["weight"]
    if not isinstance(weight, Operand):
        return units
    call.limit(call.broadcast(weight).scale, Symmetry.NOTHING, "the weight of an interpolation cannot be scaled")
    return Units(units.scale, reconcile_order(call, Activation(call.value, units), weight))
