"""A round with clients that are elsewhere: what the server asks and what a client answers, as bytes for any engine."""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import nn
from torch.utils.data import Dataset

from fedveil.checks import one_of, whole
from fedveil.defences.interface import Defence
from fedveil.defences.plain import PlainMessages
from fedveil.defences.registry import find, messages_of, names, record_of
from fedveil.errors import BadArgument, StaleUpdate
from fedveil.federation import checkpoint, masked
from fedveil.federation.client import client_update
from fedveil.federation.secure import Words, words_of
from fedveil.federation.shards import checked as checked_records
from fedveil.federation.shards import shards_of
from fedveil.federation.sources import Given, Source, as_source
from fedveil.files import make_folder
from fedveil.scheme.losses import Function, Loss, find_loss
from fedveil.scheme.messages import known_loss
from fedveil.secagg import Identity, Memory, Party, Policy, Roster
from fedveil.secagg.signed import Digest
from fedveil.wire import Tensors, as_tensor, checked, from_bytes, kind_of, to_bytes

MOST_RECORDS = 2**53
LONGEST = 1e9  # seconds
MOST_PER_TENSOR = 4  # tensors in an answer for each of the model's
Data = Given | Callable[[], Given]
Message = TypeVar("Message", "Ask", "Answer", "Masked", "Step")


@dataclass(frozen=True, eq=False)
class Ask:
    """What a client is sent in a round: the broadcast, and all that it takes to answer it."""

    session: str  # of the server's process: after a restart it is another
    round: int  # from 0
    token: str  # of the exchange; an answer quotes it
    defence: str  # its name in the registry
    settings: dict[str, Any]  # of the defence, for the client's part of it
    loss: str  # its name
    loss_settings: dict[str, Any]  # see `Loss.settings`
    whole_shard: bool  # all records of the client, or its next batch
    batch_size: int
    seed: int  # of the order of records
    secure: dict[str, Any]  # the opening of secure aggregation; empty without
    values: dict[str, Any]
    tensors: Tensors


@dataclass(frozen=True, eq=False)
class Answer:
    """What a client sends back: its update, and what it answers."""

    round: int
    token: str
    defence: str
    records: int  # |D_k|, the client's weight
    seconds: float  # that it took the client, as it says
    values: dict[str, Any]
    tensors: Tensors


@dataclass(frozen=True, eq=False)
class Masked:
    """What a client sends back under secure aggregation: words that say nothing, no count of records and no times."""

    round: int
    token: str
    defence: str
    tensors: Tensors


@dataclass(frozen=True, eq=False)
class Step:
    """Another step of secure aggregation: "hello", "settle", "reveal" or "end"; and a client's answer to it."""

    session: str
    step: str
    tensors: Tensors


def write(message: Ask | Answer | Masked | Step) -> bytes:
    """A message as bytes."""
    values = {name: getattr(message, name) for name in _wanted(type(message))}
    return to_bytes(type(message).__name__.lower(), values, message.tensors)


def read(data: bytes, kind: type[Message], most: int | None = None) -> Message:
    """The inverse of `write`; whatever else arrives is refused, and so are more than `most` tensors."""
    where = kind.__name__.lower()
    values, tensors = from_bytes(data, where, most)
    found: Message = kind(**checked(where, values, _wanted(kind)), tensors=tensors)
    if isinstance(found, Answer) and not 1 <= found.records <= MOST_RECORDS:
        raise BadArgument(where, f"records must be from 1 to 2^53, got {found.records}")
    if isinstance(found, Answer) and not 0 <= found.seconds < LONGEST:
        raise BadArgument(where, f"seconds must be from 0 to {LONGEST:g}, got {found.seconds}")
    if isinstance(found, Ask):
        whole(where, "round", found.round, 0)
        whole(where, "batch_size", found.batch_size)
    return found


def _wanted(kind: type) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(kind).items() if name != "tensors"}


class Taken(NamedTuple):
    """An answer as the server uses it."""

    update: Any
    records: int
    seconds: float


def take(data: bytes, ask: Ask, messages: PlainMessages, defence: Defence, model: nn.Module, position: int) -> Taken:
    """Server: the update in an answer to this ask, and what the client says about it; any other is refused."""
    tensors = len(list(model.parameters())) + len(list(model.buffers()))
    found = read(data, Answer, most=MOST_PER_TENSOR * (tensors + 1))
    _of_this_exchange(found, ask, position)
    update = messages.unpack_update(defence, model, found.values, found.tensors, position)
    return Taken(update, found.records, found.seconds)


def take_masked(data: bytes, ask: Ask, position: int) -> Masked:
    """Server: a masked answer to this ask; any other is refused."""
    found = read(data, Masked, most=1)
    _of_this_exchange(found, ask, position)
    return found


def _of_this_exchange(found: Answer | Masked, ask: Ask, position: int) -> None:
    if (found.round, found.token, found.defence) != (ask.round, ask.token, ask.defence):
        raise StaleUpdate(f"client {position}", f"its answer is for another exchange, of round {found.round}")


def refuse_old(ask: Ask, last: Mapping[str, Any]) -> None:
    """Client: refuse an earlier round of the server's session, and an exchange that was answered.

    `last` holds session, round and token of the last ask that was answered; nothing before the first.
    """
    if last.get("session") != ask.session:
        return
    if last["token"] == ask.token:
        raise StaleUpdate("this node", f"it has answered this exchange of round {ask.round} already")
    if ask.round < last["round"]:
        raise StaleUpdate("this node", f"the message is of round {ask.round}, and a later one was answered")


@dataclass(frozen=True, eq=False)
class ClientState:
    """What a client remembers from one ask to the next; nobody else sees it."""

    seen: Mapping[str, Any] = field(default_factory=dict)  # session, round and token of the last ask that was answered
    private: Mapping[str, Any] = field(default_factory=dict)  # the defence's: SPN's head, PPDL's source of noise


def load_private(file: Path | None) -> dict[str, Any]:
    """Client: the defence's state in a file of the client's own; nothing if there is none yet."""
    if file is None or not file.exists():
        return {}
    try:
        return checkpoint.load(file)
    except checkpoint.Damaged as error:  # an older state would draw the same noise again
        raise BadArgument(error.where, error.what, "delete it: this client then draws a new private state") from None


def save_private(file: Path, state: Mapping[str, Any]) -> None:
    """Client: keep the defence's state in a file that only its owner can read."""
    make_folder(file.parent, 0o700)
    checkpoint.save(file, dict(state))


def reply(
    message: bytes,
    state: ClientState,
    model: nn.Module,
    data: Data,
    *,
    client: int,
    defence: Defence | None = None,
    loss: Function | None = None,
    party: Party | None = None,
    policy: Policy | None = None,
    own: bytes = b"",
) -> tuple[bytes, ClientState]:
    """Client: the answer to an ask, both as bytes, and the state after it. The same for every engine.

    Nothing is read, loaded or computed before the server's signature was checked, if the client's policy names a
    server, and nothing is computed under secure aggregation before the ask was admitted and that was stored.

    Args:
        message: what arrived.
        state: the client's, after its last answer.
        model: gives the architecture; its values are ignored and stay what they are.
        data: this client's records in any form that `fedveil.Federation` takes, or a function that loads them; called
            after the message was checked.
        client: this client's number, which decides the order of its batches.
        defence: insist on these settings of a defence, whatever the server says.
        loss: the server's own function, if its loss has no name.
        party: this client's part in secure aggregation, the same object for a whole run. With one, an ask without
            secure aggregation is refused: a server cannot have it left out.
        policy: which server a client without a `party` answers; a party has its own.
        own: what arrived for this client alone.
    """
    rules = party.policy if party is not None else policy
    digest = Digest.of(message)
    own = masked.authenticate(digest, own, party, policy)
    if kind_of(message) == "step":
        step = read(message, Step, most=1)
        body = masked.respond(step, own, party, lambda: masked.check_usable(lambda: _count(data), rules or Policy()))
        return write(Step(step.session, step.step, {"body": as_tensor(body)})), state
    ask = read(message, Ask)
    refuse_old(ask, state.seen)
    admitted = masked.admit(ask, message, digest, party, model) if party is not None or ask.secure else None
    seen = {"session": ask.session, "round": ask.round, "token": ask.token}
    task = _task(ask, model, defence, loss)
    if admitted is None or party is None:
        found, private = _answer(ask, task, model, data, state.private, client)
        return found, ClientState(seen, private)
    if not task.defence.linear:
        raise BadArgument("ask", f"{task.defence.name} is not linear, and its updates cannot be summed under masks")

    def work() -> Words:
        _, tensors, records = _update(ask, task, model, data, {}, client)
        return words_of(tensors, records, admitted.opening, admitted.clip)

    upload = party.upload(admitted.ticket, masked.contribute(admitted, work))
    return write(Masked(ask.round, ask.token, ask.defence, {"upload": as_tensor(upload)})), ClientState(
        seen, state.private
    )


IDENTITY, ROSTER, POLICY = "FEDVEIL_IDENTITY", "FEDVEIL_ROSTER", "FEDVEIL_POLICY"  # files that no job names


@lru_cache(maxsize=8)
def party_of(identity: Path, roster: Path, policy: Path | None = None) -> Party:
    """Client: its part in secure aggregation, from the files of `fedveil keys` and the roster.

    Keys of a run, and what must not be forgotten before it ends, are kept in a file beside the identity: a client whose
    process starts again goes on.

    Args:
        identity: the file of `fedveil keys new`.
        roster: the file that lists who may take part.
        policy: the file of `fedveil keys policy`; by default the one beside the identity.
    """
    own = Policy.read(policy or identity.with_suffix(".policy"))
    memory = Memory(identity.with_suffix(".memory"))
    found = Party(Identity.load(identity), Roster.read(roster), memory, policy=own)
    found.sweep()
    return found


def own_party() -> Party | None:
    """Client: the one that its environment names; None without."""
    identity, roster, policy = (os.environ.get(name) for name in (IDENTITY, ROSTER, POLICY))
    if not identity:
        return None
    if not roster:
        raise BadArgument(IDENTITY, f"{ROSTER} is not set beside it", "name the file that lists who may take part")
    return party_of(Path(identity), Path(roster), Path(policy) if policy else None)


def own_policy() -> Policy | None:
    """Client: the policy that its environment names, for a client without secure aggregation; None without."""
    path = os.environ.get(POLICY)
    return Policy.read(Path(path)) if path else None


def server_files() -> tuple[Identity | None, Roster | None]:
    """Server: its signing key and the roster, as far as its environment names them."""
    identity, roster = os.environ.get(IDENTITY), os.environ.get(ROSTER)
    return Identity.load(Path(identity)) if identity else None, Roster.read(Path(roster)) if roster else None


class _Task(NamedTuple):
    """What a client is to do, from the ask and its own architecture alone."""

    messages: PlainMessages
    defence: Defence
    loss: Loss
    broadcast: Any
    dtype: torch.dtype  # that travels, and that the client computes in


def _task(ask: Ask, model: nn.Module, defence: Defence | None, loss: Function | None) -> _Task:
    messages, own = _defence(ask, defence)
    own_loss = known_loss("answer", ask.loss, ask.loss_settings, None if loss is None else find_loss(loss))
    broadcast = messages.unpack(model, ask.values, ask.tensors, own_loss)
    parameters = [tensor for name, tensor in ask.tensors.items() if name.startswith("parameter/")]
    if not parameters:
        raise BadArgument("ask", "it holds no parameters")
    return _Task(messages, own, own_loss, broadcast, parameters[0].dtype)


def _source(data: Data) -> Source:
    given = data if isinstance(data, Dataset) or not callable(data) else data()
    return checked_records([as_source("this client", given)])[0]


def _count(data: Data) -> int:
    """How many records a client has; refuses those that cannot be used."""
    return len(_source(data))


def _update(
    ask: Ask, task: _Task, model: nn.Module, data: Data, private: Mapping[str, Any], client: int
) -> tuple[dict[str, Any], Tensors, int]:
    """A client's update as it travels, and how many records the client has."""
    shards = shards_of(model, task.loss, [_source(data)], ask.batch_size, ask.seed, task.dtype)
    shards = dataclasses.replace(shards, names=(client,))
    own = task.defence
    own.prepare_client(model, shards.example, task.loss)
    if private:
        own.restore_client(0, private)
    update = client_update(
        own,
        model,
        task.broadcast,
        shards,
        client=0,
        number=ask.round,
        whole_shard=ask.whole_shard,
        dtype=task.dtype,
    )
    return *task.messages.pack_update(own, update), shards.sizes[0]


def _answer(
    ask: Ask, task: _Task, model: nn.Module, data: Data, private: Mapping[str, Any], client: int
) -> tuple[bytes, dict[str, Any]]:
    """A client's update as bytes, and what the client keeps to itself for its next one."""
    began = time.perf_counter()
    values, tensors, records = _update(ask, task, model, data, private, client)
    found = Answer(ask.round, ask.token, ask.defence, records, time.perf_counter() - began, values, tensors)
    return write(found), task.defence.client_state(0)


def _defence(ask: Ask, own: Defence | None) -> tuple[PlainMessages, Defence]:
    """A serialiser of messages, and the client's defence: of the server's kind, and not one for tests."""
    if own is None:
        one_of("ask", "defence", ask.defence, names())  # never imports what a server names
        messages = messages_of(find(ask.defence), ask.defence)
        try:
            return messages, messages.build(**ask.settings)
        except TypeError as error:
            what = f"{ask.defence} has no such settings: {error}"
            raise BadArgument("ask", what, "install the same fedveil") from error
    record = record_of(own)
    if record is None or record.name != ask.defence:
        raise BadArgument("answer", f"the server's defence is {ask.defence!r}, this client insists on {own.name!r}")
    if own.repeatable:
        raise BadArgument("answer", f"{own.name} with a seed is for tests: on a network its secrets are none")
    return messages_of(record, own.name), own
