"""Tables of attacks: each data set of a plan is attacked under every defence, once per seed."""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from fedveil.attacks.observed import PUBLISHED
from fedveil.report import NOTHING, Interval, Intervals
from fedveil.runs.build import load_data
from fedveil.runs.config import Config, configure
from fedveil.studies.attack import Asked, AttackStudy
from fedveil.studies.estimates import Estimate, average, text
from fedveil.studies.inversion.results import Inversion
from fedveil.studies.jobs import Done, Failed, Job, Result
from fedveil.studies.membership.results import Membership
from fedveil.studies.paper.plan import LOSS, Exhibit, Plan
from fedveil.studies.study import Shown
from fedveil.studies.tables import mark

Printed = dict[str, dict[str, dict[str, float]]]  # by data set, measure and defence
O = TypeVar("O")  # noqa: E741
A = TypeVar("A", bound=Membership | Inversion)
R = TypeVar("R")
Seeds = dict[int, A | Failed]
Attacked = dict[str, dict[str, Seeds[A]]]  # by data set, defence and seed
Both = tuple[Estimate | None, Estimate | None]  # by the paper's protocol, by ours
HEADLINE = ("plain", "veil")
ACCURACY = "accuracy"


class Rates(NamedTuple):
    """Success of the published attacker, plain and under the veil, and of adaptive ones under the veil."""

    plain: float
    veil: float
    adaptive: Mapping[str, float]

    @property
    def best(self) -> str:
        """The adaptive attacker that succeeds most; "" without any."""
        return max(self.adaptive, key=self.adaptive.__getitem__, default="")


class AttackExhibit(Exhibit[R], Generic[O, A, R]):
    """A table or figure of an attack; tables and figures of one attack share its jobs."""

    study: AttackStudy[O, A]

    def seeds(self, plan: Plan) -> Sequence[int]:
        """Of the attacks that are shown."""
        return range(plan.settings.seeds)

    def asked(self, plan: Plan, folder: Path, seed: int) -> dict[str, tuple[Asked[O], Path]]:
        """What the attack is asked on each data set with one seed, and the folder for its files."""
        found, options = {}, self.study.options(**plan.settings.attack)
        for group in plan.settings.runs:
            config = configure({**LOSS, **group, "device": plan.device, "seed": seed}, plan.where)
            name, data = self.study.name, config.data.name
            part = f"{data}-{seed}" if seed else data
            asked = Asked(config, tuple(plan.settings.defences), options, label=f"{name}-{part}-")
            found[data] = asked, folder / name / part
        return found

    def configs(self, plan: Plan) -> list[Config]:
        """Return one of each data set."""
        return [asked.config for asked, _ in self.asked(plan, Path(), self.seeds(plan)[0]).values()]

    def jobs(self, plan: Plan, folder: Path) -> list[Job[Result]]:
        """Of all data sets, seed by seed; missing data are reported before anything runs, images are decoded once."""
        seeds = self.seeds(plan)
        for asked, _ in self.asked(plan, folder, seeds[0]).values():
            load_data(asked.config)
        every = [one for seed in seeds for one in self.asked(plan, folder, seed).values()]
        return [job for asked, home in every for job in self.study.jobs(asked, home)]

    def attacked(self, plan: Plan, folder: Path, done: Done) -> Attacked[A]:
        """Results by data set, defence and seed."""
        found: Attacked[A] = {}
        for seed in self.seeds(plan):
            for data, (asked, home) in self.asked(plan, folder, seed).items():
                for defence, result in self.study.collect(asked, home, done).items():
                    found.setdefault(data, {}).setdefault(defence, {})[seed] = result
        return found


@dataclass(frozen=True)
class Measure:
    """What a row tells.

    Attributes:
        title: of the row.
        share: it is one, and shown in per cent.
        theirs, ours: formats of values by the paper's protocol and by ours.
    """

    title: str
    share: bool = True
    theirs: str = ".1f"
    ours: str = ".1f"

    def over(self, values: Sequence[Estimate | None], form: str) -> str:
        """A value per seed as text: their mean; seeds without one are counted."""
        there = [value for value in values if value is not None]
        said = text(over_seeds(there, share=self.share), form, 100 if self.share else 1)
        return f"{said} ({len(there)} of {len(values)} seeds)" if 0 < len(there) < len(values) else said


class AttackTable(AttackExhibit[O, A, Attacked[A]]):
    """A table of an attack, with its success in a chart and in the summary.

    Attributes:
        what, brief: the attack, in the summary and in a sentence.
        protocol: the paper's, in the header.
        note: of the table.
        single: which intervals a single seed has; several have Student's.
        measures: the paper's.
        success: the measure of the chart and the summary.
        chart: without its rows.
    """

    what: str
    brief: str
    protocol: str
    note: str
    single: str
    measures: Mapping[str, Measure]
    success: str
    chart: Intervals

    @abstractmethod
    def figures(self, result: A, attacker: str, measure: str) -> Both:
        """An attacker's figure by the paper's protocol and by ours; None where it has none."""

    def collect(self, plan: Plan, folder: Path, done: Done) -> Attacked[A]:
        """By data set, defence and seed."""
        return self.attacked(plan, folder, done)

    def present(self, plan: Plan, results: Attacked[A]) -> Shown:
        """One row per data set, measure, defence and attacker, and success in a chart and in words."""
        rows, marks, headline = list[list[str]](), list[Interval](), list[tuple[str, str, str]]()
        found = dict[str, Rates]()
        for printed_as, data in plan.settings.data.items():
            paper, ours = plan.printed(Printed)[printed_as], results[data]
            rows += self.rows(data, paper, ours)
            marks += self.marks(data, paper[self.success], ours)
            if known := self.rates(ours):
                found[data] = known
                headline.append(self.headline(data, paper[self.success], known))
        header = ("data", "measure", "defence", "attacker", "paper", f"ours, {self.protocol}", "ours")
        note, chart = f"{self.note} {self.spread(plan)}", dataclasses.replace(self.chart, rows=marks)
        return Shown(plan.title, self.verdict(found), header, rows, note, [chart], headline=headline)

    def spread(self, plan: Plan) -> str:
        """What the intervals are."""
        count = plan.settings.seeds
        several = f"Means over {count} seeds with Student's 95 % interval; all seeds draw on the same images."
        return several if count > 1 else self.single

    def rows(
        self, data: str, paper: Mapping[str, Mapping[str, float]], ours: Mapping[str, Seeds[A]]
    ) -> list[list[str]]:
        """Each measure under each defence, by the paper's attacker and all others; a failed defence says why."""
        rows = []
        for name, measure in self.measures.items():
            for defence, seeds in ours.items():
                where, printed = [data, measure.title, defence], f"{paper[name][defence]:.2f}"
                results = succeeded(seeds)
                if isinstance(results, Failed):
                    rows.append([*where, "", printed, "", f"failed: {results.failed}"])
                elif name == ACCURACY:
                    own = measure.over([point(result.test) for result in results], measure.ours)
                    rows.append([*where, NOTHING, printed, NOTHING, own])
                else:
                    for attacker in attackers_of(results):
                        theirs, own = self.cells(results, attacker, name)
                        known = printed if attacker == PUBLISHED else NOTHING
                        rows.append([*where, attacker, known, theirs, own])
        return rows

    def cells(self, results: Sequence[A], attacker: str, name: str) -> tuple[str, str]:
        """An attacker's figure over seeds, by the paper's protocol and by ours."""
        measure, every = self.measures[name], [self.figures(result, attacker, name) for result in results]
        theirs, ours = ([both[place] for both in every] for place in (0, 1))
        return measure.over(theirs, measure.theirs), measure.over(ours, measure.ours)

    def rate(self, results: Sequence[A], attacker: str) -> Estimate | None:
        """An attacker's success over seeds, if it was measured."""
        every = [self.figures(result, attacker, self.success)[1] for result in results]
        return over_seeds([one for one in every if one is not None], share=True)

    def marks(self, data: str, paper: Mapping[str, float], ours: Mapping[str, Seeds[A]]) -> list[Interval]:
        """Success in per cent: the paper's, and that of each of our attackers."""
        marks = []
        for defence, seeds in ours.items():
            group, results = f"{data}, {defence}", succeeded(seeds)
            marks.append(Interval("paper", paper[defence], group=group))
            if isinstance(results, Failed):
                marks.append(mark(f"ours, {PUBLISHED}", None, group))
                continue
            for attacker in attackers_of(results):
                marks.append(mark(f"ours, {attacker}", self.rate(results, attacker), group, 100))
        return marks

    def rates(self, ours: Mapping[str, Seeds[A]]) -> Rates | None:
        """Success plain and under the veil, if both were measured."""
        found = dict[str, dict[str, float]]()
        for defence in HEADLINE:
            results = succeeded(ours.get(defence, {}))
            if isinstance(results, Failed):
                return None
            every = {name: rate.value for name in attackers_of(results) if (rate := self.rate(results, name))}
            if PUBLISHED not in every:
                return None
            found[defence] = every
        plain, veil = (found[defence].pop(PUBLISHED) for defence in HEADLINE)
        return Rates(plain, veil, found["veil"])

    def headline(self, data: str, paper: Mapping[str, float], found: Rates) -> tuple[str, str, str]:
        """Success in %, the paper's and ours: plain and under the veil, there by the best adaptive attacker too."""
        said = [f"plain {100 * found.plain:.1f}", f"veil {100 * found.veil:.1f}"]
        if found.best:
            said.append(f"by an adaptive attacker ({found.best}) {100 * found.adaptive[found.best]:.1f}")
        theirs = ", ".join(f"{defence} {paper[defence]:.2f}" for defence in HEADLINE)
        return f"{self.what}, {data}, success in %", theirs, ", ".join(said)

    def verdict(self, found: Mapping[str, Rates]) -> str:
        """Success on the data set on which it is largest without a defence."""
        if not found:
            return ""
        data = max(found, key=lambda name: found[name].plain)
        one = found[data]
        adaptive = f" (adaptive: {100 * one.adaptive[one.best]:.1f} %)" if one.best else ""
        under, without = f"{100 * one.veil:.1f} % under the veil{adaptive}", f"{100 * one.plain:.1f} % without"
        return f"{self.brief} on {data} reach {under}, {without}"


def point(value: float) -> Estimate:
    """A value without an interval."""
    return Estimate(value, value, value)


def over_seeds(found: Sequence[Estimate], *, share: bool) -> Estimate | None:
    """One value per seed as their mean with Student's interval, within what is possible; a single one as it is."""
    if len(found) < 2:
        return found[0] if found else None
    over = average([one.value for one in found])
    return Estimate(over.value, max(0.0, over.low), min(1.0 if share else math.inf, over.high))


def succeeded(seeds: Mapping[int, A | Failed]) -> list[A] | Failed:
    """The results of all seeds, or why one of them has none."""
    results: list[A] = []
    for seed, result in seeds.items():
        if isinstance(result, Failed):
            return Failed(f"seed {seed}: {result.failed}") if len(seeds) > 1 else result
        results.append(result)
    return results or Failed("it was not attacked")


def attackers_of(results: Sequence[A]) -> list[str]:
    """The attackers in the results, the paper's first."""
    return list(dict.fromkeys(name for result in results for name in result.attackers))
