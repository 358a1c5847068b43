"""The interface of a defence: its settings, the server's part of a round, and the client's part."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn

from fedveil.defences.state import State, StateValue
from fedveil.errors import BadArgument, UpdateRefused
from fedveil.graph.inputs import Inputs
from fedveil.graph.plan import Plan
from fedveil.scheme import Aggregate, Loss
from fedveil.scheme.result import recover_each
from fedveil.wire import Packed, Tensors, Values

if TYPE_CHECKING:  # most runs do not need it
    from fedveil.privacy.accounting import Accountant, Members
    from fedveil.privacy.gradients import RecordGradients

B = TypeVar("B")  # a broadcast
U = TypeVar("U")  # an update
NO_RECORDS = "the gradients of single records are known only without a defence, or with a veil"
RECORDS_FIX = 'use defence="plain", or fedveil.Veil(multiplicative=1.0, decoys=2)'


@dataclass(frozen=True, eq=False)
class Samples:
    """A client's batch."""

    inputs: Inputs  # the arguments of the model's forward (`fedveil.graph.inputs`)
    targets: Tensor
    weights: Tensor | None = None  # the weight of each sample in the loss, by default 1 / samples


class DefenceRound(ABC, Generic[B, U]):
    """The server's part in one attempt of a round: a broadcast, and the recovery of gradients from its updates."""

    broadcast: B

    @property
    def base(self) -> "DefenceRound[B, U]":
        """The round of the defence whose messages are sent: this one, or the one that it wraps."""
        return self

    @abstractmethod
    def recover(self, updates: Sequence[U], weights: Sequence[float]) -> Aggregate:
        """Return the gradient for this round; weights are |D_k|."""

    def recover_each(self, updates: Sequence[U]) -> list[Aggregate | UpdateRefused]:
        """Return the gradient from each update separately, or the error if it is refused."""
        return recover_each(lambda update: self.recover([update], [1.0]), updates)

    def combine(self, results: Sequence[Aggregate]) -> Aggregate | None:
        """Combine results of `recover_each`; return None to leave this to the server's aggregation rule."""
        return None

    def sum_template(self) -> Tensors:
        """Return tensors like the sums of per-record gradients that `from_sums` takes, on the meta device."""
        raise BadArgument("privacy", NO_RECORDS, RECORDS_FIX)

    def from_sums(self, sums: Tensors) -> U:
        """Return an update with these sums of per-record gradients, one row per pass, in place of gradients."""
        raise BadArgument("privacy", NO_RECORDS, RECORDS_FIX)

    def recover_total(self, total: Tensors, records: float, members: int | None, survivors: int = 0) -> Aggregate:
        """Return the gradient from a sum of integers.

        Args:
            total: the sum, by the names of `sum_template`.
            records: of all clients in the sum.
            members: the number of clients that were asked, under secure aggregation.
            survivors: the number of clients in the sum, under secure aggregation.
        """
        raise BadArgument("sum", "only sums of integers are recovered without a mean")

    def count_lost(self) -> None:
        """Take note that clients have revealed a sum that the server could not open."""

    def finish_sum(self, mean: Aggregate, clients: int) -> Aggregate:
        """Complete the result of secure aggregation, a mean over `clients` clients."""
        return mean

    def release(self, *, reuse: bool = False) -> None:
        """Drop the secret: the round is over, however it ended.

        Args:
            reuse: the broadcast is no longer in use, and its memory may be reused for the next one.
        """
        return


class Ranges(ABC, Generic[U]):
    """The value ranges that secure aggregation needs; part of a linear defence's round."""

    @abstractmethod
    def expect(self, update: U, last: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """Predict the next round's update, whatever its noise, from a mean update; `last` is the last prediction."""

    @abstractmethod
    def bound(self, expected: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """Bound each row of an update that answers this round's broadcast, by the name under which it is sent."""

    @abstractmethod
    def bound_rounding(self, rows: Mapping[str, Sequence[float]]) -> float:
        """Bound the norm of the gradient error caused by rounding every element of each row."""


class DefenceServer(ABC, Generic[B, U]):
    """The server's state for a run."""

    accountant: "Accountant | None" = None  # of a differentially private defence
    plan: Plan | None = None  # of a veil: which part of the model is perturbed
    draws: int = 0  # of a veil that keeps its noise: how often it was drawn
    has_budget: bool = True  # of a differentially private defence: whether one more round is within its epsilon

    @abstractmethod
    def start_round(self, model: nn.Module, members: "Members" = None) -> DefenceRound[B, U]:
        """Create the broadcast for an attempt; `members` are the clients that will answer, if known."""

    def state(self) -> State:
        """Return the state needed to resume the run, without secrets."""
        return {}

    def restore(self, state: Mapping[str, StateValue]) -> None:
        """Continue from `state`."""
        return


class DefenceClient(ABC, Generic[B, U]):
    """A client's part, for one or several clients; `client` says whose private state to use."""

    @abstractmethod
    def step(self, broadcast: B, samples: Samples, client: int = 0) -> U:
        """Compute the update for one batch."""

    @abstractmethod
    def accumulate(self, broadcast: B, total: U | None, update: U) -> tuple[B, U]:
        """Add the update of the same client's next batch; return the broadcast to continue with, and the sum."""

    def sample(self, records: int) -> tuple[Tensor, Tensor] | None:
        """Return the indices of a round's records, and which of these count; None leaves the choice to the seed."""
        return None

    def record_gradients(self, broadcast: B) -> "RecordGradients":
        """Return how to compute the gradients of single records."""
        raise BadArgument("privacy", NO_RECORDS, RECORDS_FIX)

    def upload(self, update: U, client: int = 0) -> U:
        """Return the update to send, given the one computed in this round; by default, the same."""
        return update

    def prepare_sum(self, update: U, members: int | None) -> U:
        """Return an upload as it enters a sum over `members` clients; None without secure aggregation."""
        return update

    def state(self, client: int) -> State:
        """Return a client's private state, which the server never sees."""
        return {}

    def restore(self, client: int, state: Mapping[str, StateValue]) -> None:
        """Continue from `state`."""
        return


class Codec(ABC, Generic[B, U]):
    """The encoding of a defence's messages as plain values and tensors, which `fedveil.wire` serialises."""

    @abstractmethod
    def encode_broadcast(self, broadcast: B) -> Packed:
        """Server: encode a broadcast."""

    @abstractmethod
    def decode_broadcast(self, model: nn.Module, values: Values, tensors: Tensors, loss: Loss) -> B:
        """Client: decode a broadcast; refuse one for a model other than the client's."""

    @abstractmethod
    def encode_update(self, update: U) -> Packed:
        """Client: encode an update."""

    @abstractmethod
    def decode_update(
        self, own: DefenceRound[B, U], model: nn.Module, values: Values, tensors: Tensors, position: int
    ) -> U:
        """Server: decode the update of the client at a position; refuse one that cannot be aggregated."""

    @abstractmethod
    def template(self, own: DefenceRound[B, U], model: nn.Module) -> Packed:
        """Server: return an encoded update for this round, with arbitrary values."""


class Defence(ABC, Generic[B, U]):
    """A defence: its settings and traits. Derive yours from this class or from `Plain`."""

    name: str  # as printed
    fusable: bool = True  # batches of several clients may go through one `step` as if they were one client's
    integer_sums: bool = False  # updates are integers, which are added and not averaged
    linear: bool = False  # the weighted mean of updates may stand for all of them; its rounds have `Ranges`
    durable: bool = False  # a round must be on disk before the next broadcast, for privacy accounting
    repeatable: bool = False  # secrets follow from a seed; a server and clients on a network refuse that
    dp_clip: float | None = None  # maximum norm of a client's gradient, of a differentially private defence
    has_record_gradients: bool = False  # clients can compute the gradient of a single record
    sampling_rate: float | None = None  # at which clients draw their own samples of records
    planned_rounds: int | None = None  # for which the noise was chosen
    clippable: bool = False  # clients compute the gradient itself, and can clip it
    largest_factor: float = 1.0  # maximum factor on an update's values
    remote_settings: ClassVar[tuple[str, ...]] = ()  # attributes, also arguments, that a server may set on clients

    @property
    def base(self) -> "Defence[B, U]":
        """The defence whose messages are sent: this one, or the one that it wraps."""
        return self

    @property
    def asked(self) -> "AnyDefence":
        """The registered defence that a server asks its clients for."""
        return self.base

    @property
    def record_terms(self) -> Values:
        """If records are protected, the settings that clients need for it (`fedveil.Privacy.terms`)."""
        return {}

    @property
    def codec(self) -> Codec[B, U] | None:
        """The encoding of messages; None if they cannot be sent."""
        return None

    @abstractmethod
    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> DefenceServer[B, U]:
        """Prepare the server for a run."""

    @abstractmethod
    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> DefenceClient[B, U]:
        """Prepare clients for a run; `model` defines the architecture."""

    def require_record_gradients(self) -> None:
        """Refuse if clients cannot compute the gradient of a single record."""
        if not self.has_record_gradients:
            raise BadArgument("privacy", f"{self.name}: {NO_RECORDS}", RECORDS_FIX)

    def least_members(self, members: int) -> int:
        """Return how many of the members of a sum must be in it, if clients add noise in shares."""
        return 0

    def check_records(self, model: nn.Module, loss: Loss) -> None:
        """Refuse a model or a loss in which records influence one another, if records are protected."""
        return

    def for_records(self) -> "Defence[B, U]":
        """Return the variant of this defence that a guarantee for records needs; by default itself."""
        return self

    @abstractmethod
    def client_view(self, model: nn.Module, broadcast: B) -> nn.Module:
        """Return the model as a client receives it: the target of published attacks."""


AnyDefence = Defence[Any, Any]  # type: ignore[explicit-any]
AnyRound = DefenceRound[Any, Any]  # type: ignore[explicit-any]
AnyServer = DefenceServer[Any, Any]  # type: ignore[explicit-any]
AnyClient = DefenceClient[Any, Any]  # type: ignore[explicit-any]
AnyCodec = Codec[Any, Any]  # type: ignore[explicit-any]
AnyRanges = Ranges[Any]  # type: ignore[explicit-any]
