"""What `fedveil attack gradients` shows: a table with its floors, a chart, and pictures beside the originals."""

import base64
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks.scores import average
from fedveil.report import Interval, Intervals, Picture, Pictures, Section
from fedveil.runs.config import Config
from fedveil.studies.attack import Shown
from fedveil.studies.jobs import Result

HEADER = (
    *("defence", "view", "attacker", "batch", "images"),
    *("PSNR (dB)", "SSIM", "MSE", "> 20 dB", "SSIM > 0.5", "labels"),
)
PUBLISHED = "as published"
NOTE = (
    "V-diff: the difference of two broadcasts without the attacker's own part, all that a client has. V-up: the"
    " victim's upload beside its broadcast, a stress test. Two clients, plain SGD at the server. PSNR, SSIM and MSE are"
    " means over images [95 % interval, Student's]; images of one batch are not independent. Batches are matched to the"
    " originals for the least squared error. Restarts are chosen by the distance of gradients. Floors need no gradient."
)


def present(config: Config, settings: Any, results: Mapping[str, Result], folder: Path) -> Shown:
    """Table, chart of the smallest batch, pictures of every batch size."""
    sizes = sorted(settings.batches())
    rows = [row for name, result in results.items() for row in defence_rows(name, result, sizes)]
    floors = floors_of(results, sizes[0])
    rows += [table_row("floor", name, "", "", found) for name, found in floors.items()]
    sections: list[Section] = [chart(results, sizes[0], floors)]
    sections += [pictures for size in sizes if (pictures := gallery(results, size, folder))]
    return Shown(HEADER, rows, NOTE, sections)


def defence_rows(name: str, result: Result, sizes: list[int]) -> list[list[str]]:
    """A row for each view and batch size."""
    if "failed" in result:
        return [failed_row(name, "", "", result["failed"])]
    rows = []
    for size in sizes:
        parts, broken = parts_of(result, size)
        if broken:
            rows.append(failed_row(name, "", str(size), broken))
            continue
        for view in parts[0]["views"]:
            attacker = "adaptive" if view.endswith("masked") else PUBLISHED
            rows.append(table_row(name, view, attacker, str(size), gathered(parts, view)))
    return rows


def parts_of(result: Result, size: int) -> tuple[list[Result], str]:
    """The batches of one size, and why one of them failed, if one did."""
    own = [part for key, part in result["parts"].items() if key.startswith(f"batch{size}-")]
    broken = [part["failed"] for part in own if "failed" in part]
    return own, broken[0] if broken else ""


def gathered(parts: list[Result], view: str) -> dict[str, Any]:
    """All images' figures, and how many labels were found."""
    found = [part["views"][view] for part in parts]
    lists = {key: [value for one in found for value in one[key]] for key in ("psnr", "ssim", "mse")}
    return lists | {"labels": sum(one["labels"] for one in found)}


def failed_row(name: str, view: str, size: str, why: str) -> list[str]:
    """A row that says what went wrong."""
    return [name, view, PUBLISHED, size, *[""] * (len(HEADER) - 5), f"failed: {why}"]


def table_row(name: str, view: str, attacker: str, size: str, found: Mapping[str, Any]) -> list[str]:
    """Figures as text."""
    count = len(found["psnr"])
    cells = [name, view, attacker, size, str(count)]
    for key, form in (("psnr", ".1f"), ("ssim", ".2f"), ("mse", ".3f")):
        mean = average(found[key])
        cells.append(f"{mean.value:{form}}" + (f" [{mean.low:{form}}, {mean.high:{form}}]" if count > 1 else ""))
    cells += [f"{sum(value > 20 for value in found['psnr'])}/{count}"]
    cells += [f"{sum(value > 0.5 for value in found['ssim'])}/{count}"]
    return [*cells, f"{found['labels']}/{count}" if "labels" in found else ""]


def floors_of(results: Mapping[str, Result], size: int) -> dict[str, dict[str, list[float]]]:
    """Each floor's figures; the images are the same under every defence."""
    for result in results.values():
        parts, broken = parts_of(result, size) if "parts" in result else ([], "failed")
        if parts and not broken:
            names = parts[0]["floors"]
            keys = ("psnr", "ssim", "mse")
            return {n: {k: [v for part in parts for v in part["floors"][n][k]] for k in keys} for n in names}
    return {}


def chart(results: Mapping[str, Result], size: int, floors: Mapping[str, Mapping[str, list[float]]]) -> Intervals:
    """PSNR under each defence and view, beside the floors."""
    rows = []
    for name, result in results.items():
        parts, broken = parts_of(result, size) if "parts" in result else ([], result["failed"])
        if broken:
            rows.append(Interval("", None, group=name, missing=f"failed: {broken}"))
            continue
        for view in parts[0]["views"]:
            mean = average(values := gathered(parts, view)["psnr"])
            low, high = (mean.low, mean.high) if len(values) > 1 else (None, None)
            rows.append(Interval(view, mean.value, low, high, group=name))
    lines = {f"floor: {name}": statistics.fmean(found["psnr"]) for name, found in floors.items()}
    title = f"How near the images come, batch {size}"
    return Intervals(title, "PSNR (dB), larger is worse for the victim", rows, lines)


def gallery(results: Mapping[str, Result], size: int, folder: Path) -> Pictures | None:
    """The pictures of one batch size, of all defences that did not fail."""
    whole = {
        name: [read_part(folder, name, key) for key in result["parts"] if key.startswith(f"batch{size}-")]
        for name, result in results.items()
        if "parts" in result and not parts_of(result, size)[1]
    }
    note = "Below each picture its PSNR in dB. Within a batch, each original has the reconstruction matched to it."
    return picture_grid(f"Images from gradients, batch {size}", whole, note)


def picture_grid(title: str, parts: Mapping[str, list[Result]], note: str) -> Pictures | None:
    """Originals in the first row, and below them what each view of each defence gave; None without any."""
    rows: list[tuple[str, list[Picture | None]]] = []
    for name, own in parts.items():
        if not rows:
            rows.append(("original", [picture(part, code, "") for part in own for code in part["originals"]]))
        for view in own[0]["views"]:
            rows.append((f"{name}, {view}", [image for part in own for image in reconstructions(part, view)]))
    if not rows:
        return None
    return Pictures(title, [str(number + 1) for number in range(len(rows[0][1]))], rows, note)


def read_part(folder: Path, defence: str, name: str) -> Result:
    """A batch's result with its pictures."""
    found: Result = json.loads((folder / defence / "parts" / f"{name}.json").read_text())["result"]
    return found


def reconstructions(part: Result, view: str) -> list[Picture | None]:
    """A view's pictures."""
    found = part["views"][view]
    return [picture(part, code, f"{db:.1f}") for code, db in zip(found["pictures"], found["psnr"], strict=True)]


def picture(part: Result, code: str, caption: str) -> Picture:
    """From base64."""
    channels, height, width = part["shape"]
    return Picture(width, height, channels, base64.b64decode(code), caption)


def encoded(image: Tensor) -> str:
    """Pixels as bytes, row by row and a byte a channel, in base64: what `picture` reads."""
    pixels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().cpu().numpy()
    return base64.b64encode(pixels.tobytes()).decode()
