"""The page of an attack on gradients: a table with its floors, a chart, and pictures beside the originals."""

import statistics
from collections.abc import Mapping, Sequence

from fedveil.attacks.observation import PUBLISHED
from fedveil.report import Interval, Intervals, Picture, Pictures, Section
from fedveil.studies.estimates import average, reach, text
from fedveil.studies.gradients.results import Batch, Gradients, ImageFigures
from fedveil.studies.jobs import Failed
from fedveil.studies.pictures import decode_picture
from fedveil.studies.study import Shown
from fedveil.studies.tables import mark
from fedveil.studies.verdicts import GRADIENTS, Verdict, headline, judge_defences, verdict_section

HEADER = (
    *("defence", "view", "attacker", "batch", "images"),
    *("PSNR (dB)", "SSIM", "MSE", "> 20 dB", "SSIM > 0.5", "labels"),
)
ADAPTIVE = "adaptive"
NOTE = (
    "V-diff: the difference of two broadcasts without the attacker's contribution, all that a client has. V-up: the"
    " victim's update beside its broadcast, a stress test. V-diff, two broadcasts: both rounds of a veil in canonical"
    " form. Two clients. PSNR, SSIM and MSE: means over images [Student's 95 % interval]; images of one batch are not"
    " independent. Images of a batch are matched to the originals by squared error; restarts are chosen by the distance"
    " of gradients. Floors need no gradient."
)
PICTURES = "Below each picture its PSNR in dB. Within a batch, each original is above the image matched to it."
Found = Mapping[str, Gradients | Failed]


def judge_views(results: Found, size: int) -> dict[str, Verdict]:
    """Return the verdict on each defence, by the view whose images come nearest at one batch size."""
    guess = max((statistics.fmean(floor.psnr) for floor in mean_floors(results, size).values()), default=0.0)
    found, rule = {}, GRADIENTS.rule(guess)
    for defence, parts in complete_batches(results, size).items():
        values = {view: join_figures([part.views[view] for part in parts]).psnr for view in parts[0].views}
        found[defence] = [reach(view, average(psnr), rule, len(psnr)) for view, psnr in values.items()]
    published = {one.attacker for own in found.values() for one in own if not is_adaptive(one.attacker)}
    return judge_defences(GRADIENTS, guess, found, published)


def is_adaptive(view: str) -> bool:
    """Whether a view takes an adaptive attacker."""
    return view.startswith("V-diff, ")


def show(results: Found, sizes: Sequence[int]) -> Shown:
    """Return the table, a chart of the smallest batch, and pictures of every batch size."""
    verdicts = judge_views(results, sizes[0])
    rows = table_rows(results, sizes)
    sections: list[Section] = [chart(f"PSNR of the images, batch {sizes[0]}", results, sizes[0])]
    galleries = (gallery(f"Images from gradients, batch {size}", results, size, PICTURES) for size in sizes)
    sections += [section for section in galleries if section]
    return Shown("", headline(verdicts), HEADER, rows, NOTE, sections, verdict_section(verdicts))


def table_rows(results: Found, sizes: Sequence[int]) -> list[list[str]]:
    """Return one row per defence, view and batch size, and the floors of the first size."""
    rows = [row for name, result in results.items() for row in defence_rows(name, result, sizes)]
    return [*rows, *(table_row("floor", name, "", "", one) for name, one in mean_floors(results, sizes[0]).items())]


def defence_rows(name: str, result: Gradients | Failed, sizes: Sequence[int]) -> list[list[str]]:
    """Return one row per view and batch size."""
    if isinstance(result, Failed):
        return [_failed_row(name, "", result.failed)]
    rows = []
    for size in sizes:
        parts, why = result.batches(size)
        if why:
            rows.append(_failed_row(name, str(size), why))
            continue
        for view in parts[0].views:
            own, attacker = [part.views[view] for part in parts], ADAPTIVE if is_adaptive(view) else PUBLISHED
            labels = sum(one.labels for one in own)
            rows.append(table_row(name, view, attacker, str(size), join_figures(own), labels))
    return rows


def _failed_row(name: str, size: str, why: str) -> list[str]:
    return [name, "", PUBLISHED, size, *[""] * (len(HEADER) - 5), f"failed: {why}"]


def join_figures(parts: Sequence[ImageFigures]) -> ImageFigures:
    """Return the figures of all images as one."""
    lists = ([value for part in parts for value in getattr(part, key)] for key in ("psnr", "ssim", "mse"))
    return ImageFigures(*lists)


def table_row(
    name: str, view: str, attacker: str, size: str, found: ImageFigures, labels: int | None = None
) -> list[str]:
    """Return figures as text."""
    count = len(found.psnr)
    lists = ((found.psnr, ".1f"), (found.ssim, ".2f"), (found.mse, ".3f"))
    near = [text(average(values), form) for values, form in lists]
    good = [sum(value > 20 for value in found.psnr), sum(value > 0.5 for value in found.ssim)]
    shares = [f"{hits}/{count}" for hits in good] + ["" if labels is None else f"{labels}/{count}"]
    return [name, view, attacker, size, str(count), *near, *shares]


def complete_batches(results: Found, size: int) -> dict[str, list[Batch]]:
    """Return the batches of one size under each defence of which none failed."""
    found = {name: result.batches(size) for name, result in results.items() if isinstance(result, Gradients)}
    return {name: parts for name, (parts, why) in found.items() if parts and not why}


def mean_floors(results: Found, size: int) -> dict[str, ImageFigures]:
    """Return each floor's figures; the images are the same under every defence."""
    for parts in complete_batches(results, size).values():
        return {name: join_figures([part.floors[name] for part in parts]) for name in parts[0].floors}
    return {}


def chart(title: str, results: Found, size: int) -> Intervals:
    """Return the PSNR under each defence and view, beside the floors."""
    rows = []
    for name, result in results.items():
        parts, why = ([], result.failed) if isinstance(result, Failed) else result.batches(size)
        if why:
            rows.append(Interval("", None, group=name, missing=f"failed: {why}"))
            continue
        for view in parts[0].views:
            rows.append(mark(view, average(join_figures([part.views[view] for part in parts]).psnr), name))
    lines = {f"floor: {name}": statistics.fmean(found.psnr) for name, found in mean_floors(results, size).items()}
    return Intervals(title, "PSNR (dB), larger is worse for the victim", rows, lines)


def gallery(title: str, results: Found, size: int, note: str) -> Pictures | None:
    """Return the originals, and below them the images of each view under each defence; None without any."""
    rows: list[tuple[str, list[Picture]]] = []
    for name, parts in complete_batches(results, size).items():
        if not rows:
            rows.append(("original", [decode_picture(part.shape, code) for part in parts for code in part.originals]))
        for view in parts[0].views:
            own = [(part.shape, part.views[view]) for part in parts]
            images = [
                decode_picture(shape, code, f"{db:.1f}")
                for shape, found in own
                for code, db in zip(found.pictures, found.psnr, strict=True)
            ]
            rows.append((f"{name}, {view}", images))
    return Pictures(title, [str(number + 1) for number in range(len(rows[0][1]))], rows, note) if rows else None
