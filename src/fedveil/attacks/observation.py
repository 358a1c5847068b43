"""The view of an attacker: a client that follows the protocol (honest but curious)."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from fedveil.errors import FedveilError
from fedveil.scheme.losses import Loss

PUBLISHED = "as published"
T = TypeVar("T")


class DoesNotApply(FedveilError):
    """An attacker cannot be applied: another kind of broadcast, too few rounds, no classes."""


@dataclass(frozen=True, eq=False)
class Round:
    """One round as a client saw it."""

    broadcast: object  # as received; its type depends on the defence
    model: nn.Module  # the broadcast as a model, from the defence's `client_view`
    rows: Tensor | None = None  # indices of the client's own records in its batch; None before it answers
    upload: object = None  # the client's answer; None before it answers, or if its batch was fused with others


@dataclass(frozen=True, eq=False)
class Observation:
    """Everything that an attack may use."""

    defence: str  # its name, which is public
    model: nn.Module  # the model to attack: the last one received, or an adaptive attacker's better estimate
    architecture: nn.Module  # a network of the federation's architecture, filled with zeros
    rounds: tuple[Round, ...]  # the broadcasts, oldest first; the last has no answer yet
    inputs: Tensor  # the attacker's own records, all of them members
    targets: Tensor
    loss: Loss  # the federation's
    learning_rate: float  # of the server's last step
    share: float  # the attacker's |D_a| / |D|

    def consecutive(self, at: int = -2) -> tuple[Round, Round]:
        """Return the round with the index `at` and the one after it."""
        number = at % len(self.rounds)
        if number + 1 == len(self.rounds):
            raise DoesNotApply("two broadcasts", "it needs a round and the one after it")
        return self.rounds[number], self.rounds[number + 1]

    def own_batch(self, seen: Round) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets with which the attacker answered a round."""
        if seen.rows is None:
            raise DoesNotApply("own records", "the attacker has not answered this round")
        return self.inputs[seen.rows], self.targets[seen.rows]


def attempt(attacker: Callable[[Observation], T], observed: Observation) -> T | str:
    """Return the attacker's result, or the reason for its absence: a failing attacker must not end an audit."""
    try:
        return attacker(observed)
    except DoesNotApply as reason:
        return reason.what
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def copy_with_values(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a model with these parameters and buffers; all others are unchanged."""
    found = copy.deepcopy(model)
    found.load_state_dict(values, strict=False)
    return found
