"""Descriptions of a plan, as text and as plain values."""

from collections.abc import Sequence

from fedveil.graph.head import Head
from fedveil.graph.plan import Plan


def as_dict(plan: Plan) -> dict[str, object]:
    """Return the plan in plain values, as `fedveil inspect --json` prints it."""
    layout = plan.layout
    return {
        "model": plan.model_name,
        "parameters": layout.parameters,
        "trainable": layout.weights,
        "buffers": layout.total - layout.parameters,
        "coverage": plan.coverage,
        "shares": dict(plan.shares),
        "known": {"names": list(plan.known.names), "share": plan.known.share},
        "head": plan.head.path if plan.head else None,
        "outputs": plan.head.outputs if plan.head else None,
        "tail": plan.head.tail if plan.head else None,
        "axes": [
            {
                "written_by": list(axis.written_by),
                "size": axis.size,
                "symmetry": axis.symmetry.words,
                "limited_by": [{"where": where, "why": why} for where, why in axis.limited_by],
            }
            for axis in plan.axes
        ],
        "pinned": [{"where": where, "why": why} for where, why in plan.pinned],
        "unused": list(layout.unused),
    }


def shares_in_words(plan: Plan) -> str:
    """Return the shares in one line."""
    shares = plan.shares
    return (
        f"{shares['scaled']:.1%} scaled or with additive noise, {shares['signed']:.1%} changed in sign, "
        f"{shares['moved']:.1%} only moved, {shares['bare']:.1%} bare"
    )


def known_in_words(plan: Plan) -> str | None:
    """Say in one sentence how much known values reveal; None if nothing."""
    if not plan.known.share:
        return None
    names = ", ".join(plan.known.names[:3]) + (", ..." if len(plan.known.names) > 3 else "")
    return (
        f"The factors (or signs) of {plan.known.share:.1%} of the values follow from values that clients know "
        f"({names}): only their positions, and signs where factors have any, stay secret."
    )


def _first(names: Sequence[str], more: str = "") -> str:
    return "".join(names[:1]) + (f" (+{len(names) - 1}{more})" if len(names) > 1 else "")


def _describe_head(head: Head | None) -> str:
    """Say which layer takes additive noise, and how clients run the layers that follow."""
    if head is None:
        return "HEAD EXPOSED: no additive noise, clients read the true predictions"
    layer = f"{head.path or head.weight} with {head.outputs} outputs"
    if not head.within:
        return f"the final layer, {layer}, takes additive noise"
    runs = "on all candidates for its noise at once" if head.tail == "stacked" else "once per candidate for its noise"
    return f"{layer} takes additive noise; clients run the layers after it {runs}"


def describe(plan: Plan) -> str:
    """Return the plan as a table of axes, their factors and limits, then the pinned operations with reasons."""
    first = f"Plan of {plan.model_name}: {plan.layout.parameters:,} parameters: {shares_in_words(plan)}"
    lines = [line for line in (first, _describe_head(plan.head), known_in_words(plan)) if line] + [""]
    rows = [("channels from", "units", "factors", "limited by")]
    for axis in plan.axes:
        limits = _first([f"{where}: {why}" for where, why in axis.limited_by], " more")
        rows.append((_first(axis.written_by), str(axis.size), axis.symmetry.words, limits))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for name, units, factors, why in rows:
        lines.append(f"  {name:<{widths[0]}}  {units:>{widths[1]}}  {factors:<{widths[2]}}  {why}".rstrip())
    if plan.pinned:
        lines += ["", "no factor passes", *[f"  {where}: {why}" for where, why in plan.pinned]]
    if plan.layout.unused:
        lines += ["", "never read by forward, so neither sent nor trained: " + ", ".join(plan.layout.unused)]
    return "\n".join(lines)
