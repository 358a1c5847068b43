"""Normalisations: which factors their statistics absorb exactly."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.graph.calls import Call, NoRule, Outcome, Stored, rule
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Dims, Units, aligned, along, varying


def _weights(call: Call) -> tuple[Stored | None, Stored | None]:
    found = call["weight"], call.get("bias")
    if any(tensor is not None and not isinstance(tensor, Stored) for tensor in found):
        raise NoRule("its weight is computed, not a parameter itself")
    return found


def _affine(call: Call, inputs: Units) -> Units:
    """The output's units, which change along the channels: a new axis if there is a weight, else the input's."""
    weight, bias = _weights(call)
    outputs = inputs
    if weight is not None:
        new = call.ledger.fresh_scale(weight.value.shape, weight.name)
        weight.attach(Units((new, *[-factor for factor in inputs.scale]), inputs.order))
        outputs = Units((new,), inputs.order)
    if bias is not None:
        bias.attach(outputs)
    return outputs.each(lambda factor: along(factor, 1, call.x.value.dim()))


@rule("batch_norm", "instance_norm", "_native_batch_norm_legit_functional")
def batch_norm(call: Call) -> Outcome:
    """Batch statistics absorb signs exactly (and factors only up to eps); stored ones absorb everything."""
    inputs = call.channels(call.x.units, 1, call.x.value.dim())
    if call.get("training", "use_input_stats", "train"):
        call.limit(inputs.scale, Symmetry.SIGN, "batch statistics let only signs through, because of eps")
    for name, units in (("running_mean", inputs), ("running_var", inputs.unscaled())):
        if isinstance(call.get(name), Stored):
            call[name].attach(units)
    return call.packed(_affine(call, inputs))


@rule("group_norm")
def group_norm(call: Call) -> Outcome:
    """A mean over channels lets no factor through; channels of a group may trade places, and so may groups."""
    inputs = call.channels(call.x.units, 1, call.x.value.dim())
    inputs = call.unscaled(inputs, "statistics over several channels let no factor through")
    for factor in inputs.order:
        call.ledger.fold(factor.reshape(call["num_groups"], -1), frozenset({1}))
    return _affine(call, inputs)


def _last_dims(call: Call, symmetry: Symmetry, why: str) -> Units:
    """Normalise over the last dims; a weight there moves with what it multiplies."""
    x, (weight, bias) = call.x, _weights(call)
    rank = x.value.dim()
    ahead = rank - len(call["normalized_shape"])
    inside = frozenset(range(ahead, rank))
    call.limit(x.units.scale, symmetry, why)
    scale = x.units.scale if symmetry else ()
    if weight is None:
        for factor in x.units.order:
            call.ledger.fold(factor, inside)
        return Units(scale, x.units.order)
    order, own = _own_order(call, x.units.order, inside)
    new = call.ledger.fresh_scale(weight.value.shape, weight.name)
    absorbed = [factor for factor in scale if varying(factor) <= inside]
    passing = [factor for factor in scale if not varying(factor) <= inside]
    weight.attach(Units((new, *[-factor.reshape(factor.shape[ahead:]) for factor in absorbed]), own))
    if bias is not None:
        call.limit(passing, Symmetry.NOTHING, "its bias is the same wherever else the input changes")
        passing = []
        bias.attach(Units((new,), own))
    return Units((*passing, aligned(new, rank)), order)


def _own_order(call: Call, orders: tuple[Tensor, ...], inside: Dims) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Places after a norm over the dims `inside`, and those of its weight."""
    result, own = [], []
    for factor in orders:
        if varying(factor) & inside:
            one = call.ledger.merge_order(factor, frozenset(range(factor.dim())) - inside)
            call.ledger.count(one)
            result.append(one)
            own.append(one.reshape(one.shape[min(inside) :]))
        else:
            result.append(factor)
    return tuple(result), tuple(own)


@rule("layer_norm")
def layer_norm(call: Call) -> Outcome:
    """A mean over features lets every permutation and no factor through."""
    return _last_dims(call, Symmetry.NOTHING, "statistics over several features let no factor through")


@rule("rms_norm")
def rms_norm(call: Call) -> Outcome:
    """A mean square lets every permutation and signs through."""
    return _last_dims(call, Symmetry.SIGN, "a mean square over several features lets only signs through")


@dataclass(eq=False)
class Normed(Stored):
    """The weight of weight_norm, g v / |v| by rows.

    Factors of its rows go to g; columns only change sign, because the lengths of rows must not change; rows and columns
    of v move, and g moves with the rows.
    """

    length: Stored | None = None

    @property
    def units(self) -> Units:
        """As an activation it carries nothing."""
        for tensor in (self, self.length):
            if tensor is not None:
                Stored.leave_bare(tensor, tensor.name, "a normed weight is used in another way than as a weight")
        return Units()

    def attach(self, units: Units, shape: Sequence[int] | None = None, strides: Sequence[int] | None = None) -> None:
        """Record the noise on v and g, from that of the weight."""
        own = tuple(shape if shape is not None else self.value.shape)
        rows = _rows(own, self.value.shape[0])
        outputs = [factor for factor in units.scale if varying(factor) <= rows]
        columns = [factor for factor in units.scale if not varying(factor) <= rows]
        self.ledger.limit(columns, Symmetry.SIGN, self.name, "each row of the weight is normalised")
        super().attach(Units(tuple(columns), units.order), shape, strides)
        assert self.length is not None
        above = [factor for factor in units.order if varying(factor) <= rows]
        first = [size if dim in rows else 1 for dim, size in enumerate(own)]
        steps = torch.empty(first, device="meta").stride()
        self.length.attach(Units(tuple(outputs), tuple(above)), first, steps)


def _rows(shape: Sequence[int], count: int) -> Dims:
    """The leading dims that count rows, of a weight that may be in groups."""
    total, dims = 1, []
    for dim, size in enumerate(shape):
        if total == count and size > 1:
            break
        total *= size
        dims.append(dim)
    return frozenset(dims)


@rule("_weight_norm")
def weight_norm(call: Call) -> Outcome:
    """torch.nn.utils.weight_norm over all but the first dim."""
    direction, length = call["v"], call["g"]
    if not isinstance(direction, Stored) or not isinstance(length, Stored) or call["dim"] != 0:
        raise NoRule("the parameters of weight_norm are computed, or its dim is not 0")
    return Normed(direction.value, direction.name, True, call.ledger, direction.known, direction.whole, length)
