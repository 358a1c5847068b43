"""Table 3: membership inference by layers, by the published attacker and the adaptive one."""

from pydantic import TypeAdapter

from fedveil.attacks.observed import PUBLISHED
from fedveil.defences.registry import find
from fedveil.report import NOTHING, Intervals
from fedveil.studies.attack import Results
from fedveil.studies.estimates import Estimate, percent
from fedveil.studies.membership.results import Membership, Scored
from fedveil.studies.membership.run import MEMBERSHIP, Options
from fedveil.studies.paper.attacked import AttackTable

MEASURES = {
    "accuracy": "accuracy",
    "last": "ASR, last layer",
    "second": "ASR, second to last",
    "third": "ASR, third to last",
    "three": "ASR, last three",
}
HEADER = ("data", "measure", "defence", "paper", "ours, its choice", "ours, published", "ours, adaptive")
NOTE = (
    "In %. ASR: balanced accuracy of the attack network in telling members from non-members, with its 95 % interval; "
    '50 is guessing. The paper takes the epoch with the best accuracy on the test itself ("its choice"); in the '
    "last two columns other records choose it. Published: the attacker of the paper; adaptive: one that knows the "
    "defence. Accuracy: of the attacked federation itself (the paper repeats its Table 2)."
)
Found = dict[str, Results[Membership]]


class Table3(AttackTable[Options, Membership]):
    """Membership inference."""

    study = MEMBERSHIP
    kind = TypeAdapter(Found)
    left_out = frozenset({"roc", "network"})
    what, header, note, measures = "Table 3, membership, last three layers", HEADER, NOTE, MEASURES
    success = "three"
    chart = Intervals("Table 3: last three layers", "attack success, %", (), {"guessing": 50.0})

    def scored(self, result: Membership, attacker: str, layers: str) -> Scored | None:
        """An attacker's network on some layers, if it did not fail."""
        found = result.attackers[attacker].attacks.get(layers) if attacker in result.attackers else None
        return found if isinstance(found, Scored) else None

    def rate(self, result: Membership, attacker: str) -> Estimate | None:
        """By the last three layers together."""
        found = self.scored(result, attacker, "three")
        return found.accuracy if found else None

    def cells(self, defence: str, result: Membership, measure: str) -> list[str]:
        """Success by one set of layers: as the paper chooses the epoch, published, adaptive."""
        if measure == "accuracy":
            return [NOTHING, f"{100 * result.test:.1f}", NOTHING]
        published = self.scored(result, PUBLISHED, measure)
        adaptive = self.scored(result, find(defence).strongest or "", measure)
        if not published or published.best_on_test is None:
            return [NOTHING] * 3
        best = f"{100 * published.best_on_test:.1f}"
        return [best, percent(published.accuracy), percent(adaptive.accuracy if adaptive else None)]
