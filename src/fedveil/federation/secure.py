"""Secure aggregation in a round: updates as words, how large their numbers may be, and the steps to a sum."""

import dataclasses
import hashlib
import json
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedveil import secagg
from fedveil.defences.clipping import clip_vector, split_vector
from fedveil.defences.interface import AnyClient, AnyDefence, AnyRound, Ranges, Samples
from fedveil.defences.registry import find_codec
from fedveil.errors import BadArgument, ModelMismatch
from fedveil.federation.limits import Limits
from fedveil.federation.targets import one_output
from fedveil.graph.inputs import Inputs, count, each
from fedveil.scheme.result import Aggregate
from fedveil.secagg import Aborted, Identity, Opening, Party, Policy, Roster, Tally
from fedveil.secagg.fixed import HIGHEST, LARGEST, LOWEST, decode_rows, encode_rows, wrapped_rows
from fedveil.secagg.messages import HEAD
from fedveil.wire import Tensors, add_prefix

LOG = logging.getLogger("fedveil")
FIRST = 24  # exponent of rows of which nothing is known
PROBED = 0  # further bits of headroom for numbers that are estimated from random records
RECORDS = 2**17  # that all clients are taken to have together before the first sum tells
WIDER = 16  # bits of headroom that are added when a sum wrapped around
SMALLEST = 2.0**-8  # of the largest number of a kind: smaller rows, which may be so by chance, get as much headroom
MOST_FACTOR = 100.0  # of a veil: larger ones would cost more digits than float32 has
PASSES = "passes/"
Words = NDArray[np.uint64]
Send = Callable[[str, bytes, Mapping[str, bytes]], Iterable[tuple[str, bytes | None]]]


class Layout(NamedTuple):
    """How an update is laid out among the words; see `Opening`."""

    exponents: tuple[int, ...]
    rows: tuple[int, ...]
    checks: bool


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
    def rows(self) -> tuple[int, ...]:
        """The sizes of its rows, each of which has an exponent."""
        return tuple([part.size // part.rows if part.rows else 0 for part in self.parts for _ in range(part.rows)])

    def words(self, tensors: Mapping[str, Tensor], records: int, opening: Opening) -> Words:
        """A client's update times its records, in fixed point.

        An update that is not finite, or too large to be scaled, contributes nothing: no records and zeros.
        """
        if self.rows != opening.rows:
            what = f"the server expects {len(opening.rows)} rows, and this client's update has {len(self.rows)}"
            raise ModelMismatch("opening", what, "build the client's model with the code that built the server's")
        flat = [tensors[part.name].detach().cpu().double().reshape(-1) for part in self.parts]
        values = torch.cat(flat).numpy() if flat else np.zeros(0)
        if not np.abs(values).max(initial=0.0) < LARGEST:  # NaN too
            return no_words(opening)
        clients = len(opening.roster)
        found = encode_rows(values * records, opening.rows, row_bits(opening), clients, opening.checks)
        return np.concatenate([np.array([1, records], np.uint64), found])

    def opened(self, total: Words, opening: Opening) -> tuple[int, Tensors]:
        """From a sum of words: the records, and the weighted mean of the updates; of counters the nearest integer.

        Clipped updates are divided by the number of members: a word that a client chooses must not scale the others.
        """
        records = int(total[1] if opening.checks else total[0])  # clipped clients count once, whatever they say
        if not records:
            what = "no client contributed to it: training has diverged, or all of them failed"
            raise Aborted("sum", "the sum", what, "look at the clients' logs")
        if not 1 <= records < 2**53:
            raise Aborted("sum", "the sum", f"its clients have {records} records together", "look for a hostile client")
        values = decode_rows(total[HEAD:], opening.rows, row_bits(opening)) / records
        found, start = {}, 0
        for part in self.parts:
            own = torch.from_numpy(values[start : start + part.size]).reshape(part.shape)
            found[part.name] = own.to(part.dtype) if part.dtype.is_floating_point else own.round().to(part.dtype)
            start += part.size
        return records, found

    def rounding(self, exponents: Sequence[int], clients: int, records: int) -> dict[str, list[float]]:
        """Bound the rounding error of each number of the mean, row by row: half a unit for each client."""
        rest, found = list(exponents), {}
        for part in self.parts:
            own, rest = rest[: part.rows], rest[part.rows :]
            found[part.name] = [clients * 2.0 ** -(secagg.bits(clients, e) + 1) / records for e in own]
        return found

    def exponents(self, sizes: Mapping[str, Sequence[float]], records: int, wider: int) -> tuple[int, ...]:
        """One for each row, for sums of this many records whose mean has numbers of these sizes.

        A row may be much smaller than in the next round, or 0: it is given some headroom for what others of its kind
        have, the same pass of other tensors or other buffers.
        """
        rows = [(part.kind, row, size * records) for part in self.parts for row, size in enumerate(sizes[part.name])]
        largest: dict[tuple[str, int], float] = {}
        for kind, row, size in rows:
            largest[kind, row] = max(largest.get((kind, row), 0.0), size)
        least = [max(size, SMALLEST * largest[kind, row]) for kind, row, size in rows]
        found = [secagg.exponent(size) if 0 < size < math.inf else FIRST for size in least]
        return tuple([min(max(own + wider, LOWEST), HIGHEST) for own in found])


def row_bits(opening: Opening) -> list[int]:
    """Bits behind the point, row by row."""
    return [secagg.bits(len(opening.roster), exponent) for exponent in opening.exponents]


def no_words(opening: Opening) -> Words:
    """The words of a client that contributes nothing to a sum."""
    words = np.zeros(opening.size, np.uint64)
    words[0] = 1
    return words


def check_combination(defence: AnyDefence, model: nn.Module, limits: Limits | None) -> None:
    """Refuse what needs single updates, or cannot be had from their sum."""
    where, alone = "secure_aggregation", "leave secure_aggregation out, or use plain or veil"
    inner = defence.base
    if defence.dp_clip is not None and not inner.clippable:
        what = f"differential privacy under a {inner.name} clips what the noise is removed from, which no client has"
        raise BadArgument(where, what, "plain with differential privacy, where clients clip their own gradients")
    if not inner.linear:
        raise BadArgument(where, f"{inner.name} is not linear: the sum of its updates does not give its result", alone)
    if inner.largest_factor > MOST_FACTOR:
        what = f"factors up to {inner.largest_factor:g} leave too few digits in fixed point"
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
    flat, _, _ = clip_vector(torch.cat([own.reshape(-1).double() for own in like.values()]), clip)
    return split_vector(flat, like)


def encode_words(tensors: Mapping[str, Tensor], records: int, opening: Opening, clip: float | None = None) -> Words:
    """Client: its update as words; with differential privacy clipped, and counted once whatever its records."""
    if clip is not None:
        if not all(bool(own.isfinite().all()) for own in tensors.values()):
            return no_words(opening)
        tensors, records = clipped(tensors, clip), 1
    return Form.of(tensors).words(tensors, records, opening)


class Sums:
    """Server: what it knows from round to round of a run under secure aggregation. Nothing of a single client.

    Args:
        defence: what the run is trained with.
        client: computes an update, to estimate the numbers of the first round.
        model: the server's.
        example: inputs from which they are estimated.
        records: that all clients have together, if that is known.
    """

    def __init__(
        self, defence: AnyDefence, client: AnyClient, model: nn.Module, example: Inputs, records: int | None = None
    ) -> None:
        self.model, self.codec, self.clip = model, find_codec(defence), defence.dp_clip
        self.form: Form | None = None
        self._example, self._client = example, client
        self._expected: Mapping[str, Tensor] | None = None
        self._records = records or RECORDS
        self.wider = 0  # bits of headroom that the next attempt has besides

    def layout(self, own_round: AnyRound) -> Layout:
        """Return the layout of an attempt."""
        _, template = self.codec.template(own_round.base, self.model)
        if self.clip is not None:
            template = {name: own for name, own in template.items() if name.startswith("gradient/")}
        self.form = form = Form.of(template)
        if self.clip is not None:  # what is clipped to it always fits
            return Layout((_clipped_exponent(self.clip),) * len(form.rows), form.rows, False)
        if self._expected is None:
            self._expect_first(own_round)
        if self._expected is None:
            return Layout((min(FIRST + self.wider, HIGHEST),) * len(form.rows), form.rows, True)
        sizes = _find_ranges(own_round).bound(self._expected)
        return Layout(form.exponents(sizes, self._records, self.wider), form.rows, True)

    def _expect_first(self, own_round: AnyRound) -> None:
        """Estimate the numbers of the first round: take a client's step on records that are drawn at random."""
        draw, device = torch.Generator().manual_seed(0), next(self.model.parameters()).device
        inputs = each(lambda like: _drawn_like(like, draw), self._example)
        dense = torch.zeros_like(one_output(self.model, inputs))
        dense.view(-1)[:1] = 1.0
        for targets in (dense, torch.zeros(1, dtype=torch.int64)):
            samples = Samples(inputs, targets.expand(count(inputs), *targets.shape[1:]).to(device))
            try:
                with torch.random.fork_rng(devices=[]):
                    expected = _find_ranges(own_round).expect(self._client.step(own_round.broadcast, samples))
            except Exception:  # the loss takes other targets; then nothing is known
                continue
            if all(bool(own.isfinite().all()) for own in expected.values()):
                self._expected, self.wider = expected, self.wider + PROBED
                return

    def aggregate(self, own_round: AnyRound, total: Words, opening: Opening) -> Aggregate:
        """The round's result from the sum of its words; Aborted if it wrapped around, or holds nothing."""
        assert self.form is not None
        clients = len(opening.roster)
        wrapped = wrapped_rows(total[HEAD:], opening.rows) if opening.checks else []
        if wrapped:
            self.wider += WIDER
            what = f"{len(wrapped)} of its {len(opening.rows)} rows wrapped around"
            raise Aborted("sum", "the sum", f"{what}; the next round has {WIDER} more bits of headroom")
        records, tensors = self.form.opened(total, opening)
        values, template = self.codec.template(own_round.base, self.model)
        own = add_prefix("buffer", dict(self.model.named_buffers())) if self.clip is not None else {}
        tensors = {name: (tensors | own)[name] for name in template}  # in the model's order
        update = self.codec.decode_update(own_round.base, self.model, values, tensors, 0)
        rows = self.form.rounding(opening.exponents, clients, records)
        ranges = _find_ranges(own_round)
        expected, rounding = ranges.expect(update, self._expected), ranges.bound_rounding(rows)
        result = own_round.base.recover([update], [1.0])
        size = math.hypot(*[float(torch.linalg.vector_norm(g.double())) for g in result.gradients.values()])
        self._expected, self._records, self.wider = expected, records, 0
        error = result.error + (rounding / size if size else 0.0)
        figures = {**result.figures, "records": records, "fixed_point_error": rounding / size if size else 0.0}
        result = dataclasses.replace(result, error=error, figures=figures)
        return own_round.finish_sum(result, int(total[0]))


def _find_ranges(own_round: AnyRound) -> Ranges[Any]:
    """Return the ranges of a linear defence's round."""
    assert isinstance(own_round.base, Ranges)
    return own_round.base


def _drawn_like(like: Tensor, draw: torch.Generator) -> Tensor:
    """Normal numbers as large as the example's, whose values need not be typical; integers stay what they are."""
    if not like.is_floating_point() or not like.numel():
        return like
    size = float(like.double().square().mean().sqrt())
    return ((size if 0 < size < math.inf else 1.0) * torch.randn(like.shape, generator=draw)).to(like)


def _clipped_exponent(clip: float) -> int:
    """The e of numbers of which none is above `clip`."""
    return min(max(math.frexp(clip)[1] + 1, LOWEST), HIGHEST)


class LocalParties:
    """Clients of one process: each with its own identity, all in one roster. To test and to simulate."""

    def __init__(self, clients: int) -> None:
        identities = [Identity.new(f"client-{client}") for client in range(clients)]
        self.roster = Roster({own.name: own.public() for own in identities})
        policy = Policy(min_records=1, max_sums_per_run=2**53, max_sums_per_day=2**53, key_hours=24 * 365)
        self.parties = {client: Party(own, self.roster, policy=policy) for client, own in enumerate(identities)}
        self._run, self._attempt, self._renewal = secrets.token_hex(16), 0, policy.key_rounds
        self._hellos: dict[int, secagg.Hello] = {}

    def opening(self, clients: Sequence[int], number: int, layout: Layout) -> Opening:
        """Start the next attempt of a round."""
        if self._attempt % self._renewal == 0:
            self._hellos.clear()  # clients replace their keys
        self._attempt += 1
        for client in clients:
            if client not in self._hellos:
                self._hellos[client] = self.parties[client].hello(self._run)
        return Opening(self._run, number, self._attempt, tuple([self._hellos[client] for client in clients]), *layout)

    def total(self, opening: Opening, words: Mapping[int, Words]) -> Words:
        """The sum of the clients' words, by the protocol."""
        digest = hashlib.sha256(json.dumps(opening.values()).encode()).digest()
        named = {party.name: party for client, party in self.parties.items() if client in words}
        tally = Tally(opening, digest, self.roster)
        for client, own in words.items():
            party = self.parties[client]
            tally.take_upload(party.name, party.upload(party.admit(opening, digest), own))

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

    while not tally.has_agreement():
        take("settle", *tally.settle(), tally.take_settle_reply)
    take("reveal", tally.reveal(), dict.fromkeys(tally.survivors, b""), tally.take_reveal_reply)
    return tally.total()
