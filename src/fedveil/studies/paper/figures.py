"""Figures 4 and 5: images from model inversion and images from gradients."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from fedveil.report import Section
from fedveil.runs.config import Config, Value, configure
from fedveil.studies.attack import AttackRequest, Results, join_parts
from fedveil.studies.gradients.results import HEADER, Gradients, chart, gallery, table_rows, view_figures
from fedveil.studies.gradients.run import GRADIENTS, GradientOptions
from fedveil.studies.inversion.results import Inversion, gallery_rows, picture_rows
from fedveil.studies.inversion.run import INVERSION
from fedveil.studies.jobs import Failure, successes
from fedveil.studies.paper.attack_tables import attack_graph
from fedveil.studies.paper.plan import LOSS, ExhibitPlan, make_exhibit
from fedveil.studies.presentation import Presentation
from fedveil.studies.study import JobGraph

BATCH = 1


@dataclass(frozen=True)
class ImageGrid:
    """Encoded images of one data set: rows with a label each, under the names of their classes."""

    classes: list[str]
    shape: tuple[int, ...]
    rows: list[tuple[str, list[str]]]


Grids = dict[str, ImageGrid | Failure]  # by data set


def _grid(results: Mapping[str, Inversion]) -> ImageGrid | Failure:
    for first in results.values():
        if first.gallery:
            return ImageGrid(first.classes, first.gallery.shape, gallery_rows(results))
    return Failure("no attack was made")


def inversion_graph(plan: ExhibitPlan, folder: Path) -> JobGraph[Grids]:
    """Return the jobs for Table 4's attacks with the first seed."""
    attacks = attack_graph(INVERSION, plan, folder, seeds=(0,))
    return JobGraph(
        attacks.jobs,
        lambda done: {
            data: _grid(successes({defence: seeds[0] for defence, seeds in found.items()}))
            for data, found in attacks.collect(done).items()
        },
    )


def present_fig4(plan: ExhibitPlan, results: Grids) -> Presentation:
    """Return a grid of pictures for each data set."""
    sections: list[Section] = [
        picture_rows(f"Figure 4: {data}", found.classes, found.shape, found.rows)
        for data, found in results.items()
        if isinstance(found, ImageGrid)
    ]
    rows = [[data, f"failed: {found.failed}"] for data, found in results.items() if isinstance(found, Failure)]
    return Presentation(plan.title, "", ("data", "result"), rows, plan.file.note, sections)


def _configs(plan: ExhibitPlan) -> dict[str, Config]:
    """Return the configuration of each variant: plain, PPDL with each variance, veil."""
    changes: dict[str, dict[str, Value]] = {"plain": {"defence": "plain"}}
    for variance in plan.settings.variances:
        noise: dict[str, Value] = {"defence": "ppdl", "ppdl": "noise", "sigma": math.sqrt(variance)}
        changes[f"ppdl, variance {variance:g}"] = noise
    changes["veil"] = {"defence": "veil"}
    common = plan.settings.run | {"device": plan.device}
    return {name: configure({**LOSS, **common, **own}, plan.where) for name, own in changes.items()}


def gradient_graph(plan: ExhibitPlan, folder: Path) -> JobGraph[Results[Gradients]]:
    """Return the jobs for all batches of all variants."""
    options = GradientOptions(**plan.settings.attack)  # type: ignore[arg-type]
    configs = _configs(plan)
    jobs = {
        name: GRADIENTS.batches(AttackRequest(config, (name,), options, label="gradients-"), name, config)
        for name, config in configs.items()
    }
    return join_parts(jobs, lambda parts: Gradients(configs["plain"].training.seed, parts))


def present_fig5(plan: ExhibitPlan, every: Results[Gradients]) -> Presentation:
    """Return a row for each defence and view, a PSNR chart, and the images."""
    results = successes(every)
    pictures = gallery("Figure 5: images from gradients", results, BATCH, "PSNR in dB below each picture.")
    sections = [chart("Figure 5: PSNR of the images", results, BATCH), *pictures]
    uploads = [f"{name} {views['V-up'].near:.1f}" for name, views in view_figures(results, BATCH).items()]
    question, paper = "Figure 5, images from gradients, PSNR in dB", "no numbers; veil like PPDL with variance 0.1"
    rows, headline = table_rows(results, [BATCH]), [(question, paper, ", ".join(uploads))]
    return Presentation(plan.title, "", HEADER, rows, plan.file.note, sections, headline=headline)


FIG4 = make_exhibit(TypeAdapter(Grids), inversion_graph, present_fig4)
FIG5 = make_exhibit(TypeAdapter(Results[Gradients]), gradient_graph, present_fig5)
