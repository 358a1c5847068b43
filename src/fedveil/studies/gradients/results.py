"""Results of attacks on gradients, by a client and by a curious server."""

from dataclasses import dataclass

from fedveil.attacks.gradients import Search
from fedveil.studies.jobs import Failed, Result


@dataclass(frozen=True)
class ImageFigures:
    """Distance of each image from its original: PSNR in dB, structural similarity, mean squared error."""

    psnr: list[float]
    ssim: list[float]
    mse: list[float]


@dataclass(frozen=True)
class View(ImageFigures):
    """A reconstruction from one gradient.

    Attributes:
        labels: number of labels of the batch that were found.
        distance: final distance of the gradients; None if it is not finite.
        broken: number of restarts whose distance is not finite.
        seconds: of CPU time.
        pictures: as `studies.pictures` encodes them.
    """

    labels: int
    distance: float | None
    broken: int
    seconds: float
    pictures: list[str]


@dataclass(frozen=True)
class Batch(Result):
    """One batch of the victim.

    Attributes:
        size: records in it.
        rows: their indices in the training data.
        search: settings of the search.
        views: reconstructions by what the attacker has.
        floors: guesses that need no gradient.
        originals: the victim's images, encoded.
        shape: channels, height, width.
    """

    size: int
    rows: list[int]
    search: Search
    views: dict[str, View]
    floors: dict[str, ImageFigures]
    originals: list[str]
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class Gradients(Result):
    """All batches under one defence, by name."""

    seed: int
    parts: dict[str, Batch | Failed]

    def batches(self, size: int) -> tuple[list[Batch], str]:
        """Return the batches of one size, and why one of them failed, if one did."""
        own = [part for name, part in self.parts.items() if name.startswith(f"batch{size}-")]
        broken = [part.failed for part in own if isinstance(part, Failed)]
        return [part for part in own if isinstance(part, Batch)], broken[0] if broken else ""


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
        views: by name.
        originals: the records, encoded.
        shape: channels, height, width.
        seconds: of CPU time.
    """

    rows: list[int]
    search: Search
    views: dict[str, ServerView]
    originals: list[str]
    shape: tuple[int, int, int]
    seconds: float


@dataclass(frozen=True)
class Curious(Result):
    """All rounds under one defence."""

    rounds: list[ServerRound | Failed]

    @property
    def failed(self) -> str:
        """Why one of the rounds failed, if one did."""
        return next((one.failed for one in self.rounds if isinstance(one, Failed)), "")

    @property
    def complete(self) -> list[ServerRound]:
        """All rounds; none if one failed."""
        return [] if self.failed else [one for one in self.rounds if isinstance(one, ServerRound)]

    def view(self, name: str) -> list[ServerView]:
        """Return one view of every round."""
        return [one.views[name] for one in self.complete]
