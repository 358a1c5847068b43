"""Records of clients and of the test, checked against a model and its loss before the first round."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from fedveil.checks import check_integer, whole
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import metrics, moved, predict_source
from fedveil.federation.targets import attribute_targets, describe, first_line, target_maker, try_model
from fedveil.records.checks import check_range, check_sources
from fedveil.records.inputs import Batch, Inputs, join_batches
from fedveil.records.shards import MemoryShards, Shards, StreamShards
from fedveil.records.sources import Given, Rows, Source, as_source
from fedveil.scheme.losses import USERS, Loss, couples_samples
from fedveil.scheme.outputs import compute_outputs, head_axis

WHERE = "Federation"
TEST = "test data"


def make_shards(
    model: nn.Module, loss: Loss, clients: Sequence[Source], batch_size: int, seed: int, dtype: torch.dtype
) -> Shards:
    """Return the records of clients as the model and the loss take them: in memory, if all of them are.

    Args:
        model: tells the device, and the shape of outputs.
        loss: decides the form of targets.
        clients: their records, checked.
        batch_size: records that a client takes in a round.
        seed: of their order.
        dtype: of floating-point numbers.
    """
    whole(WHERE, "batch_size", batch_size)
    check_integer(WHERE, "seed", seed)
    make, device = target_maker(model, loss, clients[0].take([0])), next(model.parameters()).device

    def prepare(who: str, batch: Batch, numbers: Sequence[int]) -> Batch:
        check_range(who, batch, numbers, dtype)
        with attribute_targets(who):
            targets = make(batch[1])
        return moved(batch[0], device, dtype), targets.to(device, dtype if targets.is_floating_point() else None)

    sizes = tuple(len(client) for client in clients)
    common = tuple(itertools.accumulate(sizes[:-1], initial=0)), sizes, batch_size, seed, ()
    stored = [client for client in clients if isinstance(client, Rows)]
    if len(stored) < len(clients):
        return StreamShards(*common, tuple(clients), prepare)
    parts = [prepare(own.who, (own.inputs, own.targets), range(len(own))) for own in stored]
    return MemoryShards(*common, *join_batches(parts))


def read_held_out(
    given: Given, model: nn.Module, loss: Loss, dtype: torch.dtype, like: Callable[[], Inputs] | None = None
) -> Source:
    """Return test data as a source; refuse records that the model does not take, and targets that do not fit the loss.

    A user's loss is evaluated on all records in memory, as after a round. Of a stream, two records are read, or all of
    them if the loss compares samples with one another.

    Args:
        given: in any form that clients may have.
        model: the server's.
        loss: the clients' objective.
        dtype: of floating-point numbers.
        like: returns inputs of clients, if they are known.
    """
    source = check_sources([as_source(TEST, given)])[0]
    if isinstance(source, Rows):
        check_range(TEST, (source.inputs, source.targets), range(len(source)), dtype)
    inputs, targets = source.take(range(min(2, len(source))))
    fix = "give test data the form of the clients' records"
    outputs = try_model(model, inputs, TEST, fix, None if like is None else like())
    with attribute_targets(TEST):
        target_maker(model, loss, (inputs, targets))(source.targets if isinstance(source, Rows) else targets)
        if couples_samples(loss) or (isinstance(loss, USERS) and isinstance(source, Rows)):
            outputs, targets = predict_source(model, source)
        _try_loss(loss, outputs, targets.to(outputs.device), head_axis(model))
    return source


def _try_loss(loss: Loss, outputs: Tensor, targets: Tensor, axis: int | None) -> None:
    """Compute the metrics as after a round; refuse targets on which the loss fails."""
    try:
        metrics(outputs, targets, loss, axis=axis)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, BadArgument):
            raise
        what = f"{loss.name} does not take them ({describe(targets)}) for outputs ({describe(outputs)})"
        fix = "give targets in the clients' form, or correct the loss"
        raise BadArgument("targets", f"{what}: {first_line(error)}", fix) from error


def refuse_single(model: nn.Module, shards: Shards) -> None:
    """Refuse a client whose batches have one record, where a layer of the model normalises over the batch."""
    alone = shards.sizes.index(1) if 1 in shards.sizes else 0
    if shards.batch_size > 1 and shards.sizes[alone] > 1:
        return
    layer = _find_layer(model, shards, alone)
    if layer is None:
        return
    what, fix = "batch_size=1 makes batches of a single record", "choose batch_size=2 or more"
    if 1 in shards.sizes:
        what, fix = f"client {alone} has a single record", "join this client with another"
    what += f", and layer {layer or type(model).__name__!r} normalises over the records of a batch: it needs two"
    raise BadArgument(WHERE, what, f"{fix}, use GroupNorm or LayerNorm, or call model.eval()")


def _find_layer(model: nn.Module, shards: Shards, client: int) -> str | None:
    """Return the layer that does not take one record of a client in the modes that the model has; None if all do."""
    entered = [""]
    inputs, _ = shards.take(torch.arange(shards.starts[client], shards.starts[client] + 1))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with ExitStack() as stack, torch.no_grad(), torch.random.fork_rng(devices=[]):
        for path, module in model.named_modules():
            hook = module.register_forward_pre_hook(lambda *_, path=path: entered.append(path))
            stack.callback(hook.remove)
        try:
            compute_outputs(model, inputs, buffers)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            return entered[-1]
    return None
