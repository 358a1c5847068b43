"""What a curious server's attack shows: one row per view, pictures, and a sentence for a verdict."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from fedveil.report import Picture, Pictures, Section, Text
from fedveil.studies.estimates import Estimate, text
from fedveil.studies.gradients.results import Curious, ServerRound
from fedveil.studies.jobs import Failed
from fedveil.studies.pictures import decode_picture
from fedveil.studies.tables import Presented, join_words

SINGLE, SAME_MODEL, NEXT_ROUND = "single update", "same model", "next round"
SUM = "sum of "
ATTACKS, FLOORS = ("search", "first layer", "rows that agree"), ("mean image", "another of its class")
RECOGNISED = 10.0  # dB above a guess, a tenth of its squared error: such a record is known, and more says nothing
HEADER = ("defence", "view", "records", "known", *(f"{name}, dB" for name in (*ATTACKS, *FLOORS)), "SSIM")
NOTE = (
    "Without secure aggregation the server has single updates, with it sums over clients (sum of n). 10 minus 9: the "
    "difference of two sums that differ by one client, of the same model, or of a round and the next one. New "
    "networks; records: in the view. PSNR of the image that comes nearest to one of them, for attacks and for guesses "
    "alike; median over rounds [least, largest], 120 dB at most. Known: rounds in which an attack comes "
    f"{RECOGNISED:g} dB nearer than the mean image. SSIM: of the nearest attack. Search: gradient inversion. First "
    "layer: the record that fits all rows of a dense first layer's gradient. Rows that agree: the record that two of "
    "these rows show."
)
WEAK = "not even from a single update: they are too weak here to tell whether sums hide anything."
PICTURES = (
    "By the attack that comes nearest. Below each picture its PSNR in dB. Of a sum, the image that comes nearest to a "
    "record in it, above that record."
)


def sum_of(clients: int) -> str:
    """The name of the view of a sum."""
    return f"{SUM}{clients}"


def difference_of(clients: int, models: str) -> str:
    """The name of the view of a difference."""
    return f"{clients} minus {clients - 1}, {models}"


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
        views = found.view(name)
        near = [spread([view.attacks[attack].psnr for view in views if attack in view.attacks]) for attack in ATTACKS]
        near += [spread([view.floors[floor].psnr for view in views]) for floor in FLOORS]
        ssim = text(spread([view.best.ssim for view in views]), ".2f")
        known = f"{times_known(found, name)}/{len(views)}"
        yield [name, str(views[0].records), known, *map(text, near), ssim]


def spread(values: Sequence[float]) -> Estimate | None:
    """The median, and the least and the largest value: an attack finds a record up to rounding, or not at all."""
    return Estimate(statistics.median(values), min(values), max(values)) if values else None


def times_known(found: Curious, name: str) -> int:
    """The rounds in which a view gives a record away to one of the attacks."""
    return sum(view.best.psnr - view.floors[FLOORS[0]].psnr >= RECOGNISED for view in found.view(name))


def verdict(found: Curious) -> str:
    """Which views give a record away, and which do not."""
    if not found.whole:
        return f"the curious server was not measured ({found.failed})."
    known = {name: times_known(found, name) for name in found.whole[0].views}
    given = [f"{name} ({times} of {len(found.whole)} rounds)" for name, times in known.items() if times]
    kept = [name for name, times in known.items() if not times]
    if not given:
        return "a curious server rebuilds no record by these attacks, " + WEAK
    none = f" It rebuilds none from: {'; '.join(kept)}." if kept else ""
    return f"a curious server rebuilds a record from: {'; '.join(given)}.{none}"


def one_line(results: Mapping[str, Curious | Failed]) -> str:
    """Which views give a record away under any defence, in one sentence."""
    every = [one for one in results.values() if isinstance(one, Curious) and one.whole]
    known = {name: any(times_known(one, name) for one in every) for one in every for name in one.whole[0].views}
    if not any(known.values()):
        return "A curious server was not measured." if not known else f"A curious server rebuilds no record, {WEAK}"
    given = [SINGLE + "s"] if known.get(SINGLE) else []
    sums, kept = ([n.removeprefix(SUM) for n, got in known.items() if n.startswith(SUM) and got == g] for g in (1, 0))
    given += [f"sums over {join_words(sums, 'and')} clients"] if sums else []
    given += ["the difference of two sums"] if any(got for name, got in known.items() if " minus " in name) else []
    none = f", but from no sum over {join_words(kept, 'or')} clients" if kept else ""
    return f"A curious server rebuilds a record from {join_words(given, 'and')}{none}."


def gallery(title: str, found: Curious) -> Pictures | None:
    """The victim's record of each round, and below it what each view gave; None without any."""
    rounds = found.whole
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
