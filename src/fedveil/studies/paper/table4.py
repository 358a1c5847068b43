"""Table 4: model inversion with a generator (GMI), published attacker and the one that knows the defence."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fedveil.attacks.adaptive import PUBLISHED, STRONGEST
from fedveil.report import NOTHING, Intervals, Section, Text
from fedveil.studies.attack import Shown
from fedveil.studies.inversion.run import INVERSION
from fedveil.studies.jobs import Result
from fedveil.studies.membership.page import per_cent
from fedveil.studies.paper.attacked import (
    Results,
    comparison,
    gather_attack,
    measure_rows,
    success_marks,
)
from fedveil.studies.paper.plan import Exhibit, Plan

MEASURES = {"accuracy": "accuracy", "nearest": "KNN distance", "centroid": "feature distance", "value": "ASR"}
HEADER = ("data", "measure", "defence", "paper", "ours, its judge", "ours, published", "ours, adaptive")
NOTE = (
    'The paper lets the attacked model judge its own images, in its own features ("its judge"). The last two columns '
    "are by an independent judge, for the paper's attacker and for one that knows the defence: ASR in % with Wilson's "
    "95 % interval, squared distances in its features, divided by their mean norm. A defence that multiplies features "
    "multiplies the paper's distances without any change in an image. {limits}"
)


def present(plan: Plan, results: Results) -> Shown:
    """A row for data, measure and defence, and success in a picture and in words."""
    marks = success_marks(plan, results, "value", codes)
    sections: list[Section] = [
        Intervals("Table 4: attack success", "success, ours by the judge, %", marks, {}, low=0.0, high=100.0),
        Text("Table 4: what it says", ["Success by the judge, in %.", *comparison(results, codes)]),
    ]
    return Shown(HEADER, measure_rows(plan, results, MEASURES, judged), NOTE.format(limits=limits(results)), sections)


def codes(attacker: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the generator's images got from the judge."""
    found: Mapping[str, Any] = attacker["codes"]
    return found


def judged(defence: str, result: Result, measure: str) -> list[str]:
    """One measure: as in the paper, published attacker, adaptive attacker."""
    published = result["attackers"][PUBLISHED]
    adaptive = result["attackers"].get(STRONGEST.get(defence), {}).get("codes")
    if measure == "value":
        return [per_cent(published["as_sent"]), per_cent(published["codes"]), per_cent(adaptive)]
    own = f"{published['as_sent'][measure]:.4g}"
    return [own, f"{published['codes'][measure]:.3f}", f"{adaptive[measure]:.3f}" if adaptive else NOTHING]


def limits(results: Results) -> str:
    """What a generator without any model gets, and real images, by the judge."""
    said = []
    for data, ours in results.items():
        for result in [result for result in ours.values() if "floor" in result][:1]:
            said.append(
                f"{data}: a generator that asks no model {per_cent(result['floor'])}, held-out real images "
                f"{per_cent(result['ceiling'])}, guessing {100 / len(result['classes']):.1f}."
            )
    return " ".join(said)


TABLE4 = Exhibit("table4", partial(gather_attack, INVERSION), present)
