"""`fedveil compare`: the same federation under several defences and seeds, in one table and one page."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedveil.checks import one_of, whole
from fedveil.defences.registry import BUILT_IN, names
from fedveil.errors import BadArgument
from fedveil.report import Facts, Section, Text
from fedveil.runs.build import build_federation, load_data
from fedveil.runs.config import Config
from fedveil.runs.losses import primary_metric
from fedveil.runs.page import cost_section, curve_sections, quality
from fedveil.studies.jobs import Done, Failed, Job, Result
from fedveil.studies.study import Shown, Study
from fedveil.studies.tables import listed, named
from fedveil.studies.victim import Trained, TrainRun

BASELINE = "baseline"
DEFENCES = tuple(record.name for record in BUILT_IN)
NOTES = (
    "The baseline is plain training with one rounding error more: noise of one unit in the last place of every "
    "gradient. It shows what rounding alone does. A defence that loses nothing stays as near to plain as that.",
    "SPN is our re-implementation; no code of its authors is public. Settings are the defaults of each defence unless "
    "the command says otherwise; they are not tuned to this data.",
)
PRIVATE = (
    "Every run draws its own noise for differential privacy, so that curves part by that noise too, the baseline's "
    "included. Epsilon is a client's, for all rounds together, and does not bind the server."
)
HEADER = ("defence", "test {}", "difference from plain", "seconds", "bytes per client and round", "bytes per round")


@dataclass(frozen=True)
class Compared:
    """What is asked: a federation, defences, and how many seeds from the configuration's on."""

    config: Config
    defences: tuple[str, ...]
    seeds: int = 3

    def __post_init__(self) -> None:
        """Refuse what cannot be compared."""
        check_defences(self.defences, (*names(), BASELINE), "--defences")
        whole("--seeds", "seeds", self.seeds, 1)


Runs = dict[str, list[Trained | Failed]]  # by defence, seed after seed


def baseline_settings(seed: int) -> tuple[str, ...]:
    """Return the settings that make plain training the rounding baseline."""
    return (f"rounding={seed}",)


def check_defences(names: Sequence[str], known: Sequence[str], flag: str) -> None:
    """Refuse a name that is not known, or given twice; package.module:Class is not looked up here."""
    for number, name in enumerate(names):
        if ":" not in name:
            one_of(flag, "defence", name, known)
        if name in names[:number]:
            raise BadArgument(flag, f"{name!r} is given twice", "leave one out")
    if not names:
        raise BadArgument(flag, "no defence is named", f"use some of {', '.join(known)}")


def finished(runs: Sequence[Trained | Failed]) -> list[Trained]:
    """The runs that did not fail."""
    return [run for run in runs if isinstance(run, Trained)]


def farthest(runs: Sequence[Trained | Failed], plain: Sequence[Trained | Failed], metric: str) -> str:
    """The largest distance between curves of one seed; "" where no seed has both."""
    far = []
    for run, other in zip(runs, plain, strict=False):
        if isinstance(run, Trained) and isinstance(other, Trained):
            pairs = zip(run.history.curve(metric), other.history.curve(metric), strict=False)
            far.append(max((abs(a - b) for (_, a), (_, b) in pairs), default=0.0))
    return f"{max(far):.1e}" if far else ""


def rows_of(results: Runs, metric: str, config: Config) -> list[list[str]]:
    """One row per defence: metric with spread over seeds, largest distance from plain, cost, epsilon."""
    active = max(1, round(config.training.participation * config.data.clients))
    rows, private = [], config.privacy.dp_clip is not None
    for defence, own in results.items():
        done = finished(own)
        if len(done) < len(own):
            number = next(number for number, run in enumerate(own) if isinstance(run, Failed))
            rows.append([defence, f"failed with seed {config.training.seed + number}", *[""] * (5 if private else 4)])
            continue
        ends = [run.history.last[metric] for run in done]
        spread = f"{statistics.fmean(ends):.4f} ± {statistics.stdev(ends) if len(ends) > 1 else 0.0:.4f}"
        far = farthest(own, results.get("plain", []), metric) if defence != "plain" else ""
        seconds = statistics.fmean(run.records[-1]["seconds"] for run in done)
        size = statistics.fmean(
            statistics.fmean(r.get("bytes_down", 0) + r.get("bytes_up", 0) for r in run.records) for run in done
        )
        row = [defence, spread, far, f"{seconds:.1f}", f"{size:,.0f}", f"{active * size:,.0f}"]
        if private:
            row.append(f"{max(run.records[-1].get('epsilon', math.inf) for run in done):.3g}")
        rows.append(row)
    return rows


def verdict(results: Runs, metric: str) -> str:
    """How near to plain training defences end, in one sentence: means over seeds, the nearest and the farthest."""
    ends = {
        defence: statistics.fmean(run.history.last[metric] for run in finished(own))
        for defence, own in results.items()
        if own and len(finished(own)) == len(own)
    }
    broken = [named(defence) for defence in results if defence not in ends]
    failed = f"; {listed(broken, 'and')} failed" if broken else ""
    plain = ends.pop("plain", None)
    others = {name: end for name, end in ends.items() if name != BASELINE} or ends
    if not others:
        return f"Test {metric} {quality(metric, plain)} (plain training){failed}." if plain else "Every run failed."
    if plain is None:
        ordered = sorted(others, key=others.__getitem__)
        words = listed([f"{quality(metric, others[name])} ({named(name)})" for name in ordered], "and")
        return f"Test {metric} ends at {words}{failed}; plain training was not measured."
    nearest, farthest = (choose(others, key=lambda name: abs(others[name] - plain)) for choose in (min, max))
    said = f"{named(nearest)} ends {distance(metric, others[nearest] - plain)} plain training "
    said += f"({metric} {quality(metric, plain)})"
    if farthest != nearest:
        said += f", {named(farthest)} {distance(metric, others[farthest] - plain)} it"
    return f"{said[0].upper()}{said[1:]}{failed}."


def distance(metric: str, far: float) -> str:
    """How far above or below."""
    if metric != "accuracy":
        return f"{abs(far):.2g} {'above' if far > 0 else 'below'}" if far else "level with"
    return (
        f"{100 * abs(far):.1f} points {'above' if far > 0 else 'below'}" if abs(far) >= 5e-4 else "within 0.1 points of"
    )


class CompareStudy(Study[Compared, Runs]):
    """Several defences and seeds."""

    name = "compare"
    summary = "the same federation under several defences"

    def runs(self, asked: Compared, folder: Path) -> dict[tuple[str, int], Job[Trained]]:
        """A job for each seed and defence."""
        jobs, first = {}, asked.config.training.seed
        for seed in range(first, first + asked.seeds):
            for name in asked.defences:
                config = asked.config.changed(seed=seed, defence="plain" if name == BASELINE else name)
                if name == BASELINE:
                    config = config.changed(settings=baseline_settings(seed + 1))
                label = f"{name}-{seed}".replace(":", ".")
                work = TrainRun(config, folder / "runs" / label)
                jobs[name, seed] = Job(label, work, Trained)
        return jobs

    def jobs(self, asked: Compared, folder: Path) -> list[Job[Result]]:
        """Seed by seed, so that a comparison that was stopped is whole for some seeds."""
        build_federation(asked.config.changed(defence="plain"), load_data(asked.config))  # refused before anything runs
        return list(self.runs(asked, folder).values())

    def collect(self, asked: Compared, folder: Path, done: Done) -> Runs:
        """By defence."""
        found: Runs = {name: [] for name in asked.defences}
        for (name, _), job in self.runs(asked, folder).items():
            found[name].append(done[job])
        return found

    def present(self, asked: Compared, results: Runs) -> Shown:
        """The table, curves of the first seed, cost, configuration."""
        config, private = asked.config, asked.config.privacy.dp_clip is not None
        last = [run.history.last for runs in results.values() for run in finished(runs)]
        metric = primary_metric({name for record in last for name in record})
        header = [title.format(metric) for title in HEADER] + ["epsilon"] * private
        first = {name: runs[0].history for name, runs in results.items() if isinstance(runs[0], Trained)}
        failures = [
            f"{name}, seed {config.training.seed + number}: {run.failed}"
            for name, runs in results.items()
            for number, run in enumerate(runs)
            if isinstance(run, Failed)
        ]
        seeds = f"{asked.seeds} seed{'s' if asked.seeds > 1 else ''}"
        sections: list[Section] = [
            *([Text("Failed", failures)] if failures else []),
            Text("How to read it", [*NOTES, *([PRIVATE] if private else [])]),
            *curve_sections(first),
            cost_section(first),
            Facts("Configuration", {name: str(value) for name, value in config.flat().items()}),
        ]
        where = f"{config.model.name} on {config.data.name} with {config.data.clients} clients"
        return Shown(
            f"{config.data.name}, {config.model.name}: defences compared",
            verdict(results, metric),
            header,
            rows_of(results, metric, config),
            f"Mean and standard deviation over {seeds}; bytes without names and shapes.",
            sections,
            lead=f"{len(results)} ways to train {where}. Curves: first seed.",
        )


COMPARE = CompareStudy()
