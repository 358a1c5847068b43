"""Local training: the SGD steps that each client takes in a round before it sends the difference of two models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedveil.checks import check_count, check_range
from fedveil.errors import BadArgument

MAX_EPOCHS = 1000  # a server may not occupy a client for longer
SMALLEST_LR, LARGEST_LR = 1e-30, 1e4  # the largest rate fits in float16
DEFAULT_LR = 0.1


@dataclass(frozen=True)
class LocalTraining:
    """The settings of local training.

    In a round, a client goes through all its records `epochs` times, in batches and in an order that depends on the
    seed. It takes one SGD step per batch, starting from the model that it received. Its momentum starts at zero in
    every round.

    Attributes:
        epochs: number of passes over the client's records.
        lr: learning rate.
        batch_size: number of records per step; None for the federation's batch size.
        momentum: momentum.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("local_epochs", "local_lr", "local_batch", "local_momentum")
    epochs: int
    lr: float = DEFAULT_LR
    batch_size: int | None = None
    momentum: float = 0.0

    @classmethod
    def from_settings(cls, where: str, values: Mapping[str, object]) -> "LocalTraining | None":
        """Return the settings in `NAMES`, or None if there are no local epochs; None stands for the default."""
        epochs, lr, batch_size, momentum = (values.get(name) for name in cls.NAMES)
        if epochs is None:
            given = [name for name in cls.NAMES if values.get(name) is not None]
            if given:
                raise BadArgument(where, f"{given[0]} has no effect without local epochs", "set local_epochs=1 or more")
            return None
        fix = f"use 1 to {MAX_EPOCHS:,} local epochs"
        if check_count(where, "local_epochs", epochs, 1, fix) > MAX_EPOCHS:
            raise BadArgument(where, f"local_epochs must be at most {MAX_EPOCHS:,}, got {epochs}", fix)
        return cls(
            check_count(where, "local_epochs", epochs),
            check_range(where, "local_lr", DEFAULT_LR if lr is None else lr, SMALLEST_LR, LARGEST_LR),
            None if batch_size is None else check_count(where, "local_batch", batch_size),
            check_range(where, "local_momentum", 0.0 if momentum is None else momentum, 0.0, 1.0 - 2.0**-10),
        )

    def reach(self, steps: int) -> float:
        """Return how far `steps` steps move a parameter whose gradient is 1 in every step.

        A difference divided by its reach is a weighted mean of the gradients on the path.

        >>> LocalTraining(1, lr=0.5).reach(4), LocalTraining(1, lr=1.0, momentum=0.5).reach(2)
        (2.0, 2.5)
        """
        m = self.momentum
        return self.lr * (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)
