"""Figure 3: training curves of veil and plain, with their spread over seeds."""

import statistics
from collections.abc import Sequence

from pydantic import TypeAdapter

from fedveil.report import Beside, Curves, Section, Text, count
from fedveil.studies.compare import BASELINE
from fedveil.studies.paper import training
from fedveil.studies.paper.plan import Plan, make_exhibit
from fedveil.studies.paper.training import Run, select
from fedveil.studies.study import Shown

KEYS = ("model", "loss", "clients")
Line = list[tuple[float, float, float]]  # epoch, mean, standard deviation
HEADER = ("network", "loss", "clients", "seeds", "largest difference of means, all epochs", "standard deviation there")
NOTE = (
    "In points of test accuracy: the largest difference between the mean curves of veil and plain, and the pooled "
    "standard deviation over seeds in that epoch. In brackets the same for the baseline, plain training with one more "
    "rounding error. The paper gives no numbers here; its figure shows curves that coincide."
)


def present(plan: Plan, results: list[Run]) -> Shown:
    """Show one row per setting, and charts: a row for each network and loss, a chart for each number of clients."""
    rows: list[list[str]] = []
    every: dict[str, Line] = {}
    charts: dict[tuple[str, ...], list[Curves]] = {}
    for one in training.compare_runs(results, KEYS):
        lines = {name: _mean_curve(select(results, defence=name, **one.where)) for name in ("plain", "veil", BASELINE)}
        others = {name: _differences(lines["plain"], lines[name]) for name in ("veil", BASELINE) if lines[name]}
        far, deviations = zip(*map(_largest, others.values()), strict=True)
        for name, found in others.items():
            every.setdefault(name, []).extend(found)
        words = [str(value).replace("_", " ") for value in one.where.values()]
        rows.append([*words, str(len(one.plain)), training.format_pair(far), training.format_pair(deviations)])
        shown = {name: lines[name] for name in ("plain", "veil")}
        charts.setdefault(tuple(words[:2]), []).append(_chart(count(int(one.where["clients"]), "client"), shown))
    seeds = len({run.seed for run in results})
    note = f"Mean over {seeds} seeds; bands: one standard deviation up and down."
    sections: list[Section] = [
        Beside(f"Figure 3: {net}, {loss}, {results[0].data}", parts, note) for (net, loss), parts in charts.items()
    ]
    overlaps = {name: training.format_overlap(found, "epochs of all settings") for name, found in every.items()}
    said = [f"{name.capitalize()} beside plain: bands overlap in {found}." for name, found in overlaps.items()]
    sections.append(Text("Figure 3: findings", said or ["No pair of plain and veiled runs is complete."]))
    verdict, epochs = "", every.get("veil", [])
    if epochs:
        met = f"{sum(far <= first + second for far, first, second in epochs)} of {len(epochs)} epochs"
        verdict = f"the curves of veil and plain agree within their spread over seeds in {met}"
    return Shown(plan.title, verdict, HEADER, rows, NOTE, sections)


def _differences(plain: Line, other: Line) -> Line:
    """Return for each epoch the difference of the means, and both deviations."""
    return [(abs(p[1] - o[1]), p[2], o[2]) for p, o in zip(plain, other, strict=True)]


def _largest(epochs: Line) -> tuple[str, str]:
    """Format the largest difference of two mean curves, and the pooled standard deviation there."""
    far, pooled = max((far, training.pooled_deviation(first, second)) for far, first, second in epochs)
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


FIG3 = make_exhibit(TypeAdapter(list[Run]), training.training_graph, present)
