"""The results of a run on disk: metrics.jsonl has one line per round, and `fedveil train` prints summary.json."""

import copy
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Self, TypeAlias

from fedveil.errors import BadArgument
from fedveil.federation.checkpoint import BEST, MODEL
from fedveil.federation.evaluate import METRICS, find_classes, measure, predict_source, score_classes, select_positions
from fedveil.federation.history import RoundRecord, select_main_metrics
from fedveil.federation.stopping import has_stalled
from fedveil.files import convert_os_errors, write_atomically
from fedveil.plain_json import PYTHON, SCHEMA, check_schema, read_json, to_json
from fedveil.records.encoding import Encoding
from fedveil.records.sources import Source
from fedveil.scheme.outputs import head_axis

if TYPE_CHECKING:
    from fedveil.federation.server import Server

LOG = logging.getLogger("fedveil")
CONFIG = "config.json"
SummaryValue = int | float | str | Sequence[Mapping[str, int | float | str]] | None
OPTIMISTIC = "test records, so the metrics are optimistic (fedveil help metrics)"
Setting: TypeAlias = bool | int | float | str | tuple[str, ...] | None


@dataclass(frozen=True)
class RunDetails:
    """Details that a server does not know, for the page and the summary of a run.

    Attributes:
        title: title of the page, without the defence; by default, the class of the model.
        settings: further settings of the run, for the page, config.json and trackers.
        repeat: the command that repeats the run.
        encoding: how records are encoded, for predictions; see `Data.encoding` for data sets.
    """

    title: str = ""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    repeat: str = ""
    encoding: Encoding = Encoding()  # noqa: RUF009  (it is frozen)


def primary_metric(metrics: Collection[str]) -> str:
    """Return the metric that best represents the quality of a model."""
    return next((name for name in METRICS if name in metrics), METRICS[0])


@dataclass(frozen=True)
class ClassFigures:
    """The test results of one class."""

    name: str
    precision: float
    recall: float
    f1: float
    records: int


@dataclass(frozen=True)
class Budget:
    """The privacy budget that a run has spent; None represents an infinite epsilon."""

    epsilon: float | None
    epsilon_replace: float | None
    delta: float


@dataclass(frozen=True)
class RunSummary:
    """The summary of a run.

    Attributes:
        folder: folder of the run.
        rounds: number of rounds.
        metrics: metrics of the last model, `mae` and `rmse` in the units of the target, and for classes the mean
            `precision` and `recall`.
        best: monitored metric of the best model; None if no model was evaluated.
        best_on: the records and the metric that chose the best model.
        best_test: test metrics of the best model if validation records chose it.
        by_class: test results of the last model by class; empty for a regression.
        coverage: fraction of the model's values with each kind of perturbation; empty for defences other than a veil.
        budget: privacy budget spent; None without differential privacy.
        largest_error: largest relative error of a recovered gradient.
        seconds: total duration of the rounds in seconds.
        repeat: the command that repeats the run, if it is known.
        stopped: the reason why the run stopped early, or None.
    """

    folder: Path
    rounds: int
    metrics: Mapping[str, float]
    best: float | None
    best_on: str
    best_test: Mapping[str, float]
    by_class: tuple[ClassFigures, ...]
    coverage: Mapping[str, float]
    budget: Budget | None
    largest_error: float
    seconds: float
    repeat: str
    stopped: str | None = None

    def values(self) -> dict[str, int | float | str | None]:
        """Return plain values by name, without the results by class."""
        has_best, budget = self.best is not None, self.budget
        return {
            "schema": SCHEMA,
            "folder": str(self.folder),
            "rounds": self.rounds,
            **self.metrics,
            "best": self.best,
            **({"best_on": self.best_on} if has_best else {}),
            **{f"best_test_{name}": value for name, value in self.best_test.items()},
            "model": str(self.folder / MODEL),
            **({"best_model": str(self.folder / BEST)} if has_best else {}),
            **self.coverage,
            **(vars(budget) if budget else {}),
            "largest_error": self.largest_error,
            "seconds": self.seconds,
            **({"repeat": self.repeat} if self.repeat else {}),
            **({"stopped": self.stopped} if self.stopped else {}),
        }

    def to_dict(self) -> dict[str, SummaryValue]:
        """Return plain values by name, to write to a file."""
        by_class = [asdict(figures) for figures in self.by_class]
        return {**self.values(), **({"by_class": by_class} if by_class else {})}


def is_repeatable(folder: Path) -> bool:
    """Return whether a folder has the configuration of `fedveil train`, from which a run can be repeated."""
    path = folder / CONFIG
    if not path.is_file():
        return False
    config = read_json(path)
    return not (isinstance(config, dict) and PYTHON in config)


def read_rounds(folder: Path) -> int | None:
    """Return the number of rounds in a folder's summary; None if the summary is missing or damaged."""
    path = folder / "summary.json"
    try:
        rounds = check_schema(read_json(path), str(path)).get("rounds")
    except ValueError:  # a BadArgument is a ValueError
        return None
    return rounds if isinstance(rounds, int) else None


def summarise(
    server: "Server", folder: Path, details: RunDetails, test: Source | None, patience: int | None
) -> RunSummary:
    """Return the summary of a finished run."""
    history, plan, accountant = server.history, server.defence_server.plan, server.defence_server.accountant
    metrics, is_stalled = dict(history.metrics), has_stalled(history.records, server.monitor, patience)
    by_class = () if test is None else figures_by_class(server, details, test)
    if by_class:
        metrics |= {name: fmean([getattr(figures, name) for figures in by_class]) for name in ("precision", "recall")}
    best_on, best_test = "", {}
    if server.best is not None and server.monitor is not None:
        best_on = f"{server.monitor.key} on " + ("validation records" if server.monitor.prefix else OPTIMISTIC)
        if server.monitor.prefix and test is not None:
            best_model = copy.deepcopy(server.model)
            best_model.load_state_dict(server.best[1])
            best_test = select_main_metrics(
                measure(*predict_source(best_model, test), server.loss, axis=head_axis(best_model))
            )
    if details.encoding.target_scale is not None and "mse" in metrics:
        metrics["rmse"] = math.sqrt(metrics["mse"]) * details.encoding.target_scale[1]
    budget = None
    if accountant is not None:
        epsilons = accountant.epsilon(), accountant.epsilon(replace=True)
        epsilon, epsilon_replace = (value if math.isfinite(value) else None for value in epsilons)
        budget = Budget(epsilon, epsilon_replace, accountant.delta)
    return RunSummary(
        folder,
        server.round,
        metrics,
        server.best[0] if server.best else None,
        best_on,
        best_test,
        by_class,
        {} if plan is None else {**plan.shares, "revealed": plan.known.share},
        budget,
        max((record.error for record in history.records), default=0.0),
        history.records[-1].seconds if history.records else 0.0,
        details.repeat,
        f"early, after {patience} evaluations without improvement" if is_stalled else server.stopped,
    )


def figures_by_class(server: "Server", details: RunDetails, test: Source) -> tuple[ClassFigures, ...]:
    """Return the test results of each class; () if the targets are not classes."""
    outputs, targets, loss = select_positions(*predict_source(server.model, test), server.loss)
    classes = find_classes(outputs, targets, loss, head_axis(server.model))
    if classes is None:
        return ()
    names = [str(name) for name in details.encoding.classes or range(classes.count)]
    if classes.count != len(names):
        return ()
    result = score_classes(classes)
    rows = zip(names, result.precision.tolist(), result.recall.tolist(), result.f1.tolist(), strict=True)
    return tuple(ClassFigures(*row, int(count)) for row, count in zip(rows, result.records.tolist(), strict=True))


class MetricsFile:
    """The file with a server's round records.

    The file is not changed before the first record is written, so that a run can still be refused.

    Args:
        path: path of the file. Lines for rounds that are not in the server's history are removed.
        server: the server with the records.
    """

    def __init__(self, path: Path, server: "Server") -> None:
        self._path, self._server = path, server
        self._count: int | None = None  # number of lines written; None before the first

    def append(self, record: RoundRecord) -> None:
        """Add the record of the round that has just ended."""
        if self._count is None:
            self._write_all()
            return
        with convert_os_errors(self._path), self._path.open("a") as file:
            file.write(to_json(record.to_dict()) + "\n")
        self._count += 1

    def _write_all(self) -> None:
        records = self._server.history.records
        write_atomically(self._path, "".join(to_json(record.to_dict()) + "\n" for record in records))
        self._count = len(records)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Write missing records: all of them if the run had already finished, the last one if its evaluation failed."""
        if self._count == len(self._server.history.records) or (error_type is not None and self._count is None):
            return
        try:
            self._write_all()
        except BadArgument as error:
            if error_type is None:
                raise
            LOG.warning("fedveil: %s", error)  # do not hide the error that ended the run
