"""What `fedveil attack inversion` found, as the paper's Table 4, pictures and sections of a page."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.report import NOTHING, Interval, Intervals, Picture, Pictures, Section, Table, Text
from fedveil.runs.config import Config
from fedveil.studies.attack import Shown
from fedveil.studies.jobs import Result
from fedveil.studies.membership.page import per_cent

PER_CLASS = 2  # pictures of a class in a row
HEADER = (
    "defence",
    "view, attacker",
    "test accuracy",
    "KNN distance",
    "feature distance",
    "attack success",
    "self-judged, as sent",
    "self-judged, true model",
)
NOTE = (
    "Success by the independent judge in % with Wilson's 95 % interval; guessing gives {chance:.1f} % with {classes} "
    "classes. Distances: squared, in the judge's features, which are divided by their mean norm; smaller is nearer to "
    "the private images. Self-judged: success by the attacked model, as it was sent and as it truly is."
)
EXPLAINED = (
    "The attacker is a client. It has the last model it was sent, images of classes that the federation does not "
    "train on, and the number of a private class; no private image. A generator (WGAN-GP) learns the public "
    "images, and a search finds codes whose images the model takes for the class. Outputs of the model are taken "
    "as logits, whatever loss it was trained with.",
    "Success counts what an independent network, trained on the private images, takes for the class. The attacked "
    "model is no judge of itself: to please it is what the search does, also with images that show nothing. These "
    "columns are the paper's protocol, once with the model as it was sent and once with the true one.",
    "Floor: images of the generator that no model was asked about. Ceiling: held-out private images. A defence "
    "can only be told from plain where plain is above the floor. The control without a generator searches pixels: "
    "where it succeeds and the generator does not, the generator is what is poor.",
    "Wilson's interval takes reconstructions as independent of one another. Those of one class and broadcast are not: "
    "they look alike, and under a veil all of them meet the same secret. Standard errors over classes and over "
    "broadcasts are given by class below. All cover one generator and one model: other seeds differ by more.",
    'SPN is our re-implementation. "calibrated" is a participant that fits the noise of the veil\'s head on its own '
    "records, \"stacked\" one that adds up DBCL's sketches of six rounds. The other defences' models need no cleaning.",
    "Squared error is the default loss because a veiled federation then needs the fewest passes. It keeps outputs "
    "near 0 and 1, so that cross-entropy never vanishes and the search goes on to the end.",
)
Row = tuple[str, str, Mapping[str, Any], Mapping[str, Any]]  # defence, attacker, what it found, the cell's result


def attackers(results: Mapping[str, Result]) -> Iterator[Row]:
    """Every attacker on every defence that did not fail."""
    for defence, result in results.items():
        for name, found in result.get("attackers", {}).items():
            yield defence, name, found, result


def judged_cells(found: Mapping[str, Any]) -> list[str]:
    """Both distances and success, by the judge."""
    return [f"{found['nearest']:.3f}", f"{found['centroid']:.3f}", per_cent(found)]


def main_rows(results: Mapping[str, Result]) -> list[list[str]]:
    """A row for each attacker, failed defences, and the floor and ceiling of one judge."""
    rows = []
    for defence, result in results.items():
        if "failed" in result:
            rows.append([defence, "failed", *[""] * (len(HEADER) - 2)])
        for _, name, found, _ in attackers({defence: result}):
            own = [per_cent(found["as_sent"]), per_cent(found["true_model"])]
            where = [defence, f"{found['view']}, {name}", f"{100 * result['test']:.1f}"]
            rows.append([*where, *judged_cells(found["codes"]), *own])
    for result in [result for result in results.values() if "floor" in result][:1]:
        rows.append(["floor", "generator alone", NOTHING, *judged_cells(result["floor"]), NOTHING, NOTHING])
        rows.append(["ceiling", "held-out images", NOTHING, *judged_cells(result["ceiling"]), NOTHING, NOTHING])
    return rows


def standard_error(shares: Sequence[float]) -> float | None:
    """Of the mean of some shares; None for a single one."""
    return statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None


def by_broadcast(judged: Mapping[str, Any], result: Mapping[str, Any]) -> list[float]:
    """Success in each broadcast's part of the reconstructions, which come in this order."""
    right, parts = judged["right"], result["records"]["broadcasts"]
    size = len(right) // parts
    return [statistics.fmean(right[start : start + size]) for start in range(0, len(right), size)]


def class_table(results: Mapping[str, Result]) -> Table:
    """Success by class, and utility as mean over classes."""
    classes = next(iter(attackers(results)))[3]["classes"]
    rows = []
    for defence, name, found, result in attackers(results):
        shares = [f"{100 * share:.0f}" for share in found["codes"]["per_class"]]
        errors = [standard_error(found["codes"]["per_class"]), standard_error(by_broadcast(found["codes"], result))]
        kept = [f"{100 * result['train']:.1f}", f"{100 * result['test']:.1f}", f"{100 * result['macro']:.1f}"]
        spread = [NOTHING if error is None else f"{100 * error:.1f}" for error in errors]
        rows.append([defence, name, *kept, f"{100 * found['codes']['value']:.1f}", *spread, *shares])
    over = ("error over classes", "error over broadcasts")
    header = ("defence", "attacker", "train", "test", "test, mean of classes", "attack success", *over, *classes)
    note = (
        "In %. Train and test: accuracy of the server's model. Success with its standard errors where classes, or "
        "broadcasts, count as independent; under a class's name the share of its reconstructions in which the judge "
        "sees it."
    )
    return Table("By class", header, rows, note)


def own_table(results: Mapping[str, Result]) -> Table:
    """The paper's protocol: the attacked model's own features."""
    rows = []
    for defence, name, found, _ in attackers(results):
        for judge in ("as_sent", "true_model"):
            own = found[judge]
            far = [f"{own['nearest']:.4g}", f"{own['centroid']:.4g}"]
            rows.append([defence, name, judge.replace("_", " "), *far, per_cent(own)])
    header = ("defence", "attacker", "judge", "KNN distance", "feature distance", "attack success")
    note = (
        "The attacked model judges itself: squared distances in its own features, not divided by anything, to the "
        "nearest of all training images. Noise that multiplies features multiplies these distances without any "
        "change in the images, so that rows of different models cannot be compared."
    )
    return Table("The paper's protocol", header, rows, note)


def pixel_table(results: Mapping[str, Result]) -> Table:
    """The control without a generator."""
    rows = [
        [defence, name, *judged_cells(found["pixels"])]
        for defence, name, found, _ in attackers(results)
        if "pixels" in found
    ]
    header = ("defence", "attacker", "KNN distance", "feature distance", "attack success")
    return Table("Without a generator", header, rows, "Pixels and smoothness in place of codes and public images.")


def success(results: Mapping[str, Result], chance: float) -> Intervals:
    """Success of each attacker with its interval, beside guessing."""
    marks = [
        Interval(
            f"{defence}, {how}", 100 * found[key]["value"], 100 * found[key]["low"], 100 * found[key]["high"], name
        )
        for defence, name, found, _ in attackers(results)
        for key, how in (("codes", "generator"), ("pixels", "pixels"))
        if key in found
    ]
    label = "attack success by the independent judge, %"
    return Intervals("Success", label, marks, {"guessing": 100 * chance}, low=0.0, high=100.0)


def shown_images(images: Tensor, wanted: Tensor, classes: int) -> Tensor:
    """The first images of each class as bytes, class after class; grey where there are fewer."""
    rows = []
    for label in range(classes):
        own = images[wanted == label][:PER_CLASS].detach().cpu()
        blank = torch.full((PER_CLASS - len(own), *own.shape[1:]), 0.5)
        rows.append(torch.cat([own, blank]))
    return (torch.cat(rows) * 255).round().to(torch.uint8)


def picture(pixels: Tensor) -> Picture:
    """Bytes (channels, height, width) as a picture."""
    channels, height, width = pixels.shape
    return Picture(width, height, channels, pixels.permute(1, 2, 0).contiguous().numpy().tobytes())


def gallery(results: Mapping[str, Result], folder: Path) -> Section:
    """Reconstructions under each defence below real images; says so where they are gone from disk."""
    names = [name for name, result in results.items() if "attackers" in result]
    try:
        files = {name: checkpoint.load(folder / "pictures" / f"{name}.pt", torch.device("cpu")) for name in names}
    except BadArgument as error:
        return Text("Pictures", [str(error)])
    first = files[names[0]]
    rows = [("real, held out", first["real"]), ("generator alone", first["floor"])]
    for name, found in files.items():
        rows += [(f"{name}: {what}", images) for what, images in found["made"].items()]
    columns = [label for label in results[names[0]]["classes"] for _ in range(PER_CLASS)]
    grid = [(label, [picture(image) for image in images]) for label, images in rows]
    note = "The first of each class, not chosen. Columns: the wanted class."
    return Pictures("Reconstructions", columns, grid, note)


def present(config: Config, settings: Any, results: Mapping[str, Result], folder: Path) -> Shown:
    """The table, success beside guessing, pictures, success by class, the paper's protocol, the control."""
    rows = main_rows(results)
    found = list(attackers(results))
    if not found:
        return Shown(HEADER, rows, "No attack could be made.", [])
    classes = len(found[0][3]["classes"])
    sections: list[Section] = [
        Text("How to read it", EXPLAINED),
        success(results, 1 / classes),
        gallery(results, folder),
        class_table(results),
        own_table(results),
    ]
    if any("pixels" in row[2] for row in found):
        sections.append(pixel_table(results))
    return Shown(HEADER, rows, NOTE.format(chance=100 / classes, classes=classes), sections)
