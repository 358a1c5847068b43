"""The plan of `Server.fit`: how long to train, when to evaluate on which records, and when to write checkpoints."""

import contextlib
import logging
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fedveil.checks import check_boolean, check_count
from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.federation.evaluate import measure, predict_source
from fedveil.federation.history import VALIDATION, RoundRecord
from fedveil.federation.stopping import Monitor, check_monitored, choose_monitor, has_stalled
from fedveil.federation.targets import attribute_targets
from fedveil.records.sources import Source
from fedveil.scheme.outputs import head_axis

if TYPE_CHECKING:
    from fedveil.federation.prepare import HeldOut
    from fedveil.federation.results import RunDetails, Setting
    from fedveil.federation.server import Server
    from fedveil.federation.user_metrics import Metric

LOG = logging.getLogger("fedveil")
Callback = Callable[[RoundRecord], object]
CONDITIONAL_METRICS = ("auc", "r2")  # metrics that are undefined if all targets are equal


@dataclass(frozen=True)
class Evaluation:
    """The records on which a run is evaluated, and the metrics.

    Attributes:
        validation: the validation data; the monitored metric is measured on these or, without them, on the test data.
        test: the test data.
        track_test: whether the test data are evaluated every time even if there are validation data.
        monitor: the monitored metric.
        metrics: the user's metrics, by name.
        target: the target of one evaluated record.
    """

    validation: Source | None
    test: Source | None
    track_test: bool
    monitor: Monitor
    metrics: "Mapping[str, Metric]"
    target: Tensor

    def measure(self, server: "Server") -> dict[str, float]:
        """Return the metrics on the records that decide which model is best."""
        source = self.validation or self.test
        return {} if source is None else self._measure(server, source)

    def measure_test(self, server: "Server", is_last: bool) -> dict[str, float]:
        """Return the test metrics; empty if `measure` returned them or if they are computed only at the end."""
        is_due = self.validation is not None and (is_last or self.track_test)
        return self._measure(server, self.test) if is_due and self.test is not None else {}

    def check(self, server: "Server") -> None:
        """Measure once before the first round, so that a metric that fails is refused before training."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an untrained model may never predict a class
            result = self.measure(server)
        if self.monitor.name not in result:
            message = f"{self.monitor.name} is not defined for these records: all targets are equal"
            raise BadArgument("fit", message, "use more records, or monitor another metric")

    def _measure(self, server: "Server", source: Source) -> dict[str, float]:
        (outputs, targets), axis = predict_source(server.model, source), head_axis(server.model)
        with attribute_targets(source.owner):
            result = measure(outputs, targets, server.loss, axis=axis)
        if self.metrics:
            from fedveil.federation.user_metrics import compute_metrics

            result |= compute_metrics(self.metrics, outputs, targets, server.loss, axis)
        return result


@dataclass(frozen=True)
class MetricChoices:
    """The metrics that the user chose to measure and to monitor; see `Server.fit`."""

    metrics: "Mapping[str, Metric]"
    monitor: str | None
    mode: str | None
    patience: int | None
    track_test: bool

    def plan(self, server: "Server", validation: "HeldOut | None", test: "HeldOut | None") -> Evaluation | None:
        """Return the evaluation to run, or None without held-out data; refuse metrics that are unknown or fail."""
        check_boolean("fit", "track_test", self.track_test)
        monitored_data, prefix = validation or test, VALIDATION if validation else ""
        options = {"patience": self.patience, "monitor": self.monitor, "metrics": self.metrics}
        check_monitored(monitored_data is not None, server.schedule, **options)
        if monitored_data is None:
            return None
        if self.metrics:
            from fedveil.federation.user_metrics import check_metrics

            check_metrics(self.metrics)
        names = {*monitored_data.names, *self.metrics}
        monitor = choose_monitor(self.monitor, self.mode, names, server.schedule, prefix)
        sources = [part and part.source for part in (validation, test)]
        result = Evaluation(sources[0], sources[1], self.track_test, monitor, self.metrics, monitored_data.target)
        if self.metrics or monitor.name in CONDITIONAL_METRICS:
            result.check(server)
        return result


class Tracker(ABC):
    """A callback of `fit` that is also called before the first round and after the last."""

    @abstractmethod
    def start(self, settings: "Mapping[str, Setting]", is_evaluated: bool) -> None:
        """Begin a run.

        Args:
            settings: the settings of the run, as in config.json.
            is_evaluated: whether the model is evaluated on held-out data.
        """

    @abstractmethod
    def __call__(self, record: RoundRecord) -> None:
        """Receive the record of a round."""

    @abstractmethod
    def finish(self, folder: Path | None, failed: bool) -> None:
        """End the run.

        Args:
            folder: the run's folder, with its report page and models; None if `fit` was called without a folder.
            failed: whether `fit` raises an exception.
        """


@dataclass
class FitPlan:
    """The checked arguments of `fit`."""

    last_round: int  # number of the last round
    interval: int  # rounds between evaluations or, without held-out data, between checkpoints
    evaluation: Evaluation | None
    patience: int | None
    callbacks: list[Callback]
    folder: Path | None
    checkpoint_every: int  # rounds; 0 for no additional checkpoints
    durable: bool  # whether every round must be saved to disk
    last_save_time: float = field(default_factory=time.monotonic)  # time of the last checkpoint

    def ends_interval(self, round_number: int) -> bool:
        """Return whether a round is the last of an interval or of the run."""
        return round_number % self.interval == 0 or round_number >= self.last_round

    def should_save(self, round_number: int) -> bool:
        """Return whether a checkpoint is due after a round."""
        requested = self.checkpoint_every > 0 and round_number % self.checkpoint_every == 0
        overdue = time.monotonic() - self.last_save_time >= checkpoint.INTERVAL_SECONDS
        return self.durable or requested or overdue or self.ends_interval(round_number)

    def has_stalled(self, records: Sequence[RoundRecord]) -> bool:
        """Return whether to stop because the monitored metric has not improved."""
        return self.evaluation is not None and has_stalled(records, self.evaluation.monitor, self.patience)

    def show_progress(self, verbose: bool | None) -> contextlib.AbstractContextManager[None]:
        """Show a progress bar while training; by default, only in a terminal or a notebook."""
        if verbose is None:
            verbose = bool(sys.stderr and sys.stderr.isatty()) or _is_notebook()
        check_boolean("fit", "verbose", verbose)
        if not verbose:
            return contextlib.nullcontext()
        from fedveil.federation.progress import show_bar

        return show_bar(self.callbacks, self.last_round, self.evaluation.monitor if self.evaluation else None)


def _is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, whose stderr is not a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def choose_last_round(server: "Server", epochs: int | None, rounds: int | None) -> int:
    """Return the number of the last round; warn if that round is already complete."""
    for name, count in (("epochs", epochs), ("rounds", rounds)):
        check_count("fit", name, 0 if count is None else count, 0)
    if epochs is None and rounds is None:
        rounds = server.defence.planned_rounds
    rounds_per_epoch, num_complete = server.rounds_per_epoch, server.round
    last_round = rounds if rounds is not None else (1 if epochs is None else epochs) * rounds_per_epoch
    if 0 < last_round <= num_complete:
        unit, num_complete_units = (
            ("epochs", num_complete // rounds_per_epoch) if rounds is None else ("rounds", num_complete)
        )
        message = f"{unit} are counted from the start of the run, and round {num_complete} is already complete"
        LOG.warning(
            "fedveil: fit trains nothing: %s; use fit(%s=%d) to continue training",
            message,
            unit,
            num_complete_units + 1,
        )
    return last_round


def list_callbacks(on_round: Callback | Sequence[Callback] | None) -> list[Callback]:
    """Return the callbacks as a list; refuse objects that are not callable."""
    callbacks = list(on_round) if isinstance(on_round, Sequence) and not isinstance(on_round, str) else [on_round]
    for callback in callbacks:
        if callback is not None and not callable(callback):
            fix = "pass a function that takes a round's record, or a list of functions"
            raise BadArgument("fit", f"on_round must be callable, got {callback!r}", fix)
    return [callback for callback in callbacks if callable(callback)]


@contextlib.contextmanager
def track_run(server: "Server", plan: FitPlan, details: "RunDetails | None") -> Iterator[None]:
    """Write a run's files to its folder, if any, and tell trackers when the run begins and ends."""
    server.planned_rounds = plan.last_round
    trackers = [callback for callback in plan.callbacks if isinstance(callback, Tracker)]
    if plan.folder is None and not trackers:
        yield
        return
    from fedveil.federation.results import RunDetails
    from fedveil.federation.run_folder import RunFolder, list_settings

    details, started_trackers = details or RunDetails(), list[Tracker]()
    failed = True
    try:
        for tracker in trackers:
            started_trackers.append(tracker)
            tracker.start({**list_settings(server), **details.settings}, plan.evaluation is not None)
        with (
            contextlib.nullcontext()
            if plan.folder is None
            else RunFolder(server, plan, plan.folder, details) as run_folder
        ):
            if run_folder is not None:
                plan.callbacks.insert(0, run_folder.append)
            yield
        failed = False
    finally:
        for tracker in started_trackers:
            tracker.finish(plan.folder, failed)
