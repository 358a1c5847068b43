"""Analyse a model, or refuse it if it cannot be veiled."""

import warnings
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedveil.checks import suspend_autocast
from fedveil.errors import AnalysisError, BadArgument, FedveilError, NothingToVeil, TooLittleCovered
from fedveil.graph.build import Frozen, build_plan
from fedveil.graph.export import SAMPLES, combinations, export, first_line
from fedveil.graph.foreign_code import refuse_hooks, run_eagerly, unwrap
from fedveil.graph.head import find_head, find_layer
from fedveil.graph.inputs import Inputs, describe_form
from fedveil.graph.outputs import Output, choose_output
from fedveil.graph.plan import ModelState, Plan
from fedveil.graph.probe import probe
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
    dtypes and modes (train or eval). `client_step` refuses sizes for which the plan would differ. No noise can pass
    through an operation without a rule; the plan lists such operations.

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
            perturbed nor sent, so only trained parameters, and layers between frozen ones, can be perturbed.
        output: the name of the predictions in forward's output, such as "last_hidden_state", or a function that
            computes them from this output; by default, "logits" or the only floating-point tensor.

    Returns:
        The plan. `print(plan)` shows axes, symmetries and pinned operations; `plan.coverage` is the fraction of
        parameter values that can be perturbed.

    Raises:
        NotTraceable: torch.export cannot trace forward.
        HeadNotLinear: no Linear or convolution allows additive noise, and `head` is not "exposed".
        NothingToVeil: every axis is pinned.
        TooLittleCovered: the coverage is below `min_coverage`.
        BadArgument: forward returns several tensors, and none is chosen.
        NotExact: hooks or a user-defined backward pass change gradients.
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
    if not isinstance(model, nn.Module):
        raise BadArgument("analyse", f"model must be a torch.nn.Module, got {model!r:.60}", "pass an instance: Net()")
    model = choose_output(unwrap("analyse", model), output)
    if lazy_names := [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]:
        raise AnalysisError(lazy_names[0], "it has no shape yet", "run the model once: model(inputs)")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_complex() or (tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > 1e-6):
            message = f"it has dtype {tensor.dtype}, in which a veil would lose more precision than plain training"
            fix = "call model.float(); in float32 and float64, a veil is as precise as plain training"
            raise AnalysisError(name, message, fix)
    refuse_hooks(ModelState.read(model).hooks, type(model).__name__)
    plan = make_plan(
        model, example_inputs, SAMPLES, exposed=head == "exposed", public=public, frozen=frozen, output=output
    )
    if not plan.layout.trainable:
        fix = "call requires_grad_(True) on the parameters to train"
        raise AnalysisError(plan.model_name, "no parameter that forward reads requires a gradient", fix)
    reasons = "; ".join(f"{where}: {reason}" for where, reason in plan.pinned[:3]) or "it has no hidden axis"
    if plan.head is None and plan.coverage == 0:
        fix = 'put a ReLU, BatchNorm or pooling layer between two layers with weights, or use head="linear"'
        raise NothingToVeil(plan.model_name, f"a veil would change nothing, because {reasons}", fix)
    if plan.coverage < min_coverage:
        message = f"the coverage is {plan.coverage:.1%}, less than min_coverage ({min_coverage:.1%})"
        fix = "lower min_coverage, or change the layers that print(analyse(model, inputs)) lists as pinned"
        raise TooLittleCovered(plan.model_name, f"{message}: {reasons}", fix)
    if (bare_share := plan.shares["bare"]) > MAX_BARE:
        message = f"{plan.model_name}: {bare_share:.1%} of the parameter values are sent unchanged, because {reasons}."
        hint = "print(plan) lists all reasons; pass min_coverage to refuse models like this."
        warnings.warn(f"{message} {hint}", UserWarning, stacklevel=2)
    return plan


def _check_outputs(model: nn.Module, outputs: Sequence[Tensor]) -> None:
    """Refuse outputs without a row per sample, and outputs with a lower precision than the parameters."""
    name, parameter = type(model).__name__, next((p for p in model.parameters() if p.is_floating_point()), None)
    if any(output.dim() == 0 for output in outputs):
        message = "the model returns one number for the whole batch, such as a mean or a loss"
        raise AnalysisError(name, message, "return one row per sample; the loss averages them")
    for output in outputs:
        if parameter is not None and torch.finfo(output.dtype).eps > torch.finfo(parameter.dtype).eps:
            message = f"it rounds its outputs to {output.dtype}, which has a different effect on perturbed outputs"
            raise AnalysisError(name, message, f"return them in {parameter.dtype}")


REPORT_FIX = (
    "report a bug and attach the model; until then, use a defence that does not analyse models: 'plain' or 'ppdl'"
)


@suspend_autocast()
def make_plan(
    model: nn.Module,
    inputs: Inputs,
    samples: int,
    *,
    exposed: bool,
    public: Collection[str] = (),
    frozen: Frozen = "sent",
    output: Output | None = None,
) -> Plan:
    """Return the plan for inputs of this form and number of samples, regardless of its coverage.

    The model already returns the chosen predictions; the plan only records `output`.
    """
    only_trained = frozen == "local"
    with run_eagerly(model):
        graph = export(model, inputs, samples)
        if len(graph.outputs) != 1:  # forward was replaced by a function, which cannot be wrapped
            fix = "define forward in a subclass of the model's class"
            raise AnalysisError(type(model).__name__, "its replaced forward method returns several tensors", fix)
        _check_outputs(model, [value for node in graph.outputs if isinstance(value := node.meta.get("val"), Tensor)])
        probe(model, inputs, samples)
        skip_graphs = [
            export(model, inputs, samples, skipped_layers) for skipped_layers in combinations(graph.decisions)
        ]
        skipped = {
            name for name in graph.used_names if not all(name in skip_graph.used_names for skip_graph in skip_graphs)
        }
        layer, node = None, None
        if not exposed:
            layer, node = find_head(model, graph, inputs, samples, only_trained=only_trained, skipped=skipped)
    walk = Walk(graph, node)
    try:
        walk.run()
        for skip_graph in skip_graphs:
            Walk(
                skip_graph, find_layer(skip_graph, layer) if layer and node else None, walk.ledger, walk.used_names
            ).run()
        return build_plan(model, walk, layer, describe_form(inputs), public, frozen, output)
    except FedveilError:
        raise
    except Exception as error:
        message = f"its operations cannot be analysed: {first_line(error)}"
        raise AnalysisError(type(model).__name__, message, REPORT_FIX) from error
