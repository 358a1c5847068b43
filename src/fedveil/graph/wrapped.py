"""Modules that stand for another one: compiled, scripted or parallel ones, which cannot be perturbed."""

import torch
from torch import nn

from fedveil.errors import BadArgument


def refuse_wrapped(where: str, model: nn.Module) -> None:
    """Refuse a model that is, or holds, a compiled, scripted or parallel module; the fix names what to pass instead."""
    for path, module in model.named_modules():
        found = _explain(module, f"model.get_submodule({path!r})" if path else "model")
        if found is not None:
            what, fix = found
            raise BadArgument(where, f"layer {path!r} of the model {what}" if path else f"the model {what}", fix)


def _explain(module: nn.Module, name: str) -> tuple[str, str] | None:
    """Return why a module cannot be used, and the fix; None if it can."""
    kinds = [kind for kind in type(module).__mro__ if kind.__name__ == "OptimizedModule"]
    if any(kind.__module__.startswith("torch._dynamo") for kind in kinds):
        what = "was made by torch.compile, and compiled code cannot be perturbed"
        return what, f"pass the module before torch.compile: {name}._orig_mod"
    if getattr(module, "_compiled_call_impl", None) is not None:
        what = "was compiled in place by its compile(), and compiled code cannot be perturbed"
        return what, f"make the model without calling its compile(), or set {name}._compiled_call_impl = None"
    if isinstance(module, torch.jit.ScriptModule):
        what = "is a ScriptModule, whose operations cannot be followed"
        return what, "pass the module before torch.jit.script or trace"
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        what = f"is wrapped in {type(module).__name__}, which divides a batch among devices"
        return what, f"pass {name}.module, on one device"
    return None
