"""What a model inversion attack found, as the paper's Table 4, pictures and sections of a page."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from fedveil.attacks.observed import PUBLISHED
from fedveil.report import NOTHING, Intervals, Pictures, Section, Table, Text
from fedveil.studies.estimates import Rule, percent, reach
from fedveil.studies.inversion.results import Inversion, Inverted, Judged
from fedveil.studies.jobs import Failed
from fedveil.studies.pictures import decode_picture
from fedveil.studies.tables import ADAPTIVE, Furthest, Presented, Said, failed_row, furthest_of, mark, one_line

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
EXPLAINED = (
    "The attacker is a client with the last model that it received, images of classes that the federation does not "
    "train on, and the number of a private class, but no private image. A generator (WGAN-GP) learns public images, "
    "and a search finds codes whose images the model takes for the class. Outputs are taken as logits for every loss.",
    "Success counts what an independent network, trained on the private images, takes for the class. The attacked "
    "model is no judge: the search aims to please it, also with images that show nothing. Its columns are the paper's "
    "protocol, once with the model as received by the client and once with the server's.",
    "Floor: images of the generator without any model. Ceiling: held-out private images. A defence can only be told "
    "from plain where plain is above the floor. The search without a generator looks for pixels: where only this "
    "search succeeds, the generator is poor.",
    "Wilson's interval takes reconstructions as independent. Those of one class and broadcast look alike, and under a "
    "veil share one secret: standard errors over classes and over broadcasts are given by class below. All cover one "
    "generator and one model: other seeds differ by more.",
    ADAPTIVE,
    "Squared error is the default loss because a veiled federation then needs the fewest passes. It keeps outputs "
    "near 0 and 1, so that cross-entropy never vanishes and the search goes on to the end.",
)
CLEAR = 0.1  # of the way from what needs no model to every image: from there on a leak is clear
SAID = Said(
    "Of the rebuilt images, an independent network takes {found} for the private class; without a model {guess}",
    "Not even without a defence do rebuilt images show the private class ({top}) more often than without a model "
    "({guess}).",
    "There are too few images to tell whether rebuilt ones ({top} without a defence) show the private class more often "
    "than without a model ({guess}).",
)

Row = tuple[str, str, Inverted, Inversion]  # defence, attacker, what it found, the whole result


def judged_cells(found: Judged) -> list[str]:
    """Both distances and success, by the evaluator."""
    return [f"{found.nearest:.3f}", f"{found.centroid:.3f}", percent(found)]


def main_rows(results: Mapping[str, Inversion | Failed]) -> Iterator[list[str]]:
    """One row per attacker, failed defences, and the floor and ceiling of one evaluator."""
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
    """Of the mean of some shares, in points; a dash for a single one."""
    return f"{100 * statistics.stdev(shares) / math.sqrt(len(shares)):.1f}" if len(shares) > 1 else NOTHING


def by_broadcast(judged: Judged, broadcasts: int) -> list[float]:
    """Success in each broadcast's part of the reconstructions, which come in this order."""
    right = judged.right or []
    size = max(1, len(right) // broadcasts)
    return [statistics.fmean(right[start : start + size]) for start in range(0, len(right), size)]


def class_table(rows: Sequence[Row], classes: Sequence[str]) -> Table:
    """Success by class, and utility as mean over classes."""
    cells = []
    for defence, attacker, found, result in rows:
        codes = found.codes
        shares = [share for share in codes.per_class or [] if share is not None]
        errors = [standard_error(shares), standard_error(by_broadcast(codes, result.records.broadcasts))]
        utility = [f"{100 * share:.1f}" for share in (result.train, result.test, result.macro, codes.value)]
        cells.append([defence, attacker, *utility, *errors, *(f"{100 * share:.0f}" for share in shares)])
    utility_names = ("train", "test", "test, mean of classes", "attack success")
    errors_over = ("error over classes", "error over broadcasts")
    header = ("defence", "attacker", *utility_names, *errors_over, *classes)
    note = (
        "In %. Train and test: accuracy of the server's model. Standard errors take classes, or broadcasts, as "
        "independent. Under a class: the share of its reconstructions in which the evaluator sees it."
    )
    return Table("By class", header, cells, note)


def own_table(rows: Sequence[Row]) -> Table:
    """The paper's protocol: the attacked model's own features."""
    cells = []
    for defence, attacker, found, _ in rows:
        for judge, own in (("as received", found.as_received), ("true model", found.true_model)):
            far = [f"{own.nearest:.4g}", f"{own.centroid:.4g}"]
            cells.append([defence, attacker, judge, *far, percent(own)])
    note = (
        "The attacked model judges itself: squared distances in its own features, not scaled, to the nearest of all "
        "training images. Noise that multiplies features multiplies them for the same images: do not compare models."
    )
    return Table("The paper's protocol", ("defence", "attacker", "judged by", *JUDGED), cells, note)


def pixel_table(rows: Sequence[Row]) -> Table:
    """The search without a generator."""
    cells = [[defence, who, *judged_cells(found.pixels)] for defence, who, found, _ in rows if found.pixels]
    note = "Pixels and smoothness in place of codes and public images."
    return Table("Without a generator", ("defence", "attacker", *JUDGED), cells, note)


def success(rows: Sequence[Row], chance: float) -> Intervals:
    """Success of each attacker with its interval, beside guessing."""
    marks = [
        mark(f"{defence}, {how}", judged, attacker, 100)
        for defence, attacker, found, _ in rows
        for how, judged in (("generator", found.codes), ("pixels", found.pixels))
        if judged
    ]
    label = "attack success by the independent evaluator, %"
    return Intervals("Success", label, marks, {"guessing": 100 * chance}, low=0.0, high=100.0)


def gallery_rows(results: Mapping[str, Inversion | Failed]) -> list[tuple[str, list[str]]]:
    """Encoded images with a label for each row: real ones, the generator's, and each attacker's on each defence."""
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
    """Encoded images under the names of their classes."""
    columns = [label for label in classes for _ in range(PER_CLASS)]
    grid = [(label, [decode_picture(shape, code) for code in codes]) for label, codes in rows]
    return Pictures(title, columns, grid, "The first of each class, not chosen. Columns: the wanted class.")


def verdict(results: Mapping[str, Inversion | Failed]) -> str:
    """How often the images of the best search show the private class, in one sentence."""
    done = {name: one for name, one in results.items() if isinstance(one, Inversion)}
    floor = next((one.floor for one in done.values()), None)
    guess, least = (floor.value, floor.high) if floor else (0.0, 0.0)  # the floor is measured too
    rule = Rule(least, least + CLEAR * (1 - least))
    found: dict[str, Furthest] = {}
    for defence, result in done.items():
        every = [
            reach(name, one, rule) for name, own in result.attackers.items() for one in (own.codes, own.pixels) if one
        ]
        if reached := furthest_of(every, [other for other in every if other.attacker == PUBLISHED]):
            found[defence] = reached
    return one_line(found, guess, lambda share: f"{100 * share:.0f} %", SAID)


def presented(results: Mapping[str, Inversion | Failed]) -> Presented:
    """The table, and the sections."""
    cells = list(main_rows(results))
    done = {defence: result for defence, result in results.items() if isinstance(result, Inversion)}
    rows = [(defence, name, found, one) for defence, one in done.items() for name, found in one.attackers.items()]
    if not rows:
        return HEADER, cells, "No attack could be made.", []
    *_, first = rows[0]
    classes, shelf = len(first.classes), first.gallery
    sections: list[Section] = [
        Text("How to read it", EXPLAINED),
        success(rows, 1 / classes),
        *([picture_rows("Reconstructions", first.classes, shelf.shape, gallery_rows(results))] if shelf else []),
        class_table(rows, first.classes),
        own_table(rows),
        *([pixel_table(rows)] if any(found.pixels for _, _, found, _ in rows) else []),
    ]
    return HEADER, cells, NOTE.format(chance=100 / classes, classes=classes), sections
