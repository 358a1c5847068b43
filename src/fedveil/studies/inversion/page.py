"""The page of a model inversion attack: the paper's Table 4, pictures, success by class."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fedveil.report import NOTHING, Intervals, Pictures, Section, Table, Text
from fedveil.studies.estimates import percent, reach
from fedveil.studies.inversion.results import Inversion, InversionFigures, SuccessRate
from fedveil.studies.jobs import Failed
from fedveil.studies.pictures import decode_picture
from fedveil.studies.study import Shown
from fedveil.studies.tables import failed_row, mark
from fedveil.studies.verdicts import ADAPTIVE, INVERSION, Verdict, headline, judge_defences, verdict_section

PER_CLASS = 2  # pictures of a class in a row
JUDGED = ("KNN distance", "feature distance", "attack success")
SELF_JUDGED = ("self-judged, as received", "self-judged, true model")
HEADER = ("defence", "view, attacker", "test accuracy", *JUDGED, *SELF_JUDGED)
NOTE = (
    "Success by the independent evaluator in % with Wilson's 95 % interval; guessing gives {chance:.1f} % with "
    "{classes} classes. Distances: squared, in the evaluator's features, divided by their mean norm; smaller is nearer "
    "to the private images. Self-judged: success by the attacked model, as received by the client and as the server "
    "has it."
)
READING = (
    "The attacker is a client with the last model that it received, public images of other classes, and the number of "
    "a private class, but no private image. A generator (WGAN-GP) learns public images, and a search finds codes whose "
    "images the model takes for the class.",
    "Success: the fraction that an independent network, trained on the private images, takes for the class. The "
    "attacked model is not a fair judge, since the search optimises its answer: its columns are the paper's protocol.",
    "Floor: images of the generator without any model. Ceiling: held-out private images. A defence can be told from "
    "plain only where plain is above the floor. Wilson's interval takes reconstructions as independent; see the errors "
    "over classes and over broadcasts. docs/attacks/inversion.md has more.",
    ADAPTIVE,
)
Found = Mapping[str, Inversion | Failed]


class InversionRow(NamedTuple):
    """One attacker on one defence: what it found, and the result that it is part of."""

    defence: str
    attacker: str
    found: InversionFigures
    result: Inversion


def judged_cells(found: SuccessRate) -> list[str]:
    """Return both distances and success, by the evaluator."""
    return [f"{found.nearest:.3f}", f"{found.centroid:.3f}", percent(found)]


def main_rows(results: Found) -> Iterator[list[str]]:
    """Yield one row per attacker, and the floor and ceiling of the evaluator."""
    for defence, result in results.items():
        if isinstance(result, Failed):
            yield failed_row(defence, len(HEADER))
            continue
        for name, found in result.attackers.items():
            own = [percent(found.as_received), percent(found.true_model)]
            where = [defence, f"{found.view}, {name}", f"{100 * result.test:.1f}"]
            yield [*where, *judged_cells(found.codes), *own]
    if first := next((result for result in results.values() if isinstance(result, Inversion)), None):
        yield ["floor", "generator alone", NOTHING, *judged_cells(first.floor), NOTHING, NOTHING]
        yield ["ceiling", "held-out images", NOTHING, *judged_cells(first.ceiling), NOTHING, NOTHING]


def standard_error(shares: Sequence[float]) -> str:
    """Return the standard error of a mean of fractions, in points; a dash for a single one."""
    return f"{100 * statistics.stdev(shares) / math.sqrt(len(shares)):.1f}" if len(shares) > 1 else NOTHING


def broadcast_success(judged: SuccessRate, broadcasts: int) -> list[float]:
    """Return the success of each broadcast's part of the reconstructions, which come in this order."""
    right = judged.right or []
    size = max(1, len(right) // broadcasts)
    return [statistics.fmean(right[start : start + size]) for start in range(0, len(right), size)]


def class_table(rows: Sequence[InversionRow], classes: Sequence[str]) -> Table:
    """Return success by class, and accuracy as a mean over classes."""
    cells = []
    for defence, attacker, found, result in rows:
        codes = found.codes
        shares = [share for share in codes.per_class or [] if share is not None]
        errors = [standard_error(shares), standard_error(broadcast_success(codes, result.records.broadcasts))]
        utility = [f"{100 * share:.1f}" for share in (result.train, result.test, result.macro, codes.value)]
        cells.append([defence, attacker, *utility, *errors, *(f"{100 * share:.0f}" for share in shares)])
    columns = (
        "train",
        "test",
        "test, mean of classes",
        "attack success",
        "error over classes",
        "error over broadcasts",
    )
    header = ("defence", "attacker", *columns, *classes)
    note = (
        "In %. Train and test: accuracy of the server's model. Standard errors take classes, or broadcasts, as "
        "independent. Under a class: the fraction of its reconstructions in which the evaluator sees it."
    )
    return Table("By class", header, cells, note)


def other_table(rows: Sequence[InversionRow]) -> Table:
    """Return the paper's protocol, in features of the attacked model, and the search without a generator."""
    lines = []
    for defence, attacker, found, _ in rows:
        for judge, own in (("as received", found.as_received), ("true model", found.true_model)):
            far = [f"{own.nearest:.4g}", f"{own.centroid:.4g}"]
            lines.append([defence, attacker, "codes", judge, *far, percent(own)])
        if found.pixels:
            lines.append([defence, attacker, "pixels", "evaluator", *judged_cells(found.pixels)])
    note = (
        "As received, true model: the attacked model judges itself, by squared distances in its features to the "
        "nearest of all training images. Noise that multiplies features multiplies these: do not compare models. "
        "Pixels: a search for smooth images without a generator; where only it succeeds, the generator is poor."
    )
    header = ("defence", "attacker", "search for", "judged by", *JUDGED)
    return Table("The paper's protocol, and a search without a generator", header, lines, note)


def success(rows: Sequence[InversionRow], chance: float) -> Intervals:
    """Return the success of each attacker with its interval, beside guessing."""
    marks = [
        mark(f"{defence}, {how}", judged, attacker, 100)
        for defence, attacker, found, _ in rows
        for how, judged in (("generator", found.codes), ("pixels", found.pixels))
        if judged
    ]
    label = "attack success by the independent evaluator, %"
    return Intervals("Success", label, marks, {"guessing": 100 * chance}, low=0.0, high=100.0)


def gallery_rows(results: Found) -> list[tuple[str, list[str]]]:
    """Return rows of encoded images: real ones, the generator's, and each attacker's on each defence."""
    rows: list[tuple[str, list[str]]] = []
    for name, result in results.items():
        if isinstance(result, Inversion) and result.gallery:
            if not rows:
                rows = [("real, held out", result.gallery.real), ("generator alone", result.gallery.floor)]
            rows += [(f"{name}: {what}", images) for what, images in result.gallery.made.items()]
    return rows


def picture_rows(
    title: str, classes: Sequence[str], shape: Sequence[int], rows: Sequence[tuple[str, Sequence[str]]]
) -> Pictures:
    """Return encoded images under the names of their classes."""
    columns = [label for label in classes for _ in range(PER_CLASS)]
    grid = [(label, [decode_picture(shape, code) for code in codes]) for label, codes in rows]
    return Pictures(title, columns, grid, "The first images of each class, not selected. Columns: the wanted class.")


def judge_attackers(results: Found) -> dict[str, Verdict]:
    """Return the verdict on each defence, by the search that succeeds most; the floor is measured too."""
    done = {name: one for name, one in results.items() if isinstance(one, Inversion)}
    if not done:
        return {}
    floor = next(iter(done.values())).floor
    rule = INVERSION.rule(floor.high)
    found = {
        defence: [
            reach(name, one, rule) for name, own in result.attackers.items() for one in (own.codes, own.pixels) if one
        ]
        for defence, result in done.items()
    }
    return judge_defences(INVERSION, floor.value, found)


def show(results: Found) -> Shown:
    """Return the table and the sections."""
    cells, verdicts = list(main_rows(results)), judge_attackers(results)
    done = {defence: result for defence, result in results.items() if isinstance(result, Inversion)}
    rows = [
        InversionRow(defence, name, own, one) for defence, one in done.items() for name, own in one.attackers.items()
    ]
    if not rows:
        return Shown("", headline(verdicts), HEADER, cells, "", [])
    first = rows[0].result
    classes, shelf = len(first.classes), first.gallery
    sections: list[Section] = [
        Text("How to read it", READING),
        success(rows, 1 / classes),
        *([picture_rows("Reconstructions", first.classes, shelf.shape, gallery_rows(results))] if shelf else []),
        class_table(rows, first.classes),
        other_table(rows),
    ]
    note = NOTE.format(chance=100 / classes, classes=classes)
    return Shown("", headline(verdicts), HEADER, cells, note, sections, verdict_section(verdicts))
