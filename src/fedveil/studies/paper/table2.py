"""Table 2: classification with ResNets under five defences."""

import statistics
from collections.abc import Callable, Sequence

from fedveil.report import NOTHING, Section, Table, Text
from fedveil.studies.attack import Shown
from fedveil.studies.compare import CONTROL
from fedveil.studies.jobs import Result
from fedveil.studies.paper.plan import Exhibit, Plan
from fedveil.studies.paper.training import (
    Apart,
    aparts,
    bracketed,
    cell,
    counted,
    gather,
    meeting,
    only,
    spread,
)

KEYS = ("data", "model", "clients", "loss")
MEASURES: dict[str, Callable[[Apart], str]] = {
    "means apart": lambda one: f"{100 * one.means:.2f}",
    "of a seed": lambda one: f"{100 * one.along:.1f}",
    "test loss": lambda one: NOTHING if one.loss is None else f"{100 * one.loss:.1f}",
}
LOSS = "cross_entropy"  # the paper's
NOTE = (
    "Accuracy on test images in % after the last epoch, cross-entropy; ours: mean ± standard deviation over seeds. "
    "{constants}"
)
BESIDE = (
    "In points of accuracy, same seeds for all. Control: plain training with a rounding error more, one unit in the "
    "last place of every gradient. Overlap: whether the ranges of veil and plain do, mean ± standard deviation over "
    "seeds. Then the veil's distances from plain and, in brackets, the control's: of the means; the largest of a seed "
    "in any epoch; the largest of a seed in the test loss at the end, in %, where that is not the metric."
)


def present(plan: Plan, results: Sequence[Result]) -> Shown:
    """A row for data, clients and defence, paper beside ours for each network; then veil beside plain."""
    nets, sets = plan.paper["columns"], plan.settings["data"]
    header = ["data", "clients", "defence", *(f"{net}, {who}" for net in nets for who in ("paper", "ours"))]
    rows = []
    for printed_as, data in sets.items():
        for defence, values in plan.paper[printed_as].items():
            for clients, printed in values.items():
                row = [data, clients, defence]
                for net, value in zip(nets, printed, strict=True):
                    own = only(results, data=data, model=net, clients=int(clients), defence=defence, loss=LOSS)
                    row += [f"{value:.2f}", cell(own, ".1f", 100)]
                rows.append(row)
    rows.sort(key=lambda row: (list(sets.values()).index(row[0]), int(row[1])))
    shares = {result["data"]: result["constant"] for result in results if "constant" in result}
    said = " ".join(f"The commonest class of {data} has {100 * share:.1f} %." for data, share in shares.items())
    veils, controls = (list(aparts(results, KEYS, name)) for name in ("veil", CONTROL))
    sections = [*lossless(results, veils, controls), words(veils, controls)]
    return Shown(header, rows, NOTE.format(constants=said), sections)


def lossless(results: Sequence[Result], veils: Sequence[Apart], controls: Sequence[Apart]) -> list[Section]:
    """Veil beside plain, a table for each loss, and the control's distances beside the veil's."""
    rows: dict[str, list[list[str]]] = {}
    header = ("data", "network", "clients", "seeds", "plain", "veil", "control", "overlap", *MEASURES)
    for one in veils:
        own = only(results, **one.where)
        ends = [cell(only(own, defence=name), ".1f", 100) for name in ("plain", "veil", CONTROL)]
        where = [str(one.where[key]) for key in ("data", "model", "clients")]
        both = [one, *(control for control in controls if control.where == one.where)]
        numbers = [bracketed([measure(each) for each in both]) for measure in MEASURES.values()]
        overlap = "yes" if one.overlap else "no"
        rows.setdefault(one.where["loss"], []).append([*where, str(len(one.plain)), *ends, overlap, *numbers])
    return [
        Table(f"Table 2: the veil beside plain training, {loss.replace('_', ' ')}", header, own, BESIDE)
        for loss, own in rows.items()
    ]


def words(veils: Sequence[Apart], controls: Sequence[Apart]) -> Text:
    """What the figures say."""
    said = []
    for loss in dict.fromkeys(one.where["loss"] for one in veils):
        own = [one for one in veils if one.where["loss"] == loss]
        far = max(own, key=lambda one: one.means)
        said.append(
            f"{loss.replace('_', ' ').capitalize()}: the ranges of veil and plain overlap in {overlapping(own)}; the "
            f"means farthest apart are by {100 * far.means:.2f} points ({far.where['data']}, {far.where['model']}, "
            f"{counted(far.where['clients'])}; standard deviation {100 * far.spread:.2f})."
        )
        same = [one for one in controls if one.where["loss"] == loss]
        if same:
            most = max(same, key=lambda one: one.means)
            said[-1] += (
                f" The control, in which nothing but rounding differs: {overlapping(same)}, "
                f"{100 * most.means:.2f} points at most."
            )
            losses = [[one.loss for one in some if one.loss is not None] for some in (own, same)]
            if all(losses):
                veil, control = (100 * statistics.median(some) for some in losses)
                said[-1] += f" Test losses, median of settings: {veil:.1f} % apart, the control's {control:.1f} %."
    return Text("Table 2: what it says", said or ["No pair of plain and veiled runs is complete."])


def overlapping(some: Sequence[Apart]) -> str:
    """In how many settings the ranges overlap."""
    return meeting([(one.means, spread(one.plain), spread(one.other)) for one in some], "settings")


TABLE2 = Exhibit("table2", gather, present)
