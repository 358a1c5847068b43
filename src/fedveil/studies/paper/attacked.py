"""Tables of attacks: each data set of a plan is attacked under every defence."""

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from fedveil.attacks.observed import PUBLISHED
from fedveil.defences.registry import find
from fedveil.report import Interval, Intervals
from fedveil.runs.build import load_data
from fedveil.runs.config import configure
from fedveil.studies.attack import Asked, AttackStudy, Results
from fedveil.studies.estimates import Estimate
from fedveil.studies.jobs import Done, Failed, Job, Result
from fedveil.studies.paper.plan import Exhibit, Plan
from fedveil.studies.study import Shown

Printed = dict[str, dict[str, dict[str, float]]]  # by data set, measure and defence
O = TypeVar("O")  # noqa: E741
A = TypeVar("A", bound=Result)
R = TypeVar("R")


class AttackExhibit(Exhibit[R], Generic[O, A, R]):
    """A table or figure of an attack; tables and figures of one attack share its jobs."""

    study: AttackStudy[O, A]

    def asked(self, plan: Plan, folder: Path) -> dict[str, tuple[Asked[O], Path]]:
        """What the attack is asked on each data set, and the folder for its files."""
        found, options = {}, self.study.options(**plan.settings.attack)
        for group in plan.settings.runs:
            config = configure(group | {"device": plan.device}, plan.where)
            data, name = config.data.name, self.study.name
            asked = Asked(config, tuple(plan.settings.defences), options, label=f"{name}-{data}-")
            found[data] = asked, folder / name / data
        return found

    def jobs(self, plan: Plan, folder: Path) -> list[Job[Result]]:
        """Of all data sets; missing data are reported before anything runs, and images are decoded once."""
        every = self.asked(plan, folder).values()
        for asked, _ in every:
            load_data(asked.config)
        return [job for asked, home in every for job in self.study.jobs(asked, home)]

    def attacked(self, plan: Plan, folder: Path, done: Done) -> dict[str, Results[A]]:
        """Results by data set and defence."""
        every = self.asked(plan, folder).items()
        return {data: self.study.collect(asked, home, done) for data, (asked, home) in every}


class AttackTable(AttackExhibit[O, A, dict[str, Results[A]]]):
    """A table of an attack, with its success in a chart and in the summary.

    Attributes:
        what: the attack, in the summary.
        header, note: of the table.
        measures: the paper's, with their titles.
        success: the measure of the chart and the summary.
        chart: without its rows.
    """

    what: str
    header: Sequence[str]
    note: str
    measures: Mapping[str, str]
    success: str
    chart: Intervals

    @abstractmethod
    def cells(self, defence: str, result: A, measure: str) -> list[str]:
        """Three values of a measure: as the paper measures it, by the published attacker, by the adaptive one."""

    @abstractmethod
    def rate(self, result: A, attacker: str) -> Estimate | None:
        """An attacker's success, if it was measured."""

    def collect(self, plan: Plan, folder: Path, done: Done) -> dict[str, Results[A]]:
        """By data set and defence."""
        return self.attacked(plan, folder, done)

    def present(self, plan: Plan, results: dict[str, Results[A]]) -> Shown:
        """One row per data set, measure and defence, and success in a chart and in words."""
        rows, marks, headline = list[list[str]](), list[Interval](), list[tuple[str, str, str]]()
        for printed_as, data in plan.settings.data.items():
            paper, ours = plan.printed(Printed)[printed_as], results[data]
            rows += self.rows(data, paper, ours)
            marks += self.marks(data, paper[self.success], ours)
            headline += self.headline(data, paper[self.success], ours)
        chart = dataclasses.replace(self.chart, rows=marks)
        return Shown(plan.title, "", self.header, rows, self.note, [chart], headline=headline)

    def rows(self, data: str, paper: Mapping[str, Mapping[str, float]], ours: Results[A]) -> list[list[str]]:
        """The paper's value of each measure and defence, then three of ours; a failed defence says why."""
        rows = []
        for measure, title in self.measures.items():
            for defence, result in ours.items():
                if isinstance(result, Failed):
                    cells = [f"failed: {result.failed}", "", ""]
                else:
                    cells = self.cells(defence, result, measure)
                rows.append([data, title, defence, f"{paper[measure][defence]:.2f}", *cells])
        return rows

    def marks(self, data: str, paper: Mapping[str, float], ours: Results[A]) -> list[Interval]:
        """Success in per cent: the paper's, by the published attacker, by the adaptive one."""
        marks = []
        for defence, result in ours.items():
            group = f"{data}, {defence}"
            marks.append(Interval("paper", paper[defence], group=group))
            if isinstance(result, Failed):
                marks.append(Interval("ours, as published", None, group=group, missing="failed"))
                continue
            attackers = {"ours, as published": PUBLISHED, "ours, adaptive": find(defence).strongest or ""}
            for label, attacker in attackers.items():
                if found := self.rate(result, attacker):
                    marks.append(Interval(label, 100 * found.value, 100 * found.low, 100 * found.high, group))
        return marks

    def headline(self, data: str, paper: Mapping[str, float], ours: Results[A]) -> list[tuple[str, str, str]]:
        """Success in %, undefended and under the veil: the paper's and ours."""
        plain, veil = ours.get("plain"), ours.get("veil")
        if not plain or not veil or isinstance(plain, Failed) or isinstance(veil, Failed):
            return []
        every = self.rate(plain, PUBLISHED), self.rate(veil, PUBLISHED), self.rate(veil, find("veil").strongest or "")
        first, second, adaptive = [f"{100 * one.value:.1f}" for one in every if one]
        theirs = f"plain {paper['plain']:.2f}, veil {paper['veil']:.2f}"
        said = f"plain {first}, veil {second}, by an adaptive attacker {adaptive}"
        return [(f"{self.what}, {data}, success in %", theirs, said)]
