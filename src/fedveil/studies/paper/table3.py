"""Table 3: membership inference by layers, by the published attacker and adaptive ones."""

from functools import partial

from pydantic import TypeAdapter

from fedveil.report import Intervals
from fedveil.studies.membership.results import AttackScores, Membership
from fedveil.studies.membership.run import MEMBERSHIP
from fedveil.studies.paper import attack_tables
from fedveil.studies.paper.attack_tables import ACCURACY, AttackResults, AttackTable, FigurePair, TableMeasure, point
from fedveil.studies.paper.plan import make_exhibit

NOTE = (
    "In %. ASR: balanced accuracy of the attack network in telling members from non-members; 50 is guessing. The paper "
    'takes the epoch with the best accuracy on the test itself ("its choice"); in the last column other records choose '
    "it. As published: the attacker of the paper; all others are adaptive: they know the defence. "
    "Accuracy: accuracy of the attacked federation itself (the paper repeats its Table 2)."
)


def _figures(result: Membership, attacker: str, measure: str) -> FigurePair:
    """Return the success on one set of layers: with the paper's choice of the epoch, and with that of known records."""
    found = result.attackers[attacker].attacks.get(measure) if attacker in result.attackers else None
    if not isinstance(found, AttackScores):
        return FigurePair(None, None)
    return FigurePair(None if found.best_on_test is None else point(found.best_on_test), found.accuracy)


TABLE = AttackTable(
    title="Table 3, membership, last three layers",
    noun="membership attacks",
    protocol="its choice",
    note=NOTE,
    single="One seed; 95 % intervals over records.",
    measures={
        ACCURACY: TableMeasure("accuracy"),
        "last": TableMeasure("ASR, last layer"),
        "second": TableMeasure("ASR, second to last"),
        "third": TableMeasure("ASR, third to last"),
        "three": TableMeasure("ASR, last three"),
    },
    success="three",
    chart=Intervals("Table 3: last three layers", "attack success, %", (), {"guessing": 50.0}),
    figures=_figures,
)
present = partial(attack_tables.present_attack, TABLE)
KIND = TypeAdapter(AttackResults[Membership])
TABLE3 = make_exhibit(KIND, partial(attack_tables.attack_graph, MEMBERSHIP), present, frozenset({"roc", "network"}))
