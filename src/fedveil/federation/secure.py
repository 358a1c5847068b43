"""Secure aggregation in a round: updates as words, how large their numbers may be, and the steps to a sum."""

import dataclasses
import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedveil import secagg
from fedveil.defences import Aggregate, Defence, Plain, Private, Veil, innermost
from fedveil.defences.interface import Linear
from fedveil.defences.plain import split
from fedveil.defences.private import shorten
from fedveil.defences.registry import messages_of, record_of
from fedveil.errors import BadArgument
from fedveil.federation.limits import Limits
from fedveil.secagg import Aborted, Identity, Opening, Party, Roster, Tally
from fedveil.wire import Tensors, under

HEAD = 2  # words before the tensors: 1 for each client, and its records
FIRST = 12  # exponent of all numbers before anything is known of them; the first round may need a second attempt
WIDER = 8  # bits that are added when a client's numbers do not fit
SMALLEST = 2.0**-16  # of the largest number of a kind: smaller rows are given as much room
MOST_FACTOR = 100.0  # of a veil: larger ones would cost more digits than float32 has
PASSES = "passes/"
Words = NDArray[np.uint64]
Send = Callable[[str, bytes, Mapping[str, bytes]], Iterable[tuple[str, bytes | None]]]


@dataclass(frozen=True)
class Part:
    """One tensor of an update among the words."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: int  # that have an exponent of their own: passes

    @property
    def size(self) -> int:
        """In words."""
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        """Passes, gradients or buffers; counters are a kind of their own."""
        return self.name.partition("/")[0] + ("" if self.dtype.is_floating_point else " of whole numbers")


@dataclass(frozen=True)
class Form:
    """Where the numbers of an update are: a client's count of 1, its records, then tensor by tensor, by name."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Form":
        """That of an update as it travels."""
        return cls(
            tuple(
                [
                    Part(name, tuple(own.shape), own.dtype, len(own) if name.startswith(PASSES) else 1)
                    for name, own in sorted(tensors.items())
                ]
            )
        )

    @property
    def size(self) -> int:
        """In words."""
        return HEAD + sum(part.size for part in self.parts)

    @property
    def rows(self) -> int:
        """Exponents that it has."""
        return sum(part.rows for part in self.parts)

    def words(self, tensors: Mapping[str, Tensor], records: int, exponents: Sequence[int], clients: int) -> Words:
        """A client's update times its records, in fixed point.

        Raises:
            OutOfRange: a number is too large for its exponent.
        """
        flat = [tensors[part.name].detach().cpu().double().reshape(-1) for part in self.parts]
        values = torch.cat(flat).numpy() * records if flat else np.zeros(0)
        head = np.array([1, records], np.uint64)
        return np.concatenate([head, secagg.encode(values, self._bits(exponents, clients), clients)])

    def opened(self, total: Words, exponents: Sequence[int], clients: int) -> tuple[int, Tensors]:
        """From a sum of words: the records, and the weighted mean of the updates; of counters the nearest number."""
        records = int(total[1])
        if not 1 <= records < 2**53:
            raise Aborted("sum", "the sum", f"its clients have {records} records together", "look for a hostile client")
        values = secagg.decode(total[HEAD:], self._bits(exponents, clients)) / records
        found, start = {}, 0
        for part in self.parts:
            own = torch.from_numpy(values[start : start + part.size]).reshape(part.shape)
            found[part.name] = own.to(part.dtype) if part.dtype.is_floating_point else own.round().to(part.dtype)
            start += part.size
        return records, found

    def rounding(self, exponents: Sequence[int], clients: int, records: int) -> dict[str, list[float]]:
        """What fixed point may add to each number of the mean, row by row: half a unit for each client."""
        rest, found = list(exponents), {}
        for part in self.parts:
            own, rest = rest[: part.rows], rest[part.rows :]
            found[part.name] = [clients * 2.0 ** -(secagg.bits(clients, e) + 1) / records for e in own]
        return found

    def exponents(self, sizes: Mapping[str, Sequence[float]], records: int, wider: int) -> tuple[int, ...]:
        """One for each row, for sums of so many records whose mean has numbers of these sizes.

        A row may be much smaller than in the next round, or 0: it is given some room for what others of its kind have,
        the same pass of other tensors or other buffers.
        """
        rows = [(part.kind, row, size * records) for part in self.parts for row, size in enumerate(sizes[part.name])]
        largest: dict[tuple[str, int], float] = {}
        for kind, row, size in rows:
            largest[kind, row] = max(largest.get((kind, row), 0.0), size)
        least = [max(size, SMALLEST * largest[kind, row]) for kind, row, size in rows]
        return tuple([(secagg.exponent(size) if size else FIRST) + wider for size in least])

    def _bits(self, exponents: Sequence[int], clients: int) -> NDArray[np.int64]:
        if len(exponents) != self.rows:
            raise BadArgument("opening", f"it has {len(exponents)} exponents, and this update {self.rows} rows")
        counts = [part.size // part.rows for part in self.parts for _ in range(part.rows)]
        return np.repeat(np.array([secagg.bits(clients, e) for e in exponents], np.int64), counts)


def check_combination(defence: Defence, model: nn.Module, limits: Limits | None) -> None:
    """Refuse what needs single updates, or cannot be had from their sum."""
    where, alone = "secure_aggregation", "leave secure_aggregation out, or use plain or veil"
    inner = innermost(defence)
    if isinstance(defence, Private) and type(inner) is not Plain:
        what = f"differential privacy under a {inner.name} clips what the noise is removed from, which no client has"
        raise BadArgument(where, what, "plain with differential privacy, where clients clip their own gradients")
    if not inner.linear:
        raise BadArgument(where, f"{inner.name} is not linear: the sum of its updates does not give its result", alone)
    if isinstance(inner, Veil) and inner.multiplicative > MOST_FACTOR:
        what = f"factors up to {inner.multiplicative:g} leave too few digits in fixed point"
        raise BadArgument(where, what, f"multiplicative={MOST_FACTOR:g} or less")
    if limits is not None:
        what = "limits and rules judge single updates, and the server sees their sum only"
        raise BadArgument(where, what, "limits=None")
    for path, module in model.named_modules():
        if isinstance(module, _NormBase) and module.training and module.momentum is None and module.track_running_stats:
            what = f"{path or 'the model'} averages over all batches (momentum=None), which is not linear"
            raise BadArgument(where, what, "momentum=0.1")


def clipped(tensors: Mapping[str, Tensor], clip: float) -> Tensors:
    """Client: gradients, as they travel, whose common norm is `clip` at most. Buffers stay the server's."""
    like = {name: own for name, own in tensors.items() if name.startswith("gradient/")}
    flat, _, _ = shorten(torch.cat([own.reshape(-1).double() for own in like.values()]), clip)
    return split(flat, like)


def words_of(tensors: Mapping[str, Tensor], records: int, opening: Opening, clip: float | None = None) -> Words:
    """Client: its update as words; with differential privacy clipped, and counted once whatever its records."""
    if clip is not None:
        tensors, records = clipped(tensors, clip), 1
    return Form.of(tensors).words(tensors, records, opening.exponents, len(opening.roster))


class Sums:
    """Server: what it knows from round to round of a run under secure aggregation. Nothing of a single client."""

    def __init__(self, defence: Defence, model: nn.Module) -> None:
        self.whole, self.defence, self.model = defence, innermost(defence), model
        self.messages = messages_of(record_of(self.defence), type(self.defence).__name__)
        self.clip = defence.clip if isinstance(defence, Private) else None
        self.form: Form | None = None
        self._linear = cast(Linear, self.defence)
        self._expected: Mapping[str, Tensor] | None = None
        self._records = 0
        self.wider = 0  # bits of room that the next attempt has besides

    def exponents(self, broadcast: Any) -> tuple[int, ...]:
        """For the next attempt."""
        _, template = self.messages.blank(self.defence, self.model)
        if self.clip is not None:
            template = {name: own for name, own in template.items() if name.startswith("gradient/")}
        self.form = Form.of(template)
        if self._expected is None:
            return (FIRST + self.wider,) * self.form.rows
        return self.form.exponents(self._linear.sizes(broadcast, self._expected), self._records, self.wider)

    def widen(self) -> None:
        """A client's numbers did not fit: give all of them more room in the next attempt."""
        self.wider += WIDER

    def aggregate(self, total: Words, opening: Opening) -> Aggregate:
        """The round's result from the sum of its words."""
        assert self.form is not None
        clients = len(opening.roster)
        records, tensors = self.form.opened(total, opening.exponents, clients)
        values, template = self.messages.blank(self.defence, self.model)
        own = under("buffer", dict(self.model.named_buffers())) if self.clip is not None else {}
        tensors = {name: (tensors | own)[name] for name in template}  # in the model's order
        update = self.messages.unpack_update(self.defence, self.model, values, tensors, 0)
        each = self.form.rounding(opening.exponents, clients, records)
        expected, rounding = self._linear.expect(update, self._expected), self._linear.rounding(each)
        result = self.defence.aggregate([update], [1.0])
        size = math.hypot(*[float(torch.linalg.vector_norm(g.double())) for g in result.gradients.values()])
        self._expected, self._records, self.wider = expected, records, 0
        error = result.error + (rounding / size if size else 0.0)
        details = {**result.details, "records": records, "fixed_point_error": rounding / size if size else 0.0}
        result = dataclasses.replace(result, error=error, details=details)
        return self.whole.summed(result, int(total[0])) if isinstance(self.whole, Private) else result


class LocalParties:
    """Clients of one process: each with an identity of its own, all in one roster. To test and to simulate."""

    def __init__(self, clients: int) -> None:
        identities = [Identity.new(f"client-{client}") for client in range(clients)]
        roster = Roster({own.name: own.public() for own in identities})
        self.parties = {client: Party(own, roster) for client, own in enumerate(identities)}
        self._run, self._attempt = secrets.token_hex(16), 0

    def opening(self, clients: Sequence[int], number: int, exponents: tuple[int, ...]) -> Opening:
        """Of the next attempt of a round."""
        self._attempt += 1
        hellos = tuple([self.parties[client].hello(self._run) for client in clients])
        return Opening(self._run, number, self._attempt, hellos, exponents)

    def total(self, opening: Opening, words: Mapping[int, Words]) -> Words:
        """The sum of the clients' words, by the protocol."""
        digest = hashlib.sha256(json.dumps(opening.values()).encode()).digest()
        named = {party.name: party for client, party in self.parties.items() if client in words}
        tally = Tally(opening, digest, len(next(iter(words.values()))))
        for client, own in words.items():
            tally.take_upload(self.parties[client].name, self.parties[client].upload(opening, digest, own))

        def send(step: str, common: bytes, own: Mapping[str, bytes]) -> Iterable[tuple[str, bytes | None]]:
            for name, extra in own.items():
                party = named[name]
                yield name, party.settle(common, extra) if step == "settle" else party.reveal(common)

        return open_sum(tally, send)


def open_sum(tally: Tally, send: Send, refused: Callable[[str, BadArgument], None] | None = None) -> Words:
    """The last steps of an attempt, whatever carries them: settle until all who are left agree, then reveal.

    Args:
        tally: with the uploads.
        send: sends a step's bytes to the clients that it names, each with its own; yields answers, None for silence.
        refused: called with a client whose answer does not count; it has vanished.
    """

    def take(step: str, common: bytes, own: Mapping[str, bytes], taken: Callable[[str, bytes], None]) -> None:
        for name, data in send(step, common, own):
            try:
                if data is not None:
                    taken(name, data)
            except BadArgument as error:
                if refused:
                    refused(name, error)

    while not tally.settled():
        take("settle", *tally.settle(), tally.take_settled)
    take("reveal", tally.reveal(), dict.fromkeys(tally.survivors, b""), tally.take_revealed)
    return tally.total()
