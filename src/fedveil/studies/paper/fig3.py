"""Figure 3: training curves of veil and plain, with their spread over seeds."""

import statistics
from collections.abc import Sequence

from fedveil.report import Beside, Curves, Section, Text
from fedveil.studies.compare import BASELINE
from fedveil.studies.paper.plan import Plan
from fedveil.studies.paper.training import (
    Run,
    TrainingExhibit,
    aparts,
    bracketed,
    counted,
    meeting,
    only,
    pooled,
    spread,
)
from fedveil.studies.study import Shown

KEYS = ("model", "loss", "clients")
Line = list[tuple[float, float, float]]  # epoch, mean, standard deviation
HEADER = ("network", "loss", "clients", "seeds", "largest difference of means, all epochs", "standard deviation there")
NOTE = (
    "In points of test accuracy: where the mean curves of veil and plain are farthest apart, and the standard "
    "deviation over seeds, of both pooled, in that epoch. In brackets the same of the baseline, plain training with "
    "one rounding error more. The paper has no figures here, it shows that curves cover one another."
)


class Fig3(TrainingExhibit):
    """Training curves."""

    def present(self, plan: Plan, results: list[Run]) -> Shown:
        """One row per setting, and charts: a row of them for each network and loss, one for each number of clients."""
        rows: list[list[str]] = []
        every: dict[str, Line] = {}
        charts: dict[tuple[str, ...], list[Curves]] = {}
        for one in aparts(results, KEYS):
            own = only(results, **one.where)
            lines = {name: curves(only(own, defence=name)) for name in ("plain", "veil")}
            same = curves(only(own, defence=BASELINE))
            others = {"veil": lines["veil"]} | ({BASELINE: same} if same else {})
            epochs = {name: beside(lines["plain"], other) for name, other in others.items()}
            far, deviations = zip(*map(farthest, epochs.values()), strict=True)
            for name, found in epochs.items():
                every.setdefault(name, []).extend(found)
            words = [str(value).replace("_", " ") for value in one.where.values()]
            rows.append([*words, str(len(one.plain)), bracketed(far), bracketed(deviations)])
            charts.setdefault(tuple(words[:2]), []).append(chart(counted(one.where["clients"]), lines))
        seeds = len({run.seed for run in results})
        note = f"Mean over {seeds} seeds; bands: one standard deviation up and down."
        sections: list[Section] = [
            Beside(f"Figure 3: {net}, {loss}, {results[0].data}", parts, note) for (net, loss), parts in charts.items()
        ]
        said = [
            f"{name.capitalize()} beside plain: bands overlap in {meeting(found, 'epochs of all settings')}."
            for name, found in every.items()
        ]
        sections.append(Text("Figure 3: findings", said or ["No pair of plain and veiled runs is complete."]))
        return Shown(plan.title, verdict(every.get("veil", [])), HEADER, rows, NOTE, sections)


def verdict(epochs: Line) -> str:
    """In how many epochs the curves of veil and plain agree."""
    if not epochs:
        return ""
    met = sum(far <= first + second for far, first, second in epochs)
    return f"the curves of veil and plain agree within their spread over seeds in {met} of {len(epochs)} epochs"


def beside(plain: Line, other: Line) -> Line:
    """For each epoch the distance of the means, and both deviations."""
    return [(abs(p[1] - o[1]), p[2], o[2]) for p, o in zip(plain, other, strict=True)]


def farthest(epochs: Line) -> tuple[str, str]:
    """The largest distance of two mean curves, and the standard deviation there, of both pooled."""
    far, deviation = max((far, pooled(first, second)) for far, first, second in epochs)
    return f"{far:.2f}", f"{deviation:.2f}"


def curves(runs: Sequence[Run]) -> Line:
    """Epoch, mean and standard deviation over seeds, in per cent."""
    return [
        (points[0][0], 100 * statistics.fmean(y for _, y in points), 100 * spread([y for _, y in points]))
        for points in zip(*(run.curve for run in runs if not run.failed), strict=True)
    ]


def chart(title: str, lines: dict[str, Line]) -> Curves:
    """Both curves with their bands."""
    series = {name: [(epoch, mean) for epoch, mean, _ in points] for name, points in lines.items()}
    bands = {name: [(mean - far, mean + far) for _, mean, far in points] for name, points in lines.items()}
    return Curves(title, "epoch", "test accuracy (%)", series, bands=bands)
