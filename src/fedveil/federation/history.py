"""The history of a training run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fedveil.errors import BadArgument
from fedveil.scheme.result import Note

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

NO_EVALUATION = "the model was not evaluated: pass test= or validation= to fit"
VALIDATION = "validation_"  # prefix of metrics on the validation data
MAIN_METRICS = ("accuracy", "auc", "mse", "loss")
Value = int | float | Note


def select_main_metrics(metrics: Mapping[str, float], *extra_names: str) -> dict[str, float]:
    """Return the main metrics, for a short line of text, and the metrics named in `extra_names`."""
    selected_names = (*MAIN_METRICS, *extra_names)
    return {name: value for name, value in metrics.items() if name.removeprefix(VALIDATION) in selected_names}


@dataclass(frozen=True, eq=False)
class RoundRecord(Mapping[str, Value]):
    """The record of one round; `record["accuracy"]` is short for `record.metrics["accuracy"]`.

    Attributes:
        round: the round number, starting at 1.
        epoch: the number of times that the largest client has gone through its records.
        error: estimated relative error of the recovered gradient.
        lr: learning rate of the step.
        seconds: seconds since the start of the run.
        evaluated: whether the evaluation is complete; None if no evaluation was due.
        metrics: metrics on the test data and, with the prefix "validation_", on the validation data.
        figures: other numbers, such as the number of replies, bytes sent and epsilon.
        notes: faults, clients whose weight was capped, or the reason why no step was taken.
    """

    round: int
    epoch: float
    error: float
    lr: float
    seconds: float
    evaluated: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Note] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Value]:
        """Return all values in a flat dict, as in a line of metrics.jsonl."""
        result: dict[str, Value] = {"round": self.round, "epoch": self.epoch, "error": self.error, "lr": self.lr}
        result |= {**self.figures, **self.notes, "seconds": self.seconds, **self.metrics}
        return result if self.evaluated is None else {**result, "evaluated": self.evaluated}

    def __getitem__(self, name: str) -> Value:
        result = self.to_dict()
        if name not in result and not self.evaluated:
            raise KeyError(f"{name}: {NO_EVALUATION}")
        if name not in result and VALIDATION + name in result:
            raise KeyError(f"{name}: the test data are evaluated at the end; use {VALIDATION}{name}")
        return result[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())


@dataclass(repr=False)
class History:
    """The history of a run: one record per round."""

    records: list[RoundRecord] = field(default_factory=list)

    def __repr__(self) -> str:
        if not self.records:
            return "History(no rounds)"
        metrics = "".join(f", {name} {value:.4g}" for name, value in select_main_metrics(self.metrics).items())
        return f"History({len(self.records)} rounds{metrics})"

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return the (round, value) pairs of a metric or figure for the rounds that have it."""
        points = [(record.round, values[name]) for record in self.records if name in (values := record.to_dict())]
        if self.records and not points:
            names = ", ".join(sorted(self.names - {"round", "evaluated"}))
            evaluated = any(record.evaluated for record in self.records)
            message = f"no round has a value named {name!r}; available names: {names}"
            raise KeyError(message if evaluated else f"{message}; {NO_EVALUATION}")
        return [(round_number, value) for round_number, value in points if isinstance(value, int | float)]

    @property
    def names(self) -> set[str]:
        """The names of all values in the records."""
        names = set[str]()
        for record in self.records:  # calling to_dict for every record would be slow
            names.update(record.metrics, record.figures, record.notes)
        examples = {record.evaluated is None: record for record in self.records}
        return names.union(*(replace(record, metrics={}, figures={}, notes={}) for record in examples.values()))

    @property
    def last(self) -> RoundRecord:
        """The latest record with an evaluation or, if no round was evaluated, the latest record."""
        if not self.records:
            raise IndexError("there are no rounds yet")
        return next((record for record in reversed(self.records) if record.evaluated), self.records[-1])

    @property
    def metrics(self) -> Mapping[str, float]:
        """The latest metrics; empty if the model has not been evaluated."""
        return self.last.metrics if self.records else {}

    def to_frame(self) -> "DataFrame":
        """Return a pandas DataFrame with one row per round."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise BadArgument("to_frame", "pandas is not installed", "run pip install pandas") from error
        return DataFrame([record.to_dict() for record in self.records])

    def plot(self, *names: str, ax: "Axes | None" = None) -> "Axes":
        """Plot metrics or figures over the rounds with matplotlib, and return the axes.

        Args:
            *names: names of the metrics or figures to plot; by default, the first of accuracy, AUC, MSE and loss that
                was measured.
            ax: the axes to draw on; by default, new axes.
        """
        if not self.records:
            raise BadArgument("plot", "there are no rounds yet", "call fit first")
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise BadArgument("plot", "matplotlib is not installed", "run pip install 'fedveil[plots]'") from error
        main_metric = next((name for name in MAIN_METRICS if {name, VALIDATION + name} & self.names), MAIN_METRICS[0])
        default_names = [name for name in (VALIDATION + main_metric, main_metric) if name in self.names]
        curves = {name: self.curve(name) for name in names or default_names or [main_metric]}
        axes = pyplot.subplots()[1] if ax is None else ax
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) == 1 else None)
        axes.set_xlabel("round")
        axes.legend()
        return axes
