"""Tables 1 and 2 and Figure 3: training runs that compare the veil with plain training and other defences."""

import dataclasses
import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pydantic import TypeAdapter

from fedveil.report import NOTHING, Curves, Section, SideBySide, Table, count
from fedveil.runs.choices import format_command
from fedveil.runs.settings import Config, configure
from fedveil.studies.compare import BASELINE, baseline_settings
from fedveil.studies.federations import TrainedRun, TrainRun
from fedveil.studies.jobs import Failure, StudyJob
from fedveil.studies.paper.plan import LOSS, ExhibitPlan, RunValue, make_exhibit
from fedveil.studies.study import JobGraph, Presentation

Setting = dict[str, str | int]


@dataclass(frozen=True)
class Run:
    """A training run: its configuration, and its results or the reason for its failure."""

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
    """Return all combinations of the values in each group of runs, for each seed.

    Groups share the values in `common`. A value that depends on another key refers to it by `of`, for example
    batch_size = { of = "clients", 1 = 40, 5 = 8 }.
    """
    result = []
    for group in plan.settings.runs:
        values = plan.settings.common | group
        seeds = values.pop("seeds")
        assert isinstance(seeds, int)
        values |= {"device": plan.device, "seed": list(range(seeds))}
        axes: list[Sequence[RunValue]] = [value if isinstance(value, list) else [value] for value in values.values()]
        for combination in itertools.product(*axes):
            setting = dict(zip(values, combination, strict=True))
            for name, value in setting.items():
                if isinstance(value, dict):
                    setting[name] = value[str(setting[str(value["of"])])]
            if "rounding" in setting:
                setting["settings"] = baseline_settings(int(str(setting.pop("rounding"))))
            result.append(configure({**LOSS, **setting}, plan.error_prefix))
    return list(dict.fromkeys(result))


def run_name(config: Config) -> str:
    """Return a readable, unique name for a configuration."""
    digest = hashlib.sha256(json.dumps(config.flat()).encode()).hexdigest()[:8]
    net = f"{config.model.name}{config.model.layers}" if config.model.name == "mlp" else config.model.name
    parts = (config.data.name, net, f"K{config.data.clients}", str(config.training.loss), defence_name(config))
    return "-".join([*parts, str(config.training.seed), digest])


def defence_name(config: Config) -> str:
    """Return the name of the defence, or of the rounding baseline."""
    return BASELINE if config.defence.settings else config.defence.name


def training_graph(plan: ExhibitPlan, folder: Path) -> JobGraph[list[Run]]:
    """Return one job per run, ordered by seed, so that an interrupted table is complete for some seeds."""
    configs, jobs = list_configs(plan), dict[Config, StudyJob[TrainedRun]]()
    for config in sorted(configs, key=lambda config: config.training.seed):
        name = run_name(config)
        jobs[config] = StudyJob(name, TrainRun(config, folder / "runs" / name), TrainedRun)
    return JobGraph(list(jobs.values()), lambda results: [_to_run(config, results[jobs[config]]) for config in configs])


def _to_run(config: Config, result: TrainedRun | Failure) -> Run:
    identity = (config.data.name, config.model.name, config.model.layers, config.data.clients)
    run = Run(*identity, str(config.training.loss), config.training.seed, defence_name(config), format_command(config))
    if isinstance(result, Failure):
        return dataclasses.replace(run, failed=result.failed)
    metric, final_metrics = result.metric, result.history.metrics
    curve = [(round(r.epoch, 3), r.metrics[metric]) for r in result.records if r.evaluated]
    run = dataclasses.replace(
        run, metric=metric, value=final_metrics[metric], curve=curve, test_loss=final_metrics.get("loss")
    )
    return dataclasses.replace(run, constant=result.constant, seconds=result.records[-1].seconds)


def select(runs: Sequence[Run], **values: str | int) -> list[Run]:
    """Return the runs that have the given values; a number may also be given as a string."""
    return [run for run in runs if all(str(getattr(run, key)) == str(value) for key, value in values.items())]


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation, or 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def pooled_deviation(first_deviation: float, second_deviation: float) -> float:
    """Return the pooled standard deviation of two samples of equal size."""
    return math.hypot(first_deviation, second_deviation) / math.sqrt(2)


def format_runs(runs: Sequence[Run], format_spec: str, scale: float = 1.0) -> str:
    """Format the mean ± standard deviation over seeds or, if a run failed, the reason."""
    if not runs:
        return NOTHING
    if failures := [run.failed for run in runs if run.failed]:
        return f"failed: {failures[0]}"
    values = [scale * run.value for run in runs]
    return f"{statistics.fmean(values):{format_spec}} ± {deviation(values):{format_spec}}"


def format_pair(values: Sequence[str]) -> str:
    """Format the veil's value, followed by the baseline's value in brackets if there is one."""
    return values[0] + "".join(f" ({value})" for value in values[1:] if value != NOTHING)


@dataclass(frozen=True)
class Comparison:
    """A comparison of the veil or the baseline with plain training, for the same seeds.

    Attributes:
        setting: configuration values that the runs share.
        plain_values, other_values: final values of the metric, one per seed.
        final_difference: largest difference between the final values of two runs with the same seed.
        curve_difference: largest difference between the curves of two runs with the same seed, at any epoch.
        loss_difference: largest relative difference between final test losses; None if the metric is the loss.
    """

    setting: Setting
    plain_values: Sequence[float]
    other_values: Sequence[float]
    final_difference: float
    curve_difference: float
    loss_difference: float | None = None

    @property
    def mean_difference(self) -> float:
        """The absolute difference of the means."""
        return abs(statistics.fmean(self.other_values) - statistics.fmean(self.plain_values))

    @property
    def deviations(self) -> tuple[float, float]:
        """The standard deviations of both values over seeds."""
        return deviation(self.plain_values), deviation(self.other_values)

    @property
    def ranges_overlap(self) -> bool:
        """Whether the ranges (mean ± standard deviation) overlap."""
        return self.mean_difference <= sum(self.deviations)


def compare_runs(runs: Sequence[Run], keys: Sequence[str], other: str = "veil") -> Iterator[Comparison]:
    """Compare the veil or the baseline with plain training, for every combination of values of the given keys.

    Combinations without a seed that has both runs are skipped.
    """
    for values in dict.fromkeys(tuple(getattr(run, key) for key in keys) for run in runs):
        setting: Setting = dict(zip(keys, values, strict=True))
        plain_runs, other_runs = (
            {run.seed: run for run in select(runs, defence=name, **setting) if not run.failed}
            for name in ("plain", other)
        )
        pairs = [(plain_runs[seed], other_runs[seed]) for seed in sorted(plain_runs.keys() & other_runs.keys())]
        if not pairs:
            continue
        final_difference = max(abs(p.value - o.value) for p, o in pairs)
        curve_difference = max(abs(a[1] - b[1]) for p, o in pairs for a, b in zip(p.curve, o.curve, strict=True))
        loss_differences = [abs(o.test_loss / p.test_loss - 1) for p, o in pairs if p.test_loss and o.test_loss]
        plain_values, other_values = ([run.value for run in runs] for runs in zip(*pairs, strict=True))
        loss_difference = max(loss_differences, default=None)
        yield Comparison(setting, plain_values, other_values, final_difference, curve_difference, loss_difference)


DefenceValues = dict[str, dict[str, list[float]]]  # the paper's rows of values, by defence and number of clients
KIND = TypeAdapter(list[Run])
SOURCES = ("paper", "ours")
HEADER1 = (
    *("L", "clients", "plain", "veil"),
    *("largest difference of means", "largest difference within a seed", "standard deviation over seeds"),
)
TABLE2_LOSS = "cross_entropy"  # the paper's loss for Table 2
DIFFERENCES: dict[str, Callable[[Comparison], str]] = {
    "difference of means": lambda pair: f"{100 * pair.mean_difference:.2f}",
    "within a seed": lambda pair: f"{100 * pair.curve_difference:.1f}",
    "test loss": lambda pair: NOTHING if pair.loss_difference is None else f"{100 * pair.loss_difference:.1f}",
}
MeanCurve = list[tuple[float, float, float]]  # epoch, mean, standard deviation
HEADER3 = ("network", "loss", "clients", "seeds", "largest difference of means", "standard deviation at that epoch")


def paper_cells(
    plan: ExhibitPlan, paper: Sequence[float], runs: Sequence[Run], key: str, formats: tuple[str, str], scale: float = 1
) -> list[str]:
    """Return the paper's value and ours for each column of the paper's table; columns differ in the field `key`."""
    cells = []
    for column, value in zip(plan.file.columns, paper, strict=True):
        cells += [f"{value:{formats[0]}}", format_runs(select(runs, **{key: column}), formats[1], scale)]
    return cells


def present_table1(plan: ExhibitPlan, results: list[Run]) -> Presentation:
    """Return a table of the paper's values and ours, and a comparison of the veil with plain training."""
    paper, rows, comparison_rows = plan.paper_values(DefenceValues), list[list[str]](), list[list[str]]()
    for defence, values in paper.items():
        for clients, paper_row in values.items():
            selected_runs = select(results, defence=defence, clients=clients)
            rows.append([defence, clients, *paper_cells(plan, paper_row, selected_runs, "layers", (".3f", ".4f"))])
    pairs = list(compare_runs(results, ("layers", "clients")))
    for pair in pairs:
        final_values = [format_runs(select(results, defence=name, **pair.setting), ".5f") for name in ("plain", "veil")]
        numbers = (pair.mean_difference, pair.final_difference, pooled_deviation(*pair.deviations))
        comparison_rows.append(
            [*map(str, pair.setting.values()), *final_values, *(f"{value:.1e}" for value in numbers)]
        )
    summary_rows = []
    if pairs:
        our_summary = f"means at most {max(pair.mean_difference for pair in pairs):.1e} apart"
        value_pairs = zip(chain(*paper["plain"].values()), chain(*paper["veil"].values()), strict=True)
        question, gap = f"Table 1, regression, {len(pairs)} settings", max(abs(a - b) for a, b in value_pairs)
        summary_rows = [(question, f"veil and plain at most {gap:.3f} apart", our_summary)]
    note = plan.file.note.format(
        seeds=len({run.seed for run in results}),
        constant=max((run.constant for run in results if run.constant is not None), default=math.nan),
    )
    header = ["defence", "clients", *(f"L = {depth}, {source}" for depth in plan.file.columns for source in SOURCES)]
    sections = [Table("Table 1: the veil compared with plain training", HEADER1, comparison_rows, plan.file.comparison)]
    return Presentation(plan.title, "", header, rows, note, sections, summary_rows=summary_rows)


def present_table2(plan: ExhibitPlan, results: list[Run]) -> Presentation:
    """Return a table of the paper's values and ours, and compare the veil and the baseline with plain training."""
    paper, rows = plan.paper_values(dict[str, DefenceValues]), list[list[str]]()
    for paper_name, data in plan.settings.data.items():
        for clients in next(iter(paper[paper_name].values())):
            for defence, values in paper[paper_name].items():
                selected_runs = select(results, data=data, clients=clients, defence=defence, loss=TABLE2_LOSS)
                cells = paper_cells(plan, values[clients], selected_runs, "model", (".2f", ".1f"), 100)
                rows.append([data, clients, defence, *cells])
    constants = {run.data: run.constant for run in results if run.constant is not None}
    notes = [f"The most common class of {data} makes up {100 * value:.1f} %." for data, value in constants.items()]
    keys = ("data", "model", "clients", "loss")
    veils, baselines = (list(compare_runs(results, keys, name)) for name in ("veil", BASELINE))
    summary_rows = []
    if veils:
        overlapping = sum(veil.ranges_overlap for veil in veils)
        our_summary = (
            f"means at most {_largest_mean_gap(veils)} points apart, ranges overlap in {overlapping} of {len(veils)}"
        )
        our_summary += f"; the rounding baseline: {_largest_mean_gap(baselines)} points" if baselines else ""
        summary_rows = [
            (f"Table 2, ResNets, both losses, {len(veils)} settings", "veil and plain the same", our_summary)
        ]
    header = ["data", "clients", "defence", *(f"{net}, {source}" for net in plan.file.columns for source in SOURCES)]
    sections, note = _comparison_tables(plan, results, veils, baselines), " ".join([plan.file.note, *notes])
    return Presentation(plan.title, "", header, rows, note, sections, summary_rows=summary_rows)


def _comparison_tables(
    plan: ExhibitPlan, runs: Sequence[Run], veils: Sequence[Comparison], baselines: Sequence[Comparison]
) -> list[Section]:
    """Return one table per loss that compares the veil and the baseline with plain training."""
    rows: dict[str, list[list[str]]] = {}
    names = ("plain", "veil", BASELINE)
    header = ("data", "network", "clients", "seeds", *names, "overlap", *DIFFERENCES)
    for veil in veils:
        final_values = [format_runs(select(runs, defence=name, **veil.setting), ".1f", 100) for name in names]
        comparisons = [veil, *(baseline for baseline in baselines if baseline.setting == veil.setting)]
        numbers = [format_pair([measure(pair) for pair in comparisons]) for measure in DIFFERENCES.values()]
        *labels, loss = map(str, veil.setting.values())
        overlap = "yes" if veil.ranges_overlap else "no"
        rows.setdefault(loss, []).append([*labels, str(len(veil.plain_values)), *final_values, overlap, *numbers])
    title = "Table 2: the veil compared with plain training"
    return [
        Table(f"{title}, {loss.replace('_', ' ')}", header, row, plan.file.comparison) for loss, row in rows.items()
    ]


def _largest_mean_gap(comparisons: Sequence[Comparison]) -> str:
    """Format the largest difference of means, in points."""
    return f"{100 * max(comparison.mean_difference for comparison in comparisons):.2f}"


def present_fig3(plan: ExhibitPlan, results: list[Run]) -> Presentation:
    """Return one row per setting, and one chart per number of clients for each network and loss."""
    rows, agreements = list[list[str]](), list[bool]()
    charts: dict[tuple[str, ...], list[Curves]] = {}
    for comparison in compare_runs(results, ("model", "loss", "clients")):
        lines = {
            name: _mean_curve(select(results, defence=name, **comparison.setting))
            for name in ("plain", "veil", BASELINE)
        }
        differences = [_largest_difference(lines["plain"], lines[name]) for name in ("veil", BASELINE) if lines[name]]
        agreements += [abs(p[1] - v[1]) <= p[2] + v[2] for p, v in zip(lines["plain"], lines["veil"], strict=True)]
        labels = [str(value).replace("_", " ") for value in comparison.setting.values()]
        rows.append([*labels, str(len(comparison.plain_values)), *map(format_pair, zip(*differences, strict=True))])
        del lines[BASELINE]
        charts.setdefault(tuple(labels[:2]), []).append(
            _chart(count(int(comparison.setting["clients"]), "client"), lines)
        )
    note = f"Means over {len({run.seed for run in results})} seeds; bands show ± one standard deviation."
    sections: list[Section] = [
        SideBySide(f"Figure 3: {net}, {loss}, {results[0].data}", parts, note) for (net, loss), parts in charts.items()
    ]
    our_summary = (
        f"veil and plain agree within their spread over seeds in {sum(agreements)} of {len(agreements)} epochs"
    )
    summary_rows = [("Figure 3, training curves", "the curves coincide", our_summary)] if agreements else []
    return Presentation(plan.title, "", HEADER3, rows, plan.file.note, sections, summary_rows=summary_rows)


def _largest_difference(plain_curve: MeanCurve, other_curve: MeanCurve) -> tuple[str, str]:
    """Format the largest difference between two mean curves, and the pooled standard deviation at that epoch."""
    pairs = zip(plain_curve, other_curve, strict=True)
    difference, spread = max((abs(p[1] - o[1]), pooled_deviation(p[2], o[2])) for p, o in pairs)
    return f"{difference:.2f}", f"{spread:.2f}"


def _mean_curve(runs: Sequence[Run]) -> MeanCurve:
    """Return each epoch with the mean and standard deviation over seeds, in per cent."""
    return [
        (points[0][0], 100 * statistics.fmean(y for _, y in points), 100 * deviation([y for _, y in points]))
        for points in zip(*(run.curve for run in runs if not run.failed), strict=True)
    ]


def _chart(title: str, lines: dict[str, MeanCurve]) -> Curves:
    series = {name: [(epoch, mean) for epoch, mean, _ in points] for name, points in lines.items()}
    bands = {name: [(mean - spread, mean + spread) for _, mean, spread in points] for name, points in lines.items()}
    return Curves(title, "epoch", "test accuracy (%)", series, bands=bands)


TABLE1 = make_exhibit(KIND, training_graph, present_table1)
TABLE2 = make_exhibit(KIND, training_graph, present_table2)
FIG3 = make_exhibit(KIND, training_graph, present_fig3)
