"""Figure 5: an image from a gradient: undefended, under PPDL with ever more noise, under the veil."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.report import Section
from fedveil.runs.config import configure, load_data
from fedveil.studies.attack import Show, Shown
from fedveil.studies.gradients.page import (
    HEADER,
    chart,
    defence_rows,
    floors_of,
    parts_of,
    picture_grid,
    read_part,
    table_row,
)
from fedveil.studies.gradients.run import GRADIENTS
from fedveil.studies.jobs import Cell, Result, run_cells
from fedveil.studies.paper.plan import Exhibit, Plan

BATCH = 1

NOTE = (
    "Means over images [95 % interval, Student's], one image a batch; floors need no gradient. V-up: the victim's "
    "upload and the model it was sent, as the paper attacks; V-diff: what another client has, the difference of two "
    'broadcasts. "true W, veiled upload" is the pair of the public code: nobody has it, since the true model stays at '
    'the server. "masked" knows which numbers PPDL sends. The paper gives no figures.'
)


def variants(plan: Plan) -> dict[str, dict[str, Any]]:
    """The defences: plain, PPDL with each variance, veil."""
    noise = {
        f"ppdl, variance {variance:g}": {"defence": "ppdl", "ppdl": "noise", "sigma": math.sqrt(variance)}
        for variance in plan.settings["variances"]
    }
    return {"plain": {"defence": "plain"}, **noise, "veil": {"defence": "veil"}}


def gather(plan: Plan, work: Path, workers: int | None, show: Show) -> dict[str, Result]:
    """The attack on each variant, with its pictures."""
    settings = GRADIENTS.settings(**plan.settings["attack"])
    load_data(configure(plan.settings["run"]))  # what is missing is said before anything runs
    where, found = work / "gradients", {}
    folders = {name: where / name.replace(", ", "-").replace(" ", "-") for name in variants(plan)}
    cells = []
    for name, own in variants(plan).items():
        config = configure(plan.settings["run"] | own | {"device": plan.device}, f"{plan.name}.toml, {plan.scale}")
        arguments = {"config": config, "settings": settings, "folder": folders[name], "run": folders[name] / "run"}
        cells.append(Cell(folders[name].name, GRADIENTS.attack, arguments))
    done = run_cells(cells, where / "cells", workers=workers, show=show)
    for name, own in variants(plan).items():
        result = done[folders[name].name]
        if "parts" in result:
            parts = {part: read_part(folders[name], own["defence"], part) for part in result["parts"]}
            result = {**result, "parts": parts}
        found[name] = result
    return found


def present(plan: Plan, results: Mapping[str, Result]) -> Shown:
    """A row for each defence and view, PSNR in a picture, and the images."""
    floors = floors_of(results, BATCH)
    rows = [row for name, result in results.items() for row in defence_rows(name, result, [BATCH])]
    rows += [table_row("floor", name, "", "", found) for name, found in floors.items()]
    drawn = dataclasses.replace(chart(results, BATCH, floors), title="Figure 5: how near the images come")
    sections: list[Section] = [drawn]
    whole = {
        name: parts_of(result, BATCH)[0]
        for name, result in results.items()
        if "parts" in result and not parts_of(result, BATCH)[1]
    }
    pictures = picture_grid("Figure 5: images from gradients", whole, "Below each picture its PSNR in dB.")
    if pictures:
        sections.append(pictures)
    return Shown(HEADER, rows, NOTE, sections)


FIG5 = Exhibit("fig5", gather, present)
