"""What an attacker sees: it is a client that follows the protocol (honest but curious)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from fedveil.defences.registry import Record, attackers_of
from fedveil.errors import FedveilError
from fedveil.lookup import imported
from fedveil.scheme.losses import Loss

PUBLISHED = "as published"
Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class Round:
    """One round as a client saw it."""

    broadcast: Any  # as received; its type depends on the defence
    model: nn.Module  # the broadcast as a model, by the defence's `client_view`
    rows: Tensor | None = None  # which of its own records the client used; None before it answers
    upload: Any = None  # the client's own answer; None if it has not answered, or its batch was fused with others'


@dataclass(frozen=True, eq=False)
class Observed:
    """Everything that an attack may use."""

    defence: str  # its name, which is public
    model: nn.Module  # the model to attack: the last one received, or an adaptive attacker's better estimate
    architecture: nn.Module  # a network of the federation's architecture, filled with zeros
    rounds: tuple[Round, ...]  # the broadcasts, oldest first; the last has no answer yet
    inputs: Tensor  # the attacker's own records, all of them members
    targets: Tensor
    loss: Loss  # what the federation minimises
    learning_rate: float  # of the server's last step
    share: float  # the attacker's |D_a| / |D|


class DoesNotApply(FedveilError):
    """An attacker has nothing to work with: another kind of broadcast, too few rounds, no classes."""


@dataclass(frozen=True, eq=False)
class Seen:
    """What each attacker of a defence has to attack."""

    attackers: dict[str, Observed]  # as published, and what adaptive attackers make of it, by label
    left_out: dict[str, str]  # attackers that do not apply, and why; or that failed


def tried(attack: Callable[[Observed], Found], observed: Observed) -> Found | str:
    """What an attack makes of it, or why there is nothing: an attacker that fails must not end an audit."""
    try:
        return attack(observed)
    except DoesNotApply as reason:
        return reason.what
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def observations(record: Record, observed: Observed) -> Seen:
    """What each attacker of a defence has to attack: as published, what its own attackers and generic ones make of it.

    An attacker of another package that cannot be imported has failed, too.
    """
    found, left_out = {PUBLISHED: observed}, {}
    for label, spec in attackers_of(record).items():
        result = tried(lambda seen, spec=spec: named(spec)(seen), observed)  # type: ignore[misc]
        if isinstance(result, str):
            left_out[label] = result
        else:
            found[label] = result
    return Seen(found, left_out)


def named(spec: str) -> Callable[[Observed], Any]:
    """The attacker that `package.module:name` names."""
    attacker: Any = imported(spec, "an attacker", "my_package.attacks:undo")
    return attacker  # type: ignore[no-any-return]
