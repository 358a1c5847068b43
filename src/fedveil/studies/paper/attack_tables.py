"""Tables 3 and 4 and Figures 4 and 5: attacks under every defence."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.scores import Estimate, average
from fedveil.report import NOTHING, Interval, Intervals, Section
from fedveil.runs.settings import Config, Value, configure
from fedveil.studies.attack import AttackRequest, AttackStudy, Results, join_parts
from fedveil.studies.gradients.results import HEADER, Gradients, chart, gallery, table_rows, view_figures
from fedveil.studies.gradients.run import GRADIENTS, GradientOptions
from fedveil.studies.inversion.results import Inversion, gallery_rows, picture_rows
from fedveil.studies.inversion.run import INVERSION
from fedveil.studies.jobs import Failure, JobResults, successes
from fedveil.studies.membership.attacks import AttackScores, Membership
from fedveil.studies.membership.run import MEMBERSHIP
from fedveil.studies.paper.plan import LOSS, ExhibitPlan, make_exhibit
from fedveil.studies.study import JobGraph, Presentation, mark, percent, text

PaperValues = dict[str, dict[str, dict[str, float]]]  # the paper's values by data set, measure and defence
O = TypeVar("O")  # noqa: E741
A = TypeVar("A", bound=Membership | Inversion)
Seeds = dict[int, A | Failure]
AttackResults = dict[str, dict[str, Seeds[A]]]  # results by data set, defence and seed
ACCURACY = "accuracy"
BATCH = 1  # number of images in a batch of Figure 5
FigurePair = tuple[Estimate | None, Estimate | None]  # estimates by the paper's protocol and by ours


def attack_graph(
    study: AttackStudy[O, A], plan: ExhibitPlan, folder: Path, seeds: Sequence[int] | None = None
) -> JobGraph[AttackResults[A]]:
    """Return the jobs of an attack for all seeds and data sets; all exhibits that use the attack share these jobs."""
    options, graphs = study.options(**plan.settings.attack), dict[tuple[str, int], JobGraph[Results[A]]]()
    for seed in range(plan.settings.seeds) if seeds is None else seeds:
        for group in plan.settings.runs:
            config = configure({**LOSS, **group, "device": plan.device, "seed": seed}, plan.where)
            part = f"{config.data.name}-{seed}" if seed else config.data.name
            request = AttackRequest(config, tuple(plan.settings.defences), options, label=f"{study.name}-{part}-")
            graphs[config.data.name, seed] = study.graph(request, folder / study.name / part)

    def collect(done: JobResults) -> AttackResults[A]:
        results_by_seed: AttackResults[A] = {}
        for (data, seed), graph in graphs.items():
            for defence, result in graph.collect(done).items():
                results_by_seed.setdefault(data, {}).setdefault(defence, {})[seed] = result
        return results_by_seed

    return JobGraph([job for graph in graphs.values() for job in graph.jobs], collect)


@dataclass(frozen=True)
class TableMeasure:
    """A row of a table.

    Attributes:
        title: title of the row.
        fraction: whether values are fractions; they are shown in per cent.
        theirs, ours: number formats for the values by the paper's protocol and by ours.
    """

    title: str
    fraction: bool = True
    theirs: str = ".1f"
    ours: str = ".1f"

    def format(self, values: Sequence[Estimate | None], form: str) -> str:
        """Format the mean over seeds; if some seeds have no value, show how many have one."""
        present = [value for value in values if value is not None]
        mean = text(mean_over_seeds(present, fraction=self.fraction), form, 100 if self.fraction else 1)
        return f"{mean} ({len(present)} of {len(values)} seeds)" if 0 < len(present) < len(values) else mean


@dataclass(frozen=True)
class AttackEntry:
    """The paper's value and ours for one data set, measure, defence and attacker.

    Attributes:
        data, measure, defence: names of the data set, the measure and the defence.
        attacker: name of the attacker; "" if the measure does not depend on an attacker, or if the attack failed.
        paper: the paper's value.
        pairs: for each seed, the estimates by the paper's protocol and by ours.
        failed: reason why there are no values; "" if there are values.
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
        """The mean of our values over seeds; None if there are none."""
        return mean_over_seeds([ours for _, ours in self.pairs if ours is not None], fraction=True)

    def row(self, measure: TableMeasure) -> list[str]:
        """Return the table row."""
        where, paper = [self.data, measure.title, self.defence], f"{self.paper:.2f}"
        if self.failed:
            return [*where, "", paper, "", self.failed]
        theirs, ours = zip(*self.pairs, strict=True)
        known = paper if self.attacker in ("", PUBLISHED) else NOTHING
        values = measure.format(theirs, measure.theirs), measure.format(ours, measure.ours)
        return [*where, self.attacker or NOTHING, known, *values]


@dataclass(frozen=True)
class AttackTable:
    """The presentation of an attack, read from its plan.

    Attributes:
        title: name of the attack in the summary.
        protocol: name of the paper's protocol in the table header.
        single: description of the intervals if there is a single seed; for several seeds, they are Student's intervals.
        success: name of the measure shown in the chart and in the summary.
        chart: the chart, without its rows.
        measures: the paper's measures, by name.
    """

    title: str
    protocol: str
    single: str
    success: str
    chart: Intervals
    measures: dict[str, TableMeasure]


def present_attack(
    plan: ExhibitPlan, results: AttackResults[A], *, figures: Callable[[A, str, str], FigurePair]
) -> Presentation:
    """Return one row per data set, measure, defence and attacker, with success rates in a chart and in the summary.

    `figures` returns the pair of estimates for a result, an attacker and a measure.
    """
    rows, marks, headline = list[list[str]](), dict[Interval, None](), list[tuple[str, str, str]]()
    paper, table = plan.paper_values(PaperValues), TypeAdapter(AttackTable).validate_python(plan.file.table)
    for printed_as, data in plan.settings.data.items():
        entries = [
            entry
            for measure in table.measures
            for defence, seeds in results[data].items()
            for entry in _entries((data, measure, defence), paper[printed_as][measure][defence], seeds, figures)
        ]
        rows += [entry.row(table.measures[entry.measure]) for entry in entries]
        rates = [entry for entry in entries if entry.measure == table.success]
        for rate in rates:
            group = f"{data}, {rate.defence}"
            marks[Interval("paper", rate.paper, group=group)] = None
            marks[mark(f"ours, {rate.attacker or PUBLISHED}", rate.rate, group, 100)] = None
        if summary := _summarise(rates):
            headline.append((f"{table.title}, {data}, success in %", *summary))
    header = ("data", "measure", "defence", "attacker", "paper", f"ours, {table.protocol}", "ours")
    count = plan.settings.seeds
    seeds_note = f"Means over {count} seeds with Student's 95 % interval; all seeds use the same images."
    note, sections = (
        f"{plan.file.note} {seeds_note if count > 1 else table.single}",
        [replace(table.chart, rows=[*marks])],
    )
    return Presentation(plan.title, "", header, rows, note, sections, headline=headline)


def _summarise(successes: Sequence[AttackEntry]) -> tuple[str, str] | None:
    """Summarise the paper's and our success rates for plain and veil; None if we have not measured both.

    Our summary includes the best adaptive attacker.
    """
    rates = {(success.defence, success.attacker): 100 * success.rate.value for success in successes if success.rate}
    if not {("plain", PUBLISHED), ("veil", PUBLISHED)} <= rates.keys():
        return None
    theirs = {success.defence: success.paper for success in successes}
    ours = f"plain {rates['plain', PUBLISHED]:.1f}, veil {rates['veil', PUBLISHED]:.1f}"
    adaptive = {who: rate for (defence, who), rate in rates.items() if defence == "veil" and who != PUBLISHED}
    if adaptive:
        best = max(adaptive, key=adaptive.__getitem__)
        ours += f", by an adaptive attacker ({best}) {adaptive[best]:.1f}"
    return ", ".join(f"{defence} {theirs[defence]:.2f}" for defence in ("plain", "veil")), ours


def _entries(
    where: tuple[str, str, str], printed: float, seeds: Seeds[A], figures: Callable[[A, str, str], FigurePair]
) -> list[AttackEntry]:
    """Return the entries of all attackers for the data set, measure and defence in `where`."""
    results, measure = list(successes(seeds).values()), where[1]
    for seed, result in seeds.items():
        if isinstance(result, Failure):
            failed = f"failed: seed {seed}: {result.failed}" if len(seeds) > 1 else f"failed: {result.failed}"
            return [AttackEntry(*where, "", printed, failed=failed)]
    if measure == ACCURACY:
        return [AttackEntry(*where, "", printed, [(None, average([result.test])) for result in results])]
    attackers = dict.fromkeys(name for result in results for name in result.attackers)
    return [
        AttackEntry(*where, name, printed, [figures(result, name, measure) for result in results]) for name in attackers
    ]


def mean_over_seeds(estimates: Sequence[Estimate], *, fraction: bool) -> Estimate | None:
    """Average over seeds, with Student's interval clipped to valid values; return a single estimate unchanged."""
    if len(estimates) < 2:
        return estimates[0] if estimates else None
    return average([estimate.value for estimate in estimates], minimum=0.0, maximum=1.0 if fraction else math.inf)


def _membership_figures(result: Membership, attacker: str, measure: str) -> FigurePair:
    """Return the success for a set of layers, with the epoch chosen as in the paper and on known records."""
    attack = result.attackers[attacker].attacks.get(measure) if attacker in result.attackers else None
    if not isinstance(attack, AttackScores):
        return None, None
    return None if attack.best_on_test is None else average([attack.best_on_test]), attack.accuracy


def _inversion_figures(result: Inversion, attacker: str, measure: str) -> FigurePair:
    """Return a measure of the generator's images, judged by the attacked model and by the independent evaluator."""
    if attacker not in result.attackers:
        return None, None
    theirs, ours = result.attackers[attacker].as_received, result.attackers[attacker].codes
    return (
        (theirs, ours)
        if measure == "value"
        else (average([getattr(theirs, measure)]), average([getattr(ours, measure)]))
    )


present_table3 = partial(present_attack, figures=_membership_figures)
MEMBERSHIP_KIND, INVERSION_KIND = TypeAdapter(AttackResults[Membership]), TypeAdapter(AttackResults[Inversion])


def present_table4(plan: ExhibitPlan, results: AttackResults[Inversion]) -> Presentation:
    """Return the table; its note includes the success of a generator without any model, and of real images."""
    presentation, limits = present_attack(plan, results, figures=_inversion_figures), []
    for data, ours in results.items():
        result = {seed: success for seeds in ours.values() for seed, success in successes(seeds).items()}
        if all_successes := list(result.values()):
            floor = percent(mean_over_seeds([success.floor for success in all_successes], fraction=True))
            ceiling = percent(mean_over_seeds([success.ceiling for success in all_successes], fraction=True))
            limits.append(
                f"{data}: a generator without any model {floor}, held-out real images {ceiling}, "
                f"guessing {100 / len(all_successes[0].classes):.1f}."
            )
    return replace(presentation, note=" ".join([presentation.note, *limits]))


OMITTED = {"table3": frozenset({"roc", "collapsed", "known", "broadcasts"}), "table4": frozenset({"right", "gallery"})}
TABLE3 = make_exhibit(MEMBERSHIP_KIND, partial(attack_graph, MEMBERSHIP), present_table3, OMITTED["table3"])
TABLE4 = make_exhibit(INVERSION_KIND, partial(attack_graph, INVERSION), present_table4, OMITTED["table4"])


@dataclass(frozen=True)
class ImageGrid:
    """A grid of images of one data set.

    Attributes:
        classes: names of the classes, which label the columns.
        shape: channels, height and width of an image.
        rows: labels of the rows, with encoded images.
    """

    classes: list[str]
    shape: tuple[int, ...]
    rows: list[tuple[str, list[str]]]


Grids = dict[str, ImageGrid | Failure]  # grid by data set


def _grid(results: Mapping[str, Inversion]) -> ImageGrid | Failure:
    for first in results.values():
        if first.gallery:
            return ImageGrid(first.classes, first.gallery.shape, gallery_rows(results))
    return Failure("all attacks failed")


def inversion_graph(plan: ExhibitPlan, folder: Path) -> JobGraph[Grids]:
    """Return the jobs of Table 4's attacks with the first seed."""
    attacks = attack_graph(INVERSION, plan, folder, seeds=(0,))
    return JobGraph(
        attacks.jobs,
        lambda done: {
            data: _grid(successes({defence: seeds[0] for defence, seeds in results.items()}))
            for data, results in attacks.collect(done).items()
        },
    )


def present_fig4(plan: ExhibitPlan, results: Grids) -> Presentation:
    """Return a grid of pictures for each data set."""
    sections: list[Section] = [
        picture_rows(f"Figure 4: {data}", result.classes, result.shape, result.rows)
        for data, result in results.items()
        if isinstance(result, ImageGrid)
    ]
    rows = [[data, f"failed: {result.failed}"] for data, result in results.items() if isinstance(result, Failure)]
    return Presentation(plan.title, "", ("data", "result"), rows, plan.file.note, sections)


def _configs(plan: ExhibitPlan) -> dict[str, Config]:
    """Return the configuration of each variant: plain, PPDL with each variance, and veil."""
    changes: dict[str, dict[str, Value]] = {"plain": {"defence": "plain"}}
    for variance in plan.settings.variances:
        noise: dict[str, Value] = {"defence": "ppdl", "ppdl": "noise", "sigma": math.sqrt(variance)}
        changes[f"ppdl, variance {variance:g}"] = noise
    changes["veil"] = {"defence": "veil"}
    common = plan.settings.run | {"device": plan.device}
    return {name: configure({**LOSS, **common, **change}, plan.where) for name, change in changes.items()}


def gradient_graph(plan: ExhibitPlan, folder: Path) -> JobGraph[Results[Gradients]]:
    """Return the jobs for all batches of all variants."""
    options = GradientOptions(**plan.settings.attack)  # type: ignore[arg-type]
    configs = _configs(plan)
    jobs = {
        name: GRADIENTS.batches(AttackRequest(config, (name,), options, label="gradients-"), name, config)
        for name, config in configs.items()
    }
    return join_parts(jobs, lambda parts: Gradients(configs["plain"].training.seed, parts))


def present_fig5(plan: ExhibitPlan, variants: Results[Gradients]) -> Presentation:
    """Return one row per defence and view, a PSNR chart, and the images."""
    results = successes(variants)
    pictures = gallery("Figure 5: images from gradients", results, BATCH, "The PSNR in dB is shown below each image.")
    sections = [chart("Figure 5: PSNR of the images", results, BATCH), *pictures]
    uploads = [f"{name} {views['V-up'].mean_psnr:.1f}" for name, views in view_figures(results, BATCH).items()]
    question, paper = (
        "Figure 5, images from gradients, PSNR in dB",
        "no numbers; veil close to PPDL with variance 0.1",
    )
    rows, headline = table_rows(results, [BATCH]), [(question, paper, ", ".join(uploads))]
    return Presentation(plan.title, "", HEADER, rows, plan.file.note, sections, headline=headline)


FIG4 = make_exhibit(TypeAdapter(Grids), inversion_graph, present_fig4)
FIG5 = make_exhibit(TypeAdapter(Results[Gradients]), gradient_graph, present_fig5)
