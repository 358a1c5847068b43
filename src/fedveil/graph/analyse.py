"""From a model to its plan."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from fedveil.errors import AnalysisError, BadArgument, NothingToVeil
from fedveil.graph.plan import Plan, build_plan
from fedveil.graph.trace import trace


def analyse(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Tensor],
    *,
    head: Literal["linear", "exposed"] = "linear",
) -> Plan:
    """Find out which noise each part of a model lets through.

    Nothing is run on real numbers and nothing in the model is changed; only shapes, dtypes and the modes (train or
    eval) of its modules matter, and the plan holds for the model in those modes.

    Args:
        model: any network that torch.fx can trace. Operations without a rule pin the axes they touch.
        example_inputs: one tensor, or one for each argument of forward; the first dimension counts samples.
        head: "linear" asks for a model that ends in nn.Linear, whose weight takes the additive noise. "exposed"
            takes any model and does without: **clients then read the true predictions**, only hidden layers are
            covered.

    Returns:
        The plan. `print(plan)` shows axes, symmetries, and what is pinned and why.

    Raises:
        NotTraceable: torch.fx cannot follow forward.
        HeadNotLinear: the model does not end in nn.Linear, and `head` is not "exposed".
        NothingToVeil: every axis is pinned.
        AnalysisError: no parameter wants a gradient, or tensors differ in dtype or device.

    >>> import torch, fedveil
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> fedveil.analyse(net, torch.zeros(1, 4))
    <Plan of Sequential: 1 axes, coverage 100.0%>
    """
    if head not in ("linear", "exposed"):
        raise BadArgument("analyse", f'head is {head!r}, not one of "linear", "exposed"')
    plan = build_plan(model, trace(model, example_inputs, exposed=head == "exposed"))
    if not plan.layout.trainable:
        fix = "model.requires_grad_(True) for what is to be trained"
        raise AnalysisError(plan.model_name, "no parameter that forward reads wants a gradient", fix)
    hidden = bool((plan.symmetries > 0).any() or (plan.cells > 0).any())
    if not hidden and plan.head is None:
        reasons = "; ".join(f"{where}: {why}" for where, why in plan.pinned[:3]) or "it has no hidden axis"
        fix = "let two layers with weights stand around a ReLU, BatchNorm or pooling, or use the linear head's noise"
        raise NothingToVeil(plan.model_name, f"a veil would change nothing, because {reasons}", fix)
    return plan
