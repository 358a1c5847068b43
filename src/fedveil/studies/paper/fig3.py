"""Figure 3: training curves of veil and plain, with their spread over seeds."""

import statistics
from collections.abc import Sequence

from fedveil.report import Beside, Curves, Section, Text
from fedveil.studies.attack import Shown
from fedveil.studies.compare import CONTROL
from fedveil.studies.jobs import Result
from fedveil.studies.paper.plan import Exhibit, Plan
from fedveil.studies.paper.training import aparts, bracketed, counted, gather, meeting, only, pooled, spread

KEYS = ("model", "loss", "clients")
Line = list[tuple[float, float, float]]  # epoch, mean, standard deviation
HEADER = ("network", "loss", "clients", "seeds", "means apart, largest of all epochs", "standard deviation there")
NOTE = (
    "In points of test accuracy: where the mean curves of veil and plain are farthest apart, and the standard "
    "deviation over seeds, of both pooled, in that epoch. In brackets the same of the control, plain training with a "
    "rounding error more. The paper has no figures here, it shows that curves cover one another."
)


def present(plan: Plan, results: Sequence[Result]) -> Shown:
    """A row a setting, and charts: a row of them for each network and loss, one for each number of clients."""
    rows: list[list[str]] = []
    every: dict[str, list[tuple[float, float, float]]] = {}
    charts: dict[tuple[str, ...], list[Curves]] = {}
    for one in aparts(results, KEYS):
        where = one.where
        own = only(results, **where)
        lines = {name: curves(only(own, defence=name)) for name in ("plain", "veil")}
        others = {"veil": lines["veil"]} | ({CONTROL: same} if (same := curves(only(own, defence=CONTROL))) else {})
        epochs = {name: beside(lines["plain"], other) for name, other in others.items()}
        far, deviations = zip(*map(farthest, epochs.values()), strict=True)
        for name, found in epochs.items():
            every.setdefault(name, []).extend(found)
        words = [str(value).replace("_", " ") for value in where.values()]
        rows.append([*words, str(len(one.plain)), bracketed(far), bracketed(deviations)])
        charts.setdefault(tuple(words[:2]), []).append(chart(where["clients"], lines))
    note = f"Mean over {seeds_of(results)} seeds; bands: one standard deviation up and down."
    sections: list[Section] = [
        Beside(f"Figure 3: {net}, {loss}, {results[0]['data']}", parts, note) for (net, loss), parts in charts.items()
    ]
    said = [
        f"{name.capitalize()} beside plain: bands overlap in {meeting(found, 'epochs of all settings')}."
        for name, found in every.items()
    ]
    sections.append(Text("Figure 3: what it says", said or ["No pair of plain and veiled runs is complete."]))
    return Shown(HEADER, rows, NOTE, sections)


def seeds_of(results: Sequence[Result]) -> int:
    """How many seeds there are."""
    return len({result["seed"] for result in results})


def beside(plain: Line, other: Line) -> list[tuple[float, float, float]]:
    """For each epoch the distance of the means, and both deviations."""
    return [(abs(p[1] - o[1]), p[2], o[2]) for p, o in zip(plain, other, strict=True)]


def farthest(epochs: Sequence[tuple[float, float, float]]) -> tuple[str, str]:
    """The largest distance of two mean curves, and the standard deviation there, of both pooled."""
    far, deviation = max((far, pooled(first, second)) for far, first, second in epochs)
    return f"{far:.2f}", f"{deviation:.2f}"


def curves(results: Sequence[Result]) -> Line:
    """Epoch, mean and standard deviation over seeds, in per cent."""
    runs = [result["curve"] for result in results if "failed" not in result]
    return [
        (points[0][0], 100 * statistics.fmean(y for _, y in points), 100 * spread([y for _, y in points]))
        for points in zip(*runs, strict=True)
    ]


def chart(clients: int, lines: dict[str, Line]) -> Curves:
    """Both curves with their bands."""
    series = {name: [(epoch, mean) for epoch, mean, _ in points] for name, points in lines.items()}
    bands = {name: [(mean - off, mean + off) for _, mean, off in points] for name, points in lines.items()}
    return Curves(counted(clients), "epoch", "test accuracy (%)", series, bands=bands)


FIG3 = Exhibit("fig3", gather, present)
