"""The server's optimizer and learning-rate schedule, from the arguments that users pass."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fedveil.errors import BadArgument

WHERE = "Federation"
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer] | torch.optim.Optimizer
Schedule = Callable[[torch.optim.Optimizer], LRScheduler] | LRScheduler
FACTORY = "optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"


@contextmanager
def _refuse_failures(name: str, fix: str) -> Iterator[None]:
    """Refuse settings that torch rejects: a negative learning rate, text, a missing argument."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise BadArgument(
            WHERE, f"{name}= cannot be created: {error}", f"pass all its settings, as in {fix}"
        ) from error


def make_optimizer(given: Optimizer, parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer that a factory creates for these parameters, or the one given, if it is for them."""
    if isinstance(given, torch.optim.Optimizer):
        found = given
    elif callable(given):
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        with _refuse_failures("optimizer", FACTORY):
            found = given(trained)
    else:
        raise BadArgument(WHERE, f"optimizer is {given!r}", f"use {FACTORY}, or an optimizer of the model's parameters")
    if not isinstance(found, torch.optim.Optimizer):
        raise BadArgument(
            WHERE, f"optimizer created a {type(found).__name__}, not a torch.optim.Optimizer", f"use {FACTORY}"
        )
    ours = {id(parameter) for parameter in parameters.values()}
    if any(id(parameter) not in ours for group in found.param_groups for parameter in group["params"]):
        what = "the optimizer has parameters that are not this model's"
        raise BadArgument(WHERE, what, f"create it after the last change of the model, or use {FACTORY}")
    return found


def make_schedule(given: Schedule | None, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """Return the schedule that a factory creates for the optimizer, or the one given, if it is for it."""
    fix = "use schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)"
    found = given
    if given is None:
        return None
    if not isinstance(given, LRScheduler) and not callable(given):
        raise BadArgument(WHERE, f"schedule is {given!r}", fix)
    if not isinstance(given, LRScheduler):
        with _refuse_failures("schedule", fix):
            found = given(optimizer)
    if not isinstance(found, LRScheduler):
        raise BadArgument(WHERE, f"schedule created a {type(found).__name__}, not a learning-rate schedule", fix)
    if found.optimizer is not optimizer:
        raise BadArgument(WHERE, "the schedule is of another optimizer", f"pass that optimizer, too, or {fix}")
    return found


def plateau_value(schedule: ReduceLROnPlateau, found: Mapping[str, float]) -> float:
    """Return the metric that a plateau schedule monitors: one that should fall in mode "min", rise in mode "max"."""
    if schedule.mode == "max":
        if "accuracy" not in found:
            what = 'mode="max" monitors accuracy, and this task has none'
            raise BadArgument("ReduceLROnPlateau", what, 'use mode="min"')
        return float(found["accuracy"])
    falling = next((name for name in ("loss", "mse") if name in found), None)
    return float(found[falling]) if falling else 1 - float(found["accuracy"])
