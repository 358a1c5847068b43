"""The clients' data, and which batch each of them takes in which round."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedveil.checks import whole
from fedveil.errors import BadArgument
from fedveil.graph.inputs import Inputs, each

Batch = tuple[Inputs, Tensor]
WHERE = "Federation"
PLAIN = bool | int | float | str | None


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

    inputs: Inputs
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
        """Batches of a client with so many records; a single last one joins those before: statistics need two."""
        full, rest = divmod(size, self.batch_size)
        return max(1, full + (rest > 1))

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
        start, stop = self.starts[client], self.starts[client] + self.sizes[client]
        begins = [start + place * self.batch_size for place in range(self.batches(stop - start))]
        return [torch.arange(a, b) for a, b in itertools.pairwise([*begins, stop])]

    def take(self, rows: Tensor) -> Batch:
        """Records of these rows."""
        inputs, targets = self.inputs, self.targets
        rows = rows if targets.device.type == "cpu" else rows.to(targets.device)
        if isinstance(inputs, Tensor):  # every round comes here: no walk over a form that has only one tensor
            return inputs.index_select(0, rows), targets.index_select(0, rows)
        return each(lambda tensor: tensor.index_select(0, rows), inputs), targets.index_select(0, rows)


@lru_cache(maxsize=256)
def _order(seed: int, client: int, epoch: int, size: int, start: int) -> Tensor:
    return torch.randperm(size, generator=generator("order", seed, client, epoch)) + start


def named(inputs: Inputs) -> dict[str, Any]:
    """Everything in the inputs by its place there, such as "inputs", "inputs[0]" or "inputs['ids']"."""
    if isinstance(inputs, Tensor):
        return {"inputs": inputs}
    leaves, _ = pytree.tree_flatten_with_path(inputs)
    return {"inputs" + pytree.keystr(path): leaf for path, leaf in leaves}


def check_clients(clients: Sequence[Batch]) -> list[Batch]:
    """The clients' data, with all inputs in the form of client 0's; refuses what does not belong together."""
    if not clients:
        raise BadArgument(WHERE, "there are no clients", "Federation(model, [(inputs, targets), ...])")
    first, checked = named(clients[0][0]), []
    form = pytree.tree_structure(clients[0][0])
    for number, (inputs, targets) in enumerate(clients):
        if not isinstance(targets, Tensor) or not targets.dim():
            what = f"client {number}'s targets are {_value(targets)}, not a tensor with a dimension of records"
            raise BadArgument(WHERE, what, "Federation(model, [(inputs, targets), ...])")
        own = named(inputs)
        _check_form(number, inputs, clients[0][0], own, first)
        for place, leaf in own.items():
            _check_leaf(number, place, leaf, first[place], targets)
        checked.append((pytree.tree_unflatten([own[place] for place in first], form), targets))
    return checked


def _check_form(number: int, inputs: Inputs, wanted: Inputs, own: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    if not any(isinstance(leaf, Tensor) for leaf in own.values()):
        fix = "a tensor, a tuple of arguments of forward, or a dict of its keyword arguments (docs/inputs.md)"
        raise BadArgument(WHERE, f"client {number}'s inputs, a {type(inputs).__name__}, hold no tensor", fix)
    if own.keys() == first.keys():
        return
    if "inputs" in own or "inputs" in first:
        kinds = ["tensor" if isinstance(some, Tensor) else type(some).__name__ for some in (inputs, wanted)]
        what = f"client {number}'s inputs are a {kinds[0]}, client 0's a {kinds[1]}"
    else:
        lacks = [f"no {place}, which client 0 has" for place in sorted(first.keys() - own.keys())[:1]]
        strange = [f"{place}, which client 0 has not" for place in sorted(own.keys() - first.keys())[:1]]
        what = f"client {number} has {' and '.join(strange + lacks)}"
    raise BadArgument(WHERE, what, "give all clients' inputs one form")


def _value(leaf: Any) -> str:
    return ("a tensor" if leaf.dim() else "a number") if isinstance(leaf, Tensor) else repr(leaf)[:40]


def _check_leaf(number: int, place: str, leaf: Any, first: Any, targets: Tensor) -> None:
    """Refuse a tensor that has other records than the targets, or others than client 0's in its place."""
    if not isinstance(leaf, Tensor | PLAIN):
        what = f"client {number}'s {place} is a {type(leaf).__name__}, not a tensor"
        raise BadArgument(WHERE, what, "torch.as_tensor for arrays, dict for other mappings")
    if not isinstance(leaf, Tensor) or not isinstance(first, Tensor):
        if type(leaf) is not type(first) or leaf != first:
            what = f"client {number}'s {place} is {_value(leaf)}, client 0's {_value(first)}"
            raise BadArgument(WHERE, what, "a tensor for each client, or the same value for all")
        return
    records, what = len(leaf) if leaf.dim() else 0, place if place == "inputs" else f"records in {place}"
    if not records or records != len(targets):
        what = f"client {number} has {records} {what} and {len(targets)} targets: want the same number above 0"
        raise BadArgument(WHERE, what, "leave empty clients out, or split the data among fewer")
    if leaf.shape[1:] != first.shape[1:]:
        shapes = f"{place} {tuple(leaf.shape[1:])} and {tuple(first.shape[1:])}"
        raise BadArgument(WHERE, f"client {number}'s records have another shape than client 0's: {shapes}")
    if leaf.is_floating_point() != first.is_floating_point():
        raise BadArgument(WHERE, f"client {number}'s {place} are {leaf.dtype}, client 0's {first.dtype}")
    if leaf.is_floating_point() and not torch.isfinite(leaf).all():
        row = int((~torch.isfinite(leaf.flatten(1)).all(1)).nonzero()[0])
        raise BadArgument(WHERE, f"client {number}, record {row}: {place} hold NaN or infinity")


def gather(clients: Sequence[Batch], batch_size: int, seed: int, device: torch.device) -> Shards:
    """Put together the data of clients that were checked."""
    whole(WHERE, "batch_size", batch_size)
    for number, (_, targets) in enumerate(clients):
        if targets.shape[1:] != clients[0][1].shape[1:]:
            shapes = f"targets {tuple(targets.shape[1:])} and {tuple(clients[0][1].shape[1:])}"
            raise BadArgument(WHERE, f"client {number}'s records have another shape than client 0's: {shapes}")
    sizes = tuple(len(targets) for _, targets in clients)
    starts = tuple(itertools.accumulate(sizes[:-1], initial=0))

    def joined(*leaves: Any) -> Any:  # what is no tensor is the same for all
        return torch.cat(leaves).to(device) if isinstance(leaves[0], Tensor) else leaves[0]

    inputs: Inputs = pytree.tree_map(joined, *(inputs for inputs, _ in clients))
    return Shards(inputs, joined(*(targets for _, targets in clients)), starts, sizes, batch_size, seed)
