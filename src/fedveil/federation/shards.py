"""The clients' data, and which batch each of them takes in which round."""

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedveil.checks import check_integer, whole
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import moved
from fedveil.federation.sources import Batch, Rows, Source, check_finite, check_range, joined, named
from fedveil.federation.targets import target_maker, targets_of
from fedveil.graph.inputs import Inputs, each
from fedveil.scheme.losses import Loss

WHERE = "Federation"
PLAIN = bool | int | float | str | None


def generator(*parts: object) -> torch.Generator:
    """A source of random numbers that depends on its parts alone, so that a run can be taken up again."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") % 2**63)


def batches(size: int, batch_size: int, least: int = 2) -> int:
    """Count the batches of a client; a last one of fewer than `least` records joins the one before."""
    full, rest = divmod(size, batch_size)
    return max(1, full + (rest >= least))


@dataclass(frozen=True, eq=False)
class Shards(ABC):
    """All clients' records behind one another: where each client's begin, and which it takes in which round.

    The order of a client's records in each of its epochs follows from seed, client and epoch alone. `names` are the
    clients' numbers in the federation, where only some of them are here.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    batch_size: int
    seed: int
    names: tuple[int, ...]
    least: int = field(default=2, kw_only=True)  # records in a batch: statistics need two

    @abstractmethod
    def take(self, rows: Tensor) -> Batch:
        """Records of these rows."""

    @property
    def rounds_per_epoch(self) -> int:
        """Rounds until the largest client has seen each of its records."""
        return self.batches(max(self.sizes))

    def batches(self, size: int) -> int:
        """Count the batches of a client with this many records."""
        return batches(size, self.batch_size, self.least)

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

    def records(self, client: int) -> Batch:
        """All records of a client."""
        return self.take(torch.arange(self.starts[client], self.starts[client] + self.sizes[client]))

    @property
    def example(self) -> Inputs:
        """The inputs of two records, or of the only one."""
        return self.take(torch.arange(min(2, sum(self.sizes))))[0]


@dataclass(frozen=True, eq=False)
class Stored(Shards):
    """Records in memory."""

    inputs: Inputs
    targets: Tensor

    def take(self, rows: Tensor) -> Batch:
        """Records of these rows."""
        inputs, targets = self.inputs, self.targets
        rows = rows if targets.device.type == "cpu" else rows.to(targets.device)
        if isinstance(inputs, Tensor):  # every round comes here: no walk over a form that has only one tensor
            return inputs.index_select(0, rows), targets.index_select(0, rows)
        return each(lambda tensor: tensor.index_select(0, rows), inputs), targets.index_select(0, rows)


@dataclass(frozen=True, eq=False)
class Streamed(Shards):
    """Records that are read when a round needs them."""

    clients: tuple[Source, ...]
    make_targets: Callable[[Tensor], Tensor]
    device: torch.device
    dtype: torch.dtype

    def take(self, rows: Tensor) -> Batch:
        """Records of these rows, which are read now."""
        own, parts = torch.bucketize(rows, torch.tensor(self.starts[1:], dtype=torch.int64), right=True), []
        for client in sorted(set(own.tolist())):  # rows of a client follow one another
            numbers, source = (rows[own == client] - self.starts[client]).tolist(), self.clients[client]
            inputs, targets = source.take(numbers)
            check_finite(source.who, (inputs, targets), numbers)
            check_range(source.who, (inputs, targets), numbers, self.dtype)
            with targets_of(source.who):
                made = in_dtype(self.make_targets(targets), self.dtype)
            parts.append((moved(inputs, self.device, self.dtype), made))
        inputs, targets = joined(parts)
        return inputs, targets.to(self.device)


def _drawn(seed: int, client: int, epoch: int, size: int, start: int) -> Tensor:
    return torch.randperm(size, generator=generator("order", seed, client, epoch)) + start


_orders, _long_orders = lru_cache(maxsize=256)(_drawn), lru_cache(maxsize=16)(_drawn)


def _order(seed: int, client: int, epoch: int, size: int, start: int) -> Tensor:
    """The order of a client's records in an epoch: 8 bytes per record, of which few long ones are kept."""
    return (_orders if size <= 2**17 else _long_orders)(seed, client, epoch, size, start)


def checked(sources: Sequence[Source]) -> list[Source]:
    """Records with their inputs in the form of the first one's; refuses those that do not belong together.

    Of a stream, two records are looked at.
    """
    if not sources:
        raise BadArgument(WHERE, "there are no clients", "Federation(model, [(inputs, targets), ...])")
    found: list[Source] = []
    for source in sources:
        if not len(source):
            raise BadArgument(WHERE, f"{source.who} has no records", "leave empty clients out")
        inputs, targets = (
            (source.inputs, source.targets) if isinstance(source, Rows) else source.take(range(min(2, len(source))))
        )
        if not found:
            form, first, like = inputs, named(inputs), targets
        own = named(inputs)
        _check_form(source.who, inputs, form, own, first)
        for place, leaf in own.items():
            _check_leaf(source.who, place, leaf, first[place], targets)
        _check_like(source.who, "targets", targets, like)
        check_finite(source.who, (inputs, targets), range(len(targets)))
        if isinstance(source, Rows):  # keys in one order
            leaves = [own[place] for place in first]
            inputs = cast(Inputs, pytree.tree_unflatten(leaves, pytree.tree_structure(form)))
            source = replace(source, inputs=inputs)
        found.append(source)
    return found


def _check_form(who: str, inputs: Inputs, wanted: Inputs, own: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    if not any(isinstance(leaf, Tensor) for leaf in own.values()):
        fix = "a tensor, a tuple of arguments of forward, or a dict of its keyword arguments (docs/inputs.md)"
        raise BadArgument(WHERE, f"{who}'s inputs, a {type(inputs).__name__}, hold no tensor", fix)
    if own.keys() == first.keys():
        return
    if "inputs" in own or "inputs" in first:
        kinds = ["tensor" if isinstance(some, Tensor) else type(some).__name__ for some in (inputs, wanted)]
        what = f"{who}'s inputs are a {kinds[0]}, client 0's a {kinds[1]}"
    else:
        lacks = [f"no {place}, which client 0 has" for place in sorted(first.keys() - own.keys())[:1]]
        strange = [f"{place}, which client 0 has not" for place in sorted(own.keys() - first.keys())[:1]]
        what = f"{who} has {' and '.join(strange + lacks)}"
    raise BadArgument(WHERE, what, "give all clients' inputs one form")


def _value(leaf: Any) -> str:
    return ("a tensor" if leaf.dim() else "a number") if isinstance(leaf, Tensor) else repr(leaf)[:40]


def _check_leaf(who: str, place: str, leaf: Any, first: Any, targets: Tensor) -> None:
    """Refuse a tensor that has other records than the targets, or others than client 0's in its place."""
    if not isinstance(leaf, Tensor | PLAIN):
        what = f"{who}'s {place} is a {type(leaf).__name__}, not a tensor"
        raise BadArgument(WHERE, what, "torch.as_tensor for arrays, dict for other mappings")
    if not isinstance(leaf, Tensor) or not isinstance(first, Tensor):
        if type(leaf) is not type(first) or leaf != first:
            what = f"{who}'s {place} is {_value(leaf)}, client 0's {_value(first)}"
            raise BadArgument(WHERE, what, "a tensor for each client, or the same value for all")
        return
    records, what = len(leaf) if leaf.dim() else 0, place if place == "inputs" else f"records in {place}"
    if not records or records != len(targets):
        what = f"{who} has {records} {what} and {len(targets)} targets: there must be as many targets as inputs"
        raise BadArgument(WHERE, what, "give one target per record")
    _check_like(who, place, leaf, first)


def _check_like(who: str, place: str, leaf: Tensor, first: Tensor) -> None:
    """Refuse records of another shape or kind of number than client 0's."""
    if leaf.shape[1:] != first.shape[1:]:
        shapes = f"{place} {tuple(leaf.shape[1:])} and {tuple(first.shape[1:])}"
        raise BadArgument(WHERE, f"{who}'s records have another shape than client 0's: {shapes}")
    if leaf.is_floating_point() != first.is_floating_point():
        raise BadArgument(WHERE, f"{who}'s {place} are {leaf.dtype}, client 0's {first.dtype}")


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating numbers in the model's dtype; whole numbers stay what they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def shards_of(
    model: nn.Module, loss: Loss, clients: Sequence[Source], batch_size: int, seed: int, dtype: torch.dtype
) -> Shards:
    """The records of clients as the model and the loss take them: in memory, if all of them are.

    Args:
        model: tells the device, and the shape of outputs.
        loss: decides the form of targets.
        clients: their records, checked.
        batch_size: records that a client takes in a round.
        seed: of their order.
        dtype: of floating numbers.
    """
    whole(WHERE, "batch_size", batch_size)
    check_integer(WHERE, "seed", seed)
    sizes = tuple(len(client) for client in clients)
    make, device = target_maker(model, loss, clients[0].take([0])), next(model.parameters()).device
    common = tuple(itertools.accumulate(sizes[:-1], initial=0)), sizes, batch_size, seed, ()
    stored = [client for client in clients if isinstance(client, Rows)]
    if len(stored) < len(clients):
        return Streamed(*common, tuple(clients), make, device, dtype)
    parts = []
    for own in stored:
        check_range(own.who, (own.inputs, own.targets), range(len(own)), dtype)
        with targets_of(own.who):
            parts.append((moved(own.inputs, device, dtype), make(own.targets)))
    inputs, targets = joined(parts)
    return Stored(*common, inputs, in_dtype(targets, dtype).to(device))
