"""What an attacker sees: it is a client that follows the protocol (honest but curious)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedveil.scheme.losses import Loss


@dataclass(frozen=True, eq=False)
class Round:
    """One round as a client saw it.

    Attributes:
        broadcast: as received; its type depends on the defence.
        model: the broadcast as a model, by the defence's `client_view`.
        rows: which of its own records the client used; None before it answers.
        upload: the client's own answer; None if it has not answered, or its batch was fused with others'.
    """

    broadcast: Any
    model: nn.Module
    rows: Tensor | None = None
    upload: Any = None


@dataclass(frozen=True, eq=False)
class Observed:
    """Everything that an attack may use.

    Attributes:
        defence: its name, which is public.
        model: the model to attack: the last one received, or an adaptive attacker's better estimate.
        architecture: a network of the federation's architecture, filled with zeros.
        rounds: the broadcasts, oldest first; the last has no answer yet.
        inputs, targets: the attacker's own records, all of them members.
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
