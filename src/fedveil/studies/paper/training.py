"""Training runs of a plan: a grid of configurations, each run kept by what decides it."""

import dataclasses
import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from fedveil.report import NOTHING
from fedveil.runs.build import load_data
from fedveil.runs.choices import format_command
from fedveil.runs.config import Config, configure
from fedveil.studies.compare import BASELINE, baseline_settings
from fedveil.studies.jobs import Done, Failed, Job, Result
from fedveil.studies.paper.plan import LOSS, Axis, Exhibit, Plan
from fedveil.studies.victim import Trained, TrainRun

Where = dict[str, str | int]


@dataclass(frozen=True)
class Run:
    """A run as tables ask for it: what it is, and how it ended, or why it failed."""

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


def configs_of(plan: Plan) -> list[Config]:
    """Every combination of the values that a group of runs gives as lists, once for each of its seeds.

    What all groups have in common is in `common`. A value that follows another names it and says how:
    batch_size = { of = "clients", 1 = 40, 5 = 8 }.
    """
    found = []
    for group in plan.settings.runs:
        values = plan.settings.common | group
        seeds = values.pop("seeds")
        assert isinstance(seeds, int)
        values |= {"device": plan.device, "seed": list(range(seeds))}
        axes: list[Sequence[Axis]] = [value if isinstance(value, list) else [value] for value in values.values()]
        for combination in itertools.product(*axes):
            chosen = dict(zip(values, combination, strict=True))
            for name, value in chosen.items():
                if isinstance(value, dict):
                    chosen[name] = value[str(chosen[str(value["of"])])]
            if "rounding" in chosen:
                chosen["settings"] = baseline_settings(int(str(chosen.pop("rounding"))))
            found.append(configure({**LOSS, **chosen}, plan.where))
    return list(dict.fromkeys(found))


def name_of(config: Config) -> str:
    """Readable, and another one for every other configuration."""
    digest = hashlib.sha256(json.dumps(config.flat()).encode()).hexdigest()[:8]
    net = f"{config.model.name}{config.model.layers}" if config.model.name == "mlp" else config.model.name
    what = (config.data.name, net, f"K{config.data.clients}", str(config.training.loss), kind_of(config))
    return "-".join([*what, str(config.training.seed), digest])


def kind_of(config: Config) -> str:
    """The defence; a rounding baseline is none of them."""
    return BASELINE if config.defence.settings else config.defence.name


class TrainingExhibit(Exhibit[list[Run]]):
    """A table or figure of training runs."""

    kind = TypeAdapter(list[Run])

    def configs(self, plan: Plan) -> list[Config]:
        """Return those of all runs."""
        return configs_of(plan)

    def runs(self, plan: Plan, folder: Path) -> dict[Config, Job[Trained]]:
        """The job of each configuration; whole tables first, then their spread over seeds."""
        configs = sorted(configs_of(plan), key=lambda config: config.training.seed)
        names = {config: name_of(config) for config in configs}
        return {config: Job(name, TrainRun(config, folder / "runs" / name), Trained) for config, name in names.items()}

    def jobs(self, plan: Plan, folder: Path) -> list[Job[Result]]:
        """All runs; missing data are reported before anything runs, and images are decoded once."""
        runs = self.runs(plan, folder)
        for config in {config.data.name: config for config in runs}.values():
            load_data(config)
        return list(runs.values())

    def collect(self, plan: Plan, folder: Path, done: Done) -> list[Run]:
        """All runs, in the plan's order."""
        jobs, found = self.runs(plan, folder), []
        for config in configs_of(plan):
            what = (config.data.name, config.model.name, config.model.layers, config.data.clients)
            run = Run(*what, str(config.training.loss), config.training.seed, kind_of(config), format_command(config))
            trained = done[jobs[config]]
            if isinstance(trained, Failed):
                found.append(dataclasses.replace(run, failed=trained.failed))
                continue
            metric, last = trained.metric, trained.history.last
            ended = dataclasses.replace(
                run,
                metric=metric,
                value=last[metric],
                curve=[(round(r["epoch"], 3), r[metric]) for r in trained.records if r.get("evaluated")],
                constant=trained.constant,
                seconds=trained.records[-1]["seconds"],
                test_loss=last.get("loss"),
            )
            found.append(ended)
        return found


def only(runs: Sequence[Run], **values: str | int) -> list[Run]:
    """The runs with these values."""
    return [run for run in runs if all(getattr(run, key) == value for key, value in values.items())]


def ends(runs: Sequence[Run]) -> list[float]:
    """The metric at the end of runs that have one."""
    return [run.value for run in runs if not run.failed]


def counted(clients: str | int) -> str:
    """1 client, 5 clients."""
    return f"{clients} client{'s' if int(clients) > 1 else ''}"


def bracketed(values: Sequence[str]) -> str:
    """The veil's value, and the baseline's in brackets if there is one."""
    return values[0] + "".join(f" ({value})" for value in values[1:] if value != NOTHING)


def pooled(first: float, second: float) -> float:
    """Two standard deviations as one."""
    return math.hypot(first, second) / math.sqrt(2)


def meeting(pairs: Sequence[tuple[float, float, float]], what: str) -> str:
    """In how many pairs (distance of means, both deviations) the ranges mean ± deviation overlap, in words."""
    overlap = sum(far <= first + second for far, first, second in pairs)
    closer = sum(far <= pooled(first, second) for far, first, second in pairs)
    return f"{overlap} of {len(pairs)} {what} (means within one deviation in {closer})"


def spread(values: Sequence[float]) -> float:
    """The standard deviation; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def cell(runs: Sequence[Run], form: str, scale: float = 1.0) -> str:
    """Runs of several seeds as mean ± standard deviation; a failed one is said to have failed."""
    broken = [run.failed for run in runs if run.failed]
    if broken:
        return f"failed: {broken[0]}"
    if not runs:
        return NOTHING
    values = [scale * value for value in ends(runs)]
    return f"{statistics.fmean(values):{form}} ± {spread(values):{form}}"


@dataclass(frozen=True)
class Apart:
    """Veil, or the baseline, beside plain with the same seeds.

    Attributes:
        where: what the runs have in common.
        plain, other: the metric at the end, by seed.
        largest: distance between two runs of one seed at their end.
        along: the same anywhere on their curves.
        loss: the largest distance of their test losses at the end, relative to plain's; None where the metric is it.
    """

    where: Where
    plain: Sequence[float]
    other: Sequence[float]
    largest: float
    along: float
    loss: float | None = None

    @property
    def means(self) -> float:
        """The distance of the means."""
        return abs(statistics.fmean(self.other) - statistics.fmean(self.plain))

    @property
    def spread(self) -> float:
        """The standard deviation over seeds, of both pooled."""
        return pooled(spread(self.plain), spread(self.other))

    @property
    def overlap(self) -> bool:
        """Whether the ranges of one standard deviation about the means meet."""
        return self.means <= spread(self.plain) + spread(self.other)


def aparts(runs: Sequence[Run], keys: Sequence[str], other: str = "veil") -> Iterator[Apart]:
    """Veil or baseline beside plain, for every combination of the keys' values where both have run with some seeds."""
    for values in dict.fromkeys(tuple(getattr(run, key) for key in keys) for run in runs):
        where: Where = dict(zip(keys, values, strict=True))
        own = [
            {run.seed: run for run in only(runs, defence=name, **where) if not run.failed} for name in ("plain", other)
        ]
        seeds = sorted(own[0].keys() & own[1].keys())
        if not seeds:
            continue
        pairs = [(own[0][seed], own[1][seed]) for seed in seeds]
        largest = max(abs(p.value - o.value) for p, o in pairs)
        along = max(abs(a[1] - b[1]) for p, o in pairs for a, b in zip(p.curve, o.curve, strict=True))
        losses = [abs(o.test_loss / p.test_loss - 1) for p, o in pairs if p.test_loss and o.test_loss]
        plain, others = (ends(runs) for runs in zip(*pairs, strict=True))
        yield Apart(where, plain, others, largest, along, max(losses) if losses else None)
