"""A client's part of a round, on the server's machine or on its own."""

from typing import Any

import torch
from torch import nn

from fedveil.defences import Defence, Samples
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import moved, predict, rows_of
from fedveil.federation.shards import Batch, Shards
from fedveil.scheme.losses import OF_CLASSES, USERS, BinaryCrossEntropy, Loss
from fedveil.scheme.outputs import are_classes, check_classes, class_axis, head_axis, spread, without


def dense_targets(model: nn.Module, loss: Loss, part: Batch, axis: int | None = None) -> Batch:
    """A client's inputs and targets, with class indices as one-hot rows in the shape of the model's outputs.

    A user's own loss gets targets as they are. Cross-entropy at several positions of a record (pixels, tokens) keeps
    indices: one-hot targets would take the memory of the outputs, and indices say which axis of the outputs counts
    classes. Where shapes leave that open, `axis` does; by default it is the one that the model's last layer writes.
    """
    inputs, targets = part
    if targets.is_floating_point() or isinstance(loss, USERS):
        return inputs, targets
    first = next(model.parameters())
    outputs = predict(model, moved(rows_of(inputs, 0, 1), first.device, first.dtype)).cpu()
    template = outputs.expand(len(targets), *outputs.shape[1:])
    if isinstance(loss, BinaryCrossEntropy):
        return inputs, loss.dense(targets, template)
    if not are_classes(template, targets):
        wanted = " or ".join(sorted({str(tuple(without(template.shape, place))) for place in (-1, 1)}))
        raise BadArgument("targets", f"shape is {tuple(targets.shape)}, want class indices of shape {wanted}")
    axis = head_axis(model) if axis is None else axis
    if not isinstance(loss, OF_CLASSES) or template.dim() < 3:
        return inputs, spread(targets, template, axis).contiguous()
    check_classes(targets, template.shape[class_axis(template, targets, axis)])
    return inputs, targets


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
