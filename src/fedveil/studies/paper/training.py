"""Training runs of a plan: a grid of configurations, a run each, kept by what decides them."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedveil.data import Data
from fedveil.federation.evaluate import METRICS
from fedveil.report import NOTHING
from fedveil.runs.config import Config, configure, load_data
from fedveil.runs.folder import train
from fedveil.studies.attack import Show
from fedveil.studies.compare import CONTROL
from fedveil.studies.jobs import Cell, Result, Tell, run_cells
from fedveil.studies.paper.plan import Plan
from fedveil.studies.victim import shown

DATA = ("data", "path", "train_size", "test_size", "duration", "task", "target", "size", "labels", "model")
KEYS = ("data", "model", "layers", "clients", "loss", "seed")


def configs_of(plan: Plan) -> list[Config]:
    """Every combination of the values that a group of runs gives as lists, once for each of its seeds.

    What all groups have in common is in `common`. A value that follows another names it and says how:
    batch_size = { of = "clients", 1 = 40, 5 = 8 }.
    """
    found = []
    for group in plan.settings["runs"]:
        values = {**plan.settings.get("common", {}), **group}
        values |= {"device": plan.device, "seed": list(range(values.pop("seeds")))}
        axes = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
        for combination in itertools.product(*axes.values()):
            chosen = dict(zip(axes, combination, strict=True))
            follow = {name: v[str(chosen[v["of"]])] for name, v in chosen.items() if isinstance(v, Mapping)}
            found.append(configure(chosen | follow, f"{plan.name}.toml, {plan.scale}"))
    return list(dict.fromkeys(found))


def name_of(config: Config) -> str:
    """Readable, and another one for every other configuration."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config)).encode()).hexdigest()[:8]
    net = f"{config.model}{config.layers}" if config.model == "mlp" else config.model
    return f"{config.data}-{net}-K{config.clients}-{config.loss}-{kind_of(config)}-{config.seed}-{digest}"


def kind_of(config: Config) -> str:
    """The defence; a control is none of them."""
    return config.defence if config.rounding is None else CONTROL


@functools.lru_cache(maxsize=1)
def _loaded(config: Config) -> Data:
    return load_data(config)


def data_of(config: Config) -> Data:
    """A run's data; those of the last run if they are the same."""
    return _loaded(Config(**{name: getattr(config, name) for name in DATA}))


def constant(data: Data) -> float:
    """The metric of the best answer that does not look at its input: the mean, or the commonest class."""
    seen, asked = data.train.targets, data.test.targets
    if seen.is_floating_point():
        return float((asked.double() - seen.double().mean(0)).pow(2).mean())
    return float((asked == torch.mode(seen).values).double().mean())


def train_one(tell: Tell, config: Config, folder: Path) -> Result:
    """One run to its end: the metric after each epoch."""
    data = data_of(config)
    summary = train(config, folder, resume=True, on_round=shown(config.epochs, tell), data=data)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [record for record in records if record.get("evaluated")]
    metric = next(name for name in METRICS if name in evaluated[-1])
    return {
        "metric": metric,
        "value": summary[metric],
        "test_loss": summary.get("loss"),
        "curve": [[round(record["epoch"], 3), record[metric]] for record in evaluated],
        "constant": constant(data),
        "seconds": summary["seconds"],
    }


def gather(plan: Plan, work: Path, workers: int | None, show: Show) -> list[Result]:
    """All runs, each with the values of its configuration that tables ask for."""
    configs = {name_of(config): config for config in configs_of(plan)}
    for config in {config.data: config for config in configs.values()}.values():
        load_data(config)  # what is missing is said before anything runs, and images are decoded once
    cells = [
        Cell(name, train_one, {"config": config, "folder": work / "runs" / name})
        for name, config in sorted(configs.items(), key=lambda item: item[1].seed)  # whole tables first, then spread
    ]
    done = run_cells(cells, work / "cells", workers=workers, show=show)
    return [
        {
            **{key: getattr(config, key) for key in KEYS},
            "defence": kind_of(config),
            "config": config.flags(),
            **done[name],
        }
        for name, config in configs.items()
    ]


def only(results: Sequence[Result], **values: Any) -> list[Result]:
    """The runs with these values."""
    return [result for result in results if all(result[key] == value for key, value in values.items())]


def ends(results: Sequence[Result]) -> list[float]:
    """The metric at the end of runs that have one."""
    return [result["value"] for result in results if "failed" not in result]


def counted(clients: int) -> str:
    """1 client, 5 clients."""
    return f"{clients} client{'s' if clients > 1 else ''}"


def bracketed(values: Sequence[str]) -> str:
    """The veil's value, and the control's in brackets if there is one."""
    return values[0] + "".join(f" ({value})" for value in values[1:] if value != NOTHING)


def pooled(first: float, second: float) -> float:
    """Two standard deviations as one."""
    return math.hypot(first, second) / math.sqrt(2)


def meeting(pairs: Sequence[tuple[float, float, float]], what: str) -> str:
    """In how many pairs (distance of means, both deviations) the ranges overlap, and how many are within one deviation.

    A range is mean ± standard deviation.
    """
    overlap = sum(far <= first + second for far, first, second in pairs)
    closer = sum(far <= pooled(first, second) for far, first, second in pairs)
    return f"{overlap} of {len(pairs)} {what} (means within one deviation in {closer})"


def spread(values: Sequence[float]) -> float:
    """The standard deviation; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def cell(results: Sequence[Result], form: str, scale: float = 1.0) -> str:
    """Runs of several seeds as mean ± standard deviation; a failed one is said to have failed."""
    broken = [result for result in results if "failed" in result]
    if broken:
        return f"failed: {broken[0]['failed']}"
    if not results:
        return NOTHING
    values = [scale * value for value in ends(results)]
    return f"{statistics.fmean(values):{form}} ± {spread(values):{form}}"


@dataclasses.dataclass(frozen=True)
class Apart:
    """Veil, or the control, beside plain with the same seeds.

    Attributes:
        where: what the runs have in common.
        plain, other: the metric at the end, by seed.
        largest: distance between two runs of one seed at their end.
        along: the same anywhere on their curves.
        loss: the largest distance of their test losses at the end, relative to plain's; None where the metric is it.
    """

    where: Mapping[str, Any]
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


def aparts(results: Sequence[Result], keys: Sequence[str], other: str = "veil") -> Iterator[Apart]:
    """Veil or control beside plain, for every combination of the keys' values where both have run with some seeds."""
    for values in dict.fromkeys(tuple(result[key] for key in keys) for result in results):
        where = dict(zip(keys, values, strict=True))
        runs = {
            name: {result["seed"]: result for result in only(results, defence=name, **where) if "failed" not in result}
            for name in ("plain", other)
        }
        seeds = sorted(runs["plain"].keys() & runs[other].keys())
        if not seeds:
            continue
        pairs = [(runs["plain"][seed], runs[other][seed]) for seed in seeds]
        largest = max(abs(p["value"] - o["value"]) for p, o in pairs)
        along = max(abs(a[1] - b[1]) for p, o in pairs for a, b in zip(p["curve"], o["curve"], strict=True))
        losses = [
            abs(o["test_loss"] / p["test_loss"] - 1) for p, o in pairs if p.get("test_loss") and o.get("test_loss")
        ]
        loss = max(losses) if losses else None
        yield Apart(where, ends([p for p, _ in pairs]), ends([o for _, o in pairs]), largest, along, loss)
