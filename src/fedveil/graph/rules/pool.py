"""Operations on each channel separately, which mix neighbouring positions."""

from fedveil.graph.calls import Call, Outcome, rule
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Dims, Units

MAXIMUM = {
    **{f"{kind}max_pool{n}d": n for kind in ("", "adaptive_") for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": n for n in (1, 2, 3)},
    "fractional_max_pool2d": 2,
}
AVERAGE = {f"{kind}avg_pool{n}d": n for kind in ("", "adaptive_", "_adaptive_") for n in (1, 2, 3)}
RESIZE = {
    "upsample_nearest1d": 1, "upsample_nearest2d": 2, "upsample_nearest3d": 3, "upsample_linear1d": 1,
    "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3, "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 2, "_upsample_nearest_exact3d": 3, "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2,
}  # fmt: skip


def mixed_along(call: Call, units: Units, dims: Dims) -> Units:
    """Units after an operation that mixes neighbours along `dims`: one factor along them, and no permutation."""
    scale = tuple(call.ledger.merge_scale(factor, dims, call.where) for factor in units.scale)
    order = []
    for factor in units.order:
        if any(factor.shape[d] > 1 for d in dims):
            call.ledger.fix(factor)
        else:
            order.append(factor)
    return Units(scale, tuple(order))


def _channelwise(call: Call, spatial: int, symmetry: Symmetry) -> Outcome:
    rank = call.x.value.dim()
    call.limit(call.x.units.scale, symmetry)
    units = mixed_along(call, call.x.units, frozenset(range(rank - spatial, rank)))
    return [units, None] if isinstance(call.output, tuple | list) else units


@rule(*MAXIMUM)
def _(call: Call) -> Outcome:
    return _channelwise(call, MAXIMUM[call.name], Symmetry.POSITIVE)


@rule(*AVERAGE)
def _(call: Call) -> Outcome:
    return _channelwise(call, AVERAGE[call.name], Symmetry.EVERYTHING)


@rule(*RESIZE)
def _(call: Call) -> Outcome:
    return _channelwise(call, RESIZE[call.name], Symmetry.EVERYTHING)
