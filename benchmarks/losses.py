"""Losses other than squared error, each with targets that suit it and torch's own code for it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import fedveil

Function = Callable[[Tensor, Tensor], Tensor]
TEMPERATURE = 0.5


@dataclass(frozen=True)
class Trial:
    """A loss as it is tried.

    Attributes:
        loss: a name, a loss or a function.
        plain: the same in torch's functions, from outputs and targets to one number for the batch.
        targets: from samples, outputs and a generator to targets; floating ones in float64.
    """

    loss: str | fedveil.BatchLoss
    plain: Function
    targets: Callable[[int, int, torch.Generator], Tensor]


def classes(samples: int, outputs: int, generator: torch.Generator) -> Tensor:
    """Class indices."""
    return torch.randint(0, outputs, (samples,), generator=generator)


def bits(samples: int, outputs: int, generator: torch.Generator) -> Tensor:
    """0 or 1 for each output."""
    return torch.randint(0, 2, (samples, outputs), generator=generator).double()


def numbers(samples: int, outputs: int, generator: torch.Generator) -> Tensor:
    """Normal, twice as wide as where Huber's loss turns linear, so that both of its branches are taken."""
    return 2 * torch.randn(samples, outputs, generator=generator, dtype=torch.float64)


def pairs(samples: int, outputs: int, generator: torch.Generator) -> Tensor:
    """Which samples belong together: two by two, in random order."""
    return torch.randperm(samples, generator=generator) // 2


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Supervised contrastive loss: a sample is to be nearer to those of its own class than to all others."""
    directions = F.normalize(outputs, dim=1)
    itself = torch.eye(len(outputs), dtype=torch.bool)
    same = (targets.unsqueeze(0) == targets.unsqueeze(1)) & ~itself
    nearness = (directions @ directions.T / TEMPERATURE).masked_fill(itself, -torch.inf).log_softmax(1)
    return -(nearness.masked_fill(~same, 0.0).sum(1) / same.sum(1)).mean()


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed over outputs, averaged over samples."""
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="sum") / len(outputs)


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed over outputs, averaged over samples."""
    return F.huber_loss(outputs, targets, reduction="sum") / len(outputs)


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed over classes, by which torch divides, and averaged over samples."""
    return F.multi_margin_loss(outputs, targets) * outputs.shape[1]


TRIALS = {
    "cross-entropy": Trial("cross_entropy", F.cross_entropy, classes),
    "binary": Trial("binary_cross_entropy", binary_cross_entropy, bits),
    "Huber": Trial("huber", huber, numbers),
    "hinge": Trial("hinge", hinge, classes),
    "contrastive": Trial(fedveil.BatchLoss(contrastive), contrastive, pairs),
}
