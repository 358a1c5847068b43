"""`fedveil compare`: train the same federation under several defences and seeds, and compare the results."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from fedveil.checks import check_count
from fedveil.defences.registry import names
from fedveil.federation.page import cost_section, curve_sections, format_metric
from fedveil.federation.results import primary_metric
from fedveil.report import Facts, Section, Text, count
from fedveil.runs.build import build_federation, load_data
from fedveil.runs.settings import Config, has_privacy
from fedveil.studies.attack import check_defences
from fedveil.studies.federations import TrainedRun, TrainRun
from fedveil.studies.jobs import Failure, StudyJob
from fedveil.studies.study import JobGraph, Presentation, Study, display_name, failed_row, read_texts

TEXTS = read_texts()["compare"]
BASELINE = "baseline"
HEADER = ("defence", "test {}", "difference from plain", "seconds", "bytes per client and round", "bytes per round")
SeedRuns = list[TrainedRun | Failure]  # one run per seed
Runs = dict[str, SeedRuns]  # runs by defence


@dataclass(frozen=True)
class CompareRequest:
    """A federation, the defences to compare, and the number of seeds; the configuration contains the first seed."""

    config: Config
    defences: tuple[str, ...]
    seeds: int = 3

    def __post_init__(self) -> None:
        """Refuse unknown or repeated defences, and fewer than one seed."""
        check_defences(self.defences, (*names(), BASELINE), "--defences")
        check_count("--seeds", "seeds", self.seeds, 1)


def baseline_settings(seed: int) -> tuple[str, ...]:
    """Return the settings that turn plain training into the rounding baseline."""
    return (f"rounding={seed}",)


class CompareStudy(Study[CompareRequest, Runs]):
    """A comparison of training under several defences, with several seeds."""

    def graph(self, request: CompareRequest, folder: Path) -> JobGraph[Runs]:
        """Return one job per seed and defence, ordered by seed, so that the first seeds finish first."""
        build_federation(request.config.changed(defence="plain"), load_data(request.config))  # validate the settings
        jobs, first_seed = dict[tuple[str, int], StudyJob[TrainedRun]](), request.config.training.seed
        for seed in range(first_seed, first_seed + request.seeds):
            for name in request.defences:
                config = request.config.changed(seed=seed, defence="plain" if name == BASELINE else name)
                if name == BASELINE:
                    config = config.changed(settings=baseline_settings(seed + 1))
                label = f"{name}-{seed}".replace(":", ".")
                jobs[name, seed] = StudyJob(label, TrainRun(config, folder / "runs" / label), TrainedRun)
        return JobGraph(
            list(jobs.values()),
            lambda results: {
                name: [results[job] for (defence, _), job in jobs.items() if defence == name]
                for name in request.defences
            },
        )

    def present(self, request: CompareRequest, results: Runs) -> Presentation:
        """Return the table, the curves of the first seed, the cost and the configuration."""
        config, has_dp = request.config, has_privacy(request.config)
        indexed_runs = [(name, index, run) for name, runs in results.items() for index, run in enumerate(runs)]
        histories = [(name, index, run.history) for name, index, run in indexed_runs if isinstance(run, TrainedRun)]
        metric = primary_metric({name for _, _, history in histories for name in history.metrics})
        first_histories = {name: history for name, index, history in histories if index == 0}
        failures = [
            f"{name}, seed {config.training.seed + index}: {run.failed}"
            for name, index, run in indexed_runs
            if isinstance(run, Failure)
        ]
        sections: list[Section] = [
            *([Text("Failed", failures)] if failures else []),
            Text("How to read it", [*TEXTS.reading, *([TEXTS.notes["private"]] if has_dp else [])]),
            *curve_sections(first_histories),
            cost_section(first_histories),
            Facts("Configuration", {name: str(value) for name, value in config.flat().items()}),
        ]
        title, header = f"{config.data.name}, {config.model.name}: defences compared", [*HEADER, *["epsilon"] * has_dp]
        rows = [_row(name, runs, results.get("plain", []), metric, config) for name, runs in results.items()]
        note = f"Mean and standard deviation over {count(request.seeds, 'seed')}; byte counts exclude names and shapes."
        federation_text = f"{config.model.name} on {config.data.name} with {count(config.data.clients, 'client')}"
        description = f"{len(results)} ways to train {federation_text}. The curves show the first seed."
        header = [column.format(metric) for column in header]
        return Presentation(title, verdict(results, metric), header, rows, note, sections, description=description)


def _row(defence: str, runs: SeedRuns, plain_runs: SeedRuns, metric: str, config: Config) -> list[str]:
    """Return the row for a defence: its metric, largest difference from plain training, cost and epsilon."""
    completed_runs, has_dp = list[TrainedRun](), has_privacy(config)
    for index, run in enumerate(runs):
        if isinstance(run, Failure):
            return failed_row(defence, len(HEADER) + has_dp, f"failed with seed {config.training.seed + index}")
        completed_runs.append(run)
    final_values = [run.history.metrics[metric] for run in completed_runs]
    mean_and_deviation = (
        f"{statistics.fmean(final_values):.4f} ± {statistics.stdev(final_values) if len(final_values) > 1 else 0.0:.4f}"
    )
    difference = _largest_difference(runs, plain_runs, metric) if defence != "plain" else ""
    seconds = statistics.fmean(run.records[-1].seconds for run in completed_runs)
    traffic = [record.figures for run in completed_runs for record in run.records]
    size = statistics.fmean(figures.get("bytes_down", 0) + figures.get("bytes_up", 0) for figures in traffic)
    num_active = max(1, round(config.training.participation * config.data.clients))
    epsilon = (
        [f"{max(run.records[-1].figures.get('epsilon', math.inf) for run in completed_runs):.3g}"] if has_dp else []
    )
    return [
        defence,
        mean_and_deviation,
        difference,
        f"{seconds:.1f}",
        f"{size:,.0f}",
        f"{num_active * size:,.0f}",
        *epsilon,
    ]


def _largest_difference(runs: SeedRuns, plain_runs: SeedRuns, metric: str) -> str:
    """Format the largest difference between curves with the same seed; return "" if no seed has both curves."""
    differences = []
    for run, plain_run in zip(runs, plain_runs, strict=False):
        if isinstance(run, TrainedRun) and isinstance(plain_run, TrainedRun):
            pairs = zip(run.history.curve(metric), plain_run.history.curve(metric), strict=False)
            differences.append(max((abs(a - b) for (_, a), (_, b) in pairs), default=0.0))
    return f"{max(differences):.1e}" if differences else ""


def verdict(results: Runs, metric: str) -> str:
    """Return a sentence with the mean test metric of each defence over all seeds."""
    parts = []
    for name, runs in results.items():
        final_values = [run.history.metrics[metric] for run in runs if isinstance(run, TrainedRun)]
        value = format_metric(metric, statistics.fmean(final_values)) if len(final_values) == len(runs) else "failed"
        parts.append(f"{'plain training' if name == 'plain' else display_name(name)} {value}")
    return f"Test {metric}: {', '.join(parts)}."


COMPARE = CompareStudy()
