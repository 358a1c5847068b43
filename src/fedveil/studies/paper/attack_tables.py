"""Tables of attacks: each data set of a plan is attacked under every defence, once per seed."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from fedveil.attacks.observation import PUBLISHED
from fedveil.report import NOTHING, Interval, Intervals
from fedveil.runs.config import configure
from fedveil.studies.attack import AttackRequest, AttackStudy, Results
from fedveil.studies.estimates import Estimate, average, text
from fedveil.studies.inversion.results import Inversion
from fedveil.studies.jobs import Done, Failed
from fedveil.studies.membership.results import Membership
from fedveil.studies.paper.plan import LOSS, Plan
from fedveil.studies.study import JobGraph, Shown
from fedveil.studies.tables import mark

PaperValues = dict[str, dict[str, dict[str, float]]]  # by data set, measure and defence
O = TypeVar("O")  # noqa: E741
A = TypeVar("A", bound=Membership | Inversion)
Seeds = dict[int, A | Failed]
AttackResults = dict[str, dict[str, Seeds[A]]]  # by data set, defence and seed
ACCURACY = "accuracy"


class FigurePair(NamedTuple):
    """A figure by the paper's protocol and by ours; None where there is none."""

    theirs: Estimate | None
    ours: Estimate | None


def attack_graph(
    study: AttackStudy[O, A], plan: Plan, folder: Path, seeds: Sequence[int] | None = None
) -> JobGraph[AttackResults[A]]:
    """Return the jobs of an attack on all data sets, seed by seed; tables and figures of one attack share them."""
    options, graphs = study.options(**plan.settings.attack), dict[tuple[str, int], JobGraph[Results[A]]]()
    for seed in range(plan.settings.seeds) if seeds is None else seeds:
        for group in plan.settings.runs:
            config = configure({**LOSS, **group, "device": plan.device, "seed": seed}, plan.where)
            part = f"{config.data.name}-{seed}" if seed else config.data.name
            asked = AttackRequest(config, tuple(plan.settings.defences), options, label=f"{study.name}-{part}-")
            graphs[config.data.name, seed] = study.graph(asked, folder / study.name / part)

    def collect(done: Done) -> AttackResults[A]:
        found: AttackResults[A] = {}
        for (data, seed), graph in graphs.items():
            for defence, result in graph.collect(done).items():
                found.setdefault(data, {}).setdefault(defence, {})[seed] = result
        return found

    return JobGraph([job for graph in graphs.values() for job in graph.jobs], collect)


@dataclass(frozen=True)
class TableMeasure:
    """A row of a table.

    Attributes:
        title: title of the row.
        share: whether values are fractions, which are shown in per cent.
        theirs, ours: formats of values by the paper's protocol and by ours.
    """

    title: str
    share: bool = True
    theirs: str = ".1f"
    ours: str = ".1f"

    def format(self, values: Sequence[Estimate | None], form: str) -> str:
        """Format the mean of one value per seed; seeds without a value are counted."""
        there = [value for value in values if value is not None]
        said = text(mean_over_seeds(there, share=self.share), form, 100 if self.share else 1)
        return f"{said} ({len(there)} of {len(values)} seeds)" if 0 < len(there) < len(values) else said


@dataclass(frozen=True)
class AttackTable(Generic[A]):
    """A table of an attack, with a chart of its success.

    Attributes:
        title, noun: the attack, in the summary and in a sentence.
        protocol: name of the paper's protocol in the header.
        note: note below the table.
        single: description of the intervals of a single seed; several seeds have Student's.
        measures: the paper's measures.
        success: the measure in the chart and in the summary.
        chart: the chart without its rows.
        figures: function of a result, an attacker and a measure.
    """

    title: str
    noun: str
    protocol: str
    note: str
    single: str
    measures: Mapping[str, TableMeasure]
    success: str
    chart: Intervals
    figures: Callable[[A, str, str], FigurePair]


@dataclass(frozen=True)
class AttackEntry:
    """One measure of one attacker on one defence: the paper's value, and ours by seed.

    Attributes:
        attacker: name of the attacker; "" if the measure has none, or the attack failed.
        failed: reason if there are no values.
    """

    data: str
    measure: str
    defence: str
    attacker: str
    paper: float
    pairs: Sequence[FigurePair] = ()
    failed: str = ""

    @property
    def rate(self) -> Estimate | None:
        """Return the success over seeds, if it was measured."""
        return mean_over_seeds([pair.ours for pair in self.pairs if pair.ours is not None], share=True)


def present_attack(table: AttackTable[A], plan: Plan, results: AttackResults[A]) -> Shown:
    """Show a row per data set, measure, defence and attacker, and success in a chart and in the summary."""
    rows, marks, headline = list[list[str]](), list[Interval](), list[tuple[str, str, str]]()
    verdicts = dict[float, str]()
    paper = plan.paper_values(PaperValues)
    for printed_as, data in plan.settings.data.items():
        entries = list(_entries(table, data, paper[printed_as], results[data]))
        rows += [_row(table.measures[entry.measure], entry) for entry in entries]
        successes = [entry for entry in entries if entry.measure == table.success]
        marks += _marks(successes)
        rates = {(one.defence, one.attacker): one.rate.value for one in successes if one.rate}
        if {("plain", PUBLISHED), ("veil", PUBLISHED)} <= rates.keys():
            plain, veil = 100 * rates["plain", PUBLISHED], 100 * rates["veil", PUBLISHED]
            theirs = {one.defence: one.paper for one in successes}
            ours, verdict = (
                f"plain {plain:.1f}, veil {veil:.1f}",
                f"{table.noun} on {data} reach {veil:.1f} % under the veil",
            )
            adaptive = {
                who: 100 * rate for (defence, who), rate in rates.items() if defence == "veil" != who != PUBLISHED
            }
            if adaptive:
                best = max(adaptive, key=adaptive.__getitem__)
                ours += f", by an adaptive attacker ({best}) {adaptive[best]:.1f}"
                verdict += f" (adaptive: {adaptive[best]:.1f} %)"
            printed = ", ".join(f"{defence} {theirs[defence]:.2f}" for defence in ("plain", "veil"))
            headline.append((f"{table.title}, {data}, success in %", printed, ours))
            verdicts.setdefault(plain, f"{verdict}, {plain:.1f} % without")
    header = ("data", "measure", "defence", "attacker", "paper", f"ours, {table.protocol}", "ours")
    count = plan.settings.seeds
    several = f"Means over {count} seeds with Student's 95 % interval; all seeds draw on the same images."
    note, chart = f"{table.note} {several if count > 1 else table.single}", dataclasses.replace(table.chart, rows=marks)
    verdict = verdicts[max(verdicts)] if verdicts else ""
    return Shown(plan.title, verdict, header, rows, note, [chart], headline=headline)


def _entries(
    table: AttackTable[A], data: str, paper: Mapping[str, Mapping[str, float]], ours: Mapping[str, Seeds[A]]
) -> Iterator[AttackEntry]:
    for measure in table.measures:
        for defence, seeds in ours.items():
            where, printed, results = (data, measure, defence), paper[measure][defence], _require_seeds(seeds)
            if isinstance(results, Failed):
                yield AttackEntry(*where, "", printed, failed=f"failed: {results.failed}")
            elif measure == ACCURACY:
                yield AttackEntry(*where, "", printed, [FigurePair(None, point(result.test)) for result in results])
            else:
                for attacker in dict.fromkeys(name for result in results for name in result.attackers):
                    pairs = [table.figures(result, attacker, measure) for result in results]
                    yield AttackEntry(*where, attacker, printed, pairs)


def _row(measure: TableMeasure, entry: AttackEntry) -> list[str]:
    where, paper = [entry.data, measure.title, entry.defence], f"{entry.paper:.2f}"
    if entry.failed:
        return [*where, "", paper, "", entry.failed]
    theirs = measure.format([pair.theirs for pair in entry.pairs], measure.theirs)
    ours = measure.format([pair.ours for pair in entry.pairs], measure.ours)
    known = entry.attacker in ("", PUBLISHED)
    return [*where, entry.attacker or NOTHING, paper if known else NOTHING, theirs, ours]


def _marks(successes: Sequence[AttackEntry]) -> list[Interval]:
    """Return success in per cent: the paper's, and that of each of our attackers."""
    marks = dict[Interval, None]()
    for entry in successes:
        group = f"{entry.data}, {entry.defence}"
        marks[Interval("paper", entry.paper, group=group)] = None
        marks[mark(f"ours, {entry.attacker or PUBLISHED}", entry.rate, group, 100)] = None
    return list(marks)


def point(value: float) -> Estimate:
    """Return an estimate without an interval."""
    return Estimate(value, value, value)


def mean_over_seeds(found: Sequence[Estimate], *, share: bool) -> Estimate | None:
    """Average one value per seed, with Student's interval clipped to possible values; keep a single one as it is."""
    if len(found) < 2:
        return found[0] if found else None
    over = average([one.value for one in found])
    return Estimate(over.value, max(0.0, over.low), min(1.0 if share else math.inf, over.high))


def _require_seeds(seeds: Mapping[int, A | Failed]) -> list[A] | Failed:
    """Return the results of all seeds, or why one of them failed."""
    results: list[A] = []
    for seed, result in seeds.items():
        if isinstance(result, Failed):
            return Failed(f"seed {seed}: {result.failed}") if len(seeds) > 1 else result
        results.append(result)
    return results or Failed("it was not attacked")
