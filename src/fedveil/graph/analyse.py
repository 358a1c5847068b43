"""Analyse a model, or refuse it if it cannot be veiled."""

import warnings
from collections.abc import Collection
from typing import Literal

import torch
from torch import nn

from fedveil.errors import AnalysisError, BadArgument, NothingToVeil, TooLittleCovered
from fedveil.graph.build import Frozen, build_plan
from fedveil.graph.export import export
from fedveil.graph.head import find_head
from fedveil.graph.inputs import Inputs
from fedveil.graph.outputs import Output, choose_output
from fedveil.graph.plan import Plan
from fedveil.graph.walk import Walk

MAX_BARE = 0.1  # warn if more than this fraction of the parameter values would be sent unchanged


def analyse(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    head: Literal["linear", "exposed"] = "linear",
    min_coverage: float = 0.0,
    public: Collection[str] = (),
    frozen: Frozen = "sent",
    output: Output | None = None,
) -> Plan:
    """Determine which layers of a model can be perturbed, and how.

    The model is neither run nor changed: torch.export records the operations of a forward pass for the given shapes,
    dtypes and modes (train or eval), and the plan is valid only for these. No noise can pass through an operation
    without a rule; the plan lists such operations.

    Args:
        model: any network that torch.export can trace.
        example_inputs: a tensor, a tuple with one tensor per argument of forward, or a mapping of keyword arguments;
            the first dimension of each tensor is the batch dimension.
        head: "linear" adds noise to the last Linear or convolution that allows it; other operations may follow
            it. "exposed" adds none: **clients then see the true predictions**, and only hidden layers are perturbed.
        min_coverage: the minimum coverage, from 0 to 1; models with less are refused.
        public: names or name prefixes of parameters whose values clients know, such as those of a published backbone;
            `plan.known` then measures how much they reveal.
        frozen: "local" for parameters that do not require gradients and that every client has: they are neither
            perturbed nor sent, so only what is trained and the layers between frozen ones can be perturbed.
        output: the name of the predictions in what forward returns, such as "last_hidden_state", or a function of it;
            by default, "logits" or the only tensor of floats.

    Returns:
        The plan. `print(plan)` shows axes, symmetries and pinned operations; `plan.coverage` is the fraction of
        parameter values that can be perturbed.

    Raises:
        NotTraceable: torch.export cannot trace forward.
        HeadNotLinear: no Linear or convolution allows additive noise, and `head` is not "exposed".
        NothingToVeil: every axis is pinned.
        TooLittleCovered: the coverage is below `min_coverage`.
        BadArgument: forward returns several tensors, and none is chosen.
        AnalysisError: no parameter requires a gradient, or the tensors differ
            in dtype or device, or are neither float32 nor float64.

    Warns:
        UserWarning: more than a tenth of the parameter values would be sent unchanged.

    >>> import torch, fedveil
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> fedveil.analyse(net, torch.zeros(1, 4))
    <Plan of Sequential: coverage 100.0%, head 2, 8 symmetric units>
    """
    if head not in ("linear", "exposed"):
        raise BadArgument("analyse", f'head must be "linear" or "exposed", got {head!r}')
    if frozen not in ("sent", "local"):
        raise BadArgument("analyse", f'frozen must be "sent" or "local", got {frozen!r}')
    if not 0 <= min_coverage <= 1:
        raise BadArgument("analyse", f"min_coverage must be between 0 and 1, got {min_coverage}")
    refuse_wrapped("analyse", model)
    model = choose_output(model, output)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_complex() or (tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > 1e-6):
            what = f"it is {tensor.dtype}: a veil would lose more precision than plain training"
            fix = "call model.float(); in float32 and float64, a veil is as precise as plain training"
            raise AnalysisError(name, what, fix)
    graph = export(model, example_inputs)
    local = frozen == "local"
    layer, node = (None, None) if head == "exposed" else find_head(model, graph, example_inputs, only_trained=local)
    walk = Walk(graph, node)
    walk.run()
    plan = build_plan(model, walk, layer, public, frozen, output)
    if not plan.layout.trainable:
        fix = "call requires_grad_(True) on the parameters to train"
        raise AnalysisError(plan.model_name, "no parameter that forward reads requires a gradient", fix)
    reasons = "; ".join(f"{where}: {why}" for where, why in plan.pinned[:3]) or "it has no hidden axis"
    if plan.head is None and plan.coverage == 0:
        fix = 'put a ReLU, BatchNorm or pooling layer between two layers with weights, or use head="linear"'
        raise NothingToVeil(plan.model_name, f"a veil would change nothing, because {reasons}", fix)
    if plan.coverage < min_coverage:
        what = f"the coverage is {plan.coverage:.1%}, less than min_coverage ({min_coverage:.1%})"
        fix = "lower min_coverage, or change the layers that print(analyse(model, inputs)) lists as pinned"
        raise TooLittleCovered(plan.model_name, f"{what}: {reasons}", fix)
    if (bare := plan.shares["bare"]) > MAX_BARE:
        what = f"{plan.model_name}: {bare:.1%} of the parameter values are sent unchanged, because {reasons}."
        hint = "print(plan) lists all reasons; pass min_coverage to refuse models like this."
        warnings.warn(f"{what} {hint}", UserWarning, stacklevel=2)
    return plan


def refuse_wrapped(where: str, model: nn.Module) -> None:
    """Refuse a model that is or contains a compiled, scripted or parallel module."""
    for path, module in model.named_modules():
        name = f"model.get_submodule({path!r})" if path else "model"
        kinds = [kind for kind in type(module).__mro__ if kind.__name__ == "OptimizedModule"]
        if any(kind.__module__.startswith("torch._dynamo") for kind in kinds):
            what = "was compiled by torch.compile, and compiled code cannot be perturbed"
            fix = f"pass the original module: {name}._orig_mod"
        elif getattr(module, "_compiled_call_impl", None) is not None:
            what = "was compiled in place by its compile() method, and compiled code cannot be perturbed"
            fix = f"build the model without calling compile(), or set {name}._compiled_call_impl = None"
        elif isinstance(module, torch.jit.ScriptModule):
            what = "is a ScriptModule, whose operations cannot be traced"
            fix = "pass the original module, not the output of torch.jit.script or torch.jit.trace"
        elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            what = f"is wrapped in {type(module).__name__}, which splits a batch across devices"
            fix = f"pass {name}.module, on a single device"
        else:
            continue
        raise BadArgument(where, f"layer {path!r} of the model {what}" if path else f"the model {what}", fix)
