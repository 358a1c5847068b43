"""Results of a curious server's attack, and their page: one row per view, pictures, and a verdict."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedveil.attacks.gradients import Search
from fedveil.attacks.scores import Estimate
from fedveil.report import Picture, Pictures, Section
from fedveil.studies.attack import Results
from fedveil.studies.jobs import Failure, Result
from fedveil.studies.presentation import Presentation, decode_picture, read_texts, text
from fedveil.studies.verdicts import RECOGNISED, Label

TEXTS = read_texts()["server"]
NOTE = TEXTS.note.format(recognised=RECOGNISED)
SINGLE, SAME_MODEL, NEXT_ROUND = "single update", "same model", "next round"
ATTACKS, FLOORS = ("search", "first layer", "rows that agree"), ("mean image", "another of its class")
HEADER = ("defence", "view", "records", "known", *(f"{name}, dB" for name in (*ATTACKS, *FLOORS)), "SSIM")


@dataclass(frozen=True)
class Nearest:
    """The image of an attack that comes nearest to a record in the view.

    Attributes:
        psnr, ssim: similarity of the two.
        record: index of that record in the round.
        picture: the image, encoded.
    """

    psnr: float
    ssim: float
    record: int
    picture: str


@dataclass(frozen=True)
class ServerView:
    """Attacks of a curious server on one gradient.

    Attributes:
        records: number of records in it.
        attacks: nearest image by attack; attacks that do not apply are left out.
        floors: nearest of guesses that need no gradient, one guess per record.
    """

    records: int
    attacks: dict[str, Nearest]
    floors: dict[str, Nearest]

    @property
    def best(self) -> Nearest:
        """The nearest image of all attacks."""
        return max(self.attacks.values(), key=lambda one: one.psnr)


@dataclass(frozen=True)
class ServerRound(Result):
    """One round of a new federation, as the server sees it.

    Attributes:
        rows: indices of the clients' records in the training data, the victim's first.
        search: settings of the search.
        views: attacks by view.
        originals: the records, encoded.
        shape: channels, height, width.
    """

    rows: list[int]
    search: Search
    views: dict[str, ServerView]
    originals: list[str]
    shape: tuple[int, ...]

    def original(self, record: int) -> Picture:
        """Return one of the records as a picture."""
        return decode_picture(self.shape, self.originals[record])


@dataclass(frozen=True)
class Curious(Result):
    """All rounds under one defence."""

    rounds: list[ServerRound | Failure]

    @property
    def failed(self) -> str:
        """Why one of the rounds failed, if one did."""
        return next((one.failed for one in self.rounds if isinstance(one, Failure)), "")

    @property
    def complete(self) -> list[ServerRound]:
        """All rounds; none if one failed."""
        return [] if self.failed else [one for one in self.rounds if isinstance(one, ServerRound)]

    def view(self, name: str) -> list[ServerView]:
        """Return one view of every round."""
        return [one.views[name] for one in self.complete]


def sum_view(clients: int) -> str:
    """Return the name of the view of a sum."""
    return f"sum of {clients}"


def difference_view(clients: int, models: str) -> str:
    """Return the name of the view of a difference."""
    return f"{clients} minus {clients - 1}, {models}"


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
        yield [name, str(views[0].records), f"{count_rounds(found, name)}/{len(views)}", *map(text, near), ssim]


def spread(values: Sequence[float]) -> Estimate | None:
    """Return median, minimum and maximum: an attack finds a record up to rounding, or not at all."""
    return Estimate(statistics.median(values), min(values), max(values)) if values else None


def count_rounds(found: Curious, name: str) -> int:
    """Count the rounds in which one of the attacks recognises a record of a view."""
    return sum(view.best.psnr - view.floors[FLOORS[0]].psnr >= RECOGNISED for view in found.view(name))


def verdict(found: Curious) -> str:
    """Return the label with the views that show a record, and those that do not."""
    if not found.complete:
        return f"not measured ({found.failed})."
    known = {name: count_rounds(found, name) for name in found.complete[0].views}
    leaks = [f"{name} ({times} of {len(found.complete)} rounds)" for name, times in known.items() if times]
    others = ", ".join(name for name, times in known.items() if not times)
    if not leaks:
        return f"{Label.NOTHING}: no record, not even from a single update, so that sums cannot be judged."
    return f"{Label.LEAK}: a record from {', '.join(leaks)}{f'; no record from {others}' if others else ''}."


def gallery(title: str, found: Curious) -> list[Section]:
    """Return the victim's record of each round, and below it the image of each view; nothing without any."""
    rounds = found.complete
    if not rounds:
        return []
    rows: list[tuple[str, list[Picture]]] = [("victim's record", [one.original(0) for one in rounds])]
    for name in rounds[0].views:
        near = [(one, one.views[name].best) for one in rounds]
        rows.append((name, [decode_picture(one.shape, what.picture, f"{what.psnr:.1f}") for one, what in near]))
        if rounds[0].views[name].records > 1:
            rows.append(("its nearest record", [one.original(what.record) for one, what in near]))
    return [Pictures(title, [f"round {number + 1}" for number in range(len(rounds))], rows, TEXTS.notes["pictures"])]


def show(results: Results[Curious]) -> Presentation:
    """Return the table and the pictures."""
    found = {name: one for name, one in results.items() if isinstance(one, Curious)}
    rows = [[name, *row] for name, one in found.items() for row in view_rows(one)]
    sections = [part for name, one in found.items() for part in gallery(f"What the server sees, {name}", one)]
    verdicts = " ".join(f"{name}: {verdict(one)}" for name, one in found.items())
    return Presentation("", verdicts or "No verdict: the attack failed.", HEADER, rows, NOTE, sections)
