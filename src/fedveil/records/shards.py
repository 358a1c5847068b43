"""Divide the clients' records into the batches that each client uses in each round."""

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from fedveil.errors import BadArgument
from fedveil.records.inputs import Batch, Inputs, describe_exactly, join_batches, map_tensors
from fedveil.records.sources import Rows, Source, check_finite

Prepare = Callable[[str, Batch, Sequence[int]], Batch]
"""A function that converts a batch to the form that a model and its loss expect, given owner, batch and indices."""


def generator(*parts: object) -> torch.Generator:
    """Return a random generator whose seed depends only on the arguments, so that a run can be resumed."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") % 2**63)


def count_batches(size: int, batch_size: int, min_records: int = 2) -> int:
    """Count a client's batches; a last batch of fewer than `min_records` records is merged with the previous one."""
    full, remainder = divmod(size, batch_size)
    return max(1, full + (remainder >= min_records))


@dataclass(frozen=True, eq=False)
class Shards(ABC):
    """The records of all clients, concatenated, and the rows that each client uses in each round.

    The order of a client's records in an epoch depends only on the seed, the client and the epoch. If the shards
    contain only some clients of the federation, `names` are the indices of these clients in the federation.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    batch_size: int
    seed: int
    names: tuple[int, ...]
    min_records: int = field(default=2, kw_only=True)  # minimum per batch, because BatchNorm needs two

    @abstractmethod
    def take(self, rows: Tensor) -> Batch:
        """Return the records in these rows."""

    def take_separately(self, rows: Tensor) -> Batch:
        """Return the records in these rows; the form of a record does not depend on the others."""
        return self.take(rows)

    @property
    def fusable(self) -> bool:
        """Whether records of several clients can be joined in one batch."""
        return True

    @property
    def rounds_per_epoch(self) -> int:
        """The number of rounds in which the client with the most records uses each of them once."""
        return self.batches(max(self.sizes))

    def batches(self, size: int) -> int:
        """Count the batches of a client with `size` records."""
        return count_batches(size, self.batch_size, self.min_records)

    def rows(self, client: int, number: int) -> Tensor:
        """Return the rows of a client's batch in a round; the order changes with every epoch."""
        per_epoch = self.batches(self.sizes[client])
        epoch, batch = divmod(number, per_epoch)
        name = self.names[client] if self.names else client
        order = _order(self.seed, name, epoch, self.sizes[client], self.starts[client])
        stop = (batch + 1) * self.batch_size if batch < per_epoch - 1 else len(order)
        return order[batch * self.batch_size : stop]

    def local_rows(self, client: int, number: int, epochs: int) -> list[Tensor]:
        """Return the rows of a client's batches in round `number`, in which it goes through its records `epochs` times.

        Over all rounds, these are the same batches as those of `rows`, in the same order.
        """
        steps = epochs * self.batches(self.sizes[client])
        return [self.rows(client, number * steps + step) for step in range(steps)]

    def shard(self, client: int) -> list[Tensor]:
        """Return the rows of all records of a client, in batches."""
        start, stop = self.starts[client], self.starts[client] + self.sizes[client]
        batch_starts = [start + batch * self.batch_size for batch in range(self.batches(stop - start))]
        return [torch.arange(begin, end) for begin, end in itertools.pairwise([*batch_starts, stop])]

    def records(self, client: int) -> Batch:
        """Return all records of a client."""
        return self.take(torch.arange(self.starts[client], self.starts[client] + self.sizes[client]))

    @property
    def example(self) -> Inputs:
        """The inputs of at most two records, which are from one client if clients cannot be joined in one batch."""
        return self.take(torch.arange(min(2, sum(self.sizes) if self.fusable else self.sizes[0])))[0]


@dataclass(frozen=True, eq=False)
class MemoryShards(Shards):
    """Shards whose records are in memory."""

    inputs: Inputs
    targets: Tensor

    def take(self, rows: Tensor) -> Batch:
        """Return the records in these rows."""
        inputs, targets = self.inputs, self.targets
        rows = rows if targets.device.type == "cpu" else rows.to(targets.device)
        if isinstance(inputs, Tensor):  # fast path, because this runs in every round
            return inputs.index_select(0, rows), targets.index_select(0, rows)
        return map_tensors(lambda tensor: tensor.index_select(0, rows), inputs), targets.index_select(0, rows)


@dataclass(frozen=True, eq=False)
class StreamShards(Shards):
    """Shards whose records are read when a round needs them."""

    clients: tuple[Source, ...]
    prepare: Prepare

    @property
    def fusable(self) -> bool:
        """Whether batches of several clients can be joined; a custom `collate_fn` may pad each differently."""
        return all(isinstance(source, Rows) or source.uses_default_collate for source in self.clients)

    def take_separately(self, rows: Tensor) -> Batch:
        """Read records one by one; refuse different forms or dtypes, because a batch would convert some records."""
        batches = [self.take(rows[k : k + 1]) for k in range(len(rows))]
        if len({describe_exactly(batch) for batch in batches}) > 1:
            message = "record-level privacy requires all records to have the same shape and dtype, but they differ"
            fix = "pad all records to the same length, and convert numbers to the same dtype"
            raise BadArgument(self.clients[0].owner, message, fix)
        return join_batches(batches)

    def take(self, rows: Tensor) -> Batch:
        """Read and check the records in these rows."""
        clients, batches = torch.bucketize(rows, torch.tensor(self.starts[1:], dtype=torch.int64), right=True), []
        for client in sorted(set(clients.tolist())):  # in `rows`, the rows of each client are adjacent
            indices, source = (rows[clients == client] - self.starts[client]).tolist(), self.clients[client]
            batch = source.take(indices)
            check_finite(source.owner, batch, indices)
            batches.append(self.prepare(source.owner, batch, indices))
        return join_batches(batches)


def _draw_order(seed: int, client: int, epoch: int, size: int, start: int) -> Tensor:
    return torch.randperm(size, generator=generator("order", seed, client, epoch)) + start


_orders, _long_orders = lru_cache(maxsize=256)(_draw_order), lru_cache(maxsize=16)(_draw_order)


def _order(seed: int, client: int, epoch: int, size: int, start: int) -> Tensor:
    """Return the order of a client's records in an epoch; only a few long orders are cached, to save memory."""
    return (_orders if size <= 2**17 else _long_orders)(seed, client, epoch, size, start)
