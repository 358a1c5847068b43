"""What an attacker has: a client of the federation that follows the protocol and looks around."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedveil.scheme.losses import Loss


@dataclass(frozen=True, eq=False)
class Round:
    """One round as a client saw it.

    Attributes:
        broadcast: as it was sent; the defence's own kind.
        model: the broadcast as a model, by the defence's `client_view`.
        rows: which of its own records the client took; None before it answers.
        upload: what the client itself sent back; None where it has not answered, or its batch was fused with others'.
    """

    broadcast: Any
    model: nn.Module
    rows: Tensor | None = None
    upload: Any = None


@dataclass(frozen=True, eq=False)
class Observed:
    """Everything that an attack gets.

    Attributes:
        defence: what the federation says it uses; no secret.
        model: the model to attack. As published: the last one that was sent. An adaptive attacker puts a better
            estimate in its place.
        architecture: a network of the federation's architecture with zeros for values.
        rounds: what was sent, oldest first; the last has no answer yet.
        inputs, targets: the attacker's own records, members all of them.
        loss: what the federation minimises.
        learning_rate: of the server's last step.
        share: the attacker's |D_a| / |D|.
    """

    defence: str
    model: nn.Module
    architecture: nn.Module
    rounds: tuple[Round, ...]
    inputs: Tensor
    targets: Tensor
    loss: Loss
    learning_rate: float
    share: float
