"""Operations that sum or compare elements along some dims, or mix neighbours along them."""

from fedveil.graph.calls import Call, Outcome, rule
from fedveil.graph.rules.arithmetic import maximum
from fedveil.graph.rules.shape import mixed_along
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
SPATIAL = MAXIMUM | AVERAGE | RESIZE  # how many of the last dims each operation mixes


@rule(*SPATIAL)
def _(call: Call) -> Outcome:
    rank = call.x.value.dim()
    call.limit(call.x.units.scale, Symmetry.POSITIVE if call.name in MAXIMUM else Symmetry.EVERYTHING)
    return call.packed(mixed_along(call, call.x.units, frozenset(range(rank - SPATIAL[call.name], rank))))


def _reduced(call: Call, units: Units) -> Units:
    """Units after a sum: the terms share their factor and may be in any order."""
    rank, given = call.x.value.dim(), call.get("dim")
    chosen = range(rank) if given is None or given == [] else ([given] if isinstance(given, int) else given)
    dims: Dims = frozenset(d % rank for d in chosen) if rank else frozenset()
    folded = [call.ledger.fold(factor, dims) for factor in units.order]
    found = Units(call.merged(units.scale, dims), tuple(factor for factor in folded if factor is not None))
    if call.get("keepdim", default=False):
        return found
    return found.each(lambda factor: factor.reshape([size for d, size in enumerate(factor.shape) if d not in dims]))


@rule("sum", "mean")
def _(call: Call) -> Outcome:
    return _reduced(call, call.x.units)


@rule("amax", "amin", "max", "min")
def _(call: Call) -> Outcome:
    if len(call.operands) > 1:
        return maximum(call)
    call.limit(call.x.units.scale, Symmetry.POSITIVE)
    return call.packed(_reduced(call, call.x.units))


@rule("linalg_vector_norm", "norm")
def _(call: Call) -> Outcome:
    call.limit(call.x.units.scale, Symmetry.SIGN)
    return _reduced(call, call.x.units.unscaled())


@rule("logsumexp")
def _(call: Call) -> Outcome:
    return _reduced(call, call.unscaled(call.x.units))


@rule("softmax", "_softmax", "log_softmax", "_log_softmax")
def softmax(call: Call) -> Outcome:
    """No factor; the elements of a row may trade places among themselves."""
    units = call.unscaled(call.x.units)
    for factor in units.order:
        call.ledger.fold(factor, frozenset({call.dim()}))
    return units


@rule("cumsum")
def _(call: Call) -> Outcome:
    return mixed_along(call, call.x.units, frozenset({call.dim()}))
