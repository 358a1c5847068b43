"""Batches of a single record, over which nothing can be normalised."""

from contextlib import ExitStack

import torch
from torch import nn

from fedveil.errors import BadArgument
from fedveil.federation.shards import Shards
from fedveil.scheme.outputs import outputs_of


def refuse_single(model: nn.Module, shards: Shards) -> None:
    """Refuse a client whose batches have one record, where a layer of the model normalises over the batch."""
    alone = shards.sizes.index(1) if 1 in shards.sizes else 0
    if shards.batch_size > 1 and shards.sizes[alone] > 1:
        return
    layer = _find_layer(model, shards, alone)
    if layer is None:
        return
    what = (
        f"client {alone} has a single record" if 1 in shards.sizes else "batch_size=1 makes batches of a single record"
    )
    what += f", and layer {layer or type(model).__name__!r} normalises over the records of a batch: it needs two"
    fix = "join this client with another" if 1 in shards.sizes else "choose batch_size=2 or more"
    raise BadArgument("Federation", what, f"{fix}, use GroupNorm or LayerNorm, or call model.eval()")


def _find_layer(model: nn.Module, shards: Shards, client: int) -> str | None:
    """The layer that does not take one record of a client in the modes that the model has; None if all do."""
    entered = [""]
    inputs, _ = shards.take(torch.arange(shards.starts[client], shards.starts[client] + 1))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with ExitStack() as stack, torch.no_grad(), torch.random.fork_rng(devices=[]):
        for path, module in model.named_modules():
            hook = module.register_forward_pre_hook(lambda *_, path=path: entered.append(path))
            stack.callback(hook.remove)
        try:
            outputs_of(model, inputs, buffers)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            return entered[-1]
    return None
