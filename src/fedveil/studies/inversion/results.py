"""What a model inversion attack returns."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AliasChoices, Field

from fedveil.attacks.scores import Estimate
from fedveil.studies.jobs import Result


@dataclass(frozen=True)
class Judged(Estimate):
    """Success of reconstructions: the share in which a network sees the wanted class, with its interval.

    Attributes:
        hits, trials: of which it is the share.
        centroid, nearest: mean squared distances of features: to the centroid of the class, to the nearest image.
        per_class: success by class; None without any image.
        right: 1 where the class was seen, reconstruction by reconstruction.
    """

    hits: int
    trials: int
    centroid: float
    nearest: float
    per_class: list[float | None] | None = None
    right: list[int] | None = None


@dataclass(frozen=True)
class Inverted:
    """What one attacker reconstructed.

    Attributes:
        view: what it sees.
        codes: the generator's images, by the independent evaluator.
        as_received: the same by the attacked model as the attacker has it: the paper's protocol.
        true_model: the same by the server's model.
        pixels: images found without a generator, by the evaluator.
    """

    view: str
    codes: Judged
    as_received: Annotated[Judged, Field(validation_alias=AliasChoices("as_received", "as_sent"))]
    true_model: Judged
    pixels: Judged | None = None


@dataclass(frozen=True)
class Counts:
    """Private and public images, reconstructions, and the broadcasts they are shared among."""

    members: int
    public: int
    reconstructions: int
    broadcasts: int


@dataclass(frozen=True)
class Gallery:
    """The first images of each class, as `studies.pictures` encodes them: real ones, the generator's, attackers'."""

    shape: tuple[int, int, int]
    real: list[str]
    floor: list[str]
    made: dict[str, list[str]]


@dataclass(frozen=True)
class Inversion(Result):
    """All private classes of one federation, by all attackers.

    Attributes:
        train, test, macro: accuracy on members, on held-out images, and the mean over classes of the latter.
        classes: the private ones.
        floor: the generator's images without any model.
        ceiling: held-out private images.
    """

    defence: str
    seed: int
    train: float
    test: float
    macro: float
    classes: list[str]
    records: Counts
    attackers: dict[str, Inverted]
    floor: Judged
    ceiling: Judged
    cpu_seconds: float
    gallery: Gallery | None = None


@dataclass(frozen=True)
class TrainedGan(Result):
    """The generator: public images, its critic's distances by epoch."""

    images: int
    distances: list[float]
    cpu_seconds: float


@dataclass(frozen=True)
class TrainedEvaluator(Result):
    """The evaluator: its accuracy on held-out images."""

    accuracy: float
    cpu_seconds: float
