"""Table 4: model inversion with a generator (GMI), by the published attacker and the adaptive one."""

import dataclasses

from pydantic import TypeAdapter

from fedveil.attacks.observed import PUBLISHED
from fedveil.defences.registry import find
from fedveil.report import NOTHING, Intervals
from fedveil.studies.attack import Results
from fedveil.studies.estimates import Estimate, percent
from fedveil.studies.inversion.results import Inversion
from fedveil.studies.inversion.run import INVERSION, Options
from fedveil.studies.paper.attacked import AttackTable
from fedveil.studies.paper.plan import Plan
from fedveil.studies.study import Shown

MEASURES = {"accuracy": "accuracy", "nearest": "KNN distance", "centroid": "feature distance", "value": "ASR"}
HEADER = ("data", "measure", "defence", "paper", "ours, self-judged", "ours, published", "ours, adaptive")
NOTE = (
    "The paper lets the attacked model judge its own images, in its own features (self-judged). The last two columns "
    "are by an independent evaluator, for the paper's attacker and for an adaptive one: ASR in % with Wilson's 95 % "
    "interval, squared distances in its features, divided by their mean norm. A defence that multiplies features "
    "multiplies the paper's distances without any change in an image."
)
Found = dict[str, Results[Inversion]]


class Table4(AttackTable[Options, Inversion]):
    """Model inversion."""

    study = INVERSION
    kind = TypeAdapter(Found)
    left_out = frozenset({"right", "gallery"})
    what, header, note, measures = "Table 4, model inversion", HEADER, NOTE, MEASURES
    success = "value"
    chart = Intervals("Table 4: attack success", "success, ours by the evaluator, %", (), {}, low=0.0, high=100.0)

    def rate(self, result: Inversion, attacker: str) -> Estimate | None:
        """How often the evaluator recognises the generator's images."""
        return result.attackers[attacker].codes if attacker in result.attackers else None

    def cells(self, defence: str, result: Inversion, measure: str) -> list[str]:
        """One measure: self-judged, then the evaluator's judgement of the published and of the adaptive attacker."""
        if measure == "accuracy":
            return [NOTHING, f"{100 * result.test:.1f}", NOTHING]
        published, adaptive = result.attackers[PUBLISHED], result.attackers.get(find(defence).strongest or "")
        every = [published.as_received, published.codes, adaptive.codes if adaptive else None]
        if measure == "value":
            return [percent(found) for found in every]
        first, second, third = (getattr(found, measure, None) for found in every)
        return [f"{first:.4g}", f"{second:.3f}", NOTHING if third is None else f"{third:.3f}"]

    def present(self, plan: Plan, results: Found) -> Shown:
        """With what a generator gets without any model, and real images, by the evaluator."""
        shown, limits = super().present(plan, results), []
        for data, ours in results.items():
            if found := next((one for one in ours.values() if isinstance(one, Inversion)), None):
                limits.append(
                    f"{data}: a generator that asks no model {percent(found.floor)}, held-out real images "
                    f"{percent(found.ceiling)}, guessing {100 / len(found.classes):.1f}."
                )
        return dataclasses.replace(shown, note=" ".join([NOTE, *limits]))
