"""Results of model inversion attacks."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AliasChoices, Field

from fedveil.attacks.scores import Estimate
from fedveil.studies.jobs import Result


@dataclass(frozen=True)
class SuccessRate(Estimate):
    """Success of reconstructions: the fraction in which a network sees the wanted class, with its interval.

    Attributes:
        hits, trials: numerator and denominator of the fraction.
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
class InversionFigures:
    """Reconstructions of one attacker.

    Attributes:
        view: what the attacker sees.
        codes: images of the generator, judged by the independent evaluator.
        as_received: the same, judged by the attacked model as the attacker has it: the paper's protocol.
        true_model: the same, judged by the server's model.
        pixels: images found without a generator, judged by the evaluator.
    """

    view: str
    codes: SuccessRate
    as_received: Annotated[SuccessRate, Field(validation_alias=AliasChoices("as_received", "as_sent"))]
    true_model: SuccessRate
    pixels: SuccessRate | None = None


@dataclass(frozen=True)
class Counts:
    """Numbers of private and public images, of reconstructions, and of broadcasts."""

    members: int
    public: int
    reconstructions: int
    broadcasts: int


@dataclass(frozen=True)
class Gallery:
    """The first images of each class, encoded by `studies.pictures`: real, by the generator alone, by attackers."""

    shape: tuple[int, int, int]
    real: list[str]
    floor: list[str]
    made: dict[str, list[str]]


@dataclass(frozen=True)
class Inversion(Result):
    """Reconstructions of all private classes of one federation, by all attackers.

    Attributes:
        train, test, macro: accuracy on members, on held-out images, and the mean over classes of the latter.
        classes: names of the private classes.
        floor: images of the generator without any model.
        ceiling: held-out private images.
    """

    defence: str
    seed: int
    train: float
    test: float
    macro: float
    classes: list[str]
    records: Counts
    attackers: dict[str, InversionFigures]
    floor: SuccessRate
    ceiling: SuccessRate
    cpu_seconds: float
    gallery: Gallery | None = None


@dataclass(frozen=True)
class TrainedGan(Result):
    """Training of the generator: public images, its critic's distances by epoch."""

    images: int
    distances: list[float]
    cpu_seconds: float


@dataclass(frozen=True)
class TrainedEvaluator(Result):
    """Training of the evaluator: its accuracy on held-out images."""

    accuracy: float
    cpu_seconds: float
