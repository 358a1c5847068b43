"""`fedveil compare`: the same federation under several defences and seeds, in one table and one page."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedveil.checks import one_of, whole
from fedveil.defences.registry import BUILT_IN, names
from fedveil.errors import BadArgument
from fedveil.report import Facts, Section, Text, count
from fedveil.runs.build import build_federation, load_data
from fedveil.runs.config import Config
from fedveil.runs.losses import primary_metric
from fedveil.runs.page import cost_section, curve_sections, quality
from fedveil.studies.federations import TrainedRun, TrainRun
from fedveil.studies.jobs import Done, Failed, Job
from fedveil.studies.study import JobGraph, Shown, Study
from fedveil.studies.tables import display_name

BASELINE = "baseline"
DEFENCES = tuple(record.name for record in BUILT_IN)
NOTES = (
    "The baseline is plain training with one more rounding error: noise of one unit in the last place of every "
    "gradient. It shows the effect of rounding alone. A lossless defence stays as close to plain training as that.",
    "SPN is our re-implementation; its authors have not published code. Settings are the defaults of each defence "
    "unless the command changes them; they are not tuned to this data.",
)
PRIVATE = (
    "Every run draws independent noise for differential privacy, so that curves differ by that noise too, the "
    "baseline's included. Epsilon is per client, for all rounds together, and does not bind the server."
)
HEADER = ("defence", "test {}", "difference from plain", "seconds", "bytes per client and round", "bytes per round")
Runs = dict[str, list[TrainedRun | Failed]]  # by defence, seed by seed


@dataclass(frozen=True)
class Comparands:
    """A federation, the defences to compare, and the number of seeds from the configuration's on."""

    config: Config
    defences: tuple[str, ...]
    seeds: int = 3

    def __post_init__(self) -> None:
        """Refuse what cannot be compared."""
        check_defences(self.defences, (*names(), BASELINE), "--defences")
        whole("--seeds", "seeds", self.seeds, 1)


def baseline_settings(seed: int) -> tuple[str, ...]:
    """Return the settings that make plain training the rounding baseline."""
    return (f"rounding={seed}",)


def check_defences(names: Sequence[str], known: Sequence[str], flag: str) -> None:
    """Refuse an unknown or repeated name; package.module:Class is not looked up here."""
    for number, name in enumerate(names):
        if ":" not in name:
            one_of(flag, "defence", name, known)
        if name in names[:number]:
            raise BadArgument(flag, f"{name!r} is given twice", "leave one out")
    if not names:
        raise BadArgument(flag, "no defence is named", f"use some of {', '.join(known)}")


class CompareStudy(Study[Comparands, Runs]):
    """Training under several defences and seeds."""

    name = "compare"
    summary = "the same federation under several defences"

    def graph(self, asked: Comparands, folder: Path) -> JobGraph[Runs]:
        """Return a job per seed and defence, seed by seed, so that a stopped comparison is complete for some seeds."""
        build_federation(asked.config.changed(defence="plain"), load_data(asked.config))  # refused before anything runs
        jobs, first = dict[tuple[str, int], Job[TrainedRun]](), asked.config.training.seed
        for seed in range(first, first + asked.seeds):
            for name in asked.defences:
                config = asked.config.changed(seed=seed, defence="plain" if name == BASELINE else name)
                if name == BASELINE:
                    config = config.changed(settings=baseline_settings(seed + 1))
                label = f"{name}-{seed}".replace(":", ".")
                work = TrainRun(config, folder / "runs" / label)
                jobs[name, seed] = Job(label, work, TrainedRun)

        def collect(done: Done) -> Runs:
            return {name: [done[job] for (own, _), job in jobs.items() if own == name] for name in asked.defences}

        return JobGraph(list(jobs.values()), collect)

    def present(self, asked: Comparands, results: Runs) -> Shown:
        """Show the table, curves of the first seed, cost, configuration."""
        config, private = asked.config, asked.config.privacy.dp_clip is not None
        last = [run.history.last for runs in results.values() for run in _successes(runs)]
        metric = primary_metric({name for record in last for name in record})
        header = [title.format(metric) for title in HEADER] + ["epsilon"] * private
        first = {name: runs[0].history for name, runs in results.items() if isinstance(runs[0], TrainedRun)}
        failures = [
            f"{name}, seed {config.training.seed + number}: {run.failed}"
            for name, runs in results.items()
            for number, run in enumerate(runs)
            if isinstance(run, Failed)
        ]
        sections: list[Section] = [
            *([Text("Failed", failures)] if failures else []),
            Text("How to read it", [*NOTES, *([PRIVATE] if private else [])]),
            *curve_sections(first),
            cost_section(first),
            Facts("Configuration", {name: str(value) for name, value in config.flat().items()}),
        ]
        where = f"{config.model.name} on {config.data.name} with {count(config.data.clients, 'client')}"
        return Shown(
            f"{config.data.name}, {config.model.name}: defences compared",
            verdict(results, metric),
            header,
            [_row(name, runs, results.get("plain", []), metric, config) for name, runs in results.items()],
            f"Mean and standard deviation over {count(asked.seeds, 'seed')}; bytes without names and shapes.",
            sections,
            lead=f"{len(results)} ways to train {where}. Curves: first seed.",
        )


def _successes(runs: Sequence[TrainedRun | Failed]) -> list[TrainedRun]:
    return [run for run in runs if isinstance(run, TrainedRun)]


def _row(
    defence: str, runs: Sequence[TrainedRun | Failed], plain: Sequence[TrainedRun | Failed], metric: str, config: Config
) -> list[str]:
    """Return the row of a defence: metric with spread over seeds, largest difference from plain, cost, epsilon."""
    done, private = _successes(runs), config.privacy.dp_clip is not None
    if len(done) < len(runs):
        number = next(number for number, run in enumerate(runs) if isinstance(run, Failed))
        return [defence, f"failed with seed {config.training.seed + number}", *[""] * (5 if private else 4)]
    ends = [run.history.last[metric] for run in done]
    spread = f"{statistics.fmean(ends):.4f} ± {statistics.stdev(ends) if len(ends) > 1 else 0.0:.4f}"
    far = _largest_difference(runs, plain, metric) if defence != "plain" else ""
    seconds = statistics.fmean(run.records[-1]["seconds"] for run in done)
    size = statistics.fmean(
        statistics.fmean(r.get("bytes_down", 0) + r.get("bytes_up", 0) for r in run.records) for run in done
    )
    active = max(1, round(config.training.participation * config.data.clients))
    epsilon = [f"{max(run.records[-1].get('epsilon', math.inf) for run in done):.3g}"] if private else []
    return [defence, spread, far, f"{seconds:.1f}", f"{size:,.0f}", f"{active * size:,.0f}", *epsilon]


def _largest_difference(runs: Sequence[TrainedRun | Failed], plain: Sequence[TrainedRun | Failed], metric: str) -> str:
    """Format the largest difference between curves of one seed; "" where no seed has both."""
    far = []
    for run, other in zip(runs, plain, strict=False):
        if isinstance(run, TrainedRun) and isinstance(other, TrainedRun):
            pairs = zip(run.history.curve(metric), other.history.curve(metric), strict=False)
            far.append(max((abs(a - b) for (_, a), (_, b) in pairs), default=0.0))
    return f"{max(far):.1e}" if far else ""


def verdict(results: Runs, metric: str) -> str:
    """Return the mean test metric of each defence over seeds, in one sentence."""
    said = []
    for name, runs in results.items():
        done, label = _successes(runs), "plain training" if name == "plain" else display_name(name)
        if len(done) < len(runs):
            said.append(f"{label} failed")
        else:
            said.append(f"{label} {quality(metric, statistics.fmean(run.history.last[metric] for run in done))}")
    return f"Test {metric}: {', '.join(said)}."


COMPARE = CompareStudy()
