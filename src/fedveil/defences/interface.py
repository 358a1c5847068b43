"""What the federation asks of a defence."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from fedveil.errors import UpdateRefused
from fedveil.graph.inputs import Inputs
from fedveil.scheme import Loss

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class Aggregate:
    """What the server makes of a round's updates.

    Attributes:
        gradients: by parameter name, for the server's optimiser.
        buffers: by name, to put in place of the model's.
        error: estimated relative error that the defence itself adds to the gradients; 0 if it adds none.
        details: more for the round's record, mostly numbers; "bytes_down" and "bytes_up" are a client's.
        again: the round missed its precision so far that it should be repeated.
    """

    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    error: float
    details: Mapping[str, Any] = field(default_factory=dict)
    again: bool = False


class Defence(Protocol):
    """One way to train together. The server calls `broadcast` and `aggregate`, a client the rest.

    Broadcasts and updates are the defence's own; the federation only carries them.

    Attributes:
        name: as it is printed.
        fuses: whether the batches of several clients may go through one `client_step` as if they were one client's.
        repeatable: whether what should be secret follows from a seed; servers and clients on a network refuse that.
        adapts: whether a broadcast depends on earlier updates in any way but through the model.
        durable: whether a round must be on disk before the next broadcast, because what it gave away counts.
    """

    name: str
    fuses: bool
    adapts: bool
    durable: bool

    @property
    def repeatable(self) -> bool:
        """See above."""

    def prepare(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """Look at the model once before the first round."""

    def prepare_client(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """Look at the model as a client that is not in the server's process: all that its steps need, and no more."""

    def broadcast(self, model: nn.Module) -> Any:
        """What clients get this round."""

    def client_step(
        self,
        model: nn.Module,
        broadcast: Any,
        inputs: Inputs,
        targets: Tensor,
        weights: Tensor | None = None,
        client: int = 0,
    ) -> Any:
        """What a client computes of a batch.

        `model` gives the architecture, `inputs` are what its forward takes (`fedveil.graph.inputs`), `weights` the
        samples' in place of 1 / samples, `client` says whose private state to use.
        """

    def accumulate(self, broadcast: Any, total: Any, update: Any) -> tuple[Any, Any]:
        """Add what the same client computed of its next batch; returns the broadcast to go on with, and the sum."""

    def upload(self, update: Any, client: int = 0) -> Any:
        """What leaves the client, from what it computed in this round."""

    def aggregate(self, updates: Sequence[Any], weights: Sequence[float]) -> Aggregate:
        """The gradient of the round; weights are |D_k|."""

    def forget(self) -> None:
        """Drop what is secret of the last broadcast: its round is over, however it ended."""

    def each(self, updates: Sequence[Any]) -> list[Aggregate]:
        """In place of `aggregate`: what each client's update says by itself."""

    def client_view(self, model: nn.Module, broadcast: Any) -> nn.Module:
        """The model as it was sent: what published attacks attack."""

    def state(self) -> dict[str, Any]:
        """What the server must keep to go on after a stop: plain values and tensors, never a secret of a round."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""

    def client_state(self, client: int) -> dict[str, Any]:
        """What a client keeps to itself; the server never sees it."""

    def restore_client(self, client: int, state: Mapping[str, Any]) -> None:
        """Go on from `client_state`."""


class Stateless:
    """For defences that upload what they compute and keep nothing between rounds."""

    fuses = True
    adapts = False
    durable = False
    repeatable = False

    def forget(self) -> None:
        """Nothing to do."""

    def aggregate(self, updates: Sequence[Any], weights: Sequence[float]) -> Aggregate:
        """The gradient of the round."""
        raise NotImplementedError

    def each(self, updates: Sequence[Any]) -> list[Aggregate]:
        """One after another."""
        return one_by_one(lambda update: self.aggregate([update], [1.0]), updates)

    def upload(self, update: Any, client: int = 0) -> Any:
        """All of it."""
        return update

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to do."""

    def client_state(self, client: int) -> dict[str, Any]:
        """Nothing."""
        return {}

    def restore_client(self, client: int, state: Mapping[str, Any]) -> None:
        """Nothing to do."""


def one_by_one(recover: Callable[[Any], Found], updates: Sequence[Any]) -> list[Found]:
    """Each update alone; a refusal still says which client's it is."""
    found = []
    for position, update in enumerate(updates):
        try:
            found.append(recover(update))
        except UpdateRefused as error:
            raise type(error)(f"client {position}", error.what, error.fix) from error
    return found
