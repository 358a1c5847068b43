"""Modules that stand for another one: compiled, scripted or parallel ones, which cannot be covered as they are."""

import torch
from torch import nn

from fedveil.errors import BadArgument

UNDO = "make the model without calling its compile()"


def refuse_wrapped(where: str, model: nn.Module) -> None:
    """Refuse a model that is, or holds, a compiled, scripted or parallel module; the fix names what to pass instead."""
    for path, module in model.named_modules():
        if (found := _explain(module)) is not None:
            what, fix = found
            place = f"layer {path!r} of the model" if path else "the model"
            raise BadArgument(
                where, f"{place} {what}", fix.format(f"model.get_submodule({path!r})" if path else "model")
            )


def _explain(module: nn.Module) -> tuple[str, str] | None:
    """What a module is that cannot be used, and what to use instead, with its name left open."""
    if any(
        kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")
        for kind in type(module).__mro__
    ):
        return (
            "was made by torch.compile, and compiled code cannot be masked",
            "pass the module before torch.compile: {}._orig_mod",
        )
    if getattr(module, "_compiled_call_impl", None) is not None:
        return (
            "was compiled in place by its compile(), and compiled code cannot be masked",
            UNDO + ", or set {}._compiled_call_impl = None",
        )
    if isinstance(module, torch.jit.ScriptModule):
        return (
            "is a ScriptModule, whose operations cannot be followed",
            "pass the module before torch.jit.script or trace",
        )
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return (
            f"is wrapped in {type(module).__name__}, which divides a batch among devices",
            "pass {}.module, on one device",
        )
    return None
