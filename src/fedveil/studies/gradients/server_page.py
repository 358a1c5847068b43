"""What a curious server's attack shows: one row per view, pictures, and a sentence for a verdict."""

from collections.abc import Iterator, Mapping

from fedveil.report import Picture, Pictures, Section, Text
from fedveil.studies.estimates import Estimate, average, text
from fedveil.studies.gradients.results import Curious, ServerRound
from fedveil.studies.jobs import Failed
from fedveil.studies.pictures import picture
from fedveil.studies.tables import Presented

SINGLE, SAME_MODEL, NEXT_ROUND = "single update", "difference, same model", "difference, next round"
ATTACKS, FLOORS = ("search", "first layer", "rows that agree"), ("mean image", "another of its class")
RECOGNISED = 10.0  # dB above a guess, a tenth of its squared error: such a record is known, and more says nothing
HEADER = ("defence", "view", "records", *(f"{name}, dB" for name in (*ATTACKS, *FLOORS)), "SSIM", "known")
NOTE = (
    "Without secure aggregation the server has single updates, with it sums over clients (sum of n). Difference: of "
    "two sums that differ by the victim's membership, of the same model, or of one round and the next one. New "
    "networks, one update per client. PSNR of the image that comes nearest to any record in the view, for attacks and "
    "for guesses alike; mean over rounds [95 % interval, Student's], 120 dB at most. SSIM: of the best attack. Known: "
    f"rounds in which it comes {RECOGNISED:g} dB nearer than the mean image. Search: gradient inversion. First layer: "
    "the record that fits all rows of a dense first layer's gradient. Rows that agree: the one that two rows show."
)
PICTURES = (
    "By the best attack on each view. Below each picture its PSNR in dB. Of a sum, the image that comes nearest to a "
    "record in it, above that record."
)


def sum_of(clients: int) -> str:
    """The name of the view of a sum."""
    return f"sum of {clients}"


def presented(results: Mapping[str, Curious | Failed]) -> tuple[list[Section], Presented]:
    """The verdict; the table and the pictures."""
    found = {name: one for name, one in results.items() if isinstance(one, Curious)}
    rows = [[name, *row] for name, one in found.items() for row in rows_of(one)]
    said = [f"{name}: {verdict(one)}" for name, one in found.items()]
    galleries = [gallery(f"What the server sees, {name}", one) for name, one in found.items()]
    return [Text("Verdict", said)], (HEADER, rows, NOTE, [section for section in galleries if section])


def rows_of(found: Curious) -> Iterator[list[str]]:
    """One row per view, without the defence."""
    if not found.whole:
        yield ["", "", f"failed: {found.failed}", *[""] * (len(HEADER) - 4)]
        return
    for name in found.whole[0].views:
        views, best = found.view(name), found.best(name)
        figures = [figure(found, name, attack) for attack in ATTACKS]
        below = [text(average([view.floors[floor].psnr for view in views])) for floor in FLOORS]
        ssim = text(average([view.attacks[best].ssim for view in views]), ".2f")
        known = sum(view.attacks[best].psnr - view.floors[FLOORS[0]].psnr >= RECOGNISED for view in views)
        records = str(views[0].records)
        yield [name, records, *(text(one) for one in figures), *below, ssim, f"{known}/{len(views)}"]


def figure(found: Curious, view: str, attack: str) -> Estimate | None:
    """The mean PSNR of an attack on a view; None where it does not apply."""
    views = found.view(view)
    return average([one.attacks[attack].psnr for one in views]) if attack in views[0].attacks else None


def verdict(found: Curious) -> str:
    """Which views give a record away, by the best attack on each, and which do not."""
    if not found.whole:
        return f"the curious server was not measured ({found.failed})."
    given, kept = list[str](), list[str]()
    for name in found.whole[0].views:
        best, guess = (average(values).value for values in _best_and_guess(found, name))
        if best - guess >= RECOGNISED:
            given.append(f"{name} ({best:.0f} dB)")
        else:
            kept.append(f"{name} ({best:.0f} dB, the mean image {guess:.0f} dB)")
    shown = f"a curious server rebuilds a record from: {'; '.join(given)}" if given else ""
    hidden = f"a curious server rebuilds no record from: {'; '.join(kept)}" if kept else ""
    return ". ".join(part for part in (shown, hidden) if part) + "."


def _best_and_guess(found: Curious, name: str) -> tuple[list[float], list[float]]:
    views, best = found.view(name), found.best(name)
    return [view.attacks[best].psnr for view in views], [view.floors[FLOORS[0]].psnr for view in views]


def gallery(title: str, found: Curious) -> Pictures | None:
    """The victim's record of each round, and below it what each view gave; None without any."""
    rounds = found.whole
    if not rounds:
        return None
    rows: list[tuple[str, list[Picture]]] = [("victim's record", [_original(one, 0) for one in rounds])]
    for name in rounds[0].views:
        near = [(one, one.views[name].attacks[found.best(name)]) for one in rounds]
        rows.append((name, [picture(one.shape, what.picture, f"{what.psnr:.1f}") for one, what in near]))
        if rounds[0].views[name].records > 1:
            rows.append(("its nearest record", [_original(one, what.record) for one, what in near]))
    return Pictures(title, [f"round {number + 1}" for number in range(len(rounds))], rows, PICTURES)


def _original(one: ServerRound, record: int) -> Picture:
    return picture(one.shape, one.originals[record])
