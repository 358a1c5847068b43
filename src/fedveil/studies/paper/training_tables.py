"""Tables 1 and 2 and Figure 3: accuracy of the veil beside plain training and the other defences."""

import math
import statistics
from collections.abc import Callable, Sequence

from pydantic import TypeAdapter

from fedveil.report import NOTHING, Beside, Curves, Section, Table, count
from fedveil.studies.compare import BASELINE
from fedveil.studies.paper import training
from fedveil.studies.paper.plan import ExhibitPlan, make_exhibit
from fedveil.studies.paper.training import Comparison, Run, compare_runs, format_runs, select, training_graph
from fedveil.studies.presentation import Presentation

DefenceValues = dict[str, dict[str, list[float]]]  # the paper's, by defence and number of clients, one per column
KIND = TypeAdapter(list[Run])
WHO = ("paper", "ours")
HEADER1 = (
    *("L", "clients", "plain", "veil"),
    *("largest difference of means", "largest difference within a seed", "standard deviation over seeds"),
)
LOSS2 = "cross_entropy"  # the paper's
DIFFERENCES: dict[str, Callable[[Comparison], str]] = {
    "difference of means": lambda one: f"{100 * one.means:.2f}",
    "within a seed": lambda one: f"{100 * one.largest_anywhere:.1f}",
    "test loss": lambda one: NOTHING if one.loss is None else f"{100 * one.loss:.1f}",
}
Line = list[tuple[float, float, float]]  # epoch, mean, standard deviation
HEADER3 = ("network", "loss", "clients", "seeds", "largest difference of means, all epochs", "standard deviation there")


def paper_cells(
    plan: ExhibitPlan, printed: Sequence[float], runs: Sequence[Run], key: str, forms: tuple[str, str], scale: float = 1
) -> list[str]:
    """Return the paper's value and ours for each column of the paper's table; `key` is what columns differ in."""
    cells = []
    for column, value in zip(plan.file.columns, printed, strict=True):
        cells += [f"{value:{forms[0]}}", format_runs(select(runs, **{key: column}), forms[1], scale)]
    return cells


def present_table1(plan: ExhibitPlan, results: list[Run]) -> Presentation:
    """Return the paper's values beside ours, then the veil beside plain training."""
    paper, rows, beside = plan.paper_values(DefenceValues), list[list[str]](), list[list[str]]()
    for defence, values in paper.items():
        for clients, printed in values.items():
            own = select(results, defence=defence, clients=clients)
            rows.append([defence, clients, *paper_cells(plan, printed, own, "layers", (".3f", ".4f"))])
    pairs = list(compare_runs(results, ("layers", "clients")))
    for one in pairs:
        ends = [format_runs(select(results, defence=name, **one.where), ".5f") for name in ("plain", "veil")]
        numbers = (one.means, one.largest, training.pooled_deviation(*one.deviations))
        beside.append([*map(str, one.where.values()), *ends, *(f"{value:.1e}" for value in numbers)])
    headline = []
    if pairs:
        question = f"Table 1, regression, {len(pairs)} settings"
        ours = f"as plain: means at most {max(one.means for one in pairs):.1e} apart"
        headline = [(question, f"veil as plain (up to {largest_gap(paper):.3f} apart)", ours)]
    note = plan.file.note.format(
        seeds=len({run.seed for run in results}),
        constant=max((run.constant for run in results if run.constant is not None), default=math.nan),
    )
    header = ["defence", "clients", *(f"L = {depth}, {who}" for depth in plan.file.columns for who in WHO)]
    sections = [Table("Table 1: the veil beside plain training", HEADER1, beside, plan.file.comparison)]
    return Presentation(plan.title, "", header, rows, note, sections, headline=headline)


def largest_gap(paper: DefenceValues) -> float:
    """Return the largest difference between the paper's columns for its method and for FedAvg."""
    pairs = zip(paper["plain"].values(), paper["veil"].values(), strict=True)
    return max(abs(a - b) for plain, veil in pairs for a, b in zip(plain, veil, strict=True))


def present_table2(plan: ExhibitPlan, results: list[Run]) -> Presentation:
    """Return the paper's values beside ours, then the veil and the baseline beside plain training."""
    paper, rows = plan.paper_values(dict[str, DefenceValues]), list[list[str]]()
    for printed_as, data in plan.settings.data.items():
        for clients in next(iter(paper[printed_as].values())):
            for defence, values in paper[printed_as].items():
                own = select(results, data=data, clients=clients, defence=defence, loss=LOSS2)
                cells = paper_cells(plan, values[clients], own, "model", (".2f", ".1f"), 100)
                rows.append([data, clients, defence, *cells])
    constants = {run.data: run.constant for run in results if run.constant is not None}
    notes = [f"The commonest class of {data} has {100 * value:.1f} %." for data, value in constants.items()]
    keys = ("data", "model", "clients", "loss")
    veils, baselines = (list(compare_runs(results, keys, name)) for name in ("veil", BASELINE))
    headline = []
    if veils:
        met = sum(one.overlap for one in veils)
        ours = f"means at most {_farthest(veils)} points apart, ranges overlap in {met} of {len(veils)}"
        ours += f"; the rounding baseline: {_farthest(baselines)} points" if baselines else ""
        headline = [(f"Table 2, ResNets, both losses, {len(veils)} settings", "veil as plain", ours)]
    header = ["data", "clients", "defence", *(f"{net}, {who}" for net in plan.file.columns for who in WHO)]
    sections, note = _comparison_tables(plan, results, veils, baselines), " ".join([plan.file.note, *notes])
    return Presentation(plan.title, "", header, rows, note, sections, headline=headline)


def _comparison_tables(
    plan: ExhibitPlan, runs: Sequence[Run], veils: Sequence[Comparison], baselines: Sequence[Comparison]
) -> list[Section]:
    """Return the veil and the baseline beside plain training, one table for each loss."""
    rows: dict[str, list[list[str]]] = {}
    names = ("plain", "veil", BASELINE)
    header = ("data", "network", "clients", "seeds", *names, "overlap", *DIFFERENCES)
    for one in veils:
        ends = [format_runs(select(runs, defence=name, **one.where), ".1f", 100) for name in names]
        both = [one, *(same for same in baselines if same.where == one.where)]
        numbers = [training.format_pair([measure(each) for each in both]) for measure in DIFFERENCES.values()]
        *where, loss = map(str, one.where.values())
        overlap = "yes" if one.overlap else "no"
        rows.setdefault(loss, []).append([*where, str(len(one.plain)), *ends, overlap, *numbers])
    title = "Table 2: the veil beside plain training"
    return [
        Table(f"{title}, {loss.replace('_', ' ')}", header, own, plan.file.comparison) for loss, own in rows.items()
    ]


def _farthest(some: Sequence[Comparison]) -> str:
    """Format the largest difference of means, in points."""
    return f"{100 * max(one.means for one in some):.2f}"


def present_fig3(plan: ExhibitPlan, results: list[Run]) -> Presentation:
    """Return one row per setting, and charts: a row for each network and loss, a chart for each number of clients."""
    rows, epochs = list[list[str]](), list[bool]()
    charts: dict[tuple[str, ...], list[Curves]] = {}
    for one in compare_runs(results, ("model", "loss", "clients")):
        lines = {name: _mean_curve(select(results, defence=name, **one.where)) for name in ("plain", "veil", BASELINE)}
        largest = [_largest_difference(lines["plain"], lines[name]) for name in ("veil", BASELINE) if lines[name]]
        epochs += [abs(p[1] - v[1]) <= p[2] + v[2] for p, v in zip(lines["plain"], lines["veil"], strict=True)]
        words = [str(value).replace("_", " ") for value in one.where.values()]
        rows.append([*words, str(len(one.plain)), *map(training.format_pair, zip(*largest, strict=True))])
        del lines[BASELINE]
        charts.setdefault(tuple(words[:2]), []).append(_chart(count(int(one.where["clients"]), "client"), lines))
    note = f"Mean over {len({run.seed for run in results})} seeds; bands: one standard deviation up and down."
    sections: list[Section] = [
        Beside(f"Figure 3: {net}, {loss}, {results[0].data}", parts, note) for (net, loss), parts in charts.items()
    ]
    ours = f"veil and plain agree within their spread over seeds in {sum(epochs)} of {len(epochs)} epochs"
    headline = [("Figure 3, training curves", "the curves coincide", ours)] if epochs else []
    return Presentation(plan.title, "", HEADER3, rows, plan.file.note, sections, headline=headline)


def _largest_difference(plain: Line, other: Line) -> tuple[str, str]:
    """Format the largest difference of two mean curves, and the pooled standard deviation there."""
    pairs = zip(plain, other, strict=True)
    far, pooled = max((abs(p[1] - o[1]), training.pooled_deviation(p[2], o[2])) for p, o in pairs)
    return f"{far:.2f}", f"{pooled:.2f}"


def _mean_curve(runs: Sequence[Run]) -> Line:
    """Return epoch, mean and standard deviation over seeds, in per cent."""
    return [
        (points[0][0], 100 * statistics.fmean(y for _, y in points), 100 * training.deviation([y for _, y in points]))
        for points in zip(*(run.curve for run in runs if not run.failed), strict=True)
    ]


def _chart(title: str, lines: dict[str, Line]) -> Curves:
    series = {name: [(epoch, mean) for epoch, mean, _ in points] for name, points in lines.items()}
    bands = {name: [(mean - far, mean + far) for _, mean, far in points] for name, points in lines.items()}
    return Curves(title, "epoch", "test accuracy (%)", series, bands=bands)


TABLE1 = make_exhibit(KIND, training_graph, present_table1)
TABLE2 = make_exhibit(KIND, training_graph, present_table2)
FIG3 = make_exhibit(KIND, training_graph, present_fig3)
