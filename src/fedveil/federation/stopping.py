"""The monitored metric, which chooses the best model, ends training early and controls a plateau schedule."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fedveil.checks import check_choice, check_count
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import PRIMARY
from fedveil.federation.history import RoundRecord

MODES = dict.fromkeys(("accuracy", "balanced_accuracy", "f1", "auc", "r2"), "max")
MODES |= dict.fromkeys(("loss", "mse", "mae"), "min")
"""The mode of each metric: whether larger or smaller values are better."""


@dataclass(frozen=True)
class Monitor:
    """The metric that decides which model is best.

    Attributes:
        name: the metric's name in an evaluation.
        mode: "min" or "max".
        prefix: the prefix of the name in records: "validation_" if there are validation data.
        is_chosen: whether the user has chosen the metric.
    """

    name: str
    mode: str
    prefix: str = ""
    is_chosen: bool = False

    @property
    def key(self) -> str:
        """The name in records."""
        return self.prefix + self.name

    def __str__(self) -> str:
        return f"{self.key} ({self.mode})"

    def improves(self, value: float, best: float | None) -> bool:
        """Return whether a value is better than the best value so far; NaN is never better."""
        return not math.isnan(value) and (best is None or (value < best if self.mode == "min" else value > best))


def choose_monitor(
    monitor: str | None, mode: str | None, names: Collection[str], schedule: LRScheduler | None, prefix: str
) -> Monitor:
    """Return the metric to monitor, by default the first of `PRIMARY`; refuse an unknown metric before the first round.

    Args:
        monitor: the user's choice.
        mode: "min" or "max"; by default, the mode of Fedveil's metric.
        names: the names of the metrics in an evaluation.
        schedule: the learning-rate schedule; a plateau schedule must have the same mode.
        prefix: the prefix of the metrics in records.
    """
    if monitor is None:
        if mode is not None:
            raise BadArgument("fit", "mode has no effect without monitor", 'name the metric: monitor="accuracy"')
        name = next(name for name in PRIMARY if name in names)
        return Monitor(name, MODES[name], prefix)
    check_choice("fit", "monitor", monitor, sorted(names))
    if mode is None and monitor not in MODES:
        message = f"Fedveil does not know whether larger or smaller values of {monitor} are better"
        raise BadArgument("fit", message, 'pass mode="max" if larger values are better, otherwise mode="min"')
    mode = check_choice("fit", "mode", mode or MODES[monitor], ("min", "max"))
    if isinstance(schedule, ReduceLROnPlateau) and schedule.mode != mode:
        message = f"ReduceLROnPlateau has mode={schedule.mode!r}, but {monitor} is monitored with mode={mode!r}"
        raise BadArgument("fit", message, f"use ReduceLROnPlateau(optimizer, mode={mode!r})")
    return Monitor(monitor, mode, prefix, True)


def check_monitored(is_evaluated: bool, schedule: LRScheduler | None, **options: object) -> None:
    """Refuse settings that need a metric if there are neither validation nor test data."""
    if (patience := options["patience"]) is not None:
        check_count("fit", "patience", patience)
    dependents = [name for name, value in options.items() if value]
    dependents += ["ReduceLROnPlateau"] if isinstance(schedule, ReduceLROnPlateau) else []
    if dependents and not is_evaluated:
        fix = "pass validation=validation or test=test to fit"
        raise BadArgument("fit", f"{dependents[0]} needs a metric, but there are no held-out data", fix)


def plateau_value(schedule: ReduceLROnPlateau, metrics: Mapping[str, float], monitor: Monitor) -> float:
    """Return the value that a plateau schedule monitors: by default, an error in mode "min", accuracy in mode "max"."""
    if monitor.is_chosen:
        return float(metrics[monitor.name])
    if schedule.mode == "max":
        if "accuracy" not in metrics:
            message = 'mode="max" monitors accuracy, but accuracy is not defined for this task'
            raise BadArgument("ReduceLROnPlateau", message, 'use mode="min"')
        return float(metrics["accuracy"])
    error_name = next((name for name in ("loss", "mse") if name in metrics), None)
    return float(metrics[error_name]) if error_name else 1 - float(metrics["accuracy"])


def has_stalled(records: Sequence[RoundRecord], monitor: Monitor | None, patience: int | None) -> bool:
    """Return whether the metric has not improved in the last `patience` evaluations."""
    if patience is None or monitor is None or not records or not records[-1].evaluated:
        return False
    best, count = None, 0
    for record in records:
        if monitor.key in record.metrics:
            value = record.metrics[monitor.key]
            is_better = monitor.improves(value, best)
            best, count = (value, 0) if is_better else (best, count + 1)
    return count >= patience
