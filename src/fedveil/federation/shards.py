"""The clients' data, and which batch each of them takes in which round."""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedveil.errors import BadArgument

Batch = tuple[Tensor, Tensor]


def generator(*parts: object) -> torch.Generator:
    """A source of random numbers that depends on its parts alone, so that a run can be taken up again."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") % 2**63)


@dataclass(frozen=True, eq=False)
class Shards:
    """All clients' records behind one another, and where each client's begin.

    The order of a client's records in each of its epochs follows from seed, client and epoch alone. `names` are the
    clients' numbers in the federation, where only some of them are here.
    """

    inputs: Tensor
    targets: Tensor
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    batch_size: int
    seed: int
    names: tuple[int, ...] = ()

    @property
    def rounds_per_epoch(self) -> int:
        """Rounds until the largest client has seen each of its records."""
        return self.batches(max(self.sizes))

    def batches(self, size: int) -> int:
        """Batches in which a client of that size goes through its records; a single last record joins the one before.

        (Statistics of a batch need two.)
        """
        whole, rest = divmod(size, self.batch_size)
        return max(1, whole + (rest > 1 or (rest == 1 and self.batch_size == 1)))

    def chosen(self, number: int, participation: float) -> list[int]:
        """The clients that take part in a round."""
        clients = len(self.sizes)
        count = max(1, round(participation * clients))
        if count == clients:
            return list(range(clients))
        return sorted(torch.randperm(clients, generator=generator("clients", self.seed, number))[:count].tolist())

    def rows(self, client: int, number: int) -> Tensor:
        """Rows of the client's batch in a round; a client that is through its records begins again in a new order."""
        per_epoch = self.batches(self.sizes[client])
        epoch, place = divmod(number, per_epoch)
        name = self.names[client] if self.names else client
        order = _order(self.seed, name, epoch, self.sizes[client], self.starts[client])
        stop = (place + 1) * self.batch_size if place < per_epoch - 1 else len(order)
        return order[place * self.batch_size : stop]

    def shard(self, client: int) -> list[Tensor]:
        """Rows of all the client's records, in batches."""
        start, size = self.starts[client], self.sizes[client]
        count = self.batches(size)
        stops = [start + place * self.batch_size for place in range(count)] + [start + size]
        return [torch.arange(a, b) for a, b in itertools.pairwise(stops)]

    def take(self, rows: Tensor) -> Batch:
        """Records of these rows."""
        rows = rows if self.inputs.device.type == "cpu" else rows.to(self.inputs.device)
        return self.inputs.index_select(0, rows), self.targets.index_select(0, rows)


@lru_cache(maxsize=256)
def _order(seed: int, client: int, epoch: int, size: int, start: int) -> Tensor:
    return torch.randperm(size, generator=generator("order", seed, client, epoch)) + start


def gather(clients: Sequence[Batch], batch_size: int, seed: int, device: torch.device) -> Shards:
    """Check the clients' data and put it together."""
    where = "Federation"
    if not clients:
        raise BadArgument(where, "there are no clients", "Federation(model, [(inputs, targets), ...])")
    if batch_size < 1:
        raise BadArgument(where, f"batch_size must be at least 1, got {batch_size}")
    for number, (inputs, targets) in enumerate(clients):
        if not len(inputs) or len(inputs) != len(targets):
            what = f"client {number} has {len(inputs)} inputs and {len(targets)} targets: want the same number above 0"
            raise BadArgument(where, what, "leave empty clients out, or split the data among fewer")
        if inputs.shape[1:] != clients[0][0].shape[1:] or targets.shape[1:] != clients[0][1].shape[1:]:
            raise BadArgument(where, f"client {number}'s records have another shape than client 0's")
        if inputs.is_floating_point() and not torch.isfinite(inputs).all():
            row = int((~torch.isfinite(inputs.flatten(1)).all(1)).nonzero()[0])
            raise BadArgument(where, f"client {number}, record {row}: inputs hold NaN or infinity")
    sizes = tuple(len(inputs) for inputs, _ in clients)
    starts = tuple(sum(sizes[:k]) for k in range(len(sizes)))
    inputs = torch.cat([inputs for inputs, _ in clients]).to(device)
    targets = torch.cat([targets for _, targets in clients]).to(device)
    return Shards(inputs, targets, starts, sizes, batch_size, seed)
