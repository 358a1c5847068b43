"""Messages between a server and its clients: each as a frozen dataclass, their one encoding, their bounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, get_type_hints

from torch import nn

from fedveil.checks import whole
from fedveil.defences.interface import AnyCodec, AnyRound
from fedveil.errors import BadArgument, StaleUpdate
from fedveil.wire import HEAD, Tensors, checked, from_bytes, to_bytes

MOST_RECORDS = 2**53
LONGEST = 1e9  # seconds
MOST_PER_TENSOR = 4  # tensors in an ask or an answer for each of the model's
LONGEST_ASK = 2**22  # bytes of an ask's values: a roster of 10,000 members for secure aggregation takes most of it
MOST_COUNT, MOST_SEEDS = 2**53, 2**64  # of rounds and of records in a batch; seeds that torch takes
_HINTS: dict[type, dict[str, Any]] = {}  # by kind of message; they take longer to find than a message to read
Message = TypeVar("Message", "Ask", "Answer", "Masked", "Step")


@dataclass(frozen=True, eq=False)
class Ask:
    """An ask to a client: the broadcast of a round, and all that it takes to answer it."""

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
    """A client's answer: its update, and the exchange that it belongs to."""

    round: int
    token: str
    defence: str
    records: int  # |D_k|, the client's weight
    seconds: float  # that it took the client, as it says
    values: dict[str, Any]
    tensors: Tensors


@dataclass(frozen=True, eq=False)
class Masked:
    """A client's answer under secure aggregation: words that say nothing, no count of records and no times."""

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
    values, tensors = from_bytes(data, where, 1 if kind is Step else most, LONGEST_ASK if kind is Ask else HEAD)
    found: Message = kind(**checked(where, values, _wanted(kind)), tensors=tensors)
    if isinstance(found, Answer) and not 1 <= found.records <= MOST_RECORDS:
        raise BadArgument(where, f"records must be from 1 to 2^53, got {found.records}")
    if isinstance(found, Answer) and not 0 <= found.seconds < LONGEST:
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


def _wanted(kind: type) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = {name: hint for name, hint in get_type_hints(kind).items() if name != "tensors"}
    return _HINTS[kind]


class Taken(NamedTuple):
    """An answer as the server uses it."""

    update: Any
    records: int
    seconds: float


def take(data: bytes, ask: Ask, codec: AnyCodec, own_round: AnyRound, model: nn.Module, position: int) -> Taken:
    """Server: the update in an answer to this ask, and what the client says about it; any other is refused."""
    found = read(data, Answer, most=bound_tensors(model))
    _check_exchange(found, ask, position)
    update = codec.decode_update(own_round, model, found.values, found.tensors, position)
    return Taken(update, found.records, found.seconds)


def take_masked(data: bytes, ask: Ask, position: int) -> Masked:
    """Server: a masked answer to this ask; any other is refused."""
    found = read(data, Masked, most=1)
    _check_exchange(found, ask, position)
    return found


def _check_exchange(found: Answer | Masked, ask: Ask, position: int) -> None:
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
