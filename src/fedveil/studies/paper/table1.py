"""Table 1: regression on bank under five defences."""

from collections.abc import Sequence

from fedveil.report import Section, Table, Text
from fedveil.studies.paper.plan import Plan
from fedveil.studies.paper.training import Apart, Run, TrainingExhibit, aparts, cell, counted, ends, only
from fedveil.studies.study import Shown

BOUND = 0.002
NOTE = (
    "Mean squared error on the test records after the last epoch, mean ± standard deviation over {seeds} seeds; "
    "smaller is better. A constant answer has {constant:.4f}."
)
BESIDE = (
    "The veiled run with the plain one's seeds. What is between them is rounding, which training makes larger: "
    "`fedveil compare --defences plain,baseline,veil` puts plain training with one rounding error more beside them."
)
Printed = dict[str, dict[str, list[float]]]  # by defence and number of clients, one value per depth


class Table1(TrainingExhibit):
    """Regression."""

    def present(self, plan: Plan, results: list[Run]) -> Shown:
        """One row per defence and number of clients, paper beside ours for each depth; then veil beside plain."""
        header = ["defence", "clients", *(f"L = {depth}, {who}" for depth in plan.columns for who in ("paper", "ours"))]
        paper, rows = plan.printed(Printed), []
        for defence, values in paper.items():
            for clients, printed in values.items():
                row = [defence, clients]
                for depth, value in zip(plan.columns, printed, strict=True):
                    own = only(results, defence=defence, clients=int(clients), layers=int(depth))
                    row += [f"{value:.3f}", cell(own, ".4f")]
                rows.append(row)
        constants = {run.constant for run in results if run.constant is not None}
        seeds = len({run.seed for run in results})
        note = NOTE.format(seeds=seeds, constant=max(constants, default=float("nan")))
        pairs = list(aparts(results, ("layers", "clients")))
        said, headline = findings(paper, results, pairs) if pairs else ([], [])
        sections: list[Section] = [lossless(results, pairs), *said]
        return Shown(plan.title, verdict(pairs), header, rows, note, sections, headline=headline)


def verdict(pairs: Sequence[Apart]) -> str:
    """How far apart veil and plain end."""
    if not pairs:
        return ""
    return f"the veil ends within {max(one.means for one in pairs):.1e} of plain training's squared error"


def lossless(runs: Sequence[Run], pairs: Sequence[Apart]) -> Table:
    """Veil beside plain, seed by seed."""
    far = ("largest difference of means", "largest difference within a seed", "spread over seeds")
    rows = []
    for one in pairs:
        both = [cell(only(runs, defence=name, **one.where), ".5f") for name in ("plain", "veil")]
        numbers = [f"{value:.1e}" for value in (one.means, one.largest, one.spread)]
        rows.append([str(one.where["layers"]), str(one.where["clients"]), *both, *numbers])
    return Table("Table 1: the veil beside plain training", ("L", "clients", "plain", "veil", *far), rows, BESIDE)


def findings(
    paper: Printed, runs: Sequence[Run], pairs: Sequence[Apart]
) -> tuple[list[Text], list[tuple[str, str, str]]]:
    """What the figures say: in words, and in a line of the summary."""
    worst, gap = max(pairs, key=lambda one: one.means), f"{largest_gap(paper):.3f} apart"
    within = sum(one.means <= BOUND for one in pairs)
    said = [
        f"Veil within {BOUND} of plain: {within} of {len(pairs)} settings, the farthest {worst.means:.1e} (L = "
        f"{worst.where['layers']}, {counted(worst.where['clients'])}). The paper's own two columns are up to {gap}."
    ]
    for clients in dict.fromkeys(one.where["clients"] for one in pairs):
        ours = ends(only(runs, defence="plain", clients=clients))
        if theirs := paper["plain"].get(str(clients)):
            said.append(
                f"Plain, {counted(clients)}: ours {min(ours):.3f} to {max(ours):.3f} over "
                f"depths and seeds, the paper's {min(theirs):.3f} to {max(theirs):.3f}."
            )
    answer = f"as plain: means at most {worst.means:.1e} apart"
    headline = (f"Table 1, regression, {len(pairs)} settings", f"veil as plain (up to {gap})", answer)
    return [Text("Table 1: findings", said)], [headline]


def largest_gap(paper: Printed) -> float:
    """Between the paper's columns for its method and for FedAvg."""
    pairs = zip(paper["plain"].values(), paper["veil"].values(), strict=True)
    return max(abs(a - b) for plain, veil in pairs for a, b in zip(plain, veil, strict=True))
