"""What an attack on gradients shows: a table with its floors, a chart, and pictures beside the originals."""

import statistics
from collections.abc import Mapping, Sequence

from fedveil.attacks.observed import PUBLISHED
from fedveil.report import Interval, Intervals, Picture, Pictures, Section
from fedveil.studies.estimates import Rule, average, reach, text
from fedveil.studies.gradients.results import Batch, Figures, Gradients
from fedveil.studies.jobs import Failed
from fedveil.studies.pictures import decode_picture
from fedveil.studies.tables import Furthest, Presented, Said, furthest_of, one_line

HEADER = (
    *("defence", "view", "attacker", "batch", "images"),
    *("PSNR (dB)", "SSIM", "MSE", "> 20 dB", "SSIM > 0.5", "labels"),
)
ADAPTIVE = "adaptive"
NOTE = (
    "V-diff: the difference of two broadcasts without the attacker's own part, all that a client has. V-up: the"
    " victim's upload beside its broadcast, a stress test. V-diff, two broadcasts: both rounds of a veil in canonical"
    " form. Two clients. PSNR, SSIM and MSE are"
    " means over images [95 % interval, Student's]; images of one batch are not independent. Batches are matched to the"
    " originals for the least squared error. Restarts are chosen by the distance of gradients. Floors need no gradient."
)
CLEAR = 1.0  # dB above a guess: from there on a leak is clear
SAID = Said(
    "Images rebuilt from gradients have a PSNR of {found}; a guess has {guess}",
    "Not even without a defence are images rebuilt from gradients ({top}) better than a guess ({guess}).",
    "There are too few images to tell whether rebuilt ones ({top} undefended) are better than a guess ({guess}).",
)


def verdict(results: Mapping[str, Gradients | Failed], size: int) -> str:
    """How near the images of the best view come, in one sentence, at one batch size."""
    guess = max((statistics.fmean(floor.psnr) for floor in floors_of(results, size).values()), default=0.0)
    found: dict[str, Furthest] = {}
    for defence, parts in whole(results, size).items():
        values = {view: joined([part.views[view] for part in parts]).psnr for view in parts[0].views}
        rule = Rule(guess, guess + CLEAR)
        every = [reach(view, average(psnr), rule, len(psnr)) for view, psnr in values.items()]
        if one := furthest_of(every, [other for other in every if not adaptive(other.attacker)]):
            found[defence] = one
    return one_line(found, guess, lambda near: f"{near:.1f} dB", SAID)


def adaptive(view: str) -> bool:
    """Whether a view takes an adaptive attacker."""
    return view.startswith("V-diff, ")


def presented(results: Mapping[str, Gradients | Failed], sizes: Sequence[int]) -> Presented:
    """The table, a chart of the smallest batch, pictures of every batch size."""
    rows = [row for name, result in results.items() for row in defence_rows(name, result, sizes)]
    floors = floors_of(results, sizes[0])
    rows += [table_row("floor", name, "", "", found) for name, found in floors.items()]
    sections: list[Section] = [chart(f"How near the images come, batch {sizes[0]}", results, sizes[0], floors)]
    note = "Below each picture its PSNR in dB. Within a batch, each original has the reconstruction matched to it."
    pictures = [gallery(f"Images from gradients, batch {size}", results, size, note) for size in sizes]
    sections += [section for section in pictures if section]
    return HEADER, rows, NOTE, sections


def defence_rows(name: str, result: Gradients | Failed, sizes: Sequence[int]) -> list[list[str]]:
    """One row per view and batch size."""
    if isinstance(result, Failed):
        return [_failed_row(name, "", result.failed)]
    rows = []
    for size in sizes:
        parts, broken = result.of_size(size)
        if broken:
            rows.append(_failed_row(name, str(size), broken))
            continue
        for view in parts[0].views:
            attacker = ADAPTIVE if adaptive(view) else PUBLISHED
            labels = sum(part.views[view].labels for part in parts)
            rows.append(table_row(name, view, attacker, str(size), joined([p.views[view] for p in parts]), labels))
    return rows


def _failed_row(name: str, size: str, why: str) -> list[str]:
    return [name, "", PUBLISHED, size, *[""] * (len(HEADER) - 5), f"failed: {why}"]


def joined(parts: Sequence[Figures]) -> Figures:
    """The figures of all images."""
    lists = ([value for part in parts for value in getattr(part, key)] for key in ("psnr", "ssim", "mse"))
    return Figures(*lists)


def table_row(name: str, view: str, attacker: str, size: str, found: Figures, labels: int | None = None) -> list[str]:
    """Figures as text."""
    count = len(found.psnr)
    lists = ((found.psnr, ".1f"), (found.ssim, ".2f"), (found.mse, ".3f"))
    near = [text(average(values), form) for values, form in lists]
    good = [sum(value > 20 for value in found.psnr), sum(value > 0.5 for value in found.ssim)]
    shares = [f"{hits}/{count}" for hits in good] + ["" if labels is None else f"{labels}/{count}"]
    return [name, view, attacker, size, str(count), *near, *shares]


def whole(results: Mapping[str, Gradients | Failed], size: int) -> dict[str, list[Batch]]:
    """The batches of one size, of all defences of which none failed."""
    found = {name: result.of_size(size) for name, result in results.items() if isinstance(result, Gradients)}
    return {name: parts for name, (parts, broken) in found.items() if parts and not broken}


def floors_of(results: Mapping[str, Gradients | Failed], size: int) -> dict[str, Figures]:
    """Each floor's figures; the images are the same under every defence."""
    for parts in whole(results, size).values():
        return {name: joined([part.floors[name] for part in parts]) for name in parts[0].floors}
    return {}


def chart(title: str, results: Mapping[str, Gradients | Failed], size: int, floors: Mapping[str, Figures]) -> Intervals:
    """PSNR under each defence and view, beside the floors."""
    rows = []
    for name, result in results.items():
        parts, broken = ([], result.failed) if isinstance(result, Failed) else result.of_size(size)
        if broken:
            rows.append(Interval("", None, group=name, missing=f"failed: {broken}"))
            continue
        for view in parts[0].views:
            mean = average(values := joined([part.views[view] for part in parts]).psnr)
            low, high = (mean.low, mean.high) if len(values) > 1 else (None, None)
            rows.append(Interval(view, mean.value, low, high, group=name))
    lines = {f"floor: {name}": statistics.fmean(found.psnr) for name, found in floors.items()}
    return Intervals(title, "PSNR (dB), larger is worse for the victim", rows, lines)


def gallery(title: str, results: Mapping[str, Gradients | Failed], size: int, note: str) -> Pictures | None:
    """Originals in the first row, and below them what each view of each defence gave; None without any."""
    rows: list[tuple[str, list[Picture]]] = []
    for name, parts in whole(results, size).items():
        if not rows:
            rows.append(("original", [decode_picture(part.shape, code) for part in parts for code in part.originals]))
        for view in parts[0].views:
            rows.append((f"{name}, {view}", [image for part in parts for image in _reconstructions(part, view)]))
    return Pictures(title, [str(number + 1) for number in range(len(rows[0][1]))], rows, note) if rows else None


def _reconstructions(part: Batch, view: str) -> list[Picture]:
    found = part.views[view]
    return [decode_picture(part.shape, code, f"{db:.1f}") for code, db in zip(found.pictures, found.psnr, strict=True)]
