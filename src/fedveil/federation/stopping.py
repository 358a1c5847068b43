"""Early stopping: end training when the test metric stops improving."""

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fedveil.checks import check_count
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import better, deciding_metric
from fedveil.federation.history import History
from fedveil.records.sources import Source


def check_monitor(schedule: LRScheduler | None, test: Source | None, patience: int | None) -> None:
    """Refuse settings that monitor a metric if there are no test data."""
    if patience is not None:
        check_count("fit", "patience", patience)
    if test is None and (patience is not None or isinstance(schedule, ReduceLROnPlateau)):
        what = "ReduceLROnPlateau" if patience is None else "patience"
        raise BadArgument("fit", f"{what} needs a metric, but there are no test data", "pass test=test to fit")


def has_stalled(history: History, patience: int | None) -> bool:
    """Return whether the metric has not improved in the last `patience` evaluations."""
    if patience is None or not history.records or not history.records[-1].evaluated:
        return False
    name = deciding_metric(history.metrics)
    values = [value for _, value in history.curve(name)]
    best = max(values) if better(name, 1.0, 0.0) else min(values)
    return len(values) - 1 - values.index(best) >= patience
