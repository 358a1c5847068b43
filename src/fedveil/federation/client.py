"""A client: it checks a message, computes its update and answers, whatever engine carries the messages."""

import copy
import dataclasses
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import Dataset

from fedveil.defences.interface import AnyCodec, AnyDefence, B, DefenceClient, Samples, U
from fedveil.defences.registry import build_for_client, find_codec, find_record, refuse_repeatable
from fedveil.defences.state import State
from fedveil.errors import BadArgument, FedveilError
from fedveil.federation import checkpoint
from fedveil.federation.prepare import make_shards
from fedveil.federation.protocol import Answer, Ask, LastAsk, MaskedAnswer, Step, max_tensors, read, refuse_old, write
from fedveil.files import make_folder
from fedveil.records.shards import Shards
from fedveil.records.sources import Given, Source, as_source, check_sources
from fedveil.scheme.losses import Function, Loss, find_loss
from fedveil.scheme.messages import known_loss
from fedveil.wire import Packed, as_tensor, read_kind

if TYPE_CHECKING:
    from fedveil.secagg import Party, Policy
    from fedveil.secagg.identity import Digest

Data = Given | Callable[[], Given]


def compute_update(
    own: DefenceClient[B, U], broadcast: B, shards: Shards, dtype: torch.dtype, client: int, number: int, whole: bool
) -> U:
    """Compute what a client uploads in round `number`: for its next batch, or for all its records in batches."""
    if not whole:
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


@dataclass(frozen=True, eq=False)
class ClientState:
    """A client's memory from one ask to the next; nobody else sees it."""

    last: LastAsk | None = None
    private: State = field(default_factory=dict)  # of the defence: SPN's head, PPDL's source of noise


def load_private(file: Path | None) -> State:
    """Load the defence's state from the client's file; empty if there is none yet."""
    if file is None or not file.exists():
        return {}
    try:
        return checkpoint.load(file)
    except checkpoint.Damaged as error:  # an older state would draw the same noise again
        raise BadArgument(error.where, error.what, "delete it: this client then draws a new private state") from None


def save_private(file: Path, state: State) -> None:
    """Save the defence's state to a file that only its owner can read."""
    make_folder(file.parent, 0o700)
    checkpoint.save(file, state)


@contextmanager
def hide_failures() -> Iterator[None]:
    """Replace an unexpected error of a model or a defence by a refusal that says nothing about the records.

    The error itself goes to stderr and stays the cause: its text may contain values of records.
    """
    try:
        yield
    except FedveilError:
        raise
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        what = f"this client cannot answer: {type(error).__name__}"
        raise BadArgument("ask", what, "read the cause in the client's log") from error


@dataclass(frozen=True, eq=False)
class _Task:
    """An ask, decoded for the client's own architecture."""

    ask: Ask
    codec: AnyCodec
    defence: AnyDefence
    loss: Loss
    broadcast: object
    dtype: torch.dtype  # that travels, and that the client computes in


class ClientSession:
    """A client of a server on another machine.

    Nothing is read, loaded or computed before the server's signature is checked, if the client's policy names a server.
    Under secure aggregation nothing is computed before the ask is admitted, and the admission is stored.

    Args:
        model: gives the architecture; its values are ignored and not changed.
        data: the client's records in any form that `fedveil.Federation` accepts, or a function that loads them, called
            once a message has been checked.
        client: index of this client, which determines the order of its batches.
        defence: use these settings of a defence, whatever the server asks for.
        loss: the server's custom loss function, if its loss has no name.
        party: the client's part in secure aggregation, the same object for a whole run. With one, an ask without secure
            aggregation is refused: a server cannot switch it off.
        policy: which server a client without a `party` answers; a party has its own.
        state: the client's state after its last answer.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        *,
        client: int,
        defence: AnyDefence | None = None,
        loss: Function | None = None,
        party: "Party | None" = None,
        policy: "Policy | None" = None,
        state: ClientState | None = None,
    ) -> None:
        self.state = state or ClientState()
        self._model, self._data, self._client = model, data, client
        self._defence, self._loss = defence, None if loss is None else find_loss(loss)
        self.party, self._policy = party, policy
        self._prepared: tuple[object, Shards] | None = None  # with the settings for which records were prepared

    def reply(self, message: bytes, own: bytes = b"") -> bytes:
        """Answer a message.

        Args:
            message: the bytes that all clients get.
            own: the bytes for this client alone.
        """
        if read_kind(message) == "step":
            return self._take_step(message, own)
        digest = None
        if self.party is not None or self._policy is not None:
            digest, _ = self._authenticate(message, own)
        ask = read(message, Ask, max_tensors(self._model))
        refuse_old(ask, self.state.last)
        last = LastAsk(ask.session, ask.round, ask.token)
        if self.party is not None or ask.secure:
            answer, private = self._answer_masked(ask, message, digest), self.state.private
        else:
            answer, private = self._answer(self._decode(ask))
        self.state = ClientState(last, private)
        return answer

    def _authenticate(self, message: bytes, own: bytes) -> "tuple[Digest, bytes]":
        """Check the server's signature or tag on a message; return its digest, and the bytes for this client alone."""
        from fedveil.federation.secure_client import authenticate
        from fedveil.secagg.identity import Digest

        digest = Digest.compute(message)
        return digest, authenticate(digest, own, self.party, self._policy)

    def _take_step(self, message: bytes, own: bytes) -> bytes:
        """Reply to a step of secure aggregation."""
        from fedveil.federation.secure_client import take_step

        _, own = self._authenticate(message, own)
        step = read(message, Step)
        body = take_step(step, own, self.party, lambda: len(_read_source(self._data)))
        return write(Step.make(step.session, step.step, body))

    def _answer_masked(self, ask: Ask, message: bytes, digest: "Digest | None") -> bytes:
        """Answer an ask under secure aggregation. Whatever happens once records are touched, only masked words tell."""
        from fedveil.federation.secure_client import admit, contribute
        from fedveil.federation.sums import Words, encode_words

        admission = admit(ask, message, digest, self.party, self._model)
        task, party = self._decode(ask), admission.party
        if not task.defence.linear:
            what = f"{task.defence.name} is not linear, and its updates cannot be summed under masks"
            raise BadArgument("ask", what)

        def work() -> Words:
            model = copy.deepcopy(self._model)  # traces of this forward pass must not show in a later answer
            (_, tensors), records, _ = self._update(task, model, {}, party.policy.min_records)
            return encode_words(tensors, records, admission.ticket.opening, admission.clip)

        upload = party.upload(admission.ticket, contribute(admission, work))
        return write(MaskedAnswer(ask.round, ask.token, ask.defence, {"upload": as_tensor(upload)}))

    def _decode(self, ask: Ask) -> _Task:
        defence = self._find_defence(ask)
        codec, loss = find_codec(defence), known_loss("answer", ask.loss, ask.loss_settings, self._loss)
        with hide_failures():
            broadcast = codec.decode_broadcast(self._model, ask.values, ask.tensors, loss)
        parameters = [tensor for name, tensor in ask.tensors.items() if name.startswith("parameter/")]
        if not parameters:
            raise BadArgument("ask", "it contains no parameters")
        return _Task(ask, codec, defence, loss, broadcast, parameters[0].dtype)

    def _find_defence(self, ask: Ask) -> AnyDefence:
        """Return the client's defence: of the kind that the server asks for, and not one for tests."""
        own = self._defence
        if own is None:
            return build_for_client(ask.defence, ask.settings)
        record = find_record(own)
        if record is None or record.name != ask.defence:
            raise BadArgument("answer", f"the server's defence is {ask.defence!r}, this client requires {own.name!r}")
        refuse_repeatable("answer", own)
        return own

    def _answer(self, task: _Task) -> tuple[bytes, State]:
        """Return the encoded answer, and the client's private state after it."""
        began, ask = time.perf_counter(), task.ask
        (values, tensors), records, private = self._update(task, self._model, self.state.private)
        seconds = time.perf_counter() - began
        return write(Answer(ask.round, ask.token, ask.defence, records, seconds, values, tensors)), private

    def _update(self, task: _Task, model: nn.Module, private: State, least: int = 2) -> tuple[Packed, int, State]:
        """Compute an update from batches of at least `least` records; return it encoded, its records, private state."""
        ask, shards = task.ask, self._prepare(task, model, max(2, least))
        own = task.defence.client(model, shards.example, task.loss)
        if private:
            own.restore(0, private)
        with hide_failures():
            update = compute_update(own, task.broadcast, shards, task.dtype, 0, ask.round, ask.whole_shard)
        return task.codec.encode_update(update), shards.sizes[0], own.state(0)

    def _prepare(self, task: _Task, model: nn.Module, least: int) -> Shards:
        """Return the records as the loss and the ask need them; kept until an ask needs them in another form."""
        ask = task.ask
        form = (ask.loss, repr(ask.loss_settings), ask.batch_size, ask.seed, task.dtype, least)
        if self._prepared is None or self._prepared[0] != form:
            source = _read_source(self._data)
            shards = make_shards(model, task.loss, [source], ask.batch_size, ask.seed, task.dtype)
            self._prepared = form, dataclasses.replace(shards, names=(self._client,), least=least)
        return self._prepared[1]


def _read_source(data: Data) -> Source:
    """Return the client's records; refuse those that cannot be used, without a word about their values."""
    given = data if isinstance(data, Dataset) or not callable(data) else data()
    try:
        return check_sources([as_source("this client", given)])[0]
    except FedveilError as error:  # its text may contain values of records, and refusals travel to the server
        print(f"fedveil: {error}", file=sys.stderr)
        raise BadArgument("this client", "its records cannot be used; its own log says why") from None
