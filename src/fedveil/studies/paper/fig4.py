"""Figure 4: what the generator's search finds under each defence, below real images."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.federation import checkpoint
from fedveil.report import Picture, Pictures, Section
from fedveil.studies.attack import Show, Shown
from fedveil.studies.gradients.page import encoded
from fedveil.studies.inversion.page import PER_CLASS
from fedveil.studies.inversion.run import INVERSION
from fedveil.studies.paper.attacked import folder_of, gather_attack
from fedveil.studies.paper.plan import Exhibit, Plan

NOTE = "The first images of each class, none chosen. The paper shows its images without saying how they were chosen."
Gallery = Mapping[str, Any]  # classes, shape, and rows of (label, images in base64), or failed


def gather(plan: Plan, work: Path, workers: int | None, show: Show) -> dict[str, Gallery]:
    """The pictures that Table 4's attacks left, by data set; the attacks are made if they are not there."""
    results = gather_attack(INVERSION, plan, work, workers, show)
    return {data: gallery(folder_of(INVERSION, data, work), found) for data, found in results.items()}


def gallery(folder: Path, results: Mapping[str, Mapping[str, Any]]) -> Gallery:
    """Rows of pictures: real, the generator alone, each attacker on each defence."""
    names = [name for name, result in results.items() if "attackers" in result]
    if not names:
        return {"failed": "no attack was made"}
    files = {name: checkpoint.load(folder / "pictures" / f"{name}.pt", torch.device("cpu")) for name in names}
    first = files[names[0]]
    rows = [("real, held out", first["real"]), ("generator alone", first["floor"])]
    for name, found in files.items():
        rows += [(f"{name}: {what}", images) for what, images in found["made"].items()]
    return {
        "classes": results[names[0]]["classes"],
        "shape": list(first["real"].shape[1:]),
        "rows": [[label, [encoded(as_shares(image)) for image in images]] for label, images in rows],
    }


def as_shares(pixels: Tensor) -> Tensor:
    """Bytes as shares of 1."""
    return pixels.float() / 255


def present(plan: Plan, results: Mapping[str, Gallery]) -> Shown:
    """A grid of pictures for each data set."""
    sections: list[Section] = []
    for data, found in results.items():
        if "failed" in found:
            continue
        channels, height, width = found["shape"]
        columns = [label for label in found["classes"] for _ in range(PER_CLASS)]
        grid = [
            (label, [Picture(width, height, channels, base64.b64decode(code)) for code in codes])
            for label, codes in found["rows"]
        ]
        sections.append(Pictures(f"Figure 4: {data}", columns, grid, "Columns: the wanted class."))
    rows = [[data, f"failed: {found['failed']}"] for data, found in results.items() if "failed" in found]
    return Shown(("data", "result"), rows, NOTE, sections)


FIG4 = Exhibit("fig4", gather, present)
