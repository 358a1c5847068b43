"""Two tables of an audit: membership attack by attack, and which attackers ran."""

from collections.abc import Iterator

from fedveil.report import Table
from fedveil.studies.audit.members import LOOKS, NETWORK
from fedveil.studies.audit.results import Audited, Audits, Members
from fedveil.studies.estimates import percent, text

WHO = ("defence", "attacker")
TRIED = (
    "attack",
    "AUC on known records",
    "AUC",
    "accuracy, %",
    "TPR at 1 % FPR, %",
    "TPR at 0.1 % FPR, %",
    "broadcasts",
)
SEES = (
    f"The {NETWORK} sees outputs of the last three layers, label, loss and the gradient of the last Linear; it is "
    f"trained for the first {LOOKS} broadcasts at most. RMIA and LiRA compare with federations "
    "that the attacker trains itself. The attack marked with * did best on records whose membership the attacker "
    "knows, for a network on those held out from its training: it stands in the table of results. A rate is left out "
    "where fewer than ten false positives are expected."
)
DO_NOT_APPLY = "An attacker does not apply where it has nothing to work with."


def member_rows(name: str, attacker: str, found: Members) -> Iterator[list[str]]:
    """One row per attack, and one per attack that does not apply."""
    for attack, one in found.attacks.items():
        figures = [
            f"{one.known:.3f}",
            text(one.auc, ".3f"),
            percent(one.accuracy),
            *map(percent, one.tpr.values()),
        ]
        yield [name, attacker, f"{attack} *" if attack == found.attack else attack, *figures, str(one.broadcasts)]
    for attack, why in found.left_out.items():
        yield [name, attacker, attack, why, *[""] * (len(TRIED) - 2)]


def member_table(every: Audits) -> Table | None:
    """Membership, attack by attack."""
    rows = [
        row
        for name, found in every.items()
        if isinstance(found, Audited)
        for attacker, figures in found.attackers.items()
        if figures.membership
        for row in member_rows(name, attacker, figures.membership)
    ]
    return Table("Membership, attack by attack", [*WHO, *TRIED], rows, SEES) if rows else None


def attacker_rows(name: str, found: Audited) -> Iterator[list[str]]:
    """What each attacker of a defence did, or why it did nothing."""
    for attacker in found.names:
        did = {"attacks the model": attacker in found.attackers, "rebuilds records": attacker in found.rebuilt}
        yield [name, attacker, ", ".join(what for what, done in did.items() if done)]
    for attacker, why in found.inapplicable.items():
        yield [name, attacker, why if why.startswith("failed: ") else f"does not apply: {why}"]
    for attacker, why in found.not_rebuilt.items():
        yield [name, attacker, f"rebuilds no records: {why}"]
    if found.server:
        why = found.server.failed
        yield [name, "curious server", f"not run: {why}" if why else "rebuilds records from updates and sums"]


def attacker_table(every: Audits) -> Table | None:
    """Which attackers ran, and which do not apply."""
    rows = [row for name, found in every.items() if isinstance(found, Audited) for row in attacker_rows(name, found)]
    return Table("Attackers", [*WHO, "what it did"], rows, DO_NOT_APPLY) if rows else None
