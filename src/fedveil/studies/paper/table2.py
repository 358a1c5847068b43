"""Table 2: classification with ResNets under five defences."""

import statistics
from collections.abc import Callable, Sequence

from fedveil.report import NOTHING, Section, Table, Text
from fedveil.studies.compare import BASELINE
from fedveil.studies.paper.plan import Plan
from fedveil.studies.paper.training import (
    Apart,
    Run,
    TrainingExhibit,
    aparts,
    bracketed,
    cell,
    counted,
    meeting,
    only,
    spread,
)
from fedveil.studies.study import Shown

KEYS = ("data", "model", "clients", "loss")
MEASURES: dict[str, Callable[[Apart], str]] = {
    "difference of means": lambda one: f"{100 * one.means:.2f}",
    "within a seed": lambda one: f"{100 * one.along:.1f}",
    "test loss": lambda one: NOTHING if one.loss is None else f"{100 * one.loss:.1f}",
}
LOSS = "cross_entropy"  # the paper's
NOTE = (
    "Accuracy on test images in % after the last epoch, cross-entropy; ours: mean ± standard deviation over seeds. "
    "{constants}"
)
BESIDE = (
    "In points of accuracy, same seeds for all. Baseline: plain training with one rounding error more, one unit in the "
    "last place of every gradient. Overlap: whether the ranges of veil and plain do, mean ± standard deviation over "
    "seeds. Then the veil's distances from plain and, in brackets, the baseline's: of the means; the largest within a "
    "seed in any epoch; the largest within a seed in the test loss at the end, in %, where that is not the metric."
)
Printed = dict[str, dict[str, dict[str, list[float]]]]  # by data set, defence and clients, one value per network


class Table2(TrainingExhibit):
    """Classification."""

    def present(self, plan: Plan, results: list[Run]) -> Shown:
        """A row for data, clients and defence, paper beside ours for each network; then veil beside plain."""
        nets, sets, paper = plan.columns, plan.settings.data, plan.printed(Printed)
        header = ["data", "clients", "defence", *(f"{net}, {who}" for net in nets for who in ("paper", "ours"))]
        rows = []
        for printed_as, data in sets.items():
            for defence, values in paper[printed_as].items():
                for clients, printed in values.items():
                    row = [data, clients, defence]
                    for net, value in zip(nets, printed, strict=True):
                        own = only(results, data=data, model=net, clients=int(clients), defence=defence, loss=LOSS)
                        row += [f"{value:.2f}", cell(own, ".1f", 100)]
                    rows.append(row)
        rows.sort(key=lambda row: (list(sets.values()).index(row[0]), int(row[1])))
        shares = {run.data: run.constant for run in results if run.constant is not None}
        said = " ".join(f"The commonest class of {data} has {100 * share:.1f} %." for data, share in shares.items())
        veils, baselines = (list(aparts(results, KEYS, name)) for name in ("veil", BASELINE))
        words = findings(veils, baselines) or ["No pair of plain and veiled runs is complete."]
        sections = [*lossless(results, veils, baselines), Text("Table 2: findings", words)]
        headline = []
        if veils:
            met = sum(one.overlap for one in veils)
            ours = f"means at most {farthest(veils)} apart, ranges overlap in {met} of {len(veils)}"
            ours += f"; the rounding baseline: {farthest(baselines)}" if baselines else ""
            headline.append((f"Table 2, ResNets, both losses, {len(veils)} settings", "veil as plain", ours))
        said = NOTE.format(constants=said)
        return Shown(plan.title, verdict(veils, baselines), header, rows, said, sections, headline=headline)


def verdict(veils: Sequence[Apart], baselines: Sequence[Apart]) -> str:
    """How far apart veil and plain end, beside what rounding does."""
    if not veils:
        return ""
    rounding = f" (rounding alone: {farthest(baselines).removesuffix(' points')})" if baselines else ""
    return f"the veil ends within {farthest(veils)} of plain accuracy{rounding}"


def lossless(runs: Sequence[Run], veils: Sequence[Apart], baselines: Sequence[Apart]) -> list[Section]:
    """Veil beside plain, a table for each loss, and the baseline's distances beside the veil's."""
    rows: dict[str, list[list[str]]] = {}
    header = ("data", "network", "clients", "seeds", "plain", "veil", BASELINE, "overlap", *MEASURES)
    for one in veils:
        own = only(runs, **one.where)
        ends = [cell(only(own, defence=name), ".1f", 100) for name in ("plain", "veil", BASELINE)]
        where = [str(one.where[key]) for key in ("data", "model", "clients")]
        both = [one, *(same for same in baselines if same.where == one.where)]
        numbers = [bracketed([measure(each) for each in both]) for measure in MEASURES.values()]
        overlap = "yes" if one.overlap else "no"
        rows.setdefault(str(one.where["loss"]), []).append([*where, str(len(one.plain)), *ends, overlap, *numbers])
    return [
        Table(f"Table 2: the veil beside plain training, {loss.replace('_', ' ')}", header, own, BESIDE)
        for loss, own in rows.items()
    ]


def findings(veils: Sequence[Apart], baselines: Sequence[Apart]) -> list[str]:
    """What the figures say, for each loss."""
    said = []
    for loss in dict.fromkeys(str(one.where["loss"]) for one in veils):
        own, same = ([one for one in some if one.where["loss"] == loss] for some in (veils, baselines))
        far = max(own, key=lambda one: one.means)
        said.append(
            f"{loss.replace('_', ' ').capitalize()}: the ranges of veil and plain overlap in {overlapping(own)}; the "
            f"largest difference of means is {100 * far.means:.2f} points ({far.where['data']}, {far.where['model']}, "
            f"{counted(far.where['clients'])}; standard deviation {100 * far.spread:.2f})."
        )
        if same:
            said[-1] += (
                f" The baseline, in which nothing but rounding differs: {overlapping(same)}, {farthest(same)} at most."
            )
            losses = [[one.loss for one in some if one.loss is not None] for some in (own, same)]
            if all(losses):
                veil, baseline = (100 * statistics.median(some) for some in losses)
                said[-1] += f" Test losses, median of settings: {veil:.1f} % apart, the baseline's {baseline:.1f} %."
    return said


def overlapping(some: Sequence[Apart]) -> str:
    """In how many settings the ranges overlap."""
    return meeting([(one.means, spread(one.plain), spread(one.other)) for one in some], "settings")


def farthest(some: Sequence[Apart]) -> str:
    """The largest difference of means."""
    return f"{100 * max(one.means for one in some):.2f} points"
