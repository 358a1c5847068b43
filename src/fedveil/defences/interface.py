"""What the federation asks of a defence."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from fedveil.errors import UpdateRefused
from fedveil.graph.inputs import Inputs
from fedveil.scheme import Aggregate, Loss
from fedveil.scheme.recover import recover_each


@dataclass(frozen=True, eq=False)
class Samples:
    """A batch of one client."""

    inputs: Inputs  # what the model's forward takes (`fedveil.graph.inputs`)
    targets: Tensor
    weights: Tensor | None = None  # of each sample in the loss, in place of 1 / samples


class ServerSide(Protocol):
    """What the server calls. Broadcasts and updates are the defence's own; the federation only carries them."""

    name: str  # as it is printed
    fuses: bool = True  # the batches of several clients may go through one `client_step` as if they were one client's
    linear: bool = False  # the weighted mean of updates may stand for all of them; then `Linear` is there too
    durable: bool = False  # a round must be on disk before the next broadcast, for privacy accounting

    @property
    def repeatable(self) -> bool:
        """Whether what should be secret follows from a seed; servers and clients on a network refuse that."""
        return False

    @abstractmethod
    def prepare(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """Look at the model once before the first round."""

    @abstractmethod
    def broadcast(self, model: nn.Module) -> Any:
        """What clients get this round."""

    @abstractmethod
    def aggregate(self, updates: Sequence[Any], weights: Sequence[float]) -> Aggregate:
        """The gradient of the round; weights are |D_k|."""

    def each(self, updates: Sequence[Any]) -> list[Aggregate | UpdateRefused]:
        """In place of `aggregate`: what each client's update says by itself, or why it is refused."""
        return recover_each(lambda update: self.aggregate([update], [1.0]), updates)

    def forget(self, *, reuse: bool = False) -> None:
        """Drop what is secret of the last broadcast: its round is over, however it ended.

        With `reuse` nobody holds the broadcast any more, and its memory may be used for the next one.
        """
        return

    @abstractmethod
    def client_view(self, model: nn.Module, broadcast: Any) -> nn.Module:
        """The model as received by a client: what published attacks attack."""

    def state(self) -> dict[str, Any]:
        """What the server must keep to go on after a stop: plain values and tensors, never a secret of a round."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        return


class ClientSide(Protocol):
    """What a client calls; `client` says whose private state to use."""

    @abstractmethod
    def prepare_client(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """Look at the model as a client that is not in the server's process: all that its steps need, and no more."""

    @abstractmethod
    def client_step(self, model: nn.Module, broadcast: Any, samples: Samples, client: int = 0) -> Any:
        """What a client computes of a batch; `model` gives the architecture."""

    @abstractmethod
    def accumulate(self, broadcast: Any, total: Any, update: Any) -> tuple[Any, Any]:
        """Add what the same client computed of its next batch; returns the broadcast to go on with, and the sum."""

    def upload(self, update: Any, client: int = 0) -> Any:
        """What leaves the client, from what it computed in this round: by default all of it."""
        return update

    def client_state(self, client: int) -> dict[str, Any]:
        """What a client keeps to itself; the server never sees it."""
        return {}

    def restore_client(self, client: int, state: Mapping[str, Any]) -> None:
        """Go on from `client_state`."""
        return


class Linear(Protocol):
    """What secure aggregation asks of a defence that is `linear`: how large the numbers of the next round will be."""

    @abstractmethod
    def expect(self, update: Any, last: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """Of a mean update, what the next will be like, whatever its noise; `last` is what this returned before."""

    @abstractmethod
    def sizes(self, broadcast: Any, expected: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """The largest number of each row of an update under this broadcast, by the name under which it travels."""

    @abstractmethod
    def rounding(self, each: Mapping[str, Sequence[float]]) -> float:
        """The norm in the gradient of an error of so much in every number of every row of the mean update."""


@runtime_checkable
class Defence(ServerSide, ClientSide, Protocol):
    """One way to train together: derive from this, or write a class with these methods.

    By default a defence uploads what it computes and keeps nothing between rounds.
    """
