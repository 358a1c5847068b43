"""Results of a model inversion attack, and its page: the paper's Table 4, pictures, and success by class."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedveil.attacks.scores import Estimate
from fedveil.report import NOTHING, Intervals, Pictures, Section, Table, Text
from fedveil.studies.jobs import Result
from fedveil.studies.study import Presentation, decode_picture, format_percent, mark, read_texts
from fedveil.studies.verdicts import INVERSION, Verdict, headline, judge_defences, verdict_section

TEXTS = read_texts()["inversion"]
PER_CLASS = 2  # number of pictures per class in a row
HEADER = (
    *("defence", "view, attacker", "test accuracy", "KNN distance", "feature distance", "attack success"),
    *("without a generator", "self-judged, as received", "self-judged, true model"),
)
BY_CLASS = ("defence", "attacker", "error over classes", "error over broadcasts")


@dataclass(frozen=True)
class SuccessRate(Estimate):
    """Success rate of reconstructions: the fraction that a network assigns to the intended class.

    Attributes:
        hits, trials: numerator and denominator of the fraction.
        centroid, nearest: mean squared feature distances to the centroid of the class and to the nearest image.
        per_class: success rate by class; None for a class without images.
        right: for each reconstruction, 1 if the intended class was recognised, otherwise 0.
    """

    hits: int
    trials: int
    centroid: float
    nearest: float
    per_class: list[float | None] | None = None
    right: list[int] | None = None


@dataclass(frozen=True)
class InversionFigures:
    """The success rates of one attacker.

    Attributes:
        codes: success of images from the generator, judged by the independent evaluator.
        as_received: success of the same images, judged by the attacker's model (the paper's protocol).
        true_model: success of the same images, judged by the server's model.
        pixels: success of images found without a generator, judged by the independent evaluator.
    """

    codes: SuccessRate
    as_received: SuccessRate
    true_model: SuccessRate
    pixels: SuccessRate | None = None


@dataclass(frozen=True)
class Counts:
    """The numbers of private images, public images, reconstructions and broadcasts."""

    members: int
    public: int
    reconstructions: int
    broadcasts: int


@dataclass(frozen=True)
class Gallery:
    """The first images of each class, encoded by `encode_image`.

    Attributes:
        shape: channels, height and width of an image.
        real: held-out private images.
        floor: images that the generator produces without any model.
        made: reconstructions by attacker.
    """

    shape: tuple[int, ...]
    real: list[str]
    floor: list[str]
    made: dict[str, list[str]]


@dataclass(frozen=True)
class Inversion(Result):
    """The results of all attackers on one federation.

    Attributes:
        train, test: accuracy on members and on held-out images.
        classes: names of the private classes.
        floor: success of images that the generator produces without any model.
        ceiling: success of held-out private images.
    """

    defence: str
    seed: int
    train: float
    test: float
    classes: list[str]
    records: Counts
    attackers: dict[str, InversionFigures]
    floor: SuccessRate
    ceiling: SuccessRate
    gallery: Gallery | None = None


@dataclass(frozen=True)
class TrainedGan(Result):
    """The result of training the generator: the number of public images, and the critic's distance in each epoch."""

    images: int
    distances: list[float]


@dataclass(frozen=True)
class TrainedEvaluator(Result):
    """The result of training the evaluator: its accuracy on held-out images."""

    accuracy: float


def judge_cells(rate: SuccessRate) -> list[str]:
    """Format both distances and the success rate according to the evaluator."""
    return [f"{rate.nearest:.3f}", f"{rate.centroid:.3f}", format_percent(rate)]


def main_rows(results: Mapping[str, Inversion]) -> Iterator[list[str]]:
    """Yield one row per attacker, followed by the floor and the ceiling."""
    for defence, result in results.items():
        for name, attacker in result.attackers.items():
            labels = [defence, f"V-out, {name}", f"{100 * result.test:.1f}"]
            other_rates = map(format_percent, (attacker.pixels, attacker.as_received, attacker.true_model))
            yield [*labels, *judge_cells(attacker.codes), *other_rates]
    result = next(iter(results.values()))
    yield ["floor", "generator alone", NOTHING, *judge_cells(result.floor), *[NOTHING] * 3]
    yield ["ceiling", "held-out images", NOTHING, *judge_cells(result.ceiling), *[NOTHING] * 3]


def standard_error(fractions: Sequence[float]) -> str:
    """Format the standard error of the mean in percentage points; return a dash for a single fraction."""
    return f"{100 * statistics.stdev(fractions) / math.sqrt(len(fractions)):.1f}" if len(fractions) > 1 else NOTHING


def broadcast_success(rate: SuccessRate, broadcasts: int) -> list[float]:
    """Return the success rate for each broadcast; reconstructions are ordered by broadcast."""
    hits = rate.right or []
    size = max(1, len(hits) // broadcasts)
    return [statistics.fmean(hits[start : start + size]) for start in range(0, len(hits), size)]


def class_table(results: Mapping[str, Inversion], classes: Sequence[str]) -> Table:
    """Return a table of success rates by class, with standard errors."""
    cells = []
    for defence, result in results.items():
        for attacker, attack in result.attackers.items():
            fractions = [fraction for fraction in attack.codes.per_class or [] if fraction is not None]
            parts = broadcast_success(attack.codes, result.records.broadcasts)
            errors = [standard_error(fractions), standard_error(parts)]
            cells.append([defence, attacker, *errors, *(f"{100 * fraction:.0f}" for fraction in fractions)])
    return Table("By class", (*BY_CLASS, *classes), cells, TEXTS.notes["classes"])


def success_chart(results: Mapping[str, Inversion], chance: float) -> Intervals:
    """Return a chart of each attacker's success rate with its interval, and guessing as a reference."""
    marks = [
        mark(f"{defence}, {method}", rate, attacker, 100)
        for defence, result in results.items()
        for attacker, attack in result.attackers.items()
        for method, rate in (("generator", attack.codes), ("pixels", attack.pixels))
        if rate
    ]
    label = "attack success according to the independent evaluator, %"
    return Intervals("Success", label, marks, {"guessing": 100 * chance}, low=0.0, high=100.0)


def gallery_rows(results: Mapping[str, Inversion]) -> list[tuple[str, list[str]]]:
    """Return rows of encoded images: real images, and those of the generator and of each attacker."""
    rows: list[tuple[str, list[str]]] = []
    for name, result in results.items():
        if gallery := result.gallery:
            rows = rows or [("real, held out", gallery.real), ("generator alone", gallery.floor)]
            rows += [(f"{name}: {attacker}", images) for attacker, images in gallery.made.items()]
    return rows


def picture_rows(
    title: str, classes: Sequence[str], shape: Sequence[int], rows: Sequence[tuple[str, Sequence[str]]]
) -> Pictures:
    """Return a grid of images, with the names of their classes as column headers."""
    columns = [label for label in classes for _ in range(PER_CLASS)]
    grid = [(label, [decode_picture(shape, code) for code in codes]) for label, codes in rows]
    note = "The first images of each class, without selection. Each column is labelled with the intended class."
    return Pictures(title, columns, grid, note)


def judge_attackers(results: Mapping[str, Inversion]) -> dict[str, Verdict]:
    """Return the verdict on each defence, based on the most successful search; the floor counts as guessing."""
    floor = next(iter(results.values())).floor
    verdicts = {
        defence: INVERSION.compare(
            [
                (name, estimate)
                for name, attacker in result.attackers.items()
                for estimate in (attacker.codes, attacker.pixels)
                if estimate
            ],
            floor.high,
        )
        for defence, result in results.items()
    }
    return judge_defences(INVERSION, floor.value, verdicts)


def show(results: Mapping[str, Inversion]) -> Presentation:
    """Return the table and the sections."""
    if not results:
        return Presentation("", headline({}), HEADER, [], "", [])
    verdicts, first_result = judge_attackers(results), next(iter(results.values()))
    classes, gallery = len(first_result.classes), first_result.gallery
    sections: list[Section] = [
        Text("How to read it", TEXTS.reading),
        success_chart(results, 1 / classes),
        *(
            [picture_rows("Reconstructions", first_result.classes, gallery.shape, gallery_rows(results))]
            if gallery
            else []
        ),
        class_table(results, first_result.classes),
    ]
    rows, note = list(main_rows(results)), TEXTS.note.format(chance=100 / classes, classes=classes)
    return Presentation("", headline(verdicts), HEADER, rows, note, sections, verdict_section(verdicts))
