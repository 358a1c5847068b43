"""The page of a membership attack: the paper's Table 3, all figures, ROC curves and the attack networks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fedveil.report import NOTHING, Curves, Interval, Intervals, Section, Table, Text
from fedveil.studies.estimates import percent, reach, text
from fedveil.studies.jobs import Failed
from fedveil.studies.membership.results import AttackScores, Membership
from fedveil.studies.study import Shown
from fedveil.studies.tables import failed_row, mark
from fedveil.studies.verdicts import ADAPTIVE, MEMBERSHIP, Verdict, headline, judge_defences, verdict_section

GUESS = 0.5
LAYERS = {"last": "last layer", "second": "second to last", "third": "third to last", "three": "last three"}
NETWORKS = {**LAYERS, "full": "last three, label, loss, gradient"}
BEST = "last three, best epoch on test (the paper's protocol)"
HEADER = ("defence", "view, attacker", "test {}", "train-test gap", *LAYERS.values(), BEST)
FIGURES = ("balanced accuracy, %", "AUC", "TPR at 1 % FPR, %", "TPR at 0.1 % FPR, %", "best epoch on test, %")
POSITIVE = "taken for members, %"
TRAINING = ("epoch", "train right, %", POSITIVE, "validation right, %", "last epoch right, %", POSITIVE, "remark")
NOTE = (
    "Balanced accuracy of the white-box network in % with its 95 % interval; 50 is guessing. Epoch and threshold are "
    "chosen on validation records. The last column is not an estimate: it is the best of all epochs on the test "
    "itself. A rate at 1 % false positives takes 1,000 non-members, at 0.1 % 10,000; otherwise it is left out."
)
READING = (
    "The attacker is client 0. It attacks the last model that it received, and knows its records (members) and half of "
    "the non-members. It is tested on the other clients' records and as many of the other non-members.",
    "Intervals: Clopper-Pearson for rates, DeLong's variance on logits for AUC. They cover the draw of records, not of "
    "models: for those, compare seeds.",
    "Without a gap between training and test there is nothing to infer, with or without a defence. A network that "
    "gives all records the same answer has learnt nothing. Check both before you read a low figure as protection.",
    ADAPTIVE,
)
Found = Mapping[str, Membership | Failed]


class AttackerRow(NamedTuple):
    """One attacker on one defence: all of its attacks, and those that did not fail."""

    defence: str
    who: str
    attacks: Mapping[str, AttackScores | Failed]
    scored: Mapping[str, AttackScores]
    result: Membership


def attackers(results: Found) -> Iterator[AttackerRow]:
    """Yield every attacker on every defence that did not fail."""
    for defence, result in results.items():
        if isinstance(result, Membership):
            for name, found in result.attackers.items():
                scored = {attack: one for attack, one in found.attacks.items() if isinstance(one, AttackScores)}
                yield AttackerRow(defence, f"{found.view}, {name}", found.attacks, scored, result)


def main_rows(results: Found) -> Iterator[list[str]]:
    """Yield the rows of the paper's Table 3: accuracy, and the success rate by layer."""
    for defence, own in results.items():
        if isinstance(own, Failed):
            yield failed_row(defence, len(HEADER))
        for _, who, _, scored, result in attackers({defence: own}):
            scale, digits = (100, 1) if result.metric == "accuracy" else (1, 4)
            quality = [f"{scale * value:.{digits}f}" for value in (result.test, result.gap)]
            asr = [percent(scored[name].accuracy) if name in scored else NOTHING for name in LAYERS]
            yield [defence, who, *quality, *asr, best_epoch(scored["three"])]


def best_epoch(found: AttackScores) -> str:
    """Return the best epoch's accuracy on the test itself, in %."""
    return NOTHING if found.best_on_test is None else f"{100 * found.best_on_test:.1f}"


def figure_rows(row: AttackerRow) -> Iterator[list[str]]:
    """Yield one row per attack, with all figures."""
    for name, found in row.attacks.items():
        start = [row.defence, row.who, NETWORKS.get(name, name)]
        if isinstance(found, Failed):
            yield [*start, f"failed: {found.failed}", "", "", "", ""]
        else:
            rates = map(percent, found.tpr.values())
            yield [*start, percent(found.accuracy), text(found.auc, ".3f"), *rates, best_epoch(found)]


def network_rows(row: AttackerRow) -> Iterator[list[str]]:
    """Yield how each attack network trained."""
    for name, found in row.scored.items():
        if net := found.network:
            shares = (net.train, net.positive, net.validation, net.last.train, net.last.positive)
            remark = "same answer to all" if net.collapsed else ""
            yield [row.defence, row.who, NETWORKS[name], str(net.epoch), *(f"{100 * x:.1f}" for x in shares), remark]


def auc_marks(row: AttackerRow) -> Iterator[Interval]:
    """Yield the AUC of every attack."""
    for name, found in row.attacks.items():
        auc = found.auc if isinstance(found, AttackScores) else None
        yield mark(NETWORKS.get(name, name), auc, f"{row.defence}, {row.who}")


def roc_section(name: str, rows: Sequence[AttackerRow]) -> Section | None:
    """Return the ROC curves of one attack on all defences."""
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


def judge_attackers(results: Found) -> dict[str, Verdict]:
    """Return the verdict on each defence, by the AUC of the strongest attack."""
    rule = MEMBERSHIP.rule(GUESS)
    found = {
        defence: [
            reach(name, one.auc, rule)
            for name, own in result.attackers.items()
            for one in own.attacks.values()
            if isinstance(one, AttackScores)
        ]
        for defence, result in results.items()
        if isinstance(result, Membership)
    }
    return judge_defences(MEMBERSHIP, GUESS, found)


def show(results: Found) -> Shown:
    """Return Table 3, and the sections: all figures, intervals, ROC curves, attack networks."""
    rows, verdicts = list(attackers(results)), judge_attackers(results)
    metric = rows[0].result.metric if rows else "accuracy"
    curves = [roc_section(name, rows) for name in dict.fromkeys(name for row in rows for name in row.attacks)]
    figures = [cells for row in rows for cells in figure_rows(row)]
    networks = [cells for row in rows for cells in network_rows(row)]
    note = "At the chosen epoch, on the training records, half of them members; then at the last epoch."
    sections: list[Section] = [
        Text("How to read it", READING),
        Intervals("AUC of every attack", "AUC", [dot for row in rows for dot in auc_marks(row)], {"guessing": GUESS}),
        Table("All figures", ["defence", "attacker", "attack", *FIGURES], figures),
        *[curve for curve in curves if curve],
        Table("The attack networks", ["defence", "attacker", "sees", *TRAINING], networks, note),
    ]
    header = [title.format(metric) for title in HEADER]
    return Shown("", headline(verdicts), header, list(main_rows(results)), NOTE, sections, verdict_section(verdicts))
