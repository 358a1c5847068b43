"""Table 4: model inversion with a generator (GMI), by the published attacker and adaptive ones."""

import dataclasses
from functools import partial

from pydantic import TypeAdapter

from fedveil.report import Intervals
from fedveil.studies.estimates import percent
from fedveil.studies.inversion.results import Inversion
from fedveil.studies.inversion.run import INVERSION
from fedveil.studies.paper import attack_tables
from fedveil.studies.paper.attack_tables import ACCURACY, AttackResults, AttackTable, FigurePair, TableMeasure, point
from fedveil.studies.paper.plan import Plan, make_exhibit
from fedveil.studies.study import Shown

NOTE = (
    "The paper lets the attacked model judge its own images, in its own features (self-judged). The last column is by "
    "an independent evaluator: ASR in %, squared distances in its features, divided by their mean norm. A defence that "
    "multiplies features multiplies the paper's distances without any change in an image. As published: the attacker "
    "of the paper; all others are adaptive: they know the defence, and self-judged means by the model they recovered."
)


def _figures(result: Inversion, attacker: str, measure: str) -> FigurePair:
    """Return one measure of the generator's images: by the attacked model itself, and by the evaluator."""
    if attacker not in result.attackers:
        return FigurePair(None, None)
    found = result.attackers[attacker]
    if measure == "value":
        return FigurePair(found.as_received, found.codes)
    return FigurePair(point(getattr(found.as_received, measure)), point(getattr(found.codes, measure)))


TABLE = AttackTable(
    title="Table 4, model inversion",
    noun="inversion attacks",
    protocol="self-judged",
    note=NOTE,
    single="One seed; Wilson's 95 % intervals over images.",
    measures={
        ACCURACY: TableMeasure("accuracy"),
        "nearest": TableMeasure("KNN distance", share=False, theirs=".4g", ours=".3f"),
        "centroid": TableMeasure("feature distance", share=False, theirs=".4g", ours=".3f"),
        "value": TableMeasure("ASR"),
    },
    success="value",
    chart=Intervals("Table 4: attack success", "success, ours by the evaluator, %", (), {}, low=0.0, high=100.0),
    figures=_figures,
)


def present(plan: Plan, results: AttackResults[Inversion]) -> Shown:
    """Show the table, and in its note the success of a generator without any model, and of real images."""
    shown, limits = attack_tables.present_attack(TABLE, plan, results), []
    for data, ours in results.items():
        found = {seed: one for seeds in ours.values() for seed, one in seeds.items() if isinstance(one, Inversion)}
        if every := list(found.values()):
            floor = percent(attack_tables.mean_over_seeds([one.floor for one in every], share=True))
            ceiling = percent(attack_tables.mean_over_seeds([one.ceiling for one in every], share=True))
            limits.append(
                f"{data}: a generator without any model {floor}, held-out real images {ceiling}, "
                f"guessing {100 / len(every[0].classes):.1f}."
            )
    return dataclasses.replace(shown, note=" ".join([shown.note, *limits]))


TABLE4 = make_exhibit(
    TypeAdapter(AttackResults[Inversion]),
    partial(attack_tables.attack_graph, INVERSION),
    present,
    frozenset({"right", "gallery"}),
)
