"""The interface of a defence: its settings, the server's part in a round, and the client's part."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from torch import Tensor, nn

from fedveil.checks import check_count, check_range
from fedveil.errors import BadArgument, UpdateRefused
from fedveil.graph.build import Frozen
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
V = TypeVar("V")  # a value of a state
StateValue = int | float | str | Tensor | list[float] | dict[int | str, int] | dict[str, "StateValue"]
State = dict[str, StateValue]
"""The state of a defence between rounds, as stored in a checkpoint."""
MAX_LOCAL_EPOCHS = 1000  # a server may not occupy a client for longer
SMALLEST_LR, LARGEST_LR = 1e-30, 1e4  # the largest rate fits in float16
DEFAULT_LR = 0.1  # for local training
NO_RECORDS = "per-record gradients are available only without a defence or with a veil"
RECORDS_FIX = 'use defence="plain", or fedveil.Veil(multiplicative=1.0, decoys=2)'


@dataclass(frozen=True, eq=False)
class Samples:
    """A client's batch."""

    inputs: Inputs  # the arguments of the model's `forward` (see `fedveil.graph.inputs`)
    targets: Tensor
    weights: Tensor | None = None  # the weight of each sample in the loss; by default, 1 / number of samples


@dataclass(frozen=True)
class LocalTraining:
    """The settings of local training: the SGD steps that a client takes before it sends the change of the model.

    In a round, a client goes through all its records `epochs` times, in batches and in an order that depends on the
    seed. It takes one SGD step per batch, starting from the model that it received. Its momentum starts at zero in
    every round.

    Attributes:
        epochs: number of passes over the client's records.
        lr: learning rate.
        batch_size: number of records per step; None for the federation's batch size.
        momentum: momentum.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("local_epochs", "local_lr", "local_batch", "local_momentum")
    epochs: int
    lr: float = DEFAULT_LR
    batch_size: int | None = None
    momentum: float = 0.0

    @classmethod
    def from_settings(cls, where: str, values: Mapping[str, object]) -> "LocalTraining | None":
        """Return the settings in `NAMES`, or None without local epochs; a setting of None selects its default."""
        epochs, lr, batch_size, momentum = (values.get(name) for name in cls.NAMES)
        if epochs is None:
            names = [name for name in cls.NAMES if values.get(name) is not None]
            if names:
                raise BadArgument(where, f"{names[0]} has no effect without local epochs", "set local_epochs=1 or more")
            return None
        fix = f"use 1 to {MAX_LOCAL_EPOCHS:,} local epochs"
        if check_count(where, "local_epochs", epochs, 1, fix) > MAX_LOCAL_EPOCHS:
            raise BadArgument(where, f"local_epochs must be at most {MAX_LOCAL_EPOCHS:,}, got {epochs}", fix)
        return cls(
            check_count(where, "local_epochs", epochs),
            check_range(where, "local_lr", DEFAULT_LR if lr is None else lr, SMALLEST_LR, LARGEST_LR),
            None if batch_size is None else check_count(where, "local_batch", batch_size),
            check_range(where, "local_momentum", 0.0 if momentum is None else momentum, 0.0, 1.0 - 2.0**-10),
        )

    def reach(self, steps: int) -> float:
        """Return how far `steps` steps move a parameter whose gradient is 1 in every step.

        The change of the model divided by the reach is a weighted mean of the gradients along the path.

        >>> LocalTraining(1, lr=0.5).reach(4), LocalTraining(1, lr=1.0, momentum=0.5).reach(2)
        (2.0, 2.5)
        """
        m = self.momentum
        return self.lr * (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)


class DefenceRound(ABC, Generic[B, U]):
    """The server's part in one attempt at a round: it creates a broadcast and recovers gradients from the updates."""

    broadcast: B

    @property
    def base(self) -> "DefenceRound[B, U]":
        """The round of the defence that defines the messages: this round, or the round that it wraps."""
        return self

    @abstractmethod
    def recover(self, updates: Sequence[U], weights: Sequence[float]) -> Aggregate:
        """Return the gradient of the round; `weights` are the numbers of records |D_k|."""

    def recover_each(self, updates: Sequence[U]) -> list[Aggregate | UpdateRefused]:
        """Recover a gradient from each update separately; for an update that is refused, return the error."""
        return recover_each(lambda update: self.recover([update], [1.0]), updates)

    def combine(self, results: Sequence[Aggregate]) -> Aggregate | None:
        """Combine the results of `recover_each`, or return None to use the server's aggregation rule."""
        return None

    def check_exact(self, model: nn.Module, inputs: Inputs, targets: Tensor | None) -> None:
        """Refuse a model whose recovered gradients are not exact on a batch, if the defence promises exactness."""
        return

    def sum_template(self) -> Tensors:
        """Return tensors on the meta device, shaped like the sums of per-record gradients for `from_sums`."""
        raise BadArgument("privacy", NO_RECORDS, RECORDS_FIX)

    def from_sums(self, sums: Tensors) -> U:
        """Return an update that contains sums of per-record gradients, one row per pass."""
        raise BadArgument("privacy", NO_RECORDS, RECORDS_FIX)

    def recover_total(
        self, total: Tensors, records: float, num_members: int | None, num_survivors: int = 0
    ) -> Aggregate:
        """Recover the gradient from a sum of integers.

        Args:
            total: the sum, with the names of `sum_template`.
            records: the number of records of all clients in the sum.
            num_members: the number of clients selected for the round, with secure aggregation.
            num_survivors: the number of clients in the sum, with secure aggregation.
        """
        raise BadArgument("sum", "this defence cannot recover a gradient from a sum of integers")

    def count_lost(self) -> None:
        """Account for a sum that clients have revealed but the server could not recover."""

    def finish_sum(self, mean: Aggregate, total: Tensors, clients: int) -> Aggregate:
        """Complete the result of secure aggregation.

        Args:
            mean: the mean over `clients` clients, in the model's dtype.
            total: with a maximum norm for clients (`dp_clip`), the sum of their gradients in float64.
            clients: the number of clients in the sum.
        """
        return mean

    def release(self, *, reuse: bool = False) -> None:
        """Discard the secret. Called at the end of every round, whether or not it succeeded.

        Args:
            reuse: whether the memory of the broadcast may be reused for the next broadcast.
        """
        return


class Ranges(ABC, Generic[U]):
    """The value ranges that secure aggregation needs, implemented by the rounds of linear defences."""

    @abstractmethod
    def expect(self, update: U, last_prediction: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """Predict the next round's update, before noise, from a mean update and the last prediction."""

    @abstractmethod
    def bound(self, expected: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """Return a bound for each row of this round's updates, by the name of the tensor in the message."""

    @abstractmethod
    def bound_rounding(self, row_errors: Mapping[str, Sequence[float]]) -> float:
        """Bound the norm of the gradient error, given the rounding error of the elements in each row."""


class DefenceServer(ABC, Generic[B, U]):
    """The server's part in a run."""

    accountant: "Accountant | None" = None  # only for differentially private defences
    plan: Plan | None = None  # only for a veil: which parts of the model are perturbed
    draws: int = 0  # only for a veil with persistent noise: the number of times that noise was drawn
    has_budget: bool = True  # whether one more round stays within the privacy budget, if there is one

    @abstractmethod
    def start_round(self, model: nn.Module, members: "Members" = None) -> DefenceRound[B, U]:
        """Create a broadcast; `members` are the clients that will take part, if known."""

    def state(self) -> State:
        """Return the state that is needed to resume the run; it contains no secrets."""
        return {}

    def restore(self, state: Mapping[str, StateValue]) -> None:
        """Continue from `state`."""
        return


class DefenceClient(ABC, Generic[B, U]):
    """The client's part in a run. One object can serve several clients; `client` selects the private state."""

    local_training: LocalTraining | None = None  # set by `Defence.start_client`

    @abstractmethod
    def step(self, broadcast: B, samples: Samples, client: int = 0) -> U:
        """Compute the update for one batch."""

    @abstractmethod
    def accumulate(self, broadcast: B, total: U | None, update: U) -> tuple[B, U]:
        """Add the update for one more batch to `total`; return the broadcast for the next batch, and the sum."""

    def train(self, broadcast: B, batches: Iterable[Samples], local: LocalTraining, client: int = 0) -> U:
        """Take one local step per batch, and compute the update from the change of the model."""
        message = f"{type(self).__name__} computes gradients, but does not train locally"
        raise BadArgument("local training", message, "define `train`, or omit local_epochs")

    def sample(self, records: int) -> tuple[Tensor, Tensor] | None:
        """Return the indices of a round's records and a mask of the records to use, or None to use the seeded order."""
        return None

    def record_gradients(self, broadcast: B) -> "RecordGradients":
        """Return an object that computes per-record gradients."""
        raise BadArgument("privacy", NO_RECORDS, RECORDS_FIX)

    def upload(self, update: U, client: int = 0) -> U:
        """Return the update to send, given the update computed in this round; by default, they are the same."""
        return update

    def prepare_sum(self, update: U, num_members: int | None) -> U:
        """Prepare an update for a sum over `num_members` clients; `num_members` is None without secure aggregation."""
        return update

    def state(self, client: int) -> State:
        """Return a client's private state, which the server never sees."""
        return {}

    def restore(self, client: int, state: Mapping[str, StateValue]) -> None:
        """Continue from `state`."""
        return


class Codec(ABC, Generic[B, U]):
    """Encodes a defence's messages as plain values and tensors, which `fedveil.wire` serialises."""

    @abstractmethod
    def encode_broadcast(self, broadcast: B) -> Packed:
        """Server: encode a broadcast."""

    @abstractmethod
    def decode_broadcast(self, model: nn.Module, values: Values, tensors: Tensors, loss: Loss) -> B:
        """Client: decode a broadcast; refuse one that does not match the client's model."""

    @abstractmethod
    def encode_update(self, update: U) -> Packed:
        """Client: encode an update."""

    @abstractmethod
    def decode_update(
        self, defence_round: DefenceRound[B, U], model: nn.Module, values: Values, tensors: Tensors, position: int
    ) -> U:
        """Server: decode a client's update; refuse one that cannot be aggregated."""

    @abstractmethod
    def template(self, defence_round: DefenceRound[B, U], model: nn.Module) -> Packed:
        """Server: return an example of an encoded update for this round, with arbitrary values."""


class Defence(ABC, Generic[B, U]):
    """The settings and traits of a defence. To write a defence, subclass this class or `Plain`."""

    name: str  # the name shown to users
    fusable: bool = True  # one call to `step` may process the batches of several clients together
    integer_sums: bool = False  # updates are integers, which are summed instead of averaged
    linear: bool = False  # updates may be replaced by their weighted mean; rounds implement `Ranges`
    durable: bool = False  # a round must be saved to disk before the next broadcast, for privacy accounting
    repeatable: bool = False  # secrets are derived from a seed; refused by servers and clients on a network
    dp_clip: float | None = None  # maximum norm of a client's gradient, for differential privacy
    has_record_gradients: bool = False  # clients can compute the gradient of a single record
    sampling_rate: float | None = (
        None  # the rate at which clients sample records, if they choose the records themselves
    )
    planned_rounds: int | None = None  # the number of rounds for which the noise was chosen
    clippable: bool = False  # clients compute true gradients, which they can clip
    frozen: Frozen = "sent"  # "local" if clients have the frozen parameters, which are not changed and need not be sent
    largest_factor: float = 1.0  # the largest factor by which values of an update are multiplied
    local_training: LocalTraining | None = None  # how clients train before they send an update, if they do
    remote_settings: ClassVar[tuple[str, ...]] = ()  # names of arguments that a server may set

    @property
    def base(self) -> "Defence[B, U]":
        """The defence that defines the messages: this defence, or the defence that it wraps."""
        return self

    @property
    def requested(self) -> "AnyDefence":
        """The registered defence that a server asks its clients to use."""
        return self.base

    @property
    def update_kind(self) -> Literal["gradient", "difference"]:
        """The content of an update: a gradient, or the change of the model in local training."""
        return "gradient" if self.local_training is None else "difference"

    @property
    def record_terms(self) -> Values:
        """The settings that clients use to protect records (`fedveil.Privacy.terms`); empty if they do not."""
        return {}

    @property
    def codec(self) -> Codec[B, U] | None:
        """The encoding of messages, or None if messages cannot be sent over a network."""
        return None

    def arguments(self) -> Mapping[str, object]:
        """Return the arguments that recreate this defence: by default, the attributes with the names of its parameters.

        Sources of secrets (`entropy`, `seed`) are omitted.
        """
        names = inspect.signature(type(self)).parameters.keys() - {"entropy", "seed"}
        return {name: getattr(self, name) for name in sorted(names) if hasattr(self, name)}

    @abstractmethod
    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> DefenceServer[B, U]:
        """Prepare the server for a run."""

    @abstractmethod
    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> DefenceClient[B, U]:
        """Prepare clients for a run; `model` defines the architecture."""

    def start_client(self, model: nn.Module, example: Inputs, loss: Loss) -> DefenceClient[B, U]:
        """Prepare clients with `client`, including their local training."""
        client = self.client(model, example, loss)
        client.local_training = self.local_training
        return client

    def require_record_gradients(self) -> None:
        """Raise an error if clients cannot compute per-record gradients."""
        if not self.has_record_gradients:
            raise BadArgument("privacy", f"{self.name}: {NO_RECORDS}", RECORDS_FIX)

    def min_members(self, num_members: int) -> int:
        """Return the minimum number of members that must contribute to a sum if clients add shares of the noise."""
        return 0

    def check_records(self, model: nn.Module, loss: Loss) -> None:
        """Refuse a model or loss in which records influence one another, if the defence protects records."""
        return

    def for_records(self) -> "Defence[B, U]":
        """Return the variant of this defence to use with differential privacy for records; by default, this defence."""
        return self

    @abstractmethod
    def client_view(self, model: nn.Module, broadcast: B) -> nn.Module:
        """Return the model as a client receives it, which published attacks target."""


AnyDefence = Defence[Any, Any]  # type: ignore[explicit-any]
AnyRound = DefenceRound[Any, Any]  # type: ignore[explicit-any]
AnyServer = DefenceServer[Any, Any]  # type: ignore[explicit-any]
AnyClient = DefenceClient[Any, Any]  # type: ignore[explicit-any]
AnyCodec = Codec[Any, Any]  # type: ignore[explicit-any]
AnyRanges = Ranges[Any]  # type: ignore[explicit-any]


def read_state(where: str, state: Mapping[str, StateValue], name: str, kind: type[V]) -> V:
    """Return a value from a state; refuse a state without it, which must come from another defence."""
    value = state.get(name)
    if not isinstance(value, kind):
        raise BadArgument(where, "the state belongs to another defence", "resume with the defence that wrote it")
    return value
