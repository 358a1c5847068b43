"""A client's part of a round, on the server's machine or on its own."""

from typing import Any

import torch
from torch import nn

from fedveil.defences import Defence
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import answers
from fedveil.federation.shards import Batch, Shards
from fedveil.scheme.losses import BinaryCrossEntropy, Custom, Loss, one_hot


def dense_targets(model: nn.Module, loss: Loss, part: Batch) -> Batch:
    """Class indices as one-hot rows, in the shape of the model's outputs."""
    inputs, targets = part
    if targets.is_floating_point() or isinstance(loss, Custom):
        return inputs, targets
    with torch.no_grad():
        outputs = answers(model, inputs[:1].to(next(model.parameters()).device)).cpu()
    template = outputs.expand(len(targets), *outputs.shape[1:])
    if isinstance(loss, BinaryCrossEntropy):
        return inputs, loss.dense(targets, template)
    if targets.shape != template.shape[:-1]:
        raise BadArgument("targets", f"shape is {tuple(targets.shape)}, want class indices (records,)")
    return inputs, one_hot(targets, template)


def client_update(
    defence: Defence,
    model: nn.Module,
    broadcast: Any,
    shards: Shards,
    *,
    client: int,
    number: int,
    whole_shard: bool,
    dtype: torch.dtype,
) -> Any:
    """What a client uploads in round `number`: of its next batch, or of all its records in batches."""
    if not whole_shard:
        batch = shards.take(shards.rows(client, number))
        return defence.upload(defence.client_step(model, broadcast, *batch, None, client), client)
    total = None
    for rows in shards.shard(client):
        inputs, targets = shards.take(rows)
        weights = torch.full((len(rows),), 1 / shards.sizes[client], dtype=dtype, device=inputs.device)
        update = defence.client_step(model, broadcast, inputs, targets, weights, client)
        broadcast, total = defence.accumulate(broadcast, total, update)
    return defence.upload(total, client)
