"""Table 2: classification with ResNets under five defences."""

import statistics
from collections.abc import Callable, Sequence

from pydantic import TypeAdapter

from fedveil.report import NOTHING, Section, Table, Text, count
from fedveil.studies.compare import BASELINE
from fedveil.studies.paper import training
from fedveil.studies.paper.plan import Plan, make_exhibit
from fedveil.studies.paper.training import Comparison, Run, select
from fedveil.studies.study import Shown

KEYS = ("data", "model", "clients", "loss")
MEASURES: dict[str, Callable[[Comparison], str]] = {
    "difference of means": lambda one: f"{100 * one.means:.2f}",
    "within a seed": lambda one: f"{100 * one.largest_anywhere:.1f}",
    "test loss": lambda one: NOTHING if one.loss is None else f"{100 * one.loss:.1f}",
}
LOSS = "cross_entropy"  # the paper's
NOTE = (
    "Accuracy on test images in % after the last epoch, cross-entropy; ours: mean ± standard deviation over seeds. "
    "{constants}"
)
SAME_SEEDS = (
    "In points of accuracy; all runs have the same seeds. Baseline: plain training with one more rounding error, one "
    "unit in the last place of every gradient. Overlap: whether the ranges mean ± standard deviation of veil and plain "
    "overlap. Then the veil's difference from plain and, in brackets, the baseline's: of the means; the largest within "
    "a seed in any epoch; the largest within a seed in the test loss at the end, in %, where it is not the metric."
)
PaperValues = dict[str, dict[str, dict[str, list[float]]]]  # by data set, defence and clients, one value per network


def present(plan: Plan, results: list[Run]) -> Shown:
    """Show the paper's values beside ours, then the veil and the baseline beside plain training."""
    nets, sets, paper = plan.columns, plan.settings.data, plan.paper_values(PaperValues)
    header = ["data", "clients", "defence", *(f"{net}, {who}" for net in nets for who in ("paper", "ours"))]
    rows = []
    for printed_as, data in sets.items():
        for defence, values in paper[printed_as].items():
            for clients, printed in values.items():
                row = [data, clients, defence]
                for net, value in zip(nets, printed, strict=True):
                    own = select(results, data=data, model=net, clients=int(clients), defence=defence, loss=LOSS)
                    row += [f"{value:.2f}", training.format_runs(own, ".1f", 100)]
                rows.append(row)
    rows.sort(key=lambda row: (list(sets.values()).index(row[0]), int(row[1])))
    shares = {run.data: run.constant for run in results if run.constant is not None}
    constants = " ".join(f"The commonest class of {data} has {100 * part:.1f} %." for data, part in shares.items())
    veils, baselines = (list(training.compare_runs(results, KEYS, name)) for name in ("veil", BASELINE))
    verdict, headline, words = "", [], ["No pair of plain and veiled runs is complete."]
    if veils:
        met, words = sum(one.overlap for one in veils), _findings(veils, baselines)
        ours = f"means at most {_farthest(veils)} points apart, ranges overlap in {met} of {len(veils)}"
        ours += f"; the rounding baseline: {_farthest(baselines)} points" if baselines else ""
        headline.append((f"Table 2, ResNets, both losses, {len(veils)} settings", "veil as plain", ours))
        rounding = f" (rounding alone: {_farthest(baselines)})" if baselines else ""
        verdict = f"the veil ends within {_farthest(veils)} points of plain accuracy{rounding}"
    sections = [*_comparison_tables(results, veils, baselines), Text("Table 2: findings", words)]
    return Shown(plan.title, verdict, header, rows, NOTE.format(constants=constants), sections, headline=headline)


def _comparison_tables(
    runs: Sequence[Run], veils: Sequence[Comparison], baselines: Sequence[Comparison]
) -> list[Section]:
    rows: dict[str, list[list[str]]] = {}
    header = ("data", "network", "clients", "seeds", "plain", "veil", BASELINE, "overlap", *MEASURES)
    for one in veils:
        ends = [
            training.format_runs(select(runs, defence=name, **one.where), ".1f", 100)
            for name in ("plain", "veil", BASELINE)
        ]
        where = [str(one.where[key]) for key in ("data", "model", "clients")]
        both = [one, *(same for same in baselines if same.where == one.where)]
        numbers = [training.format_pair([measure(each) for each in both]) for measure in MEASURES.values()]
        overlap = "yes" if one.overlap else "no"
        rows.setdefault(str(one.where["loss"]), []).append([*where, str(len(one.plain)), *ends, overlap, *numbers])
    return [
        Table(f"Table 2: the veil beside plain training, {loss.replace('_', ' ')}", header, own, SAME_SEEDS)
        for loss, own in rows.items()
    ]


def _findings(veils: Sequence[Comparison], baselines: Sequence[Comparison]) -> list[str]:
    """Return a paragraph for each loss."""
    said = []
    for loss in dict.fromkeys(str(one.where["loss"]) for one in veils):
        own, same = ([one for one in some if one.where["loss"] == loss] for some in (veils, baselines))
        far = max(own, key=lambda one: one.means)
        words = (
            f"{loss.replace('_', ' ').capitalize()}: the ranges of veil and plain overlap in {_overlap(own)}; the "
            f"largest difference of means is {100 * far.means:.2f} points ({far.where['data']}, {far.where['model']}, "
            f"{count(int(far.where['clients']), 'client')}; standard deviation "
            f"{100 * training.pooled_deviation(*far.deviations):.2f})."
        )
        if same:
            words += (
                f" The baseline, which differs by rounding alone: {_overlap(same)}, {_farthest(same)} points at most."
            )
            losses = [[one.loss for one in some if one.loss is not None] for some in (own, same)]
            if all(losses):
                veil, baseline = (100 * statistics.median(some) for some in losses)
                words += f" Test losses, median of settings: {veil:.1f} % apart, the baseline's {baseline:.1f} %."
        said.append(words)
    return said


def _overlap(some: Sequence[Comparison]) -> str:
    return training.format_overlap([(one.means, *one.deviations) for one in some], "settings")


def _farthest(some: Sequence[Comparison]) -> str:
    """Format the largest difference of means, in points."""
    return f"{100 * max(one.means for one in some):.2f}"


TABLE2 = make_exhibit(TypeAdapter(list[Run]), training.training_graph, present)
