"""Check the arguments of a federation: records, test data, the optimizer and the schedule."""

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from fedveil.checks import check_count, check_integer
from fedveil.errors import BadArgument, FedveilError
from fedveil.federation.evaluate import metric_names, move_inputs, predict_source
from fedveil.federation.targets import attribute_targets, describe, refuse_failure, target_maker, try_model
from fedveil.records.inputs import Batch, Inputs, join_batches
from fedveil.records.shards import MemoryShards, Shards, StreamShards
from fedveil.records.sources import Rows, Source, UserRecords, as_source, check_range, check_sources
from fedveil.scheme.losses import AUTOGRAD_LOSSES, Loss, couples_samples
from fedveil.scheme.outputs import compute_outputs, head_axis

TEST, VALIDATION_DATA = "test data", "validation data"
OwnRecords = UserRecords | Callable[[], UserRecords]
"""A client's records, or a function that loads them."""


def make_shards(
    model: nn.Module,
    loss: Loss,
    clients: Sequence[Source],
    batch_size: int,
    seed: int,
    dtype: torch.dtype,
    *,
    convert_dtypes: bool = False,
) -> Shards:
    """Convert the clients' records to the form that the model and the loss expect; do so in memory if possible.

    Args:
        model: determines the device and the shape of the outputs.
        loss: determines the form of the targets.
        clients: the clients' records, already checked.
        batch_size: number of records per client and round.
        seed: seed for the order of records.
        dtype: dtype of floating-point numbers.
        convert_dtypes: whether to convert targets of the wrong dtype (`fedveil.federation.targets.fit_dtype`).
    """
    check_count(WHERE, "batch_size", batch_size)
    check_integer(WHERE, "seed", seed)
    make_targets, device = (
        target_maker(model, loss, clients[0].take([0]), convert_dtypes=convert_dtypes),
        next(model.parameters()).device,
    )

    def prepare(owner: str, batch: Batch, indices: Sequence[int]) -> Batch:
        check_range(owner, batch, indices, dtype)
        with attribute_targets(owner):
            targets = make_targets(batch[1])
        return move_inputs(batch[0], device, dtype), targets.to(device, dtype if targets.is_floating_point() else None)

    sizes = tuple(len(client) for client in clients)
    arguments = tuple(itertools.accumulate(sizes[:-1], initial=0)), sizes, batch_size, seed, ()
    memory_sources = [client for client in clients if isinstance(client, Rows)]
    if len(memory_sources) < len(clients):
        return StreamShards(*arguments, tuple(clients), prepare)
    batches = [prepare(source.owner, (source.inputs, source.targets), range(len(source))) for source in memory_sources]
    return MemoryShards(*arguments, *join_batches(batches))


def read_own_records(data: OwnRecords, *, check: bool = True) -> Source:
    """Return the client's records.

    If `check` is True, unusable records are refused without revealing their values. Otherwise, missing values and text
    in frames and arrays become NaN.
    """
    records = data if isinstance(data, Dataset) or not callable(data) else data()
    try:
        source = as_source("this client", records, gaps=not check)
        return check_sources([source])[0] if check else source
    except FedveilError as error:  # errors are sent to the server, and this one may quote values from records
        print(f"fedveil: {error}", file=sys.stderr)
        raise BadArgument(
            "this client", "the client's records cannot be used; the reason is in the client's log"
        ) from None


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch, so that a data set draws the same numbers again."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class HeldOut(NamedTuple):
    """Records that are not used for training, the names of the metrics on them, and the target of the first record."""

    source: Source
    names: set[str]
    target: Tensor


def read_held_out(
    owner: str,
    records: UserRecords,
    model: nn.Module,
    loss: Loss,
    dtype: torch.dtype,
    client_inputs: Callable[[], Inputs] | None = None,
) -> HeldOut:
    """Return held-out records; refuse inputs that the model does not accept, and targets that the loss does not accept.

    A custom loss is evaluated on all records if they are in memory. Only two records of a stream are read, or all
    records if the loss couples samples.

    Args:
        owner: "test data" or "validation data".
        records: the records, in any form that is accepted for clients' records.
        model: the server's model.
        loss: the clients' objective.
        dtype: dtype of floating-point numbers.
        client_inputs: a function that returns inputs of the clients, if these are known.
    """
    source = check_sources([as_source(owner, records)])[0]
    if isinstance(source, Rows):
        check_range(owner, (source.inputs, source.targets), range(len(source)), dtype)
    inputs, targets = source.take(range(min(2, len(source))))
    target = targets[:1]
    fix = f"use {owner} of the same form as the clients' records"
    outputs = try_model(model, inputs, owner, fix, None if client_inputs is None else client_inputs())
    with attribute_targets(owner):
        target_maker(model, loss, (inputs, targets))(source.targets if isinstance(source, Rows) else targets)
        if couples_samples(loss) or (isinstance(loss, AUTOGRAD_LOSSES) and isinstance(source, Rows)):
            outputs, targets = predict_source(model, source)
        message = f"{loss.name} does not accept these targets ({describe(targets)}) for outputs ({describe(outputs)})"
        with refuse_failure("targets", message, "use targets of the same form as the clients', or correct the loss"):
            names = metric_names(outputs, targets.to(outputs.device), loss, axis=head_axis(model))
    return HeldOut(source, names, target)


def refuse_single(model: nn.Module, shards: Shards) -> None:
    """Refuse batches of a single record if a layer of the model normalises over the batch."""
    client_index = shards.sizes.index(1) if 1 in shards.sizes else 0
    if shards.batch_size > 1 and shards.sizes[client_index] > 1:
        return
    inputs, _ = shards.take(torch.tensor([shards.starts[client_index]]))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            compute_outputs(model, inputs, buffers)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        message, fix = "with batch_size=1, batches have a single record", "set batch_size to at least 2"
        if 1 in shards.sizes:
            message, fix = f"client {client_index} has a single record", "merge this client with another"
        message += ", but a layer of the model normalises over the batch and needs at least two"
        raise BadArgument(WHERE, message, f"{fix}, use GroupNorm or LayerNorm, or call model.eval()") from error


WHERE = "Federation"
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer] | torch.optim.Optimizer
Schedule = Callable[[torch.optim.Optimizer], LRScheduler] | LRScheduler
OPTIMIZER_FIX = "use optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"
SCHEDULE_FIX = "use schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)"
T = TypeVar("T")
A = TypeVar("A")


def _create(name: str, value: T | Callable[[A], T], kind: type[T], argument: A, fix: str) -> T:
    """Return the given object, or the object that a factory creates; refuse settings that torch rejects."""
    if isinstance(value, kind):
        return value
    if not callable(value):
        raise BadArgument(
            WHERE, f"{name} must be an instance of {kind.__name__} or a function that creates one, got {value!r}", fix
        )
    try:
        result = value(argument)
    except (TypeError, ValueError) as error:
        raise BadArgument(WHERE, f"{name} cannot be created: {error}", f"pass all settings: {fix}") from error
    if not isinstance(result, kind):
        raise BadArgument(WHERE, f"{name} created a {type(result).__name__}, not a {kind.__name__}", fix)
    return result


def make_optimizer(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """Create an optimizer for these parameters, or return the given optimizer if it has only these parameters."""
    trainable_parameters = [parameter for parameter in parameters.values() if parameter.requires_grad]
    result = _create("optimizer", optimizer, torch.optim.Optimizer, trainable_parameters, OPTIMIZER_FIX)
    parameter_ids = {id(parameter) for parameter in parameters.values()}
    if any(id(parameter) not in parameter_ids for group in result.param_groups for parameter in group["params"]):
        message = "the optimizer has parameters that do not belong to this model"
        raise BadArgument(
            WHERE, message, f"create the optimizer after the last change to the model, or {OPTIMIZER_FIX}"
        )
    return result


def make_schedule(schedule: Schedule | None, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """Create a schedule for this optimizer, or return the given schedule if it is for this optimizer."""
    if schedule is None:
        return None
    result = _create("schedule", schedule, LRScheduler, optimizer, SCHEDULE_FIX)
    if result.optimizer is not optimizer:
        raise BadArgument(
            WHERE, "the schedule is for another optimizer", f"pass that optimizer as well, or {SCHEDULE_FIX}"
        )
    return result
