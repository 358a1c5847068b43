"""Create the server's optimizer and learning-rate schedule from the user's arguments."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from fedveil.errors import BadArgument

WHERE = "Federation"
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer] | torch.optim.Optimizer
Schedule = Callable[[torch.optim.Optimizer], LRScheduler] | LRScheduler
FACTORY = "use optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"
COSINE = "use schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)"
T = TypeVar("T")
A = TypeVar("A")


def _create(name: str, given: T | Callable[[A], T], kind: type[T], argument: A, fix: str) -> T:
    """Return the given object, or the object that a factory creates; refuse settings that torch rejects."""
    if isinstance(given, kind):
        return given
    if not callable(given):
        raise BadArgument(WHERE, f"{name} is {given!r}", fix)
    try:
        found = given(argument)
    except (TypeError, ValueError) as error:
        raise BadArgument(WHERE, f"{name} cannot be created: {error}", f"pass all its settings: {fix}") from error
    if not isinstance(found, kind):
        raise BadArgument(WHERE, f"{name} created a {type(found).__name__}, not a {kind.__name__}", fix)
    return found


def make_optimizer(given: Optimizer, parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """Create an optimizer for these parameters, or return the given optimizer if it already has them."""
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    found = _create("optimizer", given, torch.optim.Optimizer, trained, FACTORY)
    ours = {id(parameter) for parameter in parameters.values()}
    if any(id(parameter) not in ours for group in found.param_groups for parameter in group["params"]):
        what = "the optimizer has parameters that do not belong to this model"
        raise BadArgument(WHERE, what, f"create it after the last change to the model, or {FACTORY}")
    return found


def make_schedule(given: Schedule | None, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """Create a schedule for this optimizer, or return the given schedule if it already has it."""
    if given is None:
        return None
    found = _create("schedule", given, LRScheduler, optimizer, COSINE)
    if found.optimizer is not optimizer:
        raise BadArgument(WHERE, "the schedule is for another optimizer", f"pass that optimizer as well, or {COSINE}")
    return found
