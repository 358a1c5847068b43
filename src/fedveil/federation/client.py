"""A client's part of a round, on the server's machine or on its own."""

import torch

from fedveil.defences.interface import B, DefenceClient, Samples, U
from fedveil.records.shards import Shards


def client_update(
    own: DefenceClient[B, U],
    broadcast: B,
    shards: Shards,
    *,
    client: int,
    number: int,
    whole_shard: bool,
    dtype: torch.dtype,
) -> U:
    """Compute what a client uploads in round `number`: for its next batch, or for all its records in batches."""
    if not whole_shard:
        samples = Samples(*shards.take(shards.rows(client, number)))
        return own.upload(own.step(broadcast, samples, client), client)
    total: U | None = None
    for rows in shards.shard(client):
        inputs, targets = shards.take(rows)
        weights = torch.full((len(rows),), 1 / shards.sizes[client], dtype=dtype, device=targets.device)
        update = own.step(broadcast, Samples(inputs, targets, weights), client)
        broadcast, total = own.accumulate(broadcast, total, update)
    assert total is not None
    return own.upload(total, client)
