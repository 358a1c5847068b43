"""What the federation asks of a defence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Aggregate:
    """What the server makes of a round's updates.

    Attributes:
        gradients: by parameter name, for the server's optimiser.
        buffers: by name, to put in place of the model's.
        error: estimated relative error that the defence itself adds to the gradients; 0 if it adds none.
    """

    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    error: float


class Defence(Protocol):
    """One way to train together. The server calls `broadcast` and `aggregate`, a client `client_step`.

    Broadcasts and updates are the defence's own; the federation only carries them.
    """

    name: str

    def prepare(self, model: nn.Module, example: Tensor, loss: str) -> None:
        """Look at the model once before the first round."""

    def broadcast(self, model: nn.Module) -> Any:
        """What clients get this round."""

    def client_step(
        self, model: nn.Module, broadcast: Any, inputs: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Any:
        """A client's update; `model` gives the architecture, `weights` the samples' in place of 1 / samples."""

    def accumulate(self, broadcast: Any, total: Any, update: Any) -> tuple[Any, Any]:
        """Add an update of the same client and round; returns the broadcast to go on with, and the sum."""

    def aggregate(self, updates: Sequence[Any], weights: Sequence[float]) -> Aggregate:
        """The gradient of the round; weights are |D_k|."""

    def client_view(self, model: nn.Module, broadcast: Any) -> nn.Module:
        """The model as it was sent: what published attacks attack."""
