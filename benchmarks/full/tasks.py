"""The runs at the paper's scale: all settings, chosen before the first run and not tuned on the results."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

DEFENCES = ("plain", "veil", "rounding")
"""The rounding baseline is plain training whose gradients differ by rounding errors.

For images, the model has another memory layout (channels last): other kernels, which sum in another order. For bank, it
is `Plain(rounding=...)`.
"""
BANK_EVERY = 10  # epochs between evaluations, and between lines of progress


@dataclass(frozen=True)
class ImageTask:
    """A data set of images and how ResNet20 is trained on it.

    Attributes:
        batch: number of images in a round, divided equally among the clients.
        peak: largest learning rate of the one-cycle schedule.
        weighted: whether the loss has class weights, inversely proportional to the frequency of the class.
        metrics: metrics in the table; curves show the first one.
    """

    batch: int
    peak: float
    weighted: bool
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """A training run; `layers` is the depth of the MLP for bank."""

    task: str
    clients: int
    defence: str
    epochs: int
    seed: int = 0
    layers: int | None = None

    @property
    def name(self) -> str:
        """The name on the command line and of the folder."""
        net = f"-l{self.layers}" if self.layers else ""
        return f"{self.task}{net}-k{self.clients}-{self.defence}-{self.seed}"


IMAGE_TASKS: Mapping[str, ImageTask] = MappingProxyType(
    {
        "cifar10": ImageTask(250, 0.2, False, ("accuracy", "loss")),
        "lesion": ImageTask(100, 0.1, True, ("balanced_accuracy", "auc", "accuracy", "loss")),
    }
)
RUNS = (
    *(Run("cifar10", 5, defence, 24) for defence in DEFENCES),
    *(Run("cifar10", clients, defence, 10) for clients in (1, 10) for defence in ("plain", "veil")),
    *(Run("lesion", 5, defence, 30) for defence in DEFENCES),
    *(
        Run("bank", clients, defence, 200, seed, layers)
        for seed, clients, layers, defence in itertools.product(range(3), (10, 5, 1), (3, 5, 7), DEFENCES)
    ),
)
