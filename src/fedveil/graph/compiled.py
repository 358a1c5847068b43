"""Replace compiled models by the modules that they were compiled from, and refuse other wrappers.

Code that torch.compile has produced is for the true model and for plain gradients, so a perturbed model runs without
it. Evaluation uses it.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fedveil.errors import BadArgument

WRAPPER = "OptimizedModule"  # the class of modules that torch.compile returns; importing it takes a second


def is_wrapper(module: nn.Module) -> bool:
    """Return whether torch.compile returned this module."""
    kinds = [kind for kind in type(module).__mro__ if kind.__name__ == WRAPPER]
    return any(kind.__module__.startswith("torch._dynamo") for kind in kinds)


def find_original(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile was called with, or the model itself."""
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
    """Return the module to perturb: that from which a model was compiled, with a warning, or the model itself.

    Raises:
        BadArgument: the model is or contains a scripted or parallel module.
    """
    found = find_original(model)
    for path, module in found.named_modules():
        name = f"model.get_submodule({path!r})" if path else "model"
        if isinstance(module, torch.jit.ScriptModule):
            what = "is a ScriptModule, whose operations cannot be traced"
            fix = "pass the original module, not the output of torch.jit.script or torch.jit.trace"
        elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            what = f"is wrapped in {type(module).__name__}, which splits a batch across devices"
            fix = f"pass {name}.module, on a single device"
        else:
            continue
        raise BadArgument(where, f"layer {path!r} of the model {what}" if path else f"the model {what}", fix)
    if found is not model or any(is_wrapper(own) or own._compiled_call_impl is not None for own in found.modules()):
        what = f"{where}: the model was compiled by torch.compile; perturbed steps run without the compiled code."
        warnings.warn(what, UserWarning, stacklevel=3)
    return found
