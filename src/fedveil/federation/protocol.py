"""The messages between a server and its clients, and the interface of the engines that deliver them.

Every message is a frozen dataclass; `write` encodes it, and `read` decodes and checks it. An engine sends messages to
clients, and yields their valid replies and a fault for each client without a valid reply.
"""

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, get_type_hints

from torch import nn

from fedveil.checks import check_count, check_positive
from fedveil.defences.interface import AnyRound, U
from fedveil.errors import AnalysisError, BadArgument, FedveilError, NonFiniteUpdate, StaleUpdate, TooFewAnswers
from fedveil.wire import MAX_HEADER, Tensors, Values, as_bytes, as_tensor, check_fields, from_bytes, to_bytes

if TYPE_CHECKING:
    from fedveil.secagg import Opening

MAX_COUNT = 2**53  # bound on rounds and records: smaller integers are exact in float64 and in every JSON parser
MAX_SEED = 2**64
MAX_SECONDS = 1e9
MAX_PER_TENSOR = 4  # maximum number of tensors in a message, per tensor of the model
MAX_REQUEST_HEAD = 2**22  # maximum size of a request's values in bytes: enough for a roster of 10,000 members
CHALLENGE_SIZE = 16  # size in bytes of the challenge in a greeting, which the client must sign in its reply
MAX_RECORDED_FAULTS = 20  # maximum number of faults in a round's record
MAX_SHOWN_FAULTS = 5  # maximum number of faults in an error message
MAX_TEXT = 200  # maximum length of text from a client, in characters
SERVER = "server"  # used as the member in faults that concern a whole attempt
Member = int | str  # identifies a client: its index in this process, its Flower node id or the name of its FLARE site
LOG = logging.getLogger("fedveil.rounds")


@dataclass(frozen=True)
class SecureTerms:
    """The part of a request that concerns secure aggregation."""

    opening: "Opening"
    clip: float | None = None  # with differential privacy, the maximum norm of a client's gradient

    def values(self) -> Values:
        """Return the terms as JSON values."""
        return self.opening.values() | ({} if self.clip is None else {"clip": self.clip})

    @classmethod
    def from_values(cls, values: Values) -> "SecureTerms":
        """Parse the result of `values`; refuse anything else."""
        from fedveil.secagg import Opening  # imported here because most clients do not need it

        clip = values.get("clip")
        return cls(Opening.from_values(values), None if clip is None else check_positive("request", "clip", clip))


@dataclass(frozen=True, eq=False)
class Request:
    """A broadcast and all other values that a client needs to compute its answer."""

    session: str  # identifies the server's process; a restarted server has a new session
    round: int  # starts at 0
    token: str  # identifies the exchange; repeated in the answer
    defence: str  # name in the registry
    settings: Values  # settings of the defence that clients need
    loss: str  # name of the loss
    loss_settings: Values  # see `Loss.settings`
    whole_shard: bool  # whether to use all the client's records instead of its next batch
    batch_size: int
    seed: int  # seed for the order of records
    privacy: Values  # `Privacy.terms` if records are protected; otherwise empty
    secure: Values  # `SecureTerms.values`; empty without secure aggregation
    values: Values
    tensors: Tensors
    local: str = ""  # the digest of frozen parameters that are not sent (`fedveil.federation.frozen`)
    output: str = ""  # the choice of predictions (`fedveil.graph.outputs.describe_output`)


@dataclass(frozen=True, eq=False)
class Answer:
    """A client's update."""

    round: int
    token: str
    defence: str
    records: int  # |D_k|, the client's weight
    seconds: float  # computing time, as reported by the client
    values: Values
    tensors: Tensors


@dataclass(frozen=True, eq=False)
class MaskedAnswer:
    """A client's masked update, without its number of records or its computing time."""

    round: int
    token: str
    defence: str
    tensors: Tensors


@dataclass(frozen=True, eq=False)
class Step:
    """Any other message of secure aggregation ("hello", "settle", "reveal" or "end"), or a reply to it."""

    session: str
    step: str
    tensors: Tensors

    @classmethod
    def make(cls, session: str, step: str, body: bytes) -> "Step":
        """Create a step with the given body."""
        return cls(session, step, {"body": as_tensor(body)})

    @property
    def body(self) -> bytes:
        """The content of the step."""
        return as_bytes("step", self.tensors, "body")


Message = TypeVar("Message", Request, Answer, MaskedAnswer, Step)
HINTS: Mapping[type, dict[str, object]] = {  # the types of each message's fields, except its tensors
    message_type: {name: hint for name, hint in get_type_hints(message_type).items() if name != "tensors"}
    for message_type in (Request, Answer, MaskedAnswer, Step)
}


def write(message: Request | Answer | MaskedAnswer | Step) -> bytes:
    """Encode a message."""
    values = {
        message_field.name: getattr(message, message_field.name)
        for message_field in fields(message)
        if message_field.name != "tensors"
    }
    return to_bytes(type(message).__name__.lower(), values, message.tensors)


def read(data: bytes, message_type: type[Message], max_tensors: int | None = None) -> Message:
    """Decode a message of the given kind; refuse anything else, and messages with more than `max_tensors` tensors."""
    where = message_type.__name__.lower()
    max_header = MAX_REQUEST_HEAD if message_type is Request else MAX_HEADER
    values, tensors = from_bytes(data, where, 1 if message_type is Step else max_tensors, max_header)
    result: Message = message_type(**check_fields(where, values, HINTS[message_type]), tensors=tensors)
    if isinstance(result, Answer):
        if not 1 <= result.records <= MAX_COUNT:
            raise BadArgument(where, f"records must be from 1 to 2^53, got {result.records}")
        if not 0 <= result.seconds < MAX_SECONDS:
            raise BadArgument(where, f"seconds must be from 0 to {MAX_SECONDS:g}, got {result.seconds}")
    elif isinstance(result, Request):
        _check_request(result)
    return result


def _check_request(request: Request) -> None:
    """Refuse integers that are out of range, and unprintable text."""
    for name, minimum, bound in (("round", 0, MAX_COUNT), ("batch_size", 1, MAX_COUNT), ("seed", 0, MAX_SEED)):
        if check_count("request", name, getattr(request, name), minimum) >= bound:
            raise BadArgument("request", f"{name} must be below {bound}, got {getattr(request, name)}")
    for name in ("session", "token", "defence", "loss", "local", "output"):
        if not getattr(request, name).isprintable():
            raise BadArgument("request", f"{name} contains unprintable characters")


def max_tensors(model: nn.Module) -> int:
    """Return the maximum number of tensors in a message about this model."""
    return MAX_PER_TENSOR * (len(list(model.parameters())) + len(list(model.buffers())) + 1)


def check_exchange(answer: Answer | MaskedAnswer, request: Request) -> None:
    """Refuse an answer to another request; used by the server."""
    if (answer.round, answer.token, answer.defence) != (request.round, request.token, request.defence):
        raise StaleUpdate("answer", f"the answer belongs to another exchange, in round {answer.round}")


@dataclass(frozen=True)
class LastRequest:
    """The last request that a client answered."""

    session: str
    round: int
    token: str


def refuse_old(request: Request, last_request: LastRequest | None) -> None:
    """Refuse a request that was already answered or is for an earlier round of the session; used by the client."""
    if last_request is None or last_request.session != request.session:
        return
    if last_request.token == request.token:
        raise StaleUpdate("this client", f"the request of round {request.round} has already been answered")
    if request.round < last_request.round:
        raise StaleUpdate(
            "this client", f"the request is for round {request.round}, but this client has already answered a later one"
        )


class FaultKind(StrEnum):
    """The reason why a reply is not used. docs/flower.md and docs/nvflare.md explain each kind."""

    SILENT = "silent"
    UNREACHABLE = "unreachable"
    ENGINE_ERROR = "engine error"  # the text contains the engine's error code
    RAISED = "raised"
    UNREADABLE = "unreadable"
    MALFORMED = "malformed"
    REFUSED = "refused"
    NOT_FINITE = "not finite"
    STALE = "stale"
    FOREIGN = "foreign"
    TWICE = "twice"
    TOO_FEW = "too few"
    ABORTED = "aborted"


WRONG_REPLIES = {FaultKind.MALFORMED, FaultKind.REFUSED, FaultKind.NOT_FINITE, FaultKind.STALE, FaultKind.UNREADABLE}
"""Faults after which asking the client again in the same round would only delay the other clients."""


@dataclass(frozen=True)
class Fault:
    """A reply that is not used. The text may come from the client, so it is shortened and made printable."""

    member: Member
    kind: FaultKind
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", clean(self.text))

    def __str__(self) -> str:
        sender = SERVER if self.member == SERVER else f"client {self.member}"
        return f"{sender}: {self.kind}: {self.text}"


def clean(text: object) -> str:
    """Make untrusted text safe to print: one short line without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:MAX_TEXT])


def describe_refusal(member: Member, error: Exception) -> Fault:
    """Return the fault for a reply that caused this error."""
    if isinstance(error, BadArgument):
        return Fault(member, FaultKind.MALFORMED, f"{error.where}: {error.what}")
    if isinstance(error, FedveilError):
        kind = FaultKind.NOT_FINITE if isinstance(error, NonFiniteUpdate) else FaultKind.REFUSED
        return Fault(member, FaultKind.STALE if isinstance(error, StaleUpdate) else kind, error.what)
    return Fault(member, FaultKind.MALFORMED, f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def hide_failures() -> Iterator[None]:
    """Replace an unexpected error in a model or defence with one that reveals nothing about the records.

    The original error, whose text may contain values from records, is printed to stderr and kept as the cause.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, FedveilError) and not isinstance(error, AnalysisError):
            raise  # except an AnalysisError, which may quote the sizes of records
        traceback.print_exc(file=sys.stderr)
        message = f"this client cannot answer: {type(error).__name__}"
        raise BadArgument("request", message, "look for the cause in the client's log") from error


def print_failure(message: str) -> None:
    """Print the current exception to stderr. Loggers are not used, because engines may send logs to the server.

    Errors while printing are ignored, because otherwise the server would learn that something was printed.
    """
    with contextlib.suppress(Exception):
        print(f"fedveil: {message}", file=sys.stderr)
        traceback.print_exc(file=sys.stderr)


@dataclass
class FaultLog:
    """The faults in all attempts at a round."""

    round: int
    faults: list[Fault] = field(default_factory=list)

    def add(self, fault: Fault) -> None:
        """Record and log a fault."""
        LOG.warning("round %d: %s", self.round, fault)
        self.faults.append(fault)

    @property
    def wrong_members(self) -> set[Member]:
        """The clients that sent a wrong reply."""
        return {fault.member for fault in self.faults if fault.kind in WRONG_REPLIES}

    def texts(self) -> list[str]:
        """Return the faults as text, for the round's record."""
        return [str(fault) for fault in self.faults[:MAX_RECORDED_FAULTS]]

    def too_few_answers(self, message: str) -> TooFewAnswers:
        """Return the error of a round without enough answers, with the last faults."""
        faults = "; ".join(map(str, self.faults[-MAX_SHOWN_FAULTS:]))
        fix = "check the clients' logs, then resume from the checkpoint"
        return TooFewAnswers(f"round {self.round}", f"{message}: {faults}" if faults else message, fix)


@dataclass
class Traffic:
    """The messages sent and received in a round."""

    num_asked: int = 0  # number of clients that were asked
    exchanges: int = 0
    bytes_sent: int = 0  # bytes sent to clients
    bytes_received: int = 0  # bytes received from clients
    seconds_work: float = 0.0  # the longest computing time that a client reported
    members: set[Member] = field(default_factory=set)  # the clients that were asked
    seconds: dict[Member, float] = field(default_factory=dict)  # duration of each client's last valid answer

    def count_sent(self, sizes: Sequence[int]) -> None:
        """Count one exchange; `sizes` are the sizes of the messages to clients."""
        self.exchanges += 1
        self.num_asked = max(self.num_asked, len(sizes))
        self.bytes_sent += sum(sizes)

    def figures(self) -> dict[str, float]:
        """Return the figures for the round's record; bytes_down and bytes_up are averages per client."""
        bytes_down, bytes_up = round(self.bytes_sent / self.num_asked), round(self.bytes_received / self.num_asked)
        result = {"bytes_total": self.bytes_sent + self.bytes_received, "bytes_down": bytes_down, "bytes_up": bytes_up}
        figures = {"exchanges": self.exchanges if self.exchanges > 1 else 0, "seconds_work": self.seconds_work}
        return result | {name: value for name, value in figures.items() if value}


@dataclass(frozen=True, eq=False)
class Reply(Generic[U]):
    """A valid reply to a broadcast. If clients are fused, one reply represents several clients."""

    members: tuple[Member, ...]
    update: U
    records: int  # |D_k|, the weight of the update


AnyReply = Reply[Any]  # type: ignore[explicit-any]
Channels = Mapping[Member, bytes]  # each client's key for message tags (`fedveil.secagg.identity`)


class Engine(Protocol):
    """Sends messages to clients, and yields valid replies and faults. Fatal errors of the engine are raised.

    Attributes:
        stream: name of the random stream that determines the choice of clients.
        stable: whether a member is the same client in every round; if not, every round counts for every client in the
            privacy accounting.
        keeps_nothing: whether no client keeps a broadcast after the round, so that the broadcast's memory can be
            reused.
    """

    stream: str
    stable: bool
    keeps_nothing: bool

    @property
    def traffic(self) -> Traffic | None:
        """The traffic since the round began; None if clients are in this process."""

    def start_round(self) -> None:
        """Start counting the traffic of a round."""

    def members(self) -> list[Member]:
        """Return the clients that are currently available, in a fixed order."""

    def ask(self, round_number: int, defence_round: AnyRound, members: Sequence[Member]) -> Iterator[AnyReply | Fault]:
        """Send the broadcast of round `round_number`; yield replies, each for one or more clients, and faults."""

    def ask_masked(
        self,
        round_number: int,
        defence_round: AnyRound,
        members: Sequence[Member],
        terms: SecureTerms,
        channels: Channels,
    ) -> tuple[bytes, Iterator[tuple[Member, bytes] | Fault]]:
        """Send the broadcast of a secure-aggregation attempt; return its digest and the masked uploads."""

    def run_step(
        self, step: Step, extras: Mapping[Member, bytes], channels: Channels | None, timeout: float | None = None
    ) -> Iterator[tuple[Member, bytes] | Fault]:
        """Send a step of secure aggregation, with additional bytes for each client; yield the bodies of the replies.

        Args:
            step: the message for all clients.
            extras: additional bytes for each client.
            channels: keys for the tags that authenticate the messages; None to sign them instead.
            timeout: timeout in seconds; by default, the server's timeout.
        """

    def close(self) -> None:
        """Release the connection; where possible, tell clients that there will be no more messages."""
