"""Messages between a server and its clients: frozen dataclasses, their one encoding, and their bounds."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar, get_type_hints

from torch import nn

from fedveil.checks import check_count, check_positive
from fedveil.errors import BadArgument, StaleUpdate
from fedveil.wire import MAX_HEAD, Tensors, Values, as_bytes, as_tensor, check_fields, from_bytes, to_bytes

if TYPE_CHECKING:
    from fedveil.secagg import Opening

MAX_COUNT = 2**53  # of rounds and of records: exact in float64 and in every JSON parser
MAX_SEED = 2**64
MAX_SECONDS = 1e9
MAX_PER_TENSOR = 4  # tensors in an ask or an answer for each of the model's
MAX_ASK_HEAD = 2**22  # bytes of an ask's values: a roster of 10,000 members takes most of it


@dataclass(frozen=True)
class SecureTerms:
    """The part of an ask that concerns secure aggregation."""

    opening: "Opening"
    clip: float | None = None  # with differential privacy, the maximum norm of a client's gradient

    def values(self) -> Values:
        """Return the terms as JSON values."""
        return self.opening.values() | ({} if self.clip is None else {"clip": self.clip})

    @classmethod
    def from_values(cls, values: Values) -> "SecureTerms":
        """Invert `values`; anything else is refused."""
        from fedveil.secagg import Opening  # only clients that take part in secure aggregation need it

        clip = values.get("clip")
        return cls(Opening.from_values(values), None if clip is None else check_positive("ask", "clip", clip))


@dataclass(frozen=True, eq=False)
class Ask:
    """A broadcast and everything else that a client needs to answer it."""

    session: str  # of the server's process: a restarted server has another
    round: int  # from 0
    token: str  # of the exchange; the answer quotes it
    defence: str  # name in the registry
    settings: Values  # of the defence, for the client's part
    loss: str  # its name
    loss_settings: Values  # see `Loss.settings`
    whole_shard: bool  # all records of the client, or its next batch
    batch_size: int
    seed: int  # of the order of records
    secure: Values  # `SecureTerms.values`; empty without secure aggregation
    values: Values
    tensors: Tensors


@dataclass(frozen=True, eq=False)
class Answer:
    """A client's update."""

    round: int
    token: str
    defence: str
    records: int  # |D_k|, the client's weight
    seconds: float  # of the client's work, as it reports
    values: Values
    tensors: Tensors


@dataclass(frozen=True, eq=False)
class MaskedAnswer:
    """A client's update under secure aggregation: masked words, without its records and its time."""

    round: int
    token: str
    defence: str
    tensors: Tensors


@dataclass(frozen=True, eq=False)
class Step:
    """A further message of secure aggregation ("hello", "settle", "reveal" or "end"), and the reply to it."""

    session: str
    step: str
    tensors: Tensors

    @classmethod
    def make(cls, session: str, step: str, body: bytes) -> "Step":
        """Return a step with this body."""
        return cls(session, step, {"body": as_tensor(body)})

    @property
    def body(self) -> bytes:
        """The bytes that the step carries."""
        return as_bytes("step", self.tensors, "body")


Message = TypeVar("Message", Ask, Answer, MaskedAnswer, Step)
HINTS: Mapping[type, dict[str, object]] = {  # the types of a message's values
    kind: {name: hint for name, hint in get_type_hints(kind).items() if name != "tensors"}
    for kind in (Ask, Answer, MaskedAnswer, Step)
}


def write(message: Ask | Answer | MaskedAnswer | Step) -> bytes:
    """Encode a message."""
    values = {field.name: getattr(message, field.name) for field in fields(message) if field.name != "tensors"}
    return to_bytes(type(message).__name__.lower(), values, message.tensors)


def read(data: bytes, kind: type[Message], max_tensors: int | None = None) -> Message:
    """Decode a message of a kind; anything else is refused, and so are more than `max_tensors` tensors."""
    where = kind.__name__.lower()
    head = MAX_ASK_HEAD if kind is Ask else MAX_HEAD
    values, tensors = from_bytes(data, where, 1 if kind is Step else max_tensors, head)
    found: Message = kind(**check_fields(where, values, HINTS[kind]), tensors=tensors)
    if isinstance(found, Answer):
        if not 1 <= found.records <= MAX_COUNT:
            raise BadArgument(where, f"records must be from 1 to 2^53, got {found.records}")
        if not 0 <= found.seconds < MAX_SECONDS:
            raise BadArgument(where, f"seconds must be from 0 to {MAX_SECONDS:g}, got {found.seconds}")
    elif isinstance(found, Ask):
        _check_ask(found)
    return found


def _check_ask(ask: Ask) -> None:
    """Refuse integers out of range, and text that cannot be printed."""
    for name, least, end in (("round", 0, MAX_COUNT), ("batch_size", 1, MAX_COUNT), ("seed", 0, MAX_SEED)):
        if check_count("ask", name, getattr(ask, name), least) >= end:
            raise BadArgument("ask", f"{name} must be below {end}, got {getattr(ask, name)}")
    for name in ("session", "token", "defence", "loss"):
        if not getattr(ask, name).isprintable():
            raise BadArgument("ask", f"{name} contains characters that cannot be printed")


def max_tensors(model: nn.Module) -> int:
    """Return the maximum number of tensors in a message about this model."""
    return MAX_PER_TENSOR * (len(list(model.parameters())) + len(list(model.buffers())) + 1)


def check_exchange(answer: Answer | MaskedAnswer, ask: Ask) -> None:
    """Server: refuse an answer to another ask."""
    if (answer.round, answer.token, answer.defence) != (ask.round, ask.token, ask.defence):
        raise StaleUpdate("answer", f"it belongs to another exchange, of round {answer.round}")


@dataclass(frozen=True)
class LastAsk:
    """The last ask that a client answered."""

    session: str
    round: int
    token: str


def refuse_old(ask: Ask, last: LastAsk | None) -> None:
    """Client: refuse an earlier round of the server's session, and an ask that was answered before."""
    if last is None or last.session != ask.session:
        return
    if last.token == ask.token:
        raise StaleUpdate("this client", f"it has already answered this ask of round {ask.round}")
    if ask.round < last.round:
        raise StaleUpdate("this client", f"the ask is for round {ask.round}, and it has answered a later one")
