"""The monitored metric: it chooses the best model, ends training early and lowers a plateau schedule's rate."""

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
"""Whether a metric should be small or large."""


@dataclass(frozen=True)
class Monitor:
    """The metric that decides which model is best.

    Attributes:
        name: its name in the metrics of an evaluation.
        mode: "min" or "max".
        prefix: what precedes the name in records: "validation_" if there are validation data.
        chosen: whether the user has chosen the metric.
    """

    name: str
    mode: str
    prefix: str = ""
    chosen: bool = False

    @property
    def key(self) -> str:
        """The name in records."""
        return self.prefix + self.name

    def __str__(self) -> str:
        return f"{self.key} ({self.mode})"

    def improves(self, new: float, old: float | None) -> bool:
        """Return whether a value is better than the best so far; NaN never is."""
        return not math.isnan(new) and (old is None or (new < old if self.mode == "min" else new > old))


def choose_monitor(
    monitor: str | None, mode: str | None, known: Collection[str], schedule: LRScheduler | None, prefix: str
) -> Monitor:
    """Return the metric to monitor, by default the first of `PRIMARY`; refuse an unknown one before the first round.

    Args:
        monitor: the user's choice.
        mode: "min" or "max"; by default, the mode of Fedveil's metric.
        known: the names of the metrics in an evaluation.
        schedule: the learning-rate schedule; a plateau schedule must have the same mode.
        prefix: the prefix of the metrics in records.
    """
    if monitor is None:
        if mode is not None:
            raise BadArgument("fit", "mode is given without monitor", 'name the metric: monitor="accuracy"')
        name = next(name for name in PRIMARY if name in known)
        return Monitor(name, MODES[name], prefix)
    check_choice("fit", "monitor", monitor, sorted(known))
    if mode is None and monitor not in MODES:
        what = f"it is not known whether a larger {monitor} is better"
        raise BadArgument("fit", what, 'pass mode="max" if it is, mode="min" if a smaller one is')
    mode = check_choice("fit", "mode", mode or MODES[monitor], ("min", "max"))
    if isinstance(schedule, ReduceLROnPlateau) and schedule.mode != mode:
        what = f"ReduceLROnPlateau has mode={schedule.mode!r}, but {monitor} is monitored with mode={mode!r}"
        raise BadArgument("fit", what, f"use ReduceLROnPlateau(optimizer, mode={mode!r})")
    return Monitor(monitor, mode, prefix, True)


def check_monitored(evaluated: bool, schedule: LRScheduler | None, **requested: object) -> None:
    """Refuse settings that need a metric if there are neither validation nor test data."""
    if (patience := requested["patience"]) is not None:
        check_count("fit", "patience", patience)
    needs = [name for name, value in requested.items() if value]
    needs += ["ReduceLROnPlateau"] if isinstance(schedule, ReduceLROnPlateau) else []
    if needs and not evaluated:
        fix = "pass validation=validation or test=test to fit"
        raise BadArgument("fit", f"{needs[0]} needs a metric, but there are no test data", fix)


def plateau_value(schedule: ReduceLROnPlateau, metrics: Mapping[str, float], monitor: Monitor) -> float:
    """Return the value that a plateau schedule monitors: by default an error in mode "min", accuracy in mode "max"."""
    if monitor.chosen:
        return float(metrics[monitor.name])
    if schedule.mode == "max":
        if "accuracy" not in metrics:
            what = 'mode="max" monitors accuracy, but there is no accuracy for this task'
            raise BadArgument("ReduceLROnPlateau", what, 'use mode="min"')
        return float(metrics["accuracy"])
    falling = next((name for name in ("loss", "mse") if name in metrics), None)
    return float(metrics[falling]) if falling else 1 - float(metrics["accuracy"])


def has_stalled(records: Sequence[RoundRecord], monitor: Monitor | None, patience: int | None) -> bool:
    """Return whether the metric has not improved in the last `patience` evaluations."""
    if patience is None or monitor is None or not records or not records[-1].evaluated:
        return False
    best, count = None, 0
    for record in records:
        if monitor.key in record.metrics:
            value = record.metrics[monitor.key]
            better = monitor.improves(value, best)
            best, count = (value, 0) if better else (best, count + 1)
    return count >= patience
