"""Operations that sum or compare elements along some dims, or mix neighbours along them."""

from fedveil.graph.calls import Call, Outcome, rule
from fedveil.graph.operations import AVERAGE_POOLS, MAX_POOLS, SPATIAL_DIMS, UPSAMPLINGS, count_spatial_dims
from fedveil.graph.rules.arithmetic import maximum
from fedveil.graph.rules.elementwise import apply_even
from fedveil.graph.rules.shape import mix_neighbours
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Units

MAXIMA = MAX_POOLS | {"fractional_max_pool2d"} | {f"max_pool{n}d_with_indices" for n in SPATIAL_DIMS}


@rule(*MAXIMA, *AVERAGE_POOLS, *UPSAMPLINGS)
def _(call: Call) -> Outcome:
    rank = call.x.value.dim()
    call.limit(call.x.units.scale, Symmetry.POSITIVE if call.name in MAXIMA else Symmetry.EVERYTHING)
    dims = frozenset(range(rank - count_spatial_dims(call.name), rank))
    return call.pack(mix_neighbours(call, call.x.units, dims))


def _reduce(call: Call, units: Units) -> Units:
    """Return the units of a sum: the terms share their factor and may be in any order."""
    rank = call.x.value.dim()
    dims = frozenset(d % rank for d in call.integers("dim") or range(rank)) if rank else frozenset[int]()
    order = call.ledger.fold(units.order, dims)
    found = Units(call.merge_scale(units.scale, dims), tuple(order))
    if call.get("keepdim"):
        return found
    return found.each(lambda factor: factor.reshape([size for d, size in enumerate(factor.shape) if d not in dims]))


@rule("sum", "mean")
def _(call: Call) -> Outcome:
    return _reduce(call, call.x.units)


@rule("amax", "amin", "max", "min")
def _(call: Call) -> Outcome:
    if len(call.operands) > 1:
        return maximum(call)
    call.limit(call.x.units.scale, Symmetry.POSITIVE)
    return call.pack(_reduce(call, call.x.units))


@rule("linalg_vector_norm", "norm")
def _(call: Call) -> Outcome:
    return _reduce(call, apply_even(call))


@rule("logsumexp")
def _(call: Call) -> Outcome:
    return _reduce(call, call.drop_scale(call.x.units))


@rule("softmax", "_softmax", "log_softmax", "_log_softmax")
def softmax(call: Call) -> Outcome:
    """Let no factor through; the elements of a row may be permuted."""
    units = call.drop_scale(call.x.units)
    call.ledger.fold(units.order, frozenset({call.dim()}))
    return units


@rule("cumsum")
def _(call: Call) -> Outcome:
    return mix_neighbours(call, call.x.units, frozenset({call.dim()}))
