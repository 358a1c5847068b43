"""What a membership attack found, as a table for the terminal and sections of a page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fedveil.attacks.observation import PUBLISHED
from fedveil.report import NOTHING, Curves, Interval, Intervals, Section, Table, Text
from fedveil.studies.estimates import CHANCE, percent, reach, text
from fedveil.studies.jobs import Failed
from fedveil.studies.membership.results import Membership, Scored
from fedveil.studies.tables import ADAPTIVE, Furthest, Presented, Said, failed_row, furthest_of, mark, one_line

LAYERS = {"last": "last layer", "second": "second to last", "third": "third to last", "three": "last three"}
NETWORKS = {**LAYERS, "full": "last three, label, loss, gradient"}
BEST = "last three, best epoch on test (the paper's protocol)"
HEADER = ("defence", "view, attacker", "test {}", "train-test gap", *LAYERS.values(), BEST)
FIGURES = ("balanced accuracy, %", "AUC", "TPR at 1 % FPR, %", "TPR at 0.1 % FPR, %", "best epoch on test, %")
TAKEN = "taken for members, %"
TRAINING = ("epoch", "train right, %", TAKEN, "validation right, %", "last epoch right, %", TAKEN, "remark")
NOTE = (
    "Balanced accuracy of the white-box network in % with its 95 % interval; 50 is guessing. Epoch and threshold are "
    "chosen on validation records; the last column is not an estimate: it is the best of all epochs on the test itself."
)
EXPLAINED = (
    "The attacker is client 0, attacks the last model that it received, and knows its own records (members) and half "
    "of the non-members. It is tested on the other clients' records and the other half, as many of each. Every attack "
    "network is trained on one snapshot, so that noise shared by all records of a round is the same for all of them.",
    "Intervals: balanced accuracy from Clopper-Pearson intervals of both rates; AUC by DeLong's variance on logits; "
    "true-positive rates by Clopper-Pearson. They cover the draw of records, not of models: for those, compare seeds.",
    "A model without a gap between training and test has nothing to infer, whatever its defence: look at the gap "
    "before reading a low figure as protection. A network that takes all records for members, or none, has learnt "
    "nothing: see the attack networks below before reading 50 % as protection.",
    ADAPTIVE,
)
SAID = Said(
    "The strongest attacker tells members from others with an AUC of {found}; guessing has {guess}",
    "Not even without a defence does an attack tell members from others (AUC {top}): nothing is shown about defences.",
    "There are too few records to tell whether attacks do better than guessing (AUC {top} without a defence).",
)


class Row(NamedTuple):
    """One attacker on one defence: all of its attacks, and those that did not fail."""

    defence: str
    who: str
    attacks: Mapping[str, Scored | Failed]
    scored: Mapping[str, Scored]
    result: Membership


def attackers(results: Mapping[str, Membership | Failed]) -> Iterator[Row]:
    """Every attacker on every defence that did not fail."""
    for defence, result in results.items():
        if isinstance(result, Membership):
            for name, found in result.attackers.items():
                scored = {attack: one for attack, one in found.attacks.items() if isinstance(one, Scored)}
                yield Row(defence, f"{found.view}, {name}", found.attacks, scored, result)


def main_rows(results: Mapping[str, Membership | Failed]) -> Iterator[list[str]]:
    """The paper's Table 3: accuracy, and the success rate by layer; a failed defence keeps its place."""
    for defence, whole in results.items():
        if isinstance(whole, Failed):
            yield failed_row(defence, len(HEADER))
        for _, who, _, scored, result in attackers({defence: whole}):
            scale, digits = (100, 1) if result.metric == "accuracy" else (1, 4)
            quality = [f"{scale * value:.{digits}f}" for value in (result.test, result.gap)]
            asr = [percent(scored[name].accuracy) if name in scored else NOTHING for name in LAYERS]
            yield [defence, who, *quality, *asr, best_of(scored["three"])]


def best_of(found: Scored) -> str:
    """The best epoch's accuracy on the test itself, in %."""
    return NOTHING if found.best_on_test is None else f"{100 * found.best_on_test:.1f}"


def all_rows(row: Row) -> Iterator[list[str]]:
    """One row per attack, all figures."""
    for name, found in row.attacks.items():
        start = [row.defence, row.who, NETWORKS.get(name, name)]
        if isinstance(found, Failed):
            yield [*start, f"failed: {found.failed}", "", "", "", ""]
        else:
            rates = map(percent, found.tpr.values())
            yield [*start, percent(found.accuracy), text(found.auc, ".3f"), *rates, best_of(found)]


def network_rows(row: Row) -> Iterator[list[str]]:
    """How each attack network trained."""
    for name, found in row.scored.items():
        if net := found.network:
            shares = (net.train, net.positive, net.validation, net.last.train, net.last.positive)
            said = "same answer to all" if net.collapsed else ""
            yield [row.defence, row.who, NETWORKS[name], str(net.epoch), *(f"{100 * x:.1f}" for x in shares), said]


def auc_marks(row: Row) -> Iterator[Interval]:
    """AUC of every attack."""
    for name, found in row.attacks.items():
        auc = found.auc if isinstance(found, Scored) else None
        yield mark(NETWORKS.get(name, name), auc, f"{row.defence}, {row.who}")


def roc_section(name: str, rows: Sequence[Row]) -> Section | None:
    """ROC curves of one attack against all defences."""
    several = len({row.who for row in rows}) > 1
    lines = {
        f"{row.defence} ({row.who})" if several else row.defence: [(x, y) for x, y in found.roc if y > 0]
        for row in rows
        if (found := row.scored.get(name)) and found.roc
    }
    if not lines:
        return None
    lowest = min((x for line in lines.values() for x, _ in line), default=1e-3)
    lines["guessing"] = [(lowest, lowest), (1.0, 1.0)]
    title = f"ROC: {NETWORKS.get(name, name)}"
    return Curves(title, "false positive rate", "true positive rate", lines, log_y=True, log_x=True)


def left_out(results: Mapping[str, Membership | Failed]) -> list[str]:
    """What is not in the tables, and why."""
    sizes = [result.records.fresh for result in results.values() if isinstance(result, Membership)]
    if not sizes or min(sizes) >= 10_000:
        return []
    said = "The true-positive rate at 0.1 % false positives is left out: it takes 10,000 non-members, the test has "
    return [f"{said}{min(sizes):,}." + (" At 1 % it takes 1,000." if min(sizes) < 1000 else "")]


def verdict(results: Mapping[str, Membership | Failed]) -> str:
    """How well members are told from others, in one sentence."""
    found: dict[str, Furthest] = {}
    for defence, result in results.items():
        every = [
            reach(name, one.auc, CHANCE)
            for name, own in (result.attackers.items() if isinstance(result, Membership) else ())
            for one in own.attacks.values()
            if isinstance(one, Scored)
        ]
        if one := furthest_of(every, [other for other in every if other.attacker == PUBLISHED]):
            found[defence] = one
    return one_line(found, CHANCE.guess, "{:.2f}".format, SAID)


def presented(results: Mapping[str, Membership | Failed]) -> Presented:
    """Table 3, and the sections: all figures, intervals, ROC curves, attack networks."""
    rows, missing = list(attackers(results)), left_out(results)
    metric = rows[0].result.metric if rows else "accuracy"
    curves = [roc_section(name, rows) for name in dict.fromkeys(name for row in rows for name in row.attacks)]
    sections: list[Section] = [
        Text("How to read it", [*EXPLAINED, *missing]),
        Intervals("AUC of every attack", "AUC", [dot for row in rows for dot in auc_marks(row)], {"guessing": 0.5}),
        Table("All figures", ["defence", "attacker", "attack", *FIGURES], [r for row in rows for r in all_rows(row)]),
        *[curve for curve in curves if curve],
        Table(
            "The attack networks",
            ["defence", "attacker", "sees", *TRAINING],
            [cells for row in rows for cells in network_rows(row)],
            "At the chosen epoch, on the training records, half of them members; then at the last epoch.",
        ),
    ]
    header = [title.format(metric) for title in HEADER]
    return header, list(main_rows(results)), " ".join([NOTE, *missing]), sections
