"""Table 1: regression on bank under five defences."""

from collections.abc import Sequence
from typing import Any

from fedveil.report import Section, Table, Text
from fedveil.studies.attack import Shown
from fedveil.studies.jobs import Result
from fedveil.studies.paper.plan import Exhibit, Plan
from fedveil.studies.paper.training import aparts, cell, counted, ends, gather, only

BOUND = 0.002
NOTE = (
    "Mean squared error on the test records after the last epoch, mean ± standard deviation over {seeds} seeds; "
    "smaller is better. A constant answer has {constant:.4f}."
)


def present(plan: Plan, results: Sequence[Result]) -> Shown:
    """A row a defence and number of clients, paper beside ours for each depth; then veil beside plain."""
    layers = plan.paper["columns"]
    header = ["defence", "clients", *(f"L = {depth}, {who}" for depth in layers for who in ("paper", "ours"))]
    rows = []
    for defence, values in plan.paper.items():
        if defence == "columns":
            continue
        for clients, printed in values.items():
            row = [defence, clients]
            for depth, value in zip(layers, printed, strict=True):
                own = only(results, defence=defence, clients=int(clients), layers=depth)
                row += [f"{value:.3f}", cell(own, ".4f")]
            rows.append(row)
    constants = {result["constant"] for result in results if "constant" in result}
    seeds = len({result["seed"] for result in results})
    note = NOTE.format(seeds=seeds, constant=max(constants, default=float("nan")))
    return Shown(header, rows, note, [lossless(results), *found(plan, results)])


def lossless(results: Sequence[Result]) -> Table:
    """Veil beside plain, seed by seed."""
    header = ("L", "clients", "plain", "veil", "means apart", "largest of a seed", "spread over seeds")
    rows = []
    for one in aparts(results, ("layers", "clients")):
        own = only(results, **one.where)
        both = [cell(only(own, defence=name), ".5f") for name in ("plain", "veil")]
        numbers = [f"{value:.1e}" for value in (one.means, one.largest, one.spread)]
        rows.append([str(one.where["layers"]), str(one.where["clients"]), *both, *numbers])
    note = (
        "The veiled run with the plain one's seeds. What is between them is rounding, which training makes larger: "
        "`fedveil compare --defences plain,control,veil` puts plain training with one rounding error more beside them."
    )
    return Table("Table 1: the veil beside plain training", header, rows, note)


def found(plan: Plan, results: Sequence[Result]) -> list[Section]:
    """What the figures say, in words."""
    every = list(aparts(results, ("layers", "clients")))
    if not every:
        return []
    worst = max(every, key=lambda one: one.means)
    within = sum(one.means <= BOUND for one in every)
    said = [
        f"Veil within {BOUND} of plain: {within} of {len(every)} settings, the farthest {worst.means:.1e} (L = "
        f"{worst.where['layers']}, {counted(worst.where['clients'])}). The paper's own two columns are up to "
        f"{largest_gap(plan.paper):.3f} apart."
    ]
    for clients in dict.fromkeys(one.where["clients"] for one in every):
        ours = ends(only(results, defence="plain", clients=clients))
        theirs = plan.paper["plain"].get(str(clients))
        if theirs:
            said.append(
                f"Plain, {counted(clients)}: ours {min(ours):.3f} to {max(ours):.3f} over "
                f"depths and seeds, the paper's {min(theirs):.3f} to {max(theirs):.3f}."
            )
    return [Text("Table 1: what it says", said)]


def largest_gap(paper: Any) -> float:
    """Between the paper's columns for its method and for FedAvg."""
    pairs = zip(paper["plain"].values(), paper["veil"].values(), strict=True)
    return max(float(abs(a - b)) for plain, veil in pairs for a, b in zip(plain, veil, strict=True))


TABLE1 = Exhibit("table1", gather, present)
