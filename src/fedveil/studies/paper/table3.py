"""Table 3: membership inference by layers, by the published attacker and adaptive ones."""

from pydantic import TypeAdapter

from fedveil.report import Intervals
from fedveil.studies.membership.results import Membership, Scored
from fedveil.studies.membership.run import MEMBERSHIP, Options
from fedveil.studies.paper.attacked import ACCURACY, Attacked, AttackTable, Both, Measure, point

MEASURES = {
    ACCURACY: Measure("accuracy"),
    "last": Measure("ASR, last layer"),
    "second": Measure("ASR, second to last"),
    "third": Measure("ASR, third to last"),
    "three": Measure("ASR, last three"),
}
NOTE = (
    "In %. ASR: balanced accuracy of the attack network in telling members from non-members; 50 is guessing. The paper "
    'takes the epoch with the best accuracy on the test itself ("its choice"); in the last column other records choose '
    "it. As published: the attacker of the paper; all others are adaptive: they know the defence. "
    "Accuracy: of the attacked federation itself (the paper repeats its Table 2)."
)


class Table3(AttackTable[Options, Membership]):
    """Membership inference."""

    study = MEMBERSHIP
    kind = TypeAdapter(Attacked[Membership])
    left_out = frozenset({"roc", "network"})
    what, brief = "Table 3, membership, last three layers", "membership attacks"
    protocol, measures = "its choice", MEASURES
    note, single = NOTE, "One seed; 95 % intervals over records."
    success = "three"
    chart = Intervals("Table 3: last three layers", "attack success, %", (), {"guessing": 50.0})

    def figures(self, result: Membership, attacker: str, measure: str) -> Both:
        """Success by one set of layers: as the paper chooses the epoch, and as known records do."""
        found = result.attackers[attacker].attacks.get(measure) if attacker in result.attackers else None
        if not isinstance(found, Scored):
            return None, None
        return None if found.best_on_test is None else point(found.best_on_test), found.accuracy
