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
from fedveil.studies.study import JobGraph, Presentation, format_estimate, format_percent, mark

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
            config = configure({**LOSS, **group, "device": plan.device, "seed": seed}, plan.error_prefix)
            part = f"{config.data.name}-{seed}" if seed else config.data.name
            request = AttackRequest(config, tuple(plan.settings.defences), options, label=f"{study.name}-{part}-")
            graphs[config.data.name, seed] = study.graph(request, folder / study.name / part)

    def collect(results: JobResults) -> AttackResults[A]:
        results_by_seed: AttackResults[A] = {}
        for (data, seed), graph in graphs.items():
            for defence, result in graph.collect(results).items():
                results_by_seed.setdefault(data, {}).setdefault(defence, {})[seed] = result
        return results_by_seed

    return JobGraph([job for graph in graphs.values() for job in graph.jobs], collect)


@dataclass(frozen=True)
class TableMeasure:
    """A row of a table.

    Attributes:
        title: title of the row.
        fraction: whether values are fractions; they are shown in per cent.
        paper_format, our_format: number formats for the values by the paper's protocol and by ours.
    """

    title: str
    fraction: bool = True
    paper_format: str = ".1f"
    our_format: str = ".1f"

    def format(self, values: Sequence[Estimate | None], format_spec: str) -> str:
        """Format the mean over seeds, with the number of seeds that have a value if some have none."""
        available_values = [value for value in values if value is not None]
        estimate, scale = mean_over_seeds(available_values, fraction=self.fraction), 100 if self.fraction else 1
        mean = format_estimate(estimate, format_spec, scale)
        return (
            f"{mean} ({len(available_values)} of {len(values)} seeds)"
            if 0 < len(available_values) < len(values)
            else mean
        )


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
        return mean_over_seeds([estimate for _, estimate in self.pairs if estimate is not None], fraction=True)

    def row(self, measure: TableMeasure) -> list[str]:
        """Return the table row."""
        labels, paper = [self.data, measure.title, self.defence], f"{self.paper:.2f}"
        if self.failed:
            return [*labels, "", paper, "", self.failed]
        paper_protocol_values, our_values = zip(*self.pairs, strict=True)
        paper_cell = paper if self.attacker in ("", PUBLISHED) else NOTHING
        values = (
            measure.format(paper_protocol_values, measure.paper_format),
            measure.format(our_values, measure.our_format),
        )
        return [*labels, self.attacker or NOTHING, paper_cell, *values]


@dataclass(frozen=True)
class AttackTable:
    """The presentation of an attack, read from its plan.

    Attributes:
        title: name of the attack in the summary.
        protocol: name of the paper's protocol in the table header.
        one_seed: description of the intervals if there is one seed; for several seeds, they are Student's intervals.
        success: name of the measure shown in the chart and in the summary.
        chart: the chart, without its rows.
        measures: the paper's measures, by name.
    """

    title: str
    protocol: str
    one_seed: str
    success: str
    chart: Intervals
    measures: dict[str, TableMeasure]


def present_attack(
    plan: ExhibitPlan, results: AttackResults[A], *, figures: Callable[[A, str, str], FigurePair]
) -> Presentation:
    """Return one row per data set, measure, defence and attacker, with success rates in a chart and in the summary.

    `figures` returns the pair of estimates for a result, an attacker and a measure.
    """
    rows, marks, summary_rows = list[list[str]](), dict[Interval, None](), list[tuple[str, str, str]]()
    paper, table = plan.paper_values(PaperValues), TypeAdapter(AttackTable).validate_python(plan.file.table)
    for paper_name, data in plan.settings.data.items():
        entries = [
            entry
            for measure in table.measures
            for defence, seeds in results[data].items()
            for entry in _entries((data, measure, defence), paper[paper_name][measure][defence], seeds, figures)
        ]
        rows += [entry.row(table.measures[entry.measure]) for entry in entries]
        rates = [entry for entry in entries if entry.measure == table.success]
        for rate in rates:
            group = f"{data}, {rate.defence}"
            marks[Interval("paper", rate.paper, group=group)] = None
            marks[mark(f"ours, {rate.attacker or PUBLISHED}", rate.rate, group, 100)] = None
        if summary := _summarise(rates):
            summary_rows.append((f"{table.title}, {data}, success in %", *summary))
    header = ("data", "measure", "defence", "attacker", "paper", f"ours, {table.protocol}", "ours")
    count = plan.settings.seeds
    seeds_note = f"Means over {count} seeds with Student's 95 % interval; all seeds use the same images."
    note, sections = (
        f"{plan.file.note} {seeds_note if count > 1 else table.one_seed}",
        [replace(table.chart, rows=[*marks])],
    )
    return Presentation(plan.title, "", header, rows, note, sections, summary_rows=summary_rows)


def _summarise(successes: Sequence[AttackEntry]) -> tuple[str, str] | None:
    """Summarise the paper's and our success rates for plain and veil; return None if one of ours is missing.

    Our summary includes the best adaptive attacker.
    """
    rates = {(success.defence, success.attacker): 100 * success.rate.value for success in successes if success.rate}
    if not {("plain", PUBLISHED), ("veil", PUBLISHED)} <= rates.keys():
        return None
    paper = {success.defence: success.paper for success in successes}
    our_text = f"plain {rates['plain', PUBLISHED]:.1f}, veil {rates['veil', PUBLISHED]:.1f}"
    adaptive = {
        attacker: rate for (defence, attacker), rate in rates.items() if defence == "veil" and attacker != PUBLISHED
    }
    if adaptive:
        best = max(adaptive, key=adaptive.__getitem__)
        our_text += f", by an adaptive attacker ({best}) {adaptive[best]:.1f}"
    return ", ".join(f"{defence} {paper[defence]:.2f}" for defence in ("plain", "veil")), our_text


def _entries(
    key: tuple[str, str, str], paper: float, seeds: Seeds[A], figures: Callable[[A, str, str], FigurePair]
) -> list[AttackEntry]:
    """Return the entries of all attackers for the data set, measure and defence in `key`."""
    results, measure = list(successes(seeds).values()), key[1]
    for seed, result in seeds.items():
        if isinstance(result, Failure):
            reason = f"failed: seed {seed}: {result.failed}" if len(seeds) > 1 else f"failed: {result.failed}"
            return [AttackEntry(*key, "", paper, failed=reason)]
    if measure == ACCURACY:
        return [AttackEntry(*key, "", paper, [(None, average([result.test])) for result in results])]
    attackers = dict.fromkeys(name for result in results for name in result.attackers)
    return [
        AttackEntry(*key, name, paper, [figures(result, name, measure) for result in results]) for name in attackers
    ]


def mean_over_seeds(estimates: Sequence[Estimate], *, fraction: bool) -> Estimate | None:
    """Average over seeds, with Student's interval clipped to valid values; return a single estimate unchanged."""
    if len(estimates) < 2:
        return estimates[0] if estimates else None
    return average([estimate.value for estimate in estimates], minimum=0.0, maximum=1.0 if fraction else math.inf)


def _membership_figures(result: Membership, attacker: str, measure: str) -> FigurePair:
    """Return the success for some layers at two epochs: one chosen as in the paper, one chosen on known records."""
    attack = result.attackers[attacker].attacks.get(measure) if attacker in result.attackers else None
    if not isinstance(attack, AttackScores):
        return None, None
    return None if attack.best_on_test is None else average([attack.best_on_test]), attack.accuracy


def _inversion_figures(result: Inversion, attacker: str, measure: str) -> FigurePair:
    """Return a measure of the generator's images, judged by the attacked model and by the independent evaluator."""
    if attacker not in result.attackers:
        return None, None
    self_judged_rate, independent_rate = result.attackers[attacker].as_received, result.attackers[attacker].codes
    return (
        (self_judged_rate, independent_rate)
        if measure == "value"
        else (average([getattr(self_judged_rate, measure)]), average([getattr(independent_rate, measure)]))
    )


present_table3 = partial(present_attack, figures=_membership_figures)
MEMBERSHIP_KIND, INVERSION_KIND = TypeAdapter(AttackResults[Membership]), TypeAdapter(AttackResults[Inversion])


def present_table4(plan: ExhibitPlan, results: AttackResults[Inversion]) -> Presentation:
    """Return the table; its note includes the success of a generator without any model, and of real images."""
    presentation, limits = present_attack(plan, results, figures=_inversion_figures), []
    for data, by_defence in results.items():
        by_seed = {seed: success for seeds in by_defence.values() for seed, success in successes(seeds).items()}
        if all_successes := list(by_seed.values()):
            floor = format_percent(mean_over_seeds([success.floor for success in all_successes], fraction=True))
            ceiling = format_percent(mean_over_seeds([success.ceiling for success in all_successes], fraction=True))
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
    for result in results.values():
        if result.gallery:
            return ImageGrid(result.classes, result.gallery.shape, gallery_rows(results))
    return Failure("all attacks failed")


def inversion_graph(plan: ExhibitPlan, folder: Path) -> JobGraph[Grids]:
    """Return the jobs of Table 4's attacks with the first seed."""
    attacks = attack_graph(INVERSION, plan, folder, seeds=(0,))
    return JobGraph(
        attacks.jobs,
        lambda results: {
            data: _grid(successes({defence: seeds[0] for defence, seeds in by_defence.items()}))
            for data, by_defence in attacks.collect(results).items()
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
    shared_values = plan.settings.run | {"device": plan.device}
    return {name: configure({**LOSS, **shared_values, **change}, plan.error_prefix) for name, change in changes.items()}


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
    rows, summary_rows = table_rows(results, [BATCH]), [(question, paper, ", ".join(uploads))]
    return Presentation(plan.title, "", HEADER, rows, plan.file.note, sections, summary_rows=summary_rows)


FIG4 = make_exhibit(TypeAdapter(Grids), inversion_graph, present_fig4)
FIG5 = make_exhibit(TypeAdapter(Results[Gradients]), gradient_graph, present_fig5)
