"""The page of a curious server's attack: one row per view, pictures, and a verdict."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from fedveil.report import Picture, Pictures
from fedveil.studies.estimates import Estimate, text
from fedveil.studies.gradients.results import Curious, ServerRound
from fedveil.studies.jobs import Failed
from fedveil.studies.pictures import decode_picture
from fedveil.studies.study import Shown
from fedveil.studies.verdicts import RECOGNISED, Label

SINGLE, SAME_MODEL, NEXT_ROUND = "single update", "same model", "next round"
ATTACKS, FLOORS = ("search", "first layer", "rows that agree"), ("mean image", "another of its class")
HEADER = ("defence", "view", "records", "known", *(f"{name}, dB" for name in (*ATTACKS, *FLOORS)), "SSIM")
NOTE = (
    "Without secure aggregation the server has single updates, with it sums over clients (sum of n). 10 minus 9: the "
    "difference of two sums that differ by one client, of the same model, or of a round and the next one. New "
    "networks. Records: number in the view. PSNR of the image nearest to one of them, for attacks and guesses alike; "
    "median over rounds [minimum, maximum], at most 120 dB. Known: rounds in which an attack comes "
    f"{RECOGNISED:g} dB nearer than the mean image. SSIM: of the nearest attack. Search: gradient inversion. First "
    "layer: the record that fits all rows of a dense first layer's gradient. Rows that agree: the record that two of "
    "these rows show."
)
PICTURES = (
    "By the attack that comes nearest. Below each picture its PSNR in dB. For a sum, the image that comes nearest to a "
    "record in it, above that record."
)


def sum_view(clients: int) -> str:
    """Return the name of the view of a sum."""
    return f"sum of {clients}"


def difference_view(clients: int, models: str) -> str:
    """Return the name of the view of a difference."""
    return f"{clients} minus {clients - 1}, {models}"


def show(results: Mapping[str, Curious | Failed]) -> Shown:
    """Return the table and the pictures."""
    found = {name: one for name, one in results.items() if isinstance(one, Curious)}
    rows = [[name, *row] for name, one in found.items() for row in view_rows(one)]
    galleries = [gallery(f"What the server sees, {name}", one) for name, one in found.items()]
    said = " ".join(f"{name}: {verdict(one)}" for name, one in found.items())
    sections = [section for section in galleries if section]
    return Shown("", said or "No verdict: the attack failed.", HEADER, rows, NOTE, sections)


def view_rows(found: Curious) -> Iterator[list[str]]:
    """Yield one row per view, without the defence."""
    if not found.complete:
        yield ["", "", f"failed: {found.failed}", *[""] * (len(HEADER) - 4)]
        return
    for name in found.complete[0].views:
        views = found.view(name)
        near = [spread([view.attacks[attack].psnr for view in views if attack in view.attacks]) for attack in ATTACKS]
        near += [spread([view.floors[floor].psnr for view in views]) for floor in FLOORS]
        ssim = text(spread([view.best.ssim for view in views]), ".2f")
        known = f"{count_known(found, name)}/{len(views)}"
        yield [name, str(views[0].records), known, *map(text, near), ssim]


def spread(values: Sequence[float]) -> Estimate | None:
    """Return median, minimum and maximum: an attack finds a record up to rounding, or not at all."""
    return Estimate(statistics.median(values), min(values), max(values)) if values else None


def count_known(found: Curious, name: str) -> int:
    """Count the rounds in which one of the attacks recognises a record of a view."""
    return sum(view.best.psnr - view.floors[FLOORS[0]].psnr >= RECOGNISED for view in found.view(name))


def verdict(found: Curious) -> str:
    """Return the label with the views that show a record, and those that do not."""
    if not found.complete:
        return f"not measured ({found.failed})."
    known = {name: count_known(found, name) for name in found.complete[0].views}
    leaks = [f"{name} ({times} of {len(found.complete)} rounds)" for name, times in known.items() if times]
    others = ", ".join(name for name, times in known.items() if not times)
    if not leaks:
        return f"{Label.NOTHING}: no record, not even from a single update, so that sums cannot be judged."
    return f"{Label.LEAK}: a record from {', '.join(leaks)}{f'; no record from {others}' if others else ''}."


def gallery(title: str, found: Curious) -> Pictures | None:
    """Return the victim's record of each round, and below it the image of each view; None without any."""
    rounds = found.complete
    if not rounds:
        return None
    rows: list[tuple[str, list[Picture]]] = [("victim's record", [_original(one, 0) for one in rounds])]
    for name in rounds[0].views:
        near = [(one, one.views[name].best) for one in rounds]
        rows.append((name, [decode_picture(one.shape, what.picture, f"{what.psnr:.1f}") for one, what in near]))
        if rounds[0].views[name].records > 1:
            rows.append(("its nearest record", [_original(one, what.record) for one, what in near]))
    return Pictures(title, [f"round {number + 1}" for number in range(len(rounds))], rows, PICTURES)


def _original(one: ServerRound, record: int) -> Picture:
    return decode_picture(one.shape, one.originals[record])
