"""The information available to an attacker that is a client and follows the protocol (honest but curious)."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from fedveil.defences.interface import LocalTraining
from fedveil.errors import FedveilError
from fedveil.scheme.losses import Loss

PUBLISHED = "as published"
T = TypeVar("T")


class DoesNotApply(FedveilError):
    """Raised if an attacker cannot run, for example because there are too few rounds or no classes."""


@dataclass(frozen=True, eq=False)
class Round:
    """One round as a client observed it."""

    broadcast: object  # the message that the client received; its type depends on the defence
    model: nn.Module  # the broadcast as a model, from the defence's `client_view`
    rows: Tensor | None = None  # indices of the client's records in its batch; None before it answers
    upload: object = None  # the client's answer; None before it answers, or if its batch was fused with others
    local: LocalTraining | None = None  # how the client trained; None if the upload contains gradients
    steps: tuple[Tensor, ...] = ()  # indices of the client's records in each step of local training

    @property
    def reach(self) -> float:
        """The ratio of the upload to the mean gradient over the local steps; 1 if the upload contains gradients."""
        return 1.0 if self.local is None else self.local.reach(len(self.steps))


@dataclass(frozen=True, eq=False)
class Observation:
    """Everything that an attack may use."""

    defence: str  # name of the defence, which is public
    model: nn.Module  # the model to attack: the last one received, or an adaptive attacker's estimate
    architecture: nn.Module  # the federation's network with all values set to zero
    rounds: tuple[Round, ...]  # oldest first; the attacker has not answered the last one
    inputs: Tensor  # the attacker's own records, all of which are members
    targets: Tensor
    loss: Loss  # the federation's loss
    learning_rate: float  # learning rate of the server's last step
    share: float  # the attacker's fraction of all training records, |D_a| / |D|

    def consecutive_rounds(self, index: int = -2) -> tuple[Round, Round]:
        """Return the round at `index` and the following round."""
        position = index % len(self.rounds)
        if position + 1 == len(self.rounds):
            raise DoesNotApply("two broadcasts", "the attack needs a round and the next round")
        return self.rounds[position], self.rounds[position + 1]

    def own_batch(self, observed_round: Round) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets that the attacker used in a round."""
        if observed_round.rows is None:
            raise DoesNotApply("own records", "the attacker has not answered this round")
        return self.inputs[observed_round.rows], self.targets[observed_round.rows]


def attempt(attacker: Callable[[Observation], T], observation: Observation) -> T | str:
    """Return the attacker's result or, if it does not apply or fails, the reason; an audit continues either way."""
    try:
        return attacker(observation)
    except DoesNotApply as reason:
        return reason.what
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def copy_with_values(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a model with the given parameters and buffers replaced."""
    result = copy.deepcopy(model)
    result.load_state_dict(values, strict=False)
    return result
