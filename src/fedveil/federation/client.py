"""A client's part of a round, on the server's machine or on its own."""

from typing import Any

import torch
from torch import nn

from fedveil.defences import Defence, Samples
from fedveil.records.shards import Shards


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
        samples = Samples(*shards.take(shards.rows(client, number)))
        return defence.upload(defence.client_step(model, broadcast, samples, client), client)
    total = None
    for rows in shards.shard(client):
        inputs, targets = shards.take(rows)
        weights = torch.full((len(rows),), 1 / shards.sizes[client], dtype=dtype, device=targets.device)
        update = defence.client_step(model, broadcast, Samples(inputs, targets, weights), client)
        broadcast, total = defence.accumulate(broadcast, total, update)
    return defence.upload(total, client)
