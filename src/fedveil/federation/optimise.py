"""The server's optimiser and learning-rate schedule, from what users give for them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
    """Refuse settings that torch does not take: a rate that is negative or text, an argument that is missing."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise BadArgument(WHERE, f"{name}= cannot be made: {error}", f"give all its settings, as in {fix}") from error


def make_optimizer(given: Optimizer, parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """The optimiser that a factory makes for these parameters, or the one that was given, if it is for them."""
    if isinstance(given, torch.optim.Optimizer):
        found = given
    elif callable(given):
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        with _refuse_failures("optimizer", FACTORY):
            found = given(trained)
    else:
        raise BadArgument(WHERE, f"optimizer is {given!r}", f"{FACTORY}, or an optimiser of the model's parameters")
    if not isinstance(found, torch.optim.Optimizer):
        raise BadArgument(WHERE, f"optimizer made a {type(found).__name__}, not a torch.optim.Optimizer", FACTORY)
    ours = {id(parameter) for parameter in parameters.values()}
    if any(id(parameter) not in ours for group in found.param_groups for parameter in group["params"]):
        what = "the optimiser has parameters that are not this model's"
        raise BadArgument(WHERE, what, "make it after the last change of the model, or give a factory: " + FACTORY)
    return found


def make_schedule(given: Schedule | None, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """The schedule that a factory makes for the optimiser, or the one that was given, if it is for it."""
    fix = "schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)"
    found = given
    if given is None:
        return None
    if not isinstance(given, LRScheduler) and not callable(given):
        raise BadArgument(WHERE, f"schedule is {given!r}", fix)
    if not isinstance(given, LRScheduler):
        with _refuse_failures("schedule", fix):
            found = given(optimizer)
    if not isinstance(found, LRScheduler):
        raise BadArgument(WHERE, f"schedule made a {type(found).__name__}, not a learning-rate schedule", fix)
    if found.optimizer is not optimizer:
        raise BadArgument(WHERE, "the schedule is of another optimiser", f"give that one too, or a factory: {fix}")
    return found


def plateau_value(schedule: ReduceLROnPlateau, found: Mapping[str, Any]) -> float:
    """Return the metric that a plateau schedule watches: a falling one in mode "min", a rising one in "max"."""
    if schedule.mode == "max":
        if "accuracy" not in found:
            what = 'the schedule waits for a metric that stops rising (mode="max"), and this task has none'
            raise BadArgument("ReduceLROnPlateau", what, 'mode="min"')
        return float(found["accuracy"])
    falling = next((name for name in ("loss", "mse") if name in found), None)
    return float(found[falling]) if falling else 1 - float(found["accuracy"])
