"""A round with clients that are elsewhere: what the server asks and what a client answers, as bytes for any engine."""

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from torch import nn
from torch.utils.data import Dataset

from fedveil.checks import positive, whole
from fedveil.defences.interface import Defence
from fedveil.defences.plain import PlainMessages
from fedveil.defences.registry import build_for_client, messages_of, record_of, refuse_repeatable
from fedveil.errors import BadArgument, FedveilError, OutOfRange, StaleUpdate
from fedveil.federation import checkpoint
from fedveil.federation.client import client_update
from fedveil.federation.secure import words_of
from fedveil.federation.shards import checked as checked_records
from fedveil.federation.shards import shards_of
from fedveil.federation.sources import Given, as_source
from fedveil.files import make_folder
from fedveil.scheme.losses import Function, find_loss
from fedveil.scheme.messages import known_loss
from fedveil.secagg import Identity, Memory, Opening, Party, Roster
from fedveil.wire import HEAD, Tensors, as_bytes, as_tensor, checked, from_bytes, kind_of, to_bytes

MOST_RECORDS = 2**53
LONGEST = 1e9  # seconds
MOST_PER_TENSOR = 4  # tensors in an ask or an answer for each of the model's
LONGEST_ASK = 2**22  # bytes of an ask's values: a roster of 10,000 members for secure aggregation takes most of it
MOST_COUNT, MOST_SEEDS = 2**53, 2**64  # of rounds and of records in a batch; seeds that torch takes
_HINTS: dict[type, dict[str, Any]] = {}  # by kind of message; they take longer to find than a message to read
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
    """What a client sends back under secure aggregation: words that say nothing, and no number of records."""

    round: int
    token: str
    defence: str
    seconds: float
    fits: bool  # whether the numbers fit the exponents; if not, there are no words
    tensors: Tensors


@dataclass(frozen=True, eq=False)
class Step:
    """Another step of secure aggregation: "hello", "settle" or "reveal"; and a client's answer to it."""

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
    values, tensors = from_bytes(data, where, 1 if kind is Step else most, LONGEST_ASK if kind is Ask else HEAD)
    found: Message = kind(**checked(where, values, _wanted(kind)), tensors=tensors)
    if isinstance(found, Answer) and not 1 <= found.records <= MOST_RECORDS:
        raise BadArgument(where, f"records must be from 1 to 2^53, got {found.records}")
    if isinstance(found, Answer | Masked) and not 0 <= found.seconds < LONGEST:
        raise BadArgument(where, f"seconds must be from 0 to {LONGEST:g}, got {found.seconds}")
    if isinstance(found, Ask):
        _check_ask(found)
    return found


def _check_ask(ask: Ask) -> None:
    """Refuse numbers that no server counts to, and text that cannot be printed."""
    for name, least, end in (("round", 0, MOST_COUNT), ("batch_size", 1, MOST_COUNT), ("seed", 0, MOST_SEEDS)):
        if whole("ask", name, getattr(ask, name), least) >= end:
            raise BadArgument("ask", f"{name} must be below {end}, got {getattr(ask, name)}")
    for name in ("session", "token", "defence", "loss"):
        if not getattr(ask, name).isprintable():
            raise BadArgument("ask", f"{name} holds characters that cannot be printed")


def bound_tensors(model: nn.Module) -> int:
    """The most tensors that a message about this model may hold."""
    return MOST_PER_TENSOR * (len(list(model.parameters())) + len(list(model.buffers())) + 1)


@contextmanager
def refuse_failures() -> Iterator[None]:
    """Client: turn whatever the code of a model or of a defence makes of an ask that looked right into a refusal.

    The reason stays with the client, as the cause: its text may hold values of records.
    """
    try:
        yield
    except FedveilError:
        raise
    except Exception as error:
        what = f"this client cannot answer it: {type(error).__name__}"
        raise BadArgument("ask", what, "read the cause in this client's log") from error


def _wanted(kind: type) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = {name: hint for name, hint in get_type_hints(kind).items() if name != "tensors"}
    return _HINTS[kind]


class Taken(NamedTuple):
    """An answer as the server uses it."""

    update: Any
    records: int
    seconds: float


def take(data: bytes, ask: Ask, messages: PlainMessages, defence: Defence, model: nn.Module, position: int) -> Taken:
    """Server: the update in an answer to this ask, and what the client says about it; any other is refused."""
    found = read(data, Answer, most=bound_tensors(model))
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
    own: bytes = b"",
) -> tuple[bytes, ClientState]:
    """Client: the answer to an ask, both as bytes, and the state after it. The same for every engine.

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
        own: what arrived for this client alone.
    """
    if kind_of(message) == "step":
        return _stepped(read(message, Step), own, party), state
    ask = read(message, Ask, most=bound_tensors(model))
    refuse_old(ask, state.seen)
    opened = None
    if party is not None or ask.secure:
        opened = _opened(ask, party, hashlib.sha256(message).digest())
    found, private = answer(ask, model, data, state.private, client=client, defence=defence, loss=loss, opened=opened)
    return found, ClientState({"session": ask.session, "round": ask.round, "token": ask.token}, private)


IDENTITY, ROSTER = "FEDVEIL_IDENTITY", "FEDVEIL_ROSTER"  # of a client's environment: its files, which no job names


@lru_cache(maxsize=8)
def party_of(identity: Path, roster: Path) -> Party:
    """Client: its part in secure aggregation, from the files of `fedveil keys new` and of the roster.

    Keys of a run, and what must not be forgotten before it ends, are kept in a file beside the identity: a client whose
    process starts again goes on.
    """
    return Party(Identity.load(identity), Roster.read(roster), Memory(identity.with_suffix(".memory")))


def own_party() -> Party | None:
    """Client: the one that its environment names; None without."""
    identity, roster = os.environ.get(IDENTITY), os.environ.get(ROSTER)
    if not identity:
        return None
    if not roster:
        raise BadArgument(IDENTITY, f"there is no {ROSTER} beside it", "the file that lists who may take part")
    return party_of(Path(identity), Path(roster))


class Opened(NamedTuple):
    """What a client masks its update with."""

    party: Party
    opening: Opening
    digest: bytes  # SHA-256 of the whole ask
    clip: float | None  # with differential privacy, the longest gradient


def _opened(ask: Ask, party: Party | None, digest: bytes) -> Opened:
    if party is None:
        what = "the server asks for secure aggregation, and this client has no identity for it"
        raise BadArgument("ask", what, "fedveil keys new NAME, and a roster (docs/secure-aggregation.md)")
    if not ask.secure:
        what = "this client takes part with secure aggregation only, and the server asks for its update as it is"
        raise BadArgument("ask", what, "secure_aggregation=True on the server")
    clip = ask.secure.get("clip")
    if clip is not None:
        positive("ask", "clip", clip)
    return Opened(party, Opening.from_values(ask.secure), digest, clip)


def _stepped(step: Step, own: bytes, party: Party | None) -> bytes:
    """Client: the answer to another step of secure aggregation."""
    if party is None:
        raise BadArgument("step", "this client takes no part in secure aggregation", "docs/secure-aggregation.md")
    body = as_bytes("step", step.tensors, "body")
    if step.step == "hello":
        found = json.dumps(party.hello(step.session).values()).encode()
    elif step.step == "settle":
        found = party.settle(body, own)
    elif step.step == "reveal":
        found = party.reveal(body)
    else:
        raise BadArgument("step", f"there is no step {step.step[:20]!a}")
    return write(Step(step.session, step.step, {"body": as_tensor(found)}))


def answer(
    ask: Ask,
    model: nn.Module,
    data: Data,
    state: Mapping[str, Any],
    *,
    client: int,
    defence: Defence | None = None,
    loss: Function | None = None,
    opened: Opened | None = None,
) -> tuple[bytes, dict[str, Any]]:
    """Client: the answer to an ask, and what the client keeps to itself for its next one.

    `state` is what it kept after its last answer; the other arguments are those of `fedveil.flower.answer`.
    """
    began = time.perf_counter()
    messages, own = _defence(ask, defence)
    own_loss = known_loss("answer", ask.loss, ask.loss_settings, None if loss is None else find_loss(loss))
    with refuse_failures():
        broadcast = messages.unpack(model, ask.values, ask.tensors, own_loss)
    parameters = [tensor for name, tensor in ask.tensors.items() if name.startswith("parameter/")]
    if not parameters:
        raise BadArgument("ask", "it holds no parameters")
    dtype = parameters[0].dtype  # computes in the dtype that travels
    source = as_source("this client", data if isinstance(data, Dataset) or not callable(data) else data())
    shards = shards_of(model, own_loss, checked_records([source]), ask.batch_size, ask.seed, dtype)
    shards = dataclasses.replace(shards, names=(client,))
    own.prepare_client(model, shards.example, own_loss)
    if state:
        own.restore_client(0, state)
    with refuse_failures():
        update = client_update(
            own, model, broadcast, shards, client=0, number=ask.round, whole_shard=ask.whole_shard, dtype=dtype
        )
    values, tensors = messages.pack_update(own, update)
    if opened is not None:
        return write(_masked(ask, opened, own, tensors, shards.sizes[0], began)), own.client_state(0)
    seconds = time.perf_counter() - began
    found = Answer(ask.round, ask.token, ask.defence, shards.sizes[0], seconds, values, tensors)
    return write(found), own.client_state(0)


def _masked(ask: Ask, opened: Opened, own: Defence, tensors: Tensors, records: int, began: float) -> Masked:
    """An update under its masks; none if its numbers do not fit."""
    if not own.linear:
        raise BadArgument("ask", f"{own.name} is not linear, and its updates cannot be summed under masks")
    upload = b""
    try:
        words = words_of(tensors, records, opened.opening, opened.clip)
        upload = opened.party.upload(opened.opening, opened.digest, words)
    except OutOfRange:
        pass
    seconds = time.perf_counter() - began
    return Masked(ask.round, ask.token, ask.defence, seconds, bool(upload), {"upload": as_tensor(upload)})


def _defence(ask: Ask, own: Defence | None) -> tuple[PlainMessages, Defence]:
    """A serialiser of messages, and the client's defence: of the server's kind, and not one for tests."""
    if own is None:
        return build_for_client(ask.defence, ask.settings)
    record = record_of(own)
    if record is None or record.name != ask.defence:
        raise BadArgument("answer", f"the server's defence is {ask.defence!r}, this client insists on {own.name!r}")
    refuse_repeatable("answer", own)
    return messages_of(record, own.name), own
