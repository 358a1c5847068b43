"""Table 3: membership inference by layers, the published attacker and the one that knows the defence."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fedveil.attacks.adaptive import PUBLISHED, STRONGEST
from fedveil.report import NOTHING, Intervals, Section, Text
from fedveil.studies.attack import Shown
from fedveil.studies.jobs import Result
from fedveil.studies.membership.page import per_cent
from fedveil.studies.membership.run import MEMBERSHIP
from fedveil.studies.paper.attacked import (
    Results,
    comparison,
    gather_attack,
    measure_rows,
    success_marks,
)
from fedveil.studies.paper.plan import Exhibit, Plan

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


def present(plan: Plan, results: Results) -> Shown:
    """A row for data, measure and defence, and the last three layers in a picture and in words."""
    marks = success_marks(plan, results, "three", last_three)
    sections: list[Section] = [
        Intervals("Table 3: last three layers", "attack success, %", marks, {"guessing": 50.0}),
        Text("Table 3: what it says", ["Last three layers, in %.", *comparison(results, last_three)]),
    ]
    return Shown(HEADER, measure_rows(plan, results, MEASURES, asr), NOTE, sections)


def last_three(attacker: Mapping[str, Any]) -> Mapping[str, Any]:
    """Success by the last three layers together."""
    found: Mapping[str, Any] = attacker["attacks"]["three"]["accuracy"]
    return found


def asr(defence: str, result: Result, layers: str) -> list[str]:
    """Success by one set of layers: as the paper chooses the epoch, published, adaptive."""
    published = result["attackers"][PUBLISHED]["attacks"].get(layers)
    adaptive = result["attackers"].get(STRONGEST.get(defence), {}).get("attacks", {}).get(layers)
    if not published:
        return [NOTHING] * 3
    best = f"{100 * published['best_on_test']:.1f}"
    return [best, per_cent(published["accuracy"]), per_cent(adaptive and adaptive["accuracy"])]


TABLE3 = Exhibit("table3", partial(gather_attack, MEMBERSHIP), present)
