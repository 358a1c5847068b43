"""The runs at the paper's scale: all settings, chosen before the first run and not tuned on the results."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

DEFENCES = ("plain", "veil", "rounding")
"""The rounding baseline is plain training in another memory layout: other kernels, which sum in another order."""


@dataclass(frozen=True)
class ImageTask:
    """A data set of images and how ResNet20 is trained on it.

    Attributes:
        batch: number of images in a round, divided equally among the clients.
        peak: largest learning rate of the one-cycle schedule.
        weighted: whether the loss has class weights, inversely proportional to the frequency of the class.
        metrics: metrics in the table.
    """

    batch: int
    peak: float
    weighted: bool
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class ImageRun:
    """A training run on images."""

    task: str
    clients: int
    defence: str
    epochs: int
    seed: int = 0

    @property
    def name(self) -> str:
        """The name on the command line and of the folder."""
        return f"{self.task}-k{self.clients}-{self.defence}-{self.seed}"


IMAGE_TASKS: Mapping[str, ImageTask] = MappingProxyType(
    {
        "cifar10": ImageTask(250, 0.2, False, ("accuracy", "loss")),
        "lesion": ImageTask(100, 0.1, True, ("accuracy", "balanced_accuracy", "auc", "loss")),
    }
)
IMAGE_RUNS = (
    *(ImageRun("cifar10", 5, defence, 24) for defence in DEFENCES),
    *(ImageRun("lesion", 5, defence, 30) for defence in DEFENCES),
    *(ImageRun("cifar10", clients, defence, 10) for clients in (1, 10) for defence in ("plain", "veil")),
)
