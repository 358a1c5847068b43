"""Table 1: regression on bank under five defences."""

from collections.abc import Sequence

from pydantic import TypeAdapter

from fedveil.report import Table, Text, count
from fedveil.studies.paper import training
from fedveil.studies.paper.plan import Plan, make_exhibit
from fedveil.studies.paper.training import Comparison, Run, select
from fedveil.studies.study import Shown

BOUND = 0.002
NOTE = (
    "Mean squared error on the test records after the last epoch, mean ± standard deviation over {seeds} seeds; "
    "smaller is better. A constant prediction has {constant:.4f}."
)
SAME_SEEDS = (
    "The veiled run has the seeds of the plain one. They differ by rounding errors, which training amplifies: "
    "`fedveil compare --defences plain,baseline,veil` shows plain training with one more rounding error beside them."
)
PaperValues = dict[str, dict[str, list[float]]]  # by defence and number of clients, one value per depth


def present(plan: Plan, results: list[Run]) -> Shown:
    """Show the paper's values beside ours, then the veil beside plain training."""
    header = ["defence", "clients", *(f"L = {depth}, {who}" for depth in plan.columns for who in ("paper", "ours"))]
    paper, rows = plan.paper_values(PaperValues), []
    for defence, values in paper.items():
        for clients, printed in values.items():
            row = [defence, clients]
            for depth, value in zip(plan.columns, printed, strict=True):
                own = select(results, defence=defence, clients=int(clients), layers=int(depth))
                row += [f"{value:.3f}", training.format_runs(own, ".4f")]
            rows.append(row)
    constants = {run.constant for run in results if run.constant is not None}
    seeds = len({run.seed for run in results})
    note = NOTE.format(seeds=seeds, constant=max(constants, default=float("nan")))
    pairs = list(training.compare_runs(results, ("layers", "clients")))
    if not pairs:
        return Shown(plan.title, "", header, rows, note, [_comparison_table(results, pairs)])
    far, gap = max(one.means for one in pairs), f"{largest_gap(paper):.3f} apart"
    summary = (f"Table 1, regression, {len(pairs)} settings", f"veil as plain (up to {gap})")
    return Shown(
        plan.title,
        f"the veil ends within {far:.1e} of plain training's squared error",
        header,
        rows,
        note,
        [_comparison_table(results, pairs), Text("Table 1: findings", _findings(paper, results, pairs))],
        headline=[(*summary, f"as plain: means at most {far:.1e} apart")],
    )


def _comparison_table(runs: Sequence[Run], pairs: Sequence[Comparison]) -> Table:
    far = ("largest difference of means", "largest difference within a seed", "standard deviation over seeds")
    rows = []
    for one in pairs:
        both = [training.format_runs(select(runs, defence=name, **one.where), ".5f") for name in ("plain", "veil")]
        numbers = [f"{value:.1e}" for value in (one.means, one.largest, training.pooled_deviation(*one.deviations))]
        rows.append([str(one.where["layers"]), str(one.where["clients"]), *both, *numbers])
    return Table("Table 1: the veil beside plain training", ("L", "clients", "plain", "veil", *far), rows, SAME_SEEDS)


def _findings(paper: PaperValues, runs: Sequence[Run], pairs: Sequence[Comparison]) -> list[str]:
    worst = max(pairs, key=lambda one: one.means)
    within = sum(one.means <= BOUND for one in pairs)
    said = [
        f"Veil within {BOUND} of plain: {within} of {len(pairs)} settings, the farthest {worst.means:.1e} (L = "
        f"{worst.where['layers']}, {count(int(worst.where['clients']), 'client')}). The paper's own two columns are up "
        f"to {largest_gap(paper):.3f} apart."
    ]
    for clients in dict.fromkeys(int(one.where["clients"]) for one in pairs):
        ours = training.final_values(select(runs, defence="plain", clients=clients))
        if theirs := paper["plain"].get(str(clients)):
            said.append(
                f"Plain, {count(clients, 'client')}: ours {min(ours):.3f} to {max(ours):.3f} over "
                f"depths and seeds, the paper's {min(theirs):.3f} to {max(theirs):.3f}."
            )
    return said


def largest_gap(paper: PaperValues) -> float:
    """Return the largest difference between the paper's columns for its method and for FedAvg."""
    pairs = zip(paper["plain"].values(), paper["veil"].values(), strict=True)
    return max(abs(a - b) for plain, veil in pairs for a, b in zip(plain, veil, strict=True))


TABLE1 = make_exhibit(TypeAdapter(list[Run]), training.training_graph, present)
