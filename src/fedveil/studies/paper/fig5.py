"""Figure 5: an image from a gradient: undefended, under PPDL with increasing noise, under the veil."""

import math
from pathlib import Path

from pydantic import TypeAdapter

from fedveil.report import Section
from fedveil.runs.config import Config, Value, configure
from fedveil.studies.attack import AttackRequest, Results
from fedveil.studies.estimates import average
from fedveil.studies.gradients.page import HEADER, chart, complete_batches, gallery, join_figures, table_rows
from fedveil.studies.gradients.results import Gradients
from fedveil.studies.gradients.run import GRADIENTS, GradientOptions
from fedveil.studies.paper.plan import LOSS, Plan, make_exhibit
from fedveil.studies.study import JobGraph, Shown

BATCH = 1
NOTE = (
    "Means over images [95 % interval, Student's], one image per batch; floors need no gradient. V-up: the victim's "
    "upload and the model it received, as the paper attacks; V-diff: what another client has, the difference of two "
    'broadcasts. "true W, veiled upload" is the pair in the public code: no participant has it, since the true model '
    'stays at the server. "masked" knows which numbers PPDL sends. The paper gives no numbers.'
)


def _configs(plan: Plan) -> dict[str, Config]:
    """Return the configuration of each variant: plain, PPDL with each variance, veil."""
    changes: dict[str, dict[str, Value]] = {"plain": {"defence": "plain"}}
    for variance in plan.settings.variances:
        noise: dict[str, Value] = {"defence": "ppdl", "ppdl": "noise", "sigma": math.sqrt(variance)}
        changes[f"ppdl, variance {variance:g}"] = noise
    changes["veil"] = {"defence": "veil"}
    common = plan.settings.run | {"device": plan.device}
    return {name: configure({**LOSS, **common, **own}, plan.where) for name, own in changes.items()}


def graph(plan: Plan, folder: Path) -> JobGraph[Results[Gradients]]:
    """Return the jobs of all batches of all variants."""
    options = GradientOptions(**plan.settings.attack)  # type: ignore[arg-type]
    configs = _configs(plan)
    batches = {
        name: GRADIENTS.parts(AttackRequest(config, (name,), options, label="gradients-"), name, config)
        for name, config in configs.items()
    }
    seed = configs["plain"].training.seed
    return JobGraph(
        [job for jobs in batches.values() for job in jobs.values()],
        lambda done: {
            name: Gradients(seed, {part: done[job] for part, job in jobs.items()}) for name, jobs in batches.items()
        },
    )


def present(plan: Plan, results: Results[Gradients]) -> Shown:
    """Show a row for each defence and view, a chart of the PSNR, and the images."""
    rows = table_rows(results, [BATCH])
    sections: list[Section] = [chart("Figure 5: PSNR of the images", results, BATCH)]
    if pictures := gallery("Figure 5: images from gradients", results, BATCH, "PSNR in dB below each picture."):
        sections.append(pictures)
    near = {
        name: {view: average(join_figures([part.views[view] for part in parts]).psnr).value for view in parts[0].views}
        for name, parts in complete_batches(results, BATCH).items()
    }
    verdict, uploads = "", ", ".join(f"{name} {views['V-up']:.1f}" for name, views in near.items())
    if {"plain", "veil"} <= near.keys():
        veil, plain = (max(near[name].values()) for name in ("veil", "plain"))
        verdict = f"images from gradients have {veil:.1f} dB under the veil, {plain:.1f} dB without"
    summary = ("Figure 5, images from gradients, PSNR in dB", "no numbers; veil like PPDL with variance 0.1", uploads)
    return Shown(plan.title, verdict, HEADER, rows, NOTE, sections, headline=[summary])


FIG5 = make_exhibit(TypeAdapter(Results[Gradients]), graph, present)
