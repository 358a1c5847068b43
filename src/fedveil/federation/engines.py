"""Engines: how a server reaches its clients, what valid replies hold, and what can go wrong with the others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol

from fedveil.defences.interface import AnyRound, U
from fedveil.errors import BadArgument, FedveilError, NonFiniteUpdate, StaleUpdate

if TYPE_CHECKING:
    from fedveil.federation.protocol import SecureTerms, Step

MAX_TEXT = 200  # characters of a client's text
SERVER = "server"  # in place of a member, for faults of an attempt as a whole
Member = int | str  # a client, by its index in this process, its Flower node id or the name of its FLARE site


class FaultKind(StrEnum):
    """Why a reply does not count; docs/flower.md and docs/nvflare.md explain each."""

    SILENT = "silent"
    UNREACHABLE = "unreachable"
    ENGINE_ERROR = "engine error"  # the engine's own code is in the text
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
"""Faults after which asking a client again in the same round would only delay the others."""


@dataclass(frozen=True)
class Fault:
    """A reply that does not count. Its text may come from the client, so it is shortened and made printable."""

    member: Member
    kind: FaultKind
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", clean(self.text))

    def __str__(self) -> str:
        who = SERVER if self.member == SERVER else f"client {self.member}"
        return f"{who}: {self.kind}: {self.text}"


def clean(text: object) -> str:
    """Make untrusted text safe to print: one short line without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:MAX_TEXT])


def describe_refusal(member: Member, error: Exception) -> Fault:
    """Return the fault of a client whose reply raised this error; the text of other errors than ours is left out."""
    if isinstance(error, BadArgument):
        return Fault(member, FaultKind.MALFORMED, f"{error.where}: {error.what}")
    if isinstance(error, FedveilError):
        other = FaultKind.NOT_FINITE if isinstance(error, NonFiniteUpdate) else FaultKind.REFUSED
        return Fault(member, FaultKind.STALE if isinstance(error, StaleUpdate) else other, error.what)
    return Fault(member, FaultKind.MALFORMED, f"{type(error).__name__}: {error}")


@dataclass
class Traffic:
    """The bytes of a round's exchanges."""

    asked: int = 0  # clients
    exchanges: int = 0
    down: int = 0
    up: int = 0
    seconds_work: float = field(default=0.0)  # of the slowest client, as it reports

    def count_down(self, sizes: Sequence[int]) -> None:
        """Count one exchange, from the sizes of its messages to clients."""
        self.exchanges += 1
        self.asked = max(self.asked, len(sizes))
        self.down += sum(sizes)

    def figures(self) -> dict[str, float]:
        """Return the figures for the round's record; those per client are averages."""
        down, up = round(self.down / self.asked), round(self.up / self.asked)
        found = {"bytes_total": self.down + self.up, "bytes_down": down, "bytes_up": up}
        further = {"exchanges": self.exchanges if self.exchanges > 1 else 0, "seconds_work": self.seconds_work}
        return found | {name: value for name, value in further.items() if value}


@dataclass(frozen=True, eq=False)
class Reply(Generic[U]):
    """A valid reply to a broadcast. A fused pass replies for several clients at once."""

    members: tuple[Member, ...]
    update: U
    records: int  # |D_k|, the weight of the update


AnyReply = Reply[Any]  # type: ignore[explicit-any]
Channels = Mapping[Member, bytes]  # the keys of tags, by client (`fedveil.secagg.identity`)


class Engine(Protocol):
    """Asks clients, and yields valid replies and faults. Whatever ends the engine itself is raised.

    Attributes:
        stream: name of the random stream that chooses clients.
        stable: whether a member is the same client in every round; otherwise privacy is accounted for all clients.
        keeps_nothing: whether no client holds a broadcast after its round, so that its memory can be reused.
    """

    stream: str
    stable: bool
    keeps_nothing: bool

    @property
    def traffic(self) -> Traffic | None:
        """The bytes since the round began; None in one process."""

    def start_round(self) -> None:
        """Begin to count the traffic of a round."""

    def members(self) -> list[Member]:
        """Return the clients that can be asked now, in a fixed order."""

    def ask(self, number: int, own_round: AnyRound, members: Sequence[Member]) -> Iterator[AnyReply | Fault]:
        """Send the broadcast of round `number`; yield a reply or a fault for each client, or one reply for several."""

    def ask_masked(
        self, number: int, own_round: AnyRound, members: Sequence[Member], terms: "SecureTerms", channels: Channels
    ) -> tuple[bytes, Iterator[tuple[Member, bytes] | Fault]]:
        """Send the broadcast of an attempt under secure aggregation; return its digest, and the masked uploads."""

    def take_step(
        self, step: "Step", own: Mapping[Member, bytes], channels: Channels | None, timeout: float | None = None
    ) -> Iterator[tuple[Member, bytes] | Fault]:
        """Send a step of secure aggregation, to each client with bytes for it alone; yield the bodies of the replies.

        Args:
            step: for all clients.
            own: for each client.
            channels: keys of the tags that authenticate it; None for a signature.
            timeout: seconds, in place of the server's.
        """

    def close(self) -> None:
        """Release the connection; where possible, tell clients that there will be no more messages."""
