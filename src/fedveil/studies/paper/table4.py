"""Table 4: model inversion with a generator (GMI), by the published attacker and adaptive ones."""

import dataclasses

from pydantic import TypeAdapter

from fedveil.report import Intervals
from fedveil.studies.estimates import percent
from fedveil.studies.inversion.results import Inversion
from fedveil.studies.inversion.run import INVERSION, Options
from fedveil.studies.paper.attacked import ACCURACY, Attacked, AttackTable, Both, Measure, over_seeds, point
from fedveil.studies.paper.plan import Plan
from fedveil.studies.study import Shown

MEASURES = {
    ACCURACY: Measure("accuracy"),
    "nearest": Measure("KNN distance", share=False, theirs=".4g", ours=".3f"),
    "centroid": Measure("feature distance", share=False, theirs=".4g", ours=".3f"),
    "value": Measure("ASR"),
}
NOTE = (
    "The paper lets the attacked model judge its own images, in its own features (self-judged). The last column is by "
    "an independent evaluator: ASR in %, squared distances in its features, divided by their mean norm. A defence that "
    "multiplies features multiplies the paper's distances without any change in an image. As published: the attacker "
    "of the paper; all others are adaptive: they know the defence, and self-judged means by the model they recovered."
)


class Table4(AttackTable[Options, Inversion]):
    """Model inversion."""

    study = INVERSION
    kind = TypeAdapter(Attacked[Inversion])
    left_out = frozenset({"right", "gallery"})
    what, brief = "Table 4, model inversion", "inversion attacks"
    protocol, measures = "self-judged", MEASURES
    note, single = NOTE, "One seed; Wilson's 95 % intervals over images."
    success = "value"
    chart = Intervals("Table 4: attack success", "success, ours by the evaluator, %", (), {}, low=0.0, high=100.0)

    def figures(self, result: Inversion, attacker: str, measure: str) -> Both:
        """One measure of the generator's images: by the attacked model itself, and by the evaluator."""
        if attacker not in result.attackers:
            return None, None
        found = result.attackers[attacker]
        if measure == "value":
            return found.as_received, found.codes
        return point(getattr(found.as_received, measure)), point(getattr(found.codes, measure))

    def present(self, plan: Plan, results: Attacked[Inversion]) -> Shown:
        """With what a generator gets without any model, and real images, by the evaluator."""
        shown, limits = super().present(plan, results), []
        for data, ours in results.items():
            found = {seed: one for seeds in ours.values() for seed, one in seeds.items() if isinstance(one, Inversion)}
            if every := list(found.values()):
                floor, ceiling = (
                    percent(over_seeds(some, share=True))
                    for some in ([one.floor for one in every], [one.ceiling for one in every])
                )
                limits.append(
                    f"{data}: a generator that asks no model {floor}, held-out real images {ceiling}, "
                    f"guessing {100 / len(every[0].classes):.1f}."
                )
        return dataclasses.replace(shown, note=" ".join([shown.note, *limits]))
