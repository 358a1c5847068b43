"""Operations that sum or compare elements along some dims."""

from collections.abc import Sequence

from torch import Tensor

from fedveil.graph.calls import Call, Outcome, rule
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Dims, Units


def dims_of(call: Call) -> Dims:
    """The dims that are reduced; all of them if none is given."""
    rank = call.x.value.dim()
    given = call.get("dim", default=None)
    chosen = range(rank) if given is None or given == [] else ([given] if isinstance(given, int) else given)
    return frozenset(d % rank for d in chosen) if rank else frozenset()


def reduced(call: Call, units: Units, dims: Dims) -> Units:
    """Units after a sum over `dims`: the terms share their factor and may be in any order."""
    kept = call.get("keepdim", default=False)
    scale = [call.ledger.merge_scale(factor, dims, call.where) for factor in units.scale]
    folded = [call.ledger.fold(factor, dims) for factor in units.order]
    order = [factor for factor in folded if factor is not None]
    return Units(tuple(scale), tuple(order)).each(lambda factor: factor if kept else without(factor, dims))


def without(factor: Tensor, dims: Dims) -> Tensor:
    """The factor without these dims, along which it is constant."""
    return factor.reshape([size for d, size in enumerate(factor.shape) if d not in dims])


@rule("sum", "mean")
def _(call: Call) -> Outcome:
    return reduced(call, call.x.units, dims_of(call))


@rule("amax", "amin", "max", "min")
def _(call: Call) -> Outcome:
    if len(call.operands) > 1:
        return _pairwise(call)
    call.limit(call.x.units.scale, Symmetry.POSITIVE)
    units = reduced(call, call.x.units, dims_of(call))
    return [units, None] if isinstance(call.output, Sequence) and not isinstance(call.output, Tensor) else units


def _pairwise(call: Call) -> Outcome:
    from fedveil.graph.calls import RULES

    return RULES["maximum"](call)


@rule("linalg_vector_norm", "norm")
def _(call: Call) -> Outcome:
    call.limit(call.x.units.scale, Symmetry.SIGN)
    return reduced(call, call.x.units.unscaled(), dims_of(call))


@rule("logsumexp")
def _(call: Call) -> Outcome:
    return reduced(call, call.unscaled(call.x.units), dims_of(call))


@rule("softmax", "_softmax", "log_softmax", "_log_softmax")
def softmax(call: Call) -> Outcome:
    """No factor; the elements of a row may trade places among themselves."""
    units = call.unscaled(call.x.units)
    for factor in units.order:
        call.ledger.fold(factor, frozenset({call.dim()}))
    return units


@rule("cumsum")
def _(call: Call) -> Outcome:
    dim = frozenset({call.dim()})
    scale = tuple(call.ledger.merge_scale(factor, dim, call.where) for factor in call.x.units.scale)
    for factor in call.x.units.order:
        if factor.shape[call.dim()] > 1:
            call.ledger.fix(factor)
    return Units(scale, tuple(factor for factor in call.x.units.order if factor.shape[call.dim()] == 1))
