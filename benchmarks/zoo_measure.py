"""Measure a model of the zoo: analyse it, and compare its recovered gradients with those of autograd in float64."""

import copy
import importlib
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fedveil
from benchmarks.zoo import BOUND
from fedveil.errors import BadArgument
from fedveil.graph.inputs import Inputs, call
from fedveil.graph.outputs import Output, choose_output
from fedveil.scheme.losses import Loss, find_loss
from fedveil.scheme.outputs import loss_values

CLASSES, SAMPLES = 10, 3
NMS = "Tensor dets, Tensor scores, float iou_threshold"
Case = tuple[nn.Module, Inputs]
LIBRARIES: list[torch.library.Library] = []


def measure(build: Callable[[], Case], note: str = "") -> dict[str, object]:
    """Return the result for a model in training mode without dropout, with constants replaced by random numbers."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        model, inputs = build()
        model = prepare(model)
        view, output = choose(model, inputs)
        loss, targets = objective(forward(view, inputs))
    except Exception as error:
        return {"result": "not built", "reason": f"{note} {describe(error)}".strip()}
    began = time.process_time()
    try:
        plan = fedveil.analyse(model, inputs, output=output)
        error, own_error = worst_errors(model, view, plan, inputs, loss, targets)
    except fedveil.FedveilError as refusal:
        return {"result": "refused", "reason": f"{note} {describe(refusal)}".strip(), "seconds": seconds_since(began)}
    except Exception as raw:
        return {"result": "raw", "reason": f"{note} {describe(raw)}".strip(), "seconds": seconds_since(began)}
    result = "exact" if error < BOUND else "wrong"
    known = ", ".join(filter(None, (note, loss, output and "with output=")))
    found = {"result": result, "error": own_error, "error_of_all": error, "coverage": plan.coverage}
    return {**found, "seconds": seconds_since(began), "note": known}


def prepare(model: nn.Module) -> nn.Module:
    """Return the model in float64 and training mode, without dropout and without constant parameters."""
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout", "drop_rate"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and parameter.is_floating_point() and parameter.min() == parameter.max():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().train()


def choose(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Output | None]:
    """Return a view of a model that returns one tensor, and the choice that it needed: the first tensor, or none."""
    for output in (None, first):
        view = choose_output(model, output)
        try:
            forward(view, inputs)
        except BadArgument:
            continue
        return view, output
    raise ValueError("forward returns no tensor")


def first(returned: object) -> Tensor:
    """Return the first tensor that a forward method returned."""
    return next(leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor))


def forward(model: nn.Module, inputs: Inputs) -> Tensor:
    """Run a copy of the model; its random numbers are those of every other pass."""
    torch.manual_seed(1)
    with torch.no_grad():
        return call(copy.deepcopy(model), inputs)


def images(size: int = 64, channels: int = 3, dims: int = 2) -> Tensor:
    """Return a batch of random images."""
    return torch.randn(SAMPLES, channels, *[size] * dims, generator=torch.Generator().manual_seed(1)).double()


def declare_torchvision() -> None:
    """Declare two operations, so that a build of torchvision whose compiled part does not load can be imported."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}({NMS}) -> Tensor")
        LIBRARIES.append(library)  # its operations exist as long as it does
        for name in [own for own in sys.modules if own.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


def objective(outputs: Tensor) -> tuple[str, Tensor]:
    """Return the name of a loss that suits the outputs, and targets."""
    draw = torch.Generator().manual_seed(2)
    if outputs.dim() == 2 and outputs.shape[1] > 1:
        return "cross_entropy", torch.randint(0, outputs.shape[1], (len(outputs),), generator=draw)
    return "squared_error", torch.randn(outputs.shape, generator=draw).double()


def worst_errors(
    model: nn.Module, view: nn.Module, plan: fedveil.Plan, inputs: Inputs, loss: str, targets: Tensor
) -> tuple[float, float]:
    """Return the worst parameter's error, relative to the whole gradient's norm and to its own.

    For the second, a norm below a millionth of the whole counts as that. `view` returns the outputs.
    """
    perturbation = fedveil.Veil().perturb(model, plan, loss)
    torch.manual_seed(1)
    update = fedveil.client_step(copy.deepcopy(model), perturbation.broadcast, inputs, targets)
    found = perturbation.recover([update]).gradients
    names = [entry.name for entry in plan.layout.trainable]
    chosen: Loss = find_loss(loss)
    torch.manual_seed(1)
    value = loss_values(chosen, call(view, inputs), targets).mean()
    true = torch.autograd.grad(value, [model.get_parameter(name) for name in names], allow_unused=True)
    known = {n: torch.zeros_like(found[n]) if own is None else own for n, own in zip(names, true, strict=True)}
    whole = float(torch.stack([own.norm() for own in known.values()]).norm())
    errors = [(float((found[name] - own).norm()), float(own.norm())) for name, own in known.items()]
    return max(error / whole for error, _ in errors), max(error / max(own, 1e-6 * whole) for error, own in errors)


def describe(error: Exception) -> str:
    """Return an exception's type and first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def seconds_since(began: float) -> float:
    """Return the rounded seconds of CPU time since then."""
    return round(time.process_time() - began, 1)
