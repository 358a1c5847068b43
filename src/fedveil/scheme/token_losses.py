"""Cross-entropy over labelled positions, averaged over a batch, as Hugging Face models compute it from labels."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedveil.errors import BadArgument
from fedveil.scheme.losses import IGNORED, AutogradLoss, check_classes
from fedveil.wire import Values


@dataclass(frozen=True)
class TokenCrossEntropy(AutogradLoss):
    """Cross-entropy of class indices, averaged over the positions of a batch whose label is not -100.

    This is torch.nn.CrossEntropyLoss for outputs with classes on the last axis. The divisor depends on the whole batch,
    so the loss couples samples: batches are not fused, and a client that uses all its records in one
    round needs a batch_size that is at least their number.

    Args:
        label_smoothing: fraction of each target that is distributed equally over all classes.
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            message = f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}"
            raise BadArgument(f"loss {self.name}", message)

    @property
    def name(self) -> str:
        """The name of the loss in messages."""
        return "token_cross_entropy"

    @property
    def couples(self) -> bool:
        """Always true: the divisor is the number of labels in the batch."""
        return True

    def settings(self) -> Values:
        """Return the fields by name."""
        return dict(vars(self))

    def weigh_part(self, weights: Tensor) -> Tensor:
        """Return 1 / samples; refuse a batch with only some of a client's records, because the divisor is unknown."""
        equal_weights = torch.full_like(weights, 1 / len(weights))
        if not torch.equal(weights, equal_weights):
            message = "its mean divides by the number of labels, but this batch contains only some of the records"
            fix = 'choose a batch_size that covers all records of a client, or loss="cross_entropy"'
            raise BadArgument(f"loss {self.name}", message, fix)
        return equal_weights

    def select(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs and the class indices of all positions that have a label."""
        outputs, targets = self._align(outputs, targets)
        labelled = targets != IGNORED
        return outputs[labelled], targets[labelled].long()

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the batch's mean, repeated for each sample."""
        result, classes = self.select(outputs, targets)
        if not len(classes):
            message = f"every label in a batch of {len(targets)} records is {IGNORED}, which is ignored"
            raise BadArgument("targets", message, "omit these records, or use a larger batch_size")
        check_classes(classes, result.shape[-1])
        return F.cross_entropy(result, classes, label_smoothing=self.label_smoothing).expand(outputs.shape[0])

    def _align(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if targets.is_floating_point() or outputs.dim() < 2 or targets.shape != outputs.shape[:-1]:
            form = f"got {targets.dtype} of shape {tuple(targets.shape)}"
            message = f"{form}, but {self.name} expects class indices of shape {tuple(outputs.shape[:-1])}"
            raise BadArgument(
                "targets", message, "use one label per position; classes are on the last axis of the outputs"
            )
        return outputs, targets


@dataclass(frozen=True)
class CausalCrossEntropy(TokenCrossEntropy):
    """`TokenCrossEntropy` of each position's outputs and the next position's label, for language models."""

    @property
    def name(self) -> str:
        """The name of the loss in messages."""
        return "causal_cross_entropy"

    def _align(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs, targets = super()._align(outputs, targets)
        if targets.dim() < 2:
            raise BadArgument("targets", f"{self.name} needs one label per position", "use token_cross_entropy")
        return outputs[:, :-1], targets[:, 1:]


TOKEN_LOSSES: dict[str, type[TokenCrossEntropy]] = {
    kind().name: kind for kind in (TokenCrossEntropy, CausalCrossEntropy)
}
