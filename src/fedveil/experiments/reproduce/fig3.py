"""Figure 3: training curves of veil and plain, with their spread over seeds."""

import math
import statistics
from collections.abc import Sequence

from fedveil.experiments.attack import Shown
from fedveil.experiments.cells import Result
from fedveil.experiments.reproduce.exhibit import Exhibit, Plan
from fedveil.experiments.reproduce.training import aparts, counted, gather, only, spread
from fedveil.report import Beside, Curves, Section

KEYS = ("model", "loss", "clients")
HEADER = ("network", "loss", "clients", "seeds", "means apart, largest of all epochs", "standard deviation there")
NOTE = (
    "In points of test accuracy: where the mean curves of veil and plain are farthest apart, and the standard "
    "deviation over seeds, of both pooled, in that epoch. The paper has no figures here, it shows that curves cover "
    "one another."
)


def present(plan: Plan, results: Sequence[Result]) -> Shown:
    """A row a setting, and charts: a row of them for each network and loss, one for each number of clients."""
    rows: list[list[str]] = []
    charts: dict[tuple[str, ...], list[Curves]] = {}
    for one in aparts(results, KEYS):
        where = one.where
        own = only(results, **where)
        lines = {name: curves(only(own, defence=name)) for name in ("plain", "veil")}
        pairs = zip(lines["plain"], lines["veil"], strict=True)
        far, deviation = max((abs(p[1] - v[1]), math.hypot(p[2], v[2]) / math.sqrt(2)) for p, v in pairs)
        words = [str(value).replace("_", " ") for value in where.values()]
        rows.append([*words, str(len(one.plain)), f"{far:.2f}", f"{deviation:.2f}"])
        charts.setdefault(tuple(words[:2]), []).append(chart(where["clients"], lines))
    note = f"Mean over {seeds_of(results)} seeds; bands: one standard deviation up and down."
    sections: list[Section] = [
        Beside(f"Figure 3: {net}, {loss}, {results[0]['data']}", parts, note) for (net, loss), parts in charts.items()
    ]
    return Shown(HEADER, rows, NOTE, sections)


def seeds_of(results: Sequence[Result]) -> int:
    """How many seeds there are."""
    return len({result["seed"] for result in results})


def curves(results: Sequence[Result]) -> list[tuple[float, float, float]]:
    """Epoch, mean and standard deviation over seeds, in per cent."""
    runs = [result["curve"] for result in results if "failed" not in result]
    return [
        (points[0][0], 100 * statistics.fmean(y for _, y in points), 100 * spread([y for _, y in points]))
        for points in zip(*runs, strict=True)
    ]


def chart(clients: int, lines: dict[str, list[tuple[float, float, float]]]) -> Curves:
    """Both curves with their bands."""
    series = {name: [(epoch, mean) for epoch, mean, _ in points] for name, points in lines.items()}
    bands = {name: [deviation for _, _, deviation in points] for name, points in lines.items()}
    return Curves(counted(clients), "epoch", "test accuracy (%)", series, spread=bands)


FIG3 = Exhibit("fig3", gather, present)
