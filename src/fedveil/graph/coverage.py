"""Measure and describe how much of a model is perturbed, and how much of the noise known values reveal.

For example, the weight of a newly initialised BatchNorm is all ones, so each perturbed value equals the product of its
factors. If all but one of these factors are known, the last one is revealed, for this tensor and all others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedveil.graph.units import Dims, Symmetry, varying_dims

if TYPE_CHECKING:
    from fedveil.graph.plan import Plan, TensorPart

Mask = NDArray[np.bool_]
KINDS = ("scaled", "signed", "moved")


@dataclass(frozen=True)
class KnownValues:
    """Values that clients know, and how much they reveal.

    Attributes:
        names: the parameters whose values are known: constant parameters and those declared public.
        share: the fraction of parameter values whose factors are revealed: the magnitudes of all their factors,
            or the signs if only signs are secret. Positions and the signs of other factors stay secret, but a public
            tensor with distinct values also reveals positions.
    """

    names: tuple[str, ...]
    share: float


def _count_free(part: "TensorPart", scale: Mask, order: Mask | None = None) -> int:
    """Count the elements of a part that none of the selected slots act on, as a product over independent dims."""
    factors = [factor.select(torch.from_numpy(~scale)) for factor in part.scale]
    factors += [] if order is None else [factor.select(torch.from_numpy(~order)) for factor in part.order]
    groups: list[tuple[Dims, torch.Tensor]] = []
    for factor in factors:
        dims = varying_dims(factor)
        for other_dims, other_factor in [group for group in groups if group[0] & dims]:
            groups = [group for group in groups if group[0] is not other_dims]
            factor, dims = factor & other_factor, dims | other_dims
        groups.append((dims, factor))
    constant = [size for dim, size in enumerate(part.shape) if not any(dim in dims for dims, _ in groups)]
    return math.prod([*constant, *[int(factor.sum()) for _, factor in groups]])


def _hidden_parts(plan: "Plan") -> list["TensorPart"]:
    """Return the parts of all parameters except those of the head, whose noise is not revealed by known values."""
    head = (plan.head.weight, plan.head.bias) if plan.head else ()
    parameters = plan.layout.trainable + plan.layout.frozen
    return [part for entry in parameters if entry.name not in head for part in plan.pieces[entry.name]]


def restrict(plan: "Plan", *, factors: bool, permutations: bool) -> "Plan":
    """Return the plan that a veil uses if its factors are all 1, apart from signs, or if it permutes nothing."""
    if not factors:
        axes = tuple(replace(axis, symmetry=axis.symmetry & Symmetry.SIGN) for axis in plan.axes)
        plan = replace(plan, axes=axes, symmetries=plan.symmetries & Symmetry.SIGN)
    if not permutations:
        plan = replace(plan, slots=replace(plan.slots, order=np.zeros_like(plan.slots.order)))
    return plan


def measure_shares(plan: "Plan") -> MappingProxyType[str, float]:
    """Return the fraction of parameter values for each kind of perturbation; a value counts for its strongest kind."""
    symmetries = plan.symmetries[plan.slots.unit]
    has_factor, has_scale, has_order = (symmetries & Symmetry.POSITIVE) > 0, symmetries > 0, plan.slots.order > 0
    counts = np.zeros(len(KINDS), np.int64)
    for part in _hidden_parts(plan):
        size, unscaled, unsigned = math.prod(part.shape), _count_free(part, has_factor), _count_free(part, has_scale)
        counts += [size - unscaled, unscaled - unsigned, unsigned - _count_free(part, has_scale, has_order)]
    head = (plan.head.weight, plan.head.bias) if plan.head else ()
    counts[0] += sum(entry.shape.numel() for entry in plan.layout.entries if entry.name in head)
    total = max(1, plan.layout.parameters)
    shares = {kind: float(count / total) for kind, count in zip(KINDS, counts, strict=True)}
    return MappingProxyType({**shares, "bare": float((plan.layout.parameters - counts.sum()) / total)})


def measure_known_values(plan: "Plan") -> KnownValues:
    """Measure how much of the noise is revealed by values that clients know in advance."""
    known_parts = [part for name in plan.known_names for part in plan.pieces[name]]
    units = plan.slots.unit
    has_factor, has_sign = ((plan.symmetries[units] & kind) > 0 for kind in (Symmetry.POSITIVE, Symmetry.SIGN))
    secret_factor, secret_sign = (
        secret & ~np.isin(units, _find_revealed_classes(plan, known_parts, kind))
        for secret, kind in ((has_factor, Symmetry.POSITIVE), (has_sign, Symmetry.SIGN))
    )
    count = 0
    for part in _hidden_parts(plan) if known_parts else ():  # count magnitudes, or signs if only signs are secret
        count += _count_free(part, secret_factor) - _count_free(part, has_factor)
        count += _count_free(part, has_factor | secret_sign) - _count_free(part, has_factor | has_sign)
    return KnownValues(plan.known_names, count / max(1, plan.layout.parameters))


def _find_revealed_classes(plan: "Plan", known_parts: Sequence["TensorPart"], kind: Symmetry) -> list[int]:
    """Return the scale classes whose magnitude (or sign) is revealed as the last unknown factor of a known product."""
    secret = (plan.symmetries & kind) > 0
    products = [product for part in known_parts for product in _find_products(plan, part, secret)]
    revealed: set[int] = set()
    while newly_revealed := {
        next(iter(remaining)) for product in products if len(remaining := product - revealed) == 1
    }:
        revealed |= newly_revealed
    return sorted(revealed)


def _find_products(plan: "Plan", part: "TensorPart", secret: Mask) -> set[frozenset[int]]:
    """Return the distinct sets of secret classes that multiply the elements of a part."""
    if not part.scale:
        return set()
    units = torch.from_numpy(plan.slots.unit)
    rows = np.broadcast_arrays(*[slots.select(units).numpy() for slots in part.scale])
    table = np.unique(np.stack([row.ravel() for row in rows], 1), axis=0)
    return {frozenset(int(c) for c in row if secret[c]) for row in table}


# Descriptions.


def as_dict(plan: "Plan") -> dict[str, object]:
    """Return the plan as a dict of plain values, as printed by `fedveil inspect --json`."""
    layout, head = plan.layout, plan.head
    return {
        "model": plan.model_name,
        "parameters": layout.parameters,
        "local": sum(entry.shape.numel() for entry in layout.local),
        "trainable": layout.weights,
        "buffers": layout.total - layout.parameters,
        "coverage": plan.coverage,
        "shares": dict(plan.shares),
        "known": {"names": list(plan.known.names), "share": plan.known.share},
        "head": head.path if head else None,
        "outputs": head.outputs if head else None,
        "tail": head.tail if head else None,
        "axes": [
            {
                **vars(axis),
                "symmetry": axis.symmetry.words,
                "limited_by": [reason._asdict() for reason in axis.limited_by],
            }
            for axis in plan.axes
        ],
        "pinned": [reason._asdict() for reason in plan.pinned],
        "unused": list(layout.unused),
    }


def describe_shares(plan: "Plan") -> str:
    """Describe in one line how much of the model is perturbed in each way."""
    words = ("scaled or with additive noise", "with changed signs", "only permuted", "bare")
    return ", ".join(
        f"{share:.1%} {description}" for share, description in zip(plan.shares.values(), words, strict=True)
    )


def describe_known_values(plan: "Plan") -> str | None:
    """Describe in one sentence how much is revealed by known values; return None if nothing is revealed."""
    if not plan.known.share:
        return None
    names = ", ".join(plan.known.names[:3]) + (", ..." if len(plan.known.names) > 3 else "")
    return (
        f"Values that clients know ({names}) reveal the factors (or signs) of {plan.known.share:.1%} of the values; "
        "only their positions and the signs of their factors stay secret."
    )


def _abbreviate(names: Sequence[str], suffix: str = "") -> str:
    return "".join(names[:1]) + (f" (+{len(names) - 1}{suffix})" if len(names) > 1 else "")


def _describe_local(plan: "Plan") -> str | None:
    """Describe the frozen parameters that are not sent; return None if there are none."""
    if not plan.layout.local:
        return None
    values = sum(entry.shape.numel() for entry in plan.layout.local)
    return f"clients already have {values:,} more, which are frozen and neither perturbed nor sent"


def _describe_head(plan: "Plan") -> str:
    """Describe which layer receives additive noise, and how clients run later layers."""
    head = plan.head
    if head is None:
        return "HEAD EXPOSED: no additive noise; clients see the true predictions"
    layer = f"{head.path or head.weight} with {head.outputs} outputs"
    if not head.is_inner:
        return f"the final layer, {layer}, receives additive noise"
    runs = "on all noise candidates at once" if head.tail == "stacked" else "once per noise candidate"
    return f"{layer} receives additive noise; clients run later layers {runs}"


def describe(plan: "Plan") -> str:
    """Describe a plan: a table of axes with their factors and limits, followed by the pinned operations and reasons."""
    heading = f"Plan of {plan.model_name}: {plan.layout.parameters:,} parameters: {describe_shares(plan)}"
    texts = heading, _describe_local(plan), _describe_head(plan), describe_known_values(plan)
    lines = [line for line in texts if line] + [""]
    rows = [("channels from", "units", "factors", "limited by")]
    for axis in plan.axes:
        limits = _abbreviate([f"{where}: {reason}" for where, reason in axis.limited_by], " more")
        rows.append((_abbreviate(axis.written_by), str(axis.size), axis.symmetry.words, limits))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for name, units, factors, reason in rows:
        lines.append(f"  {name:<{widths[0]}}  {units:>{widths[1]}}  {factors:<{widths[2]}}  {reason}".rstrip())
    if plan.pinned:
        lines += ["", "no factor passes through", *[f"  {where}: {reason}" for where, reason in plan.pinned]]
    if plan.layout.unused:
        lines += ["", "never read by forward, so neither sent nor trained: " + ", ".join(plan.layout.unused)]
    return "\n".join(lines)
