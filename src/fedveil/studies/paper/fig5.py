"""Figure 5: an image from a gradient: undefended, under PPDL with ever more noise, under the veil."""

import math
from pathlib import Path

from pydantic import TypeAdapter

from fedveil.report import Section
from fedveil.runs.build import load_data
from fedveil.runs.config import Config, Value, configure
from fedveil.studies.attack import Asked, Results
from fedveil.studies.estimates import average
from fedveil.studies.gradients.page import HEADER, chart, defence_rows, floors_of, gallery, joined, table_row, whole
from fedveil.studies.gradients.results import Batch, Gradients
from fedveil.studies.gradients.run import GRADIENTS, Options
from fedveil.studies.jobs import Done, Job, Result
from fedveil.studies.paper.plan import LOSS, Exhibit, Plan
from fedveil.studies.study import Shown

BATCH = 1
NOTE = (
    "Means over images [95 % interval, Student's], one image per batch; floors need no gradient. V-up: the victim's "
    "upload and the model it received, as the paper attacks; V-diff: what another client has, the difference of two "
    'broadcasts. "true W, veiled upload" is the pair of the public code: no participant has it, since the true model '
    'stays at the server. "masked" knows which numbers PPDL sends. The paper gives no figures.'
)
Found = Results[Gradients]


def variants(plan: Plan) -> dict[str, Config]:
    """The defences: plain, PPDL with each variance, veil."""
    changes: dict[str, dict[str, Value]] = {"plain": {"defence": "plain"}}
    for variance in plan.settings.variances:
        noise: dict[str, Value] = {"defence": "ppdl", "ppdl": "noise", "sigma": math.sqrt(variance)}
        changes[f"ppdl, variance {variance:g}"] = noise
    changes["veil"] = {"defence": "veil"}
    common = plan.settings.run | {"device": plan.device}
    return {name: configure({**LOSS, **common, **own}, plan.where) for name, own in changes.items()}


class Fig5(Exhibit[Found]):
    """Images from gradients."""

    kind = TypeAdapter(Found)

    def configs(self, plan: Plan) -> list[Config]:
        """Return those of all variants."""
        return list(variants(plan).values())

    def batches(self, plan: Plan) -> dict[str, dict[str, Job[Batch]]]:
        """The jobs of each variant."""
        options = Options(**plan.settings.attack)  # type: ignore[arg-type]
        configs = variants(plan)
        return {
            name: GRADIENTS.batches(Asked(config, (name,), options, label="gradients-"), name, config)
            for name, config in configs.items()
        }

    def jobs(self, plan: Plan, folder: Path) -> list[Job[Result]]:
        """All batches of all variants; missing data are reported before anything runs."""
        load_data(variants(plan)["plain"])
        return [job for own in self.batches(plan).values() for job in own.values()]

    def collect(self, plan: Plan, folder: Path, done: Done) -> Found:
        """By variant."""
        seed = variants(plan)["plain"].training.seed
        every = self.batches(plan).items()
        return {name: Gradients(seed, {part: done[job] for part, job in own.items()}) for name, own in every}

    def present(self, plan: Plan, results: Found) -> Shown:
        """A row for each defence and view, PSNR in a picture, and the images."""
        floors = floors_of(results, BATCH)
        rows = [row for name, result in results.items() for row in defence_rows(name, result, [BATCH])]
        rows += [table_row("floor", name, "", "", found) for name, found in floors.items()]
        sections: list[Section] = [chart("Figure 5: how near the images come", results, BATCH, floors)]
        note = "Below each picture its PSNR in dB."
        if pictures := gallery("Figure 5: images from gradients", results, BATCH, note):
            sections.append(pictures)
        return Shown(plan.title, verdict(results), HEADER, rows, NOTE, sections, headline=headline(results))


def verdict(results: Found) -> str:
    """How near the images of the best view come, under the veil and without it."""
    near = {
        name: max(average(joined([part.views[view] for part in parts]).psnr).value for view in parts[0].views)
        for name, parts in whole(results, BATCH).items()
    }
    if not {"plain", "veil"} <= near.keys():
        return ""
    return f"images from gradients have {near['veil']:.1f} dB under the veil, {near['plain']:.1f} dB without"


def headline(results: Found) -> list[tuple[str, str, str]]:
    """How near the images come, from the upload, in dB."""
    near = {
        name: average(joined([part.views["V-up"] for part in parts]).psnr).value
        for name, parts in whole(results, BATCH).items()
    }
    said = ", ".join(f"{name} {value:.1f}" for name, value in near.items())
    return [("Figure 5, images from gradients, PSNR in dB", "no figures; veil like PPDL with variance 0.1", said)]
