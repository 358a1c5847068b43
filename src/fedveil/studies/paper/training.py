"""Training runs of a plan: a grid of configurations, and comparisons of runs with plain training."""

import dataclasses
import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedveil.report import NOTHING
from fedveil.runs.choices import format_command
from fedveil.runs.config import Config, configure
from fedveil.studies.compare import BASELINE, baseline_settings
from fedveil.studies.federations import TrainedRun, TrainRun
from fedveil.studies.jobs import Failure, StudyJob
from fedveil.studies.paper.plan import LOSS, ExhibitPlan, RunValue
from fedveil.studies.study import JobGraph

Setting = dict[str, str | int]


@dataclass(frozen=True)
class Run:
    """A training run: its configuration, and how it ended or why it failed."""

    data: str
    model: str
    layers: int
    clients: int
    loss: str
    seed: int
    defence: str
    config: str
    metric: str = ""
    value: float = math.nan
    curve: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    constant: float | None = None
    seconds: float = 0.0
    test_loss: float | None = None
    failed: str | None = None


def list_configs(plan: ExhibitPlan) -> list[Config]:
    """Return every combination of the values that a group of runs lists, once for each of its seeds.

    Groups share the values in `common`. A value that depends on another names it:
    batch_size = { of = "clients", 1 = 40, 5 = 8 }.
    """
    found = []
    for group in plan.settings.runs:
        values = plan.settings.common | group
        seeds = values.pop("seeds")
        assert isinstance(seeds, int)
        values |= {"device": plan.device, "seed": list(range(seeds))}
        axes: list[Sequence[RunValue]] = [value if isinstance(value, list) else [value] for value in values.values()]
        for combination in itertools.product(*axes):
            chosen = dict(zip(values, combination, strict=True))
            for name, value in chosen.items():
                if isinstance(value, dict):
                    chosen[name] = value[str(chosen[str(value["of"])])]
            if "rounding" in chosen:
                chosen["settings"] = baseline_settings(int(str(chosen.pop("rounding"))))
            found.append(configure({**LOSS, **chosen}, plan.where))
    return list(dict.fromkeys(found))


def run_name(config: Config) -> str:
    """Return a readable name that is unique to a configuration."""
    digest = hashlib.sha256(json.dumps(config.flat()).encode()).hexdigest()[:8]
    net = f"{config.model.name}{config.model.layers}" if config.model.name == "mlp" else config.model.name
    what = (config.data.name, net, f"K{config.data.clients}", str(config.training.loss), defence_name(config))
    return "-".join([*what, str(config.training.seed), digest])


def defence_name(config: Config) -> str:
    """Return the name of the defence, or of the rounding baseline."""
    return BASELINE if config.defence.settings else config.defence.name


def training_graph(plan: ExhibitPlan, folder: Path) -> JobGraph[list[Run]]:
    """Return a job for each run: first seeds first, so that a stopped table is complete for some seeds."""
    configs, jobs = list_configs(plan), dict[Config, StudyJob[TrainedRun]]()
    for config in sorted(configs, key=lambda config: config.training.seed):
        name = run_name(config)
        jobs[config] = StudyJob(name, TrainRun(config, folder / "runs" / name), TrainedRun)
    return JobGraph(list(jobs.values()), lambda done: [_to_run(config, done[jobs[config]]) for config in configs])


def _to_run(config: Config, trained: TrainedRun | Failure) -> Run:
    what = (config.data.name, config.model.name, config.model.layers, config.data.clients)
    run = Run(*what, str(config.training.loss), config.training.seed, defence_name(config), format_command(config))
    if isinstance(trained, Failure):
        return dataclasses.replace(run, failed=trained.failed)
    metric, last = trained.metric, trained.history.metrics
    return dataclasses.replace(
        run,
        metric=metric,
        value=last[metric],
        curve=[(round(r.epoch, 3), r.metrics[metric]) for r in trained.records if r.evaluated],
        constant=trained.constant,
        seconds=trained.records[-1].seconds,
        test_loss=last.get("loss"),
    )


def select(runs: Sequence[Run], **values: str | int) -> list[Run]:
    """Return the runs with these values; a number may be given as text."""
    return [run for run in runs if all(str(getattr(run, key)) == str(value) for key, value in values.items())]


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def pooled_deviation(first: float, second: float) -> float:
    """Pool two standard deviations."""
    return math.hypot(first, second) / math.sqrt(2)


def format_runs(runs: Sequence[Run], form: str, scale: float = 1.0) -> str:
    """Format the runs of several seeds as mean ± standard deviation, or say why one failed."""
    if not runs:
        return NOTHING
    if broken := [run.failed for run in runs if run.failed]:
        return f"failed: {broken[0]}"
    values = [scale * run.value for run in runs]
    return f"{statistics.fmean(values):{form}} ± {deviation(values):{form}}"


def format_pair(values: Sequence[str]) -> str:
    """Format the veil's value, and the baseline's in brackets if there is one."""
    return values[0] + "".join(f" ({value})" for value in values[1:] if value != NOTHING)


@dataclass(frozen=True)
class Comparison:
    """The veil, or the baseline, beside plain training with the same seeds.

    Attributes:
        where: values that the runs share.
        plain, other: the metric at the end, by seed.
        largest: largest difference at the end between two runs of one seed.
        largest_anywhere: largest difference anywhere on the curves of one seed.
        loss: largest relative difference of test losses at the end; None where the metric is the loss.
    """

    where: Setting
    plain: Sequence[float]
    other: Sequence[float]
    largest: float
    largest_anywhere: float
    loss: float | None = None

    @property
    def means(self) -> float:
        """Return the absolute difference of the means."""
        return abs(statistics.fmean(self.other) - statistics.fmean(self.plain))

    @property
    def deviations(self) -> tuple[float, float]:
        """Return both standard deviations over seeds."""
        return deviation(self.plain), deviation(self.other)

    @property
    def overlap(self) -> bool:
        """Whether the ranges mean ± deviation overlap."""
        return self.means <= sum(self.deviations)


def compare_runs(runs: Sequence[Run], keys: Sequence[str], other: str = "veil") -> Iterator[Comparison]:
    """Compare the veil or the baseline with plain training for every setting of the keys that has seeds of both."""
    for values in dict.fromkeys(tuple(getattr(run, key) for key in keys) for run in runs):
        where: Setting = dict(zip(keys, values, strict=True))
        plain, others = (
            {run.seed: run for run in select(runs, defence=name, **where) if not run.failed}
            for name in ("plain", other)
        )
        pairs = [(plain[seed], others[seed]) for seed in sorted(plain.keys() & others.keys())]
        if not pairs:
            continue
        largest = max(abs(p.value - o.value) for p, o in pairs)
        anywhere = max(abs(a[1] - b[1]) for p, o in pairs for a, b in zip(p.curve, o.curve, strict=True))
        losses = [abs(o.test_loss / p.test_loss - 1) for p, o in pairs if p.test_loss and o.test_loss]
        first, second = ([run.value for run in own] for own in zip(*pairs, strict=True))
        yield Comparison(where, first, second, largest, anywhere, max(losses, default=None))
