"""What an attack on gradients returns."""

from dataclasses import dataclass

from fedveil.attacks.gradients import Search
from fedveil.studies.jobs import Failed, Result


@dataclass(frozen=True)
class Figures:
    """How near each image comes: PSNR in dB, structural similarity, mean squared error."""

    psnr: list[float]
    ssim: list[float]
    mse: list[float]


@dataclass(frozen=True)
class View(Figures):
    """A reconstruction from one gradient.

    Attributes:
        labels: how many labels of the batch were found.
        distance: of the gradients at the end; None if it is not finite.
        broken: restarts that ended in a distance that is not finite.
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
        rows: their places in the training data.
        search: how was searched.
        views: reconstructions by what the attacker has.
        floors: what needs no gradient.
        originals: the victim's images, encoded.
        shape: channels, height, width.
    """

    size: int
    rows: list[int]
    search: Search
    views: dict[str, View]
    floors: dict[str, Figures]
    originals: list[str]
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class Gradients(Result):
    """All batches under one defence, by name."""

    seed: int
    parts: dict[str, Batch | Failed]

    def of_size(self, size: int) -> tuple[list[Batch], str]:
        """The batches of one size, and why one of them failed, if one did."""
        own = [part for name, part in self.parts.items() if name.startswith(f"batch{size}-")]
        broken = [part.failed for part in own if isinstance(part, Failed)]
        return [part for part in own if isinstance(part, Batch)], broken[0] if broken else ""
