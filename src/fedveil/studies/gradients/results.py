"""Results of an attack on gradients, and its page: a table with floors, a chart, and pictures with their originals."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedveil.attacks.gradients import Search
from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.scores import average
from fedveil.report import Interval, Intervals, Picture, Pictures, Section
from fedveil.studies.jobs import Failure, Result
from fedveil.studies.study import Presentation, decode_picture, format_estimate, mark, read_texts
from fedveil.studies.verdicts import GRADIENTS, Verdict, headline, judge_defences, verdict_section

TEXTS = read_texts()["gradients"]
HEADER = (
    *("defence", "view", "attacker", "batch", "images"),
    *("PSNR (dB)", "SSIM", "MSE", "> 20 dB", "SSIM > 0.5", "labels"),
)
ADAPTIVE = "adaptive"


@dataclass(frozen=True)
class ImageFigures:
    """Similarity of each image to its original: PSNR in dB, structural similarity and mean squared error."""

    psnr: list[float]
    ssim: list[float]
    mse: list[float]


@dataclass(frozen=True)
class View(ImageFigures):
    """A reconstruction from one gradient.

    Attributes:
        labels: number of correct labels.
        distance: final distance between the gradients; None if it is not finite.
        broken: number of restarts without a finite distance.
        pictures: images encoded by `encode_image`.
    """

    labels: int
    distance: float | None
    broken: int
    pictures: list[str]


@dataclass(frozen=True)
class Batch(Result):
    """The results of the attack on one of the victim's batches.

    Attributes:
        size: number of records in the batch.
        rows: indices of these records in the training data.
        search: settings of the search.
        views: reconstructions by view, that is, by the gradient that the attacker has.
        floors: similarity of guesses that need no gradient.
        originals: the victim's images, encoded by `encode_image`.
        shape: channels, height and width of an image.
    """

    size: int
    rows: list[int]
    search: Search
    views: dict[str, View]
    floors: dict[str, ImageFigures]
    originals: list[str]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Gradients(Result):
    """The results under one defence; `parts` contains the results of each batch, by name."""

    seed: int
    parts: dict[str, Batch | Failure]

    def batches(self, size: int) -> list[Batch] | Failure:
        """Return the batches of one size, or the first failure among them."""
        parts = [part for name, part in self.parts.items() if name.startswith(f"batch{size}-")]
        failures = [part for part in parts if isinstance(part, Failure)]
        return failures[0] if failures else [part for part in parts if isinstance(part, Batch)]


@dataclass(frozen=True)
class ViewFigures(ImageFigures):
    """The results of one view for all images at one batch size, with the number of correct labels and the pictures."""

    labels: int | None = None
    pictures: Sequence[Picture] = ()

    @property
    def mean_psnr(self) -> float:
        """The mean PSNR."""
        return statistics.fmean(self.psnr)


def join_figures(
    parts: Sequence[ImageFigures], labels: int | None = None, pictures: Sequence[Picture] = ()
) -> ViewFigures:
    """Combine the results of one view, or of one floor, from all batches."""
    psnr, ssim, mse = ([value for part in parts for value in getattr(part, key)] for key in ("psnr", "ssim", "mse"))
    return ViewFigures(psnr, ssim, mse, labels, pictures)


def join_batches(batches: Sequence[Batch], view: str) -> ViewFigures:
    """Combine the results and pictures of one view from all batches."""
    reconstructions = [(batch.shape, batch.views[view]) for batch in batches]
    pictures = [
        decode_picture(shape, code, f"{db:.1f}")
        for shape, images in reconstructions
        for code, db in zip(images.pictures, images.psnr, strict=True)
    ]
    views = [images for _, images in reconstructions]
    return join_figures(views, sum(images.labels for images in views), pictures)


def complete_batches(results: Mapping[str, Gradients], size: int) -> dict[str, list[Batch]]:
    """Return the batches of one size by defence, omitting defences with a failed batch."""
    result = {name: result.batches(size) for name, result in results.items()}
    return {name: batches for name, batches in result.items() if isinstance(batches, list) and batches}


def view_figures(results: Mapping[str, Gradients], size: int) -> dict[str, dict[str, ViewFigures]]:
    """Return the results of each view by defence, omitting defences with a failed batch."""
    return {
        name: {view: join_batches(batches, view) for view in batches[0].views}
        for name, batches in complete_batches(results, size).items()
    }


def floor_figures(results: Mapping[str, Gradients], size: int) -> dict[str, ViewFigures]:
    """Return the results of each floor; the images are the same under every defence."""
    for batches in complete_batches(results, size).values():
        return {name: join_figures([batch.floors[name] for batch in batches]) for name in batches[0].floors}
    return {}


def is_adaptive(view: str) -> bool:
    """Return whether a view needs an adaptive attacker."""
    return view.startswith("V-diff, ")


def judge_views(results: Mapping[str, Gradients], size: int) -> dict[str, Verdict]:
    """Return the verdict on each defence, based on the view with the best images at one batch size."""
    guess = max((floor.mean_psnr for floor in floor_figures(results, size).values()), default=0.0)
    views = view_figures(results, size)
    result = {
        name: GRADIENTS.compare([(view, average(figures.psnr)) for view, figures in figures_by_view.items()], guess)
        for name, figures_by_view in views.items()
    }
    published_views = {view for names in views.values() for view in names if not is_adaptive(view)}
    return judge_defences(GRADIENTS, guess, result, published_views)


def table_rows(results: Mapping[str, Gradients], sizes: Sequence[int]) -> list[list[str]]:
    """Return one row per defence, view and batch size, followed by the floors for the first size."""
    rows, views = list[list[str]](), {size: view_figures(results, size) for size in sizes}
    for name, result in results.items():
        for size in sizes:
            if isinstance(failure := result.batches(size), Failure):
                rows.append([name, "", PUBLISHED, str(size), *[""] * (len(HEADER) - 5), f"failed: {failure.failed}"])
            for view, figures in views[size].get(name, {}).items():
                attacker = ADAPTIVE if is_adaptive(view) else PUBLISHED
                rows.append([name, view, attacker, str(size), *figure_cells(figures)])
    floors = floor_figures(results, sizes[0])
    return [*rows, *(["floor", name, "", "", *figure_cells(floor)] for name, floor in floors.items())]


def figure_cells(figures: ViewFigures) -> list[str]:
    """Format the results of one view as cells."""
    count = len(figures.psnr)
    similarities = [
        format_estimate(average(value), format_spec)
        for value, format_spec in ((figures.psnr, ".1f"), (figures.ssim, ".2f"), (figures.mse, ".3f"))
    ]
    hit_counts = [sum(value > 20 for value in figures.psnr), sum(value > 0.5 for value in figures.ssim), figures.labels]
    return [str(count), *similarities, *("" if hits is None else f"{hits}/{count}" for hits in hit_counts)]


def chart(title: str, results: Mapping[str, Gradients], size: int) -> Intervals:
    """Return a chart of the PSNR under each defence and view, with the floors as references."""
    rows, views = list[Interval](), view_figures(results, size)
    for name in results:
        rows += [mark(view, average(figures.psnr), name) for view, figures in views.get(name, {}).items()]
        rows += [] if name in views else [mark("", None, name)]
    lines = {f"floor: {name}": figures.mean_psnr for name, figures in floor_figures(results, size).items()}
    return Intervals(title, "PSNR (dB), larger is worse for the victim", rows, lines)


def gallery(title: str, results: Mapping[str, Gradients], size: int, note: str) -> list[Section]:
    """Return a grid of the originals above the images of each view and defence; return an empty list without images."""
    for batches in complete_batches(results, size).values():
        originals = [decode_picture(batch.shape, code) for batch in batches for code in batch.originals]
        rows = [("original", originals)]
        for name, figures_by_view in view_figures(results, size).items():
            rows += [(f"{name}, {view}", list(figures.pictures)) for view, figures in figures_by_view.items()]
        return [Pictures(title, [str(index + 1) for index in range(len(originals))], rows, note)]
    return []


def show(results: Mapping[str, Gradients], sizes: Sequence[int]) -> Presentation:
    """Return the table, a chart for the smallest batch, and pictures for every batch size."""
    verdicts = judge_views(results, sizes[0])
    sections: list[Section] = [chart(f"PSNR of the images, batch {sizes[0]}", results, sizes[0])]
    for size in sizes:
        sections += gallery(f"Images from gradients, batch {size}", results, size, TEXTS.notes["pictures"])
    rows, top_sections = table_rows(results, sizes), verdict_section(verdicts)
    return Presentation("", headline(verdicts), HEADER, rows, TEXTS.note, sections, top_sections)
