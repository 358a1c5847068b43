"""Unwrap compiled models, and refuse code around a model that cannot be traced or that changes gradients.

Code that torch.compile has produced is for the true model and plain gradients, so it is used in evaluation, but not to
run a perturbed model. The backward pass of a perturbed model has perturbed gradients: a hook or a user-defined
backward pass that clamps, masks or rounds them does not have the same effect as on plain gradients, and the recovered
gradient would be wrong. Forward hooks are part of forward and are supported.
"""

import random
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from fedveil.errors import BadArgument, NotExact, NotTraceable

HOOK_FIX = "remove it; change gradients in the step of your own optimizer, which receives the recovered gradients"
BACKWARD_FIX = (
    "use torch functions, which autograd can differentiate; for an identity with a different gradient, such as "
    "a straight-through estimator, use x + (f(x) - x).detach()"
)
LIBRARIES = {"torch", "numpy", "fedveil"} | sys.stdlib_module_names
REENTRANT_FIX = "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
# User-defined backward passes of published packages that have been checked: each is the derivative of its forward pass,
# or differs from it by a rounded constant, where the rules for the operations of forward let no factor through.
KNOWN_BACKWARD = {
    "transformers.models.bloom.modeling_bloom.GeLUFunction",
    "transformers.models.sew_d.modeling_sew_d.XDropout",
    "transformers.models.sew_d.modeling_sew_d.XSoftmax",
}
# Functions of transformers that draw positions with NumPy: masked times and features, or blocks of keys to attend to.
# They become constants, whose values no rule uses.
KNOWN_DRAWS = re.compile(
    r"transformers\.models\.\w+\.modeling_\w+\."
    r"(_compute_mask_indices|BigBird\w+\.(_get_single_block_row_attention|\w*bigbird_block_\w+))(\.<locals>\.<\w+>)?"
)
KNOWN_PACKERS = ("torch.utils.checkpoint", "torch.autograd.graph")  # they restore tensors exactly


MODULE_HOOK = "it has a backward hook, which would receive perturbed gradients"
TENSOR_HOOK = "it has a gradient hook (register_hook), which would not see the recovered gradient"
GLOBAL_HOOK = "a backward hook is registered for all modules, and would receive perturbed gradients"


def refuse_hooks(hooks: tuple[tuple[str, str], ...], model_name: str) -> None:
    """Refuse a model with hooks; `hooks` lists the path of a module or tensor, and the kind of hook."""
    for path, message in hooks:
        fix = "remove the hook: call remove() on the handle that its registration returned"
        raise NotExact(path or model_name, message, fix if message == GLOBAL_HOOK else HOOK_FIX)


def refuse_packing(where: str) -> None:
    """Refuse saved_tensors_hooks that may change tensors saved for the backward pass."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks and getattr(hooks[0], "__module__", None) not in KNOWN_PACKERS:
        message = "saved_tensors_hooks are active, which may change the activations from which gradients are computed"
        raise NotExact(where, message, "remove them; torch.utils.checkpoint and save_on_cpu are supported")


def new_nodes(outputs: list[Tensor], visited: set[Node]) -> Iterator[Node]:
    """Yield the nodes of the backward graph of these tensors that are not in `visited`, and add them to it."""
    pending = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            yield node
            pending += [successor for successor, _ in node.next_functions if successor is not None]


def refuse_custom_backward(node: Node, where: str) -> None:
    """Refuse a node of the backward graph whose backward pass is not derived by PyTorch."""
    kind = type(node)
    function: Callable[..., object] | None = getattr(kind, "_forward_cls", None)
    if function is None and not node.name().startswith("torch::autograd::CppNode"):
        return
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", node.name())
    if module.startswith("torch._higher_order_ops") or f"{module}.{name}" in KNOWN_BACKWARD:
        return
    if function is torch.utils.checkpoint.CheckpointFunction:
        raise NotExact(where, "its reentrant checkpoint hides the backward pass of its layers", REENTRANT_FIX)
    message = f"the backward pass of {name} is user-defined, and would receive perturbed gradients"
    raise NotExact(where, message, BACKWARD_FIX)


def refuse_draws(found: Collection[str], model_name: str) -> None:
    """Refuse functions of forward that draw from NumPy's or Python's global generator."""
    for own in found:
        if not KNOWN_DRAWS.fullmatch(own):
            what = f"{own} draws random numbers from NumPy or Python, which may decide what forward computes"
            raise NotTraceable(
                model_name, what, "draw them with torch, such as torch.rand(()) < 0.1, or remove the code"
            )


WRAPPER = "OptimizedModule"  # the class of modules that torch.compile returns; importing it takes a second


def is_wrapper(module: nn.Module) -> bool:
    """Return whether torch.compile returned this module."""
    kinds = [kind for kind in type(module).__mro__ if kind.__name__ == WRAPPER]
    return any(kind.__module__.startswith("torch._dynamo") for kind in kinds)


def find_original(model: nn.Module) -> nn.Module:
    """Return the module that was passed to torch.compile, or the model itself."""
    while is_wrapper(model):
        model = model._orig_mod  # type: ignore[assignment]
    return model


@contextmanager
def run_eagerly(model: nn.Module) -> Iterator[None]:
    """Run the model's compiled layers without compiling them."""
    if not any(is_wrapper(module) or module._compiled_call_impl is not None for module in model.modules()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def unwrap(where: str, model: nn.Module) -> nn.Module:
    """Return the module to perturb: the original of a compiled model (with a warning), or the model itself.

    Raises:
        BadArgument: the model is or contains a scripted or parallel module, or has parameters on the meta device.
    """
    original = find_original(model)
    if meta := [name for name, parameter in original.named_parameters() if parameter.is_meta]:
        raise BadArgument(where, f"{meta[0]} is on the meta device, which has no values", "load the model's weights")
    for path, module in original.named_modules():
        name = f"model.get_submodule({path!r})" if path else "model"
        if isinstance(module, torch.jit.ScriptModule):
            message = "is a ScriptModule, whose operations cannot be traced"
            fix = "pass the original module, not the output of torch.jit.script or torch.jit.trace"
        elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            message = f"is wrapped in {type(module).__name__}, which splits a batch across devices"
            fix = f"pass {name}.module, on a single device"
        else:
            continue
        raise BadArgument(where, f"layer {path!r} of the model {message}" if path else f"the model {message}", fix)
    if original is not model or any(
        is_wrapper(module) or module._compiled_call_impl is not None for module in original.modules()
    ):
        message = f"{where}: the model was compiled by torch.compile; perturbed steps run without the compiled code."
        warnings.warn(message, UserWarning, stacklevel=3)
    return original


def read_generators() -> tuple[object, ...]:
    """Return the states of NumPy's and Python's global generators, which can be compared."""
    numpy_state = np.random.get_state(legacy=False)
    parts = [part.tobytes() if isinstance(part, np.ndarray) else part for part in numpy_state["state"].values()]
    return parts, numpy_state["has_gauss"], numpy_state["gauss"], random.getstate()


@contextmanager
def restore_generators() -> Iterator[None]:
    """Restore the states of all global generators afterwards, so that several passes draw the same numbers."""
    numpy_state, python_state, initial = np.random.get_state(legacy=False), random.getstate(), read_generators()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        if read_generators() != initial:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


@contextmanager
def find_draws() -> Iterator[dict[str, CodeType]]:
    """Collect the functions that draw from NumPy's or Python's global generator, by module and name; this is slow."""
    functions, state, profiler = dict[str, CodeType](), read_generators(), sys.getprofile()

    def check(frame: FrameType | None, event: str, _: object) -> None:
        nonlocal state
        if event not in ("call", "return") or frame is None or _is_library(frame) or read_generators() == state:
            return
        state = read_generators()
        caller = frame if event == "return" else frame.f_back
        while caller and _is_library(caller):
            caller = caller.f_back
        if caller:
            functions[f"{caller.f_globals.get('__name__')}.{caller.f_code.co_qualname}"] = caller.f_code

    sys.setprofile(check)
    try:
        yield functions
    finally:
        sys.setprofile(profiler)


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in LIBRARIES
