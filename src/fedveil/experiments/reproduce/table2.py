"""Table 2: classification with ResNets under five defences."""

from collections.abc import Sequence

from fedveil.experiments.attack import Shown
from fedveil.experiments.cells import Result
from fedveil.experiments.reproduce.exhibit import Exhibit, Plan
from fedveil.experiments.reproduce.training import Apart, aparts, cell, counted, gather, only
from fedveil.report import Table, Text
from fedveil.report.numbers import NOTHING

KEYS = ("data", "model", "clients", "loss")
LOSS = "cross_entropy"  # the paper's
NOTE = (
    "Accuracy on test images in % after the last epoch, cross-entropy; ours: mean ± standard deviation over seeds. "
    "{constants}"
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
    every = list(aparts(results, KEYS))
    return Shown(header, rows, NOTE.format(constants=said), [lossless(results, every), words(every)])


def lossless(results: Sequence[Result], every: Sequence[Apart]) -> Table:
    """Veil beside plain for both losses."""
    header = (
        *("data", "network", "clients", "loss", "seeds", "plain", "veil"),
        *("means apart", "spread over seeds", "within it", "largest of a seed, any epoch", "test loss apart"),
    )
    rows = []
    for one in every:
        own = only(results, **one.where)
        both = [cell(only(own, defence=name), ".2f", 100) for name in ("plain", "veil")]
        where = [str(value).replace("_", " ") for value in one.where.values()]
        numbers = [f"{100 * one.means:.2f}", f"{100 * one.spread:.2f}", "yes" if within(one) else "no"]
        loss = NOTHING if one.loss is None else f"{one.loss:.1e}"
        rows.append([*where, str(len(one.plain)), *both, *numbers, f"{100 * one.along:.2f}", loss])
    note = (
        "In points of accuracy, same seeds for both. Spread: the standard deviation over seeds, of both columns "
        "pooled. Test loss: the largest relative distance of a seed, which tells more than accuracies of networks that "
        "hardly learnt; squared error has no other loss than its metric here."
    )
    return Table("Table 2: the veil beside plain training", header, rows, note)


def within(one: Apart) -> bool:
    """Whether the means are no farther apart than seeds are."""
    return one.means <= one.spread


def words(every: Sequence[Apart]) -> Text:
    """What the figures say."""
    said = []
    for loss in dict.fromkeys(one.where["loss"] for one in every):
        own = [one for one in every if one.where["loss"] == loss]
        far = max(own, key=lambda one: one.means)
        inside = sum(map(within, own))
        said.append(
            f"{loss.replace('_', ' ').capitalize()}: the means of veil and plain are within the standard deviation "
            f"over seeds in {inside} of {len(own)} settings; the farthest apart are {100 * far.means:.2f} points "
            f"({far.where['data']}, {far.where['model']}, {counted(far.where['clients'])}; deviation "
            f"{100 * far.spread:.2f})."
        )
    return Text("Table 2: what it says", said or ["No pair of plain and veiled runs is complete."])


TABLE2 = Exhibit("table2", gather, present)
