"""What `fedveil attack membership` found, as a table for the terminal and sections of a page."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.report import NOTHING, Curves, Interval, Intervals, Section, Table, Text
from fedveil.runs.config import Config
from fedveil.studies.attack import Shown
from fedveil.studies.jobs import Result

NETWORKS = {
    "last": "last layer",
    "second": "second to last",
    "third": "third to last",
    "three": "last three",
    "full": "last three, label, loss, gradient",
}
HEADER = ("defence", "view, attacker", "test {}", "train-test gap", *list(NETWORKS.values())[:4])
BEST = "last three, best epoch on test (the paper's protocol)"
NOTE = (
    "Balanced accuracy of the white-box network in % with its 95 % interval; 50 is guessing. Epoch and threshold are "
    "chosen on validation records; the last column is not an estimate: it is the best of all epochs on the test itself."
)
EXPLAINED = (
    "The attacker is client 0, attacks the last model it was sent, and knows its own records (members) and half of the "
    "non-members. It is tested on the other clients' records and the other half, as many of each. Every attack network "
    "is trained on one snapshot, so that noise shared by all records of a round is the same for all of them.",
    "Intervals: balanced accuracy from Clopper-Pearson intervals of both rates; AUC by DeLong's variance on logits; "
    "true-positive rates by Clopper-Pearson. They cover the draw of records, not of models: for "
    "those, compare seeds.",
    "A model without a gap between training and test has nothing to infer, whatever its defence: look at the gap "
    "before reading a low figure as protection. A network that takes all records for members, or none, has learnt "
    "nothing: see the attack networks below before reading 50 % as protection.",
    'SPN is our re-implementation. "calibrated" is a participant that fits the veil\'s head noise on its own records, '
    '"stacked" one that adds up DBCL\'s sketches of six rounds. The others send a model that needs no cleaning.',
)
Attacker = tuple[str, str, Mapping[str, Any], Mapping[str, Any]]  # defence, attacker, its attacks, the cell's result


def per_cent(found: Mapping[str, Any] | None) -> str:
    """An estimate as 61.2 (59.0 to 63.4), in per cent."""
    if not found:
        return NOTHING
    return f"{100 * found['value']:.1f} ({100 * found['low']:.1f} to {100 * found['high']:.1f})"


def plain_number(found: Mapping[str, Any]) -> str:
    """An estimate as 0.612 (0.590 to 0.634)."""
    return f"{found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def attackers(results: Mapping[str, Result]) -> Iterator[Attacker]:
    """Every attacker on every defence that did not fail."""
    for defence, result in results.items():
        for name, found in result.get("attackers", {}).items():
            yield defence, f"{found['view']}, {name}", found["attacks"], result


def main_row(attacker: Attacker) -> list[str]:
    """The paper's Table 3: accuracy, and the success rate by layer."""
    defence, who, attacks, result = attacker
    asr = [per_cent(attacks[name]["accuracy"]) if name in attacks else NOTHING for name in list(NETWORKS)[:4]]
    scale = 100 if result["metric"] == "accuracy" else 1
    quality = [f"{scale * result[name]:.{1 if scale > 1 else 4}f}" for name in ("test", "gap")]
    return [defence, who, *quality, *asr, f"{100 * attacks['three']['best_on_test']:.1f}"]


def all_rows(attacker: Attacker) -> list[list[str]]:
    """A row an attack, all figures."""
    defence, who, attacks, _ = attacker
    rows = []
    for name, found in attacks.items():
        label = NETWORKS.get(name, name)
        if "failed" in found:
            rows.append([defence, who, label, f"failed: {found['failed']}", "", "", "", ""])
            continue
        best = f"{100 * found['best_on_test']:.1f}" if "best_on_test" in found else NOTHING
        figures = [per_cent(found["accuracy"]), plain_number(found["auc"]), *map(per_cent, found["tpr"].values()), best]
        rows.append([defence, who, label, *figures])
    return rows


def network_rows(attacker: Attacker) -> list[list[str]]:
    """How each attack network trained."""
    defence, who, attacks, _ = attacker
    rows = []
    for name, found in attacks.items():
        if net := found.get("network"):
            shares = [f"{100 * net[key]:.1f}" for key in ("train", "positive")]
            end = [f"{100 * net['last'][key]:.1f}" for key in ("train", "positive")]
            said = "same answer to all" if net["collapsed"] else ""
            rows.append(
                [defence, who, NETWORKS[name], str(net["epoch"]), *shares, f"{100 * net['validation']:.1f}", *end, said]
            )
    return rows


def auc_intervals(attacker: Attacker) -> list[Interval]:
    """AUC of every attack."""
    defence, who, attacks, _ = attacker
    group = f"{defence}, {who}"
    rows = []
    for name, found in attacks.items():
        label, area = NETWORKS.get(name, name), found.get("auc")
        if area:
            rows.append(Interval(label, area["value"], area["low"], area["high"], group))
        else:
            rows.append(Interval(label, None, group=group, missing="failed"))
    return rows


def roc_section(name: str, found: Sequence[Attacker]) -> Section | None:
    """ROC curves of one attack against all defences."""
    several = len({who for _, who, _, _ in found}) > 1
    lines = {
        f"{defence} ({who})" if several else defence: [(x, y) for x, y in attacks[name]["roc"] if y > 0]
        for defence, who, attacks, _ in found
        if name in attacks and "roc" in attacks[name]
    }
    if not lines:
        return None
    lowest = min((x for line in lines.values() for x, _ in line), default=1e-3)
    lines["guessing"] = [(lowest, lowest), (1.0, 1.0)]
    title = f"ROC: {NETWORKS.get(name, name)}"
    return Curves(title, "false positive rate", "true positive rate", lines, log_y=True, log_x=True)


def left_out(results: Mapping[str, Result]) -> list[str]:
    """What is not in the tables, and why."""
    sizes = {result["records"]["fresh"] for result in results.values() if "records" in result}
    words = []
    if sizes and min(sizes) < 10_000:
        words.append(
            f"The true-positive rate at 0.1 % false positives is left out: it takes 10,000 non-members, the test has "
            f"{min(sizes):,}." + (" At 1 % it takes 1,000." if min(sizes) < 1000 else "")
        )
    return words


def present(config: Config, settings: Any, results: Mapping[str, Result], folder: Path) -> Shown:
    """Table 3, all figures, intervals, ROC curves, attack networks."""
    found = list(attackers(results))
    metric = next((result["metric"] for result in results.values() if "metric" in result), "accuracy")
    header = [title.format(metric) for title in (*HEADER, BEST)]
    failed = [[name, "failed", *[""] * (len(header) - 2)] for name, result in results.items() if "failed" in result]
    rows = [main_row(attacker) for attacker in found] + failed
    rows.sort(key=lambda row: list(results).index(row[0]))
    figures = ["balanced accuracy, %", "AUC", "TPR at 1 % FPR, %", "TPR at 0.1 % FPR, %", "best epoch on test, %"]
    columns = ["epoch", "train right, %", "taken for members, %", "validation right, %", "last epoch right, %"]
    names = dict.fromkeys(name for _, _, attacks, _ in found for name in attacks)
    dots = [dot for attacker in found for dot in auc_intervals(attacker)]
    curves = [roc_section(name, found) for name in names]
    sections: list[Section] = [
        Text("How to read it", [*EXPLAINED, *left_out(results)]),
        Intervals("AUC of every attack", "AUC", dots, {"guessing": 0.5}),
        Table("All figures", ["defence", "attacker", "attack", *figures], [r for a in found for r in all_rows(a)]),
        *[curve for curve in curves if curve],
        Table(
            "The attack networks",
            ["defence", "attacker", "sees", *columns, "taken for members, %", "remark"],
            [r for a in found for r in network_rows(a)],
            "At the chosen epoch, on the training records, half of them members; then at the last epoch.",
        ),
    ]
    return Shown(header, rows, " ".join([NOTE, *left_out(results)]), sections)
