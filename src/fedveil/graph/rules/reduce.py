"""Rules for operations that combine elements along dims: reductions, pooling, normalisation, scatter and gather."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedveil.graph.calls import Activation, Call, NoRule, Operand, Outcome, StateTensor, rule
from fedveil.graph.operations import AVERAGE_POOLS, MAX_POOLS, SPATIAL_DIMS, UPSAMPLINGS, count_spatial_dims
from fedveil.graph.rules.elementwise import add_tensors, apply_even, maximum, multiply_tensors
from fedveil.graph.rules.shape import concatenate, mix_neighbours, narrow, share
from fedveil.graph.units import Dims, Symmetry, Units, align, distinct_dims, reshape_along, varying_dims

MAXIMA = MAX_POOLS | {"fractional_max_pool2d"} | {f"max_pool{n}d_with_indices" for n in SPATIAL_DIMS}


@rule(*MAXIMA, *AVERAGE_POOLS, *UPSAMPLINGS)
def _(call: Call) -> Outcome:
    rank = call.x.value.dim()
    call.limit(call.x.units.scale, Symmetry.POSITIVE if call.name in MAXIMA else Symmetry.EVERYTHING)
    dims = frozenset(range(rank - count_spatial_dims(call.name), rank))
    return _with_indices(call, mix_neighbours(call, call.x.units, dims))


def _with_indices(call: Call, units: Units) -> Outcome:
    """Return the units of maxima, and those of their positions: a channel's positions move along with it."""
    return units if isinstance(call.output, Tensor) else [units, Units((), units.order)]


def _reduce(call: Call, units: Units) -> Units:
    """Return the units of a sum, whose terms must have the same factor and may be permuted."""
    rank = call.x.value.dim()
    dims = frozenset(d % rank for d in call.integers("dim") or range(rank)) if rank else frozenset[int]()
    order = call.ledger.fold(units.order, dims)
    result = Units(call.merge_scale(units.scale, dims), tuple(order))
    if call.get("keepdim"):
        return result
    return result.map(lambda factor: factor.reshape([size for d, size in enumerate(factor.shape) if d not in dims]))


@rule("amax", "amin", "max", "min")
def _(call: Call) -> Outcome:
    if len(call.operands) > 1:
        return maximum(call)
    units = call.x.units
    call.limit(units.scale, Symmetry.POSITIVE)
    if not isinstance(call.output, Tensor):  # the positions along `dim` are also returned
        units = Units(units.scale, call.ledger.fix_along(units.order, frozenset({call.dim()})))
    return _with_indices(call, _reduce(call, units))


rule("sum", "mean")(lambda call: _reduce(call, call.x.units))
rule("linalg_vector_norm", "norm")(lambda call: _reduce(call, apply_even(call)))
rule("logsumexp")(lambda call: _reduce(call, call.drop_scale(call.x.units)))
rule("cumsum")(lambda call: mix_neighbours(call, call.x.units, frozenset({call.dim()})))


@rule("softmax", "_softmax", "log_softmax", "_log_softmax")
def softmax(call: Call) -> Outcome:
    """Allow no factors; the elements of a row may be permuted."""
    units = call.drop_scale(call.x.units)
    call.ledger.fold(units.order, frozenset({call.dim()}))
    return units


@rule("glu")
def glu(call: Call) -> Outcome:
    """Multiply the first half by the sigmoid of the second, which cannot be scaled and is permuted with the first."""
    dim, size = call.dim(), call.value.shape[call.dim()]
    value, gate = (narrow(call, dim, start, size) for start in (0, size))
    return multiply_tensors(call, Activation(call.value, value), Activation(call.value, call.drop_scale(gate)))


# Normalisation layers, with the factors that their statistics absorb exactly.


def _apply_affine(call: Call, inputs: Units) -> Units:
    """Return the output's units along the channels: new units if there is a weight, otherwise the input's units."""
    weight, bias = call.state("weight"), call.state("bias")
    outputs = inputs
    if weight is not None:
        weight_scale = call.ledger.create_scale(weight.value.shape, weight.name)
        weight.attach(Units((weight_scale, *[-factor for factor in inputs.scale]), inputs.order))
        outputs = Units((weight_scale,), inputs.order)
    if bias is not None:
        bias.attach(outputs)
    return outputs.map(lambda factor: reshape_along(factor, 1, call.x.value.dim()))


@rule(
    "batch_norm", "instance_norm", *[f"_native_batch_norm_legit{form}" for form in ("", "_functional", "_no_training")]
)
def batch_norm(call: Call) -> Outcome:
    """Normalise channels. Because of eps, batch statistics absorb only signs; running statistics absorb all factors."""
    inputs = call.merge_to_channels(call.x.units, 1, call.x.value.dim())
    if call.get("training", "use_input_stats", "train"):
        call.limit(inputs.scale, Symmetry.SIGN, "batch statistics let only signs through, because of eps")
    for name, units in (("running_mean", inputs), ("running_var", Units((), inputs.order))):
        statistic = call.get(name)
        if isinstance(statistic, StateTensor):
            statistic.attach(units)
    return call.pack(_apply_affine(call, inputs))


@rule("group_norm")
def group_norm(call: Call) -> Outcome:
    """Normalise groups of channels. Allow no factors; channels within a group and whole groups may be permuted."""
    inputs = call.merge_to_channels(call.x.units, 1, call.x.value.dim())
    count, channels = *call.integers("num_groups"), call.x.value.shape[1]
    if count == channels:
        call.limit(inputs.scale, Symmetry.SIGN, "statistics over a channel let only signs through, because of eps")
        return call.pack(_apply_affine(call, inputs))
    inputs = call.drop_scale(inputs, "statistics over several channels let no factor through")
    groups = [factor.reshape(count, -1) for factor in inputs.order]
    call.ledger.fold(groups, frozenset({1}))
    return _apply_affine(call, inputs)


@rule("layer_norm", "rms_norm")
def normalise_last_dims(call: Call) -> Outcome:
    """Normalise over the last dims. This commutes with permutations; the weight is permuted along with the features."""
    symmetry, reason = Symmetry.NOTHING, "statistics over several features let no factor through"
    if call.name == "rms_norm":
        symmetry, reason = Symmetry.SIGN, "a mean square over several features lets only signs through"
    units, weight, bias = call.x.units, call.get("weight"), call.get("bias")
    if any(weight_order is not None and not isinstance(weight_order, StateTensor) for weight_order in (weight, bias)):
        return _normalise_with_computed(call, symmetry, reason)
    weight, bias = call.state("weight"), call.state("bias")
    rank = call.x.value.dim()
    num_leading = rank - len(call.integers("normalized_shape"))
    normalised_dims = frozenset(range(num_leading, rank))
    call.limit(units.scale, symmetry, reason)
    scale = units.scale if symmetry else ()
    if weight is None:
        call.ledger.fold(units.order, normalised_dims)
        return Units(scale, units.order)
    order, weight_order = _merge_orders(call, units.order, normalised_dims)
    weight_scale = call.ledger.create_scale(weight.value.shape, weight.name)
    absorbed_scale = [factor for factor in scale if varying_dims(factor) <= normalised_dims]
    passed_scale = [factor for factor in scale if not varying_dims(factor) <= normalised_dims]
    weight.attach(
        Units((weight_scale, *[-factor.reshape(factor.shape[num_leading:]) for factor in absorbed_scale]), weight_order)
    )
    if bias is not None:
        call.limit(passed_scale, Symmetry.NOTHING, "its bias is constant along the other dims of the input")
        passed_scale = []
        bias.attach(Units((weight_scale,), weight_order))
    return Units((*passed_scale, align(weight_scale, rank)), order)


def _normalise_with_computed(call: Call, symmetry: Symmetry, reason: str) -> Units:
    """Normalise, then multiply by a computed weight, such as 1 plus a parameter, and add a bias."""
    rank, units = call.x.value.dim(), call.x.units
    call.limit(units.scale, symmetry, reason)
    normalised_dims = frozenset(range(rank - len(call.integers("normalized_shape")), rank))
    call.ledger.fold(units.order, normalised_dims)
    result = Units(units.scale if symmetry else (), units.order)
    if call.get("weight") is not None:
        result = multiply_tensors(call, Activation(call.value, result), call.tensor("weight"))
    if call.get("bias") is not None:
        result = add_tensors(call, Activation(call.value, result), call.tensor("bias"))
    return result


def _merge_orders(call: Call, orders: Sequence[Tensor], normalised_dims: Dims) -> tuple[tuple[Tensor, ...], ...]:
    """Return the order after normalisation over the dims `normalised_dims`, and the order of the weight."""
    result, weight_order = [], []
    for factor in orders:
        if varying_dims(factor) & normalised_dims:
            (factor,) = call.merge_order([factor], frozenset(range(factor.dim())) - normalised_dims)
            weight_order.append(factor.reshape(factor.shape[min(normalised_dims) :]))
        result.append(factor)
    return tuple(result), tuple(weight_order)


@dataclass(eq=False)
class NormedWeight(StateTensor):
    """A weight normalised by weight_norm: each slice along one dim, such as each row, is g v / |v|.

    The factors along this dim multiply g. The other factors can only be signs, because the norms of the slices must not
    change. The rows and columns of v are permuted, and g is permuted along with the slices.
    """

    norm: StateTensor | None = None
    dim: int = 0

    @property
    def units(self) -> Units:
        """Empty units, because this tensor carries no noise if it is treated as an activation."""
        for tensor in (self, self.norm):
            if tensor is not None:
                StateTensor.leave_bare(tensor, tensor.name, "it is normalised but not used as a weight")
        return Units()

    def attach(self, units: Units, view: Tensor | None = None) -> None:
        """Record the noise on v and g that corresponds to noise on the weight."""
        assert self.norm is not None
        shape = (self.value if view is None else view).shape
        rows = _row_dims(shape, self.value.shape[0])
        if self.dim:  # a view splits only the first dim, into groups
            rows = frozenset({len(shape) - self.value.dim() + self.dim})
        outputs = tuple(factor for factor in units.scale if varying_dims(factor) <= rows)
        columns = tuple(factor for factor in units.scale if not varying_dims(factor) <= rows)
        self.ledger.limit(columns, Symmetry.SIGN, self.name, "each slice of the weight is normalised")
        super().attach(Units(columns, units.order), view)
        order = tuple(factor for factor in units.order if varying_dims(factor) <= rows)
        self.ledger.fix(
            *[factor for factor in units.order if varying_dims(factor) & rows and not varying_dims(factor) <= rows]
        )
        norms = self.norm.value.reshape([size if dim in rows else 1 for dim, size in enumerate(shape)])
        self.norm.attach(Units(outputs, order), norms)


def _row_dims(shape: Sequence[int], count: int) -> Dims:
    """Return the leading dims of a weight that index its rows: two dims if the rows are grouped."""
    return frozenset(dim for dim in range(len(shape)) if math.prod(shape[: dim + 1]) <= count)


@rule("_weight_norm")
def weight_norm(call: Call) -> Outcome:
    """Normalise a weight over all dims except one, as torch.nn.utils.weight_norm does."""
    direction, norm, (dim,) = call["v"], call["g"], call.integers("dim")
    if not isinstance(direction, StateTensor) or not isinstance(norm, StateTensor) or dim < 0:
        raise NoRule("the parameters of weight_norm are computed, or it normalises the whole weight")
    return NormedWeight(direction.value, direction.name, True, call.ledger, direction.full, norm, dim)


def _index_dims(call: Call, operands: list[Operand]) -> Dims:
    """Return the dims other than `dim` along which the index of a scatter or gather operation may vary.

    Every operand has one element per element of the index along these dims.
    """
    index = call.tensor("index")
    other_dims = frozenset(range(index.value.dim())) - {call.dim()}
    if any(index.units[:2]):
        raise NoRule("its index is computed from values that carry noise")
    if any(operand.value.shape[d] != index.value.shape[d] for operand in operands for d in other_dims):
        raise NoRule("its index covers only a part of the other dims")
    return distinct_dims(index.value) & other_dims


def _share_along(call: Call, operand: Operand, fixed: Dims) -> Units:
    """Make the units of an operand equal along `dim`, and forbid permutations along the dims `fixed`."""
    units = operand.units
    fixed_units = Units(units.scale, call.ledger.fix_along(units.order, fixed), units.zero)
    return share(call, fixed_units, frozenset({call.dim()}))


def _combine(call: Call, source: Operand, fixed: Dims) -> Units:
    """Return the units of a tensor into which another is written or added, at positions that depend on the data."""
    source_units = Activation(call.value, _share_along(call, source, fixed))
    return add_tensors(call, Activation(call.value, _share_along(call, call.tensor("self"), fixed)), source_units)


@rule("scatter_add", "scatter", "scatter_reduce")
def scatter(call: Call) -> Outcome:
    """Write or add elements of a tensor to another; maxima and minima allow only positive factors."""
    reduction = call.get("reduce") or "sum"
    if call.get("src") is None or reduction not in ("sum", "mean", "amax", "amin"):
        raise NoRule("it multiplies, or writes a constant")
    source = call.tensor("src")
    units = _combine(call, source, _index_dims(call, [call.tensor("self"), source]))
    call.limit(units.scale, Symmetry.POSITIVE if reduction in ("amax", "amin") else Symmetry.EVERYTHING)
    return units


rule("index_add", "index_copy")(lambda call: _combine(call, call.tensor("source"), frozenset()))


@rule("gather")
def gather(call: Call) -> Outcome:
    """Select elements along one dim; any of them may be selected."""
    return _share_along(call, call.x, _index_dims(call, [call.x]))


@rule("slice_scatter", "select_scatter")
def replace_slice(call: Call) -> Outcome:
    """Replace a slice of a tensor; all other elements keep their noise."""
    dim, x, source = call.dim(), call.tensor("self"), call.tensor("src")
    if call.name == "select_scatter":
        source = Activation(source.value.unsqueeze(dim), source.units.map(lambda factor: factor.unsqueeze(dim)))
    elif call["step"] != 1:
        raise NoRule("it replaces elements that are not adjacent")
    size, width = x.value.shape[dim], source.value.shape[dim]
    start = (call.integers("start", "index") or [0])[0]
    start = min(start + size if start < 0 else start, size - width)
    pieces: list[Operand] = [
        Activation(x.value.narrow(dim, begin, count), narrow(call, dim, begin, count))
        for begin, count in ((0, start), (start + width, size - start - width))
    ]
    return concatenate(call, [piece for piece in (pieces[0], source, pieces[1]) if piece.value.shape[dim]], dim)


@rule("copy")
def _(call: Call) -> Outcome:
    return call.broadcast(call.tensor("src"))


@rule("fill", "full", "full_like", "new_full", "ones", "ones_like", "new_ones")
def _(call: Call) -> Outcome:
    return Units(zero=call.get("value", "fill_value") == 0)
