"""Losses: one value per sample, and its derivative with respect to the model's outputs.

The last axis of the outputs is that of classes or target numbers. Values at further positions of a sample are summed;
the caller averages over samples.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.errors import BadArgument

Function = Callable[[Tensor, Tensor], Tensor]


class Loss(Protocol):
    """What clients minimise."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    def settings(self) -> dict[str, Any]:
        """Plain values from which another process can build an equal loss."""

    def dense(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Targets as this loss compares them with `outputs`; dense ones are not changed."""

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One number per sample."""

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The derivative of values with respect to the outputs, for dense targets.

        Outputs of a named loss may have more leading dims, with the same targets.
        """


def match_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Targets in the outputs' shape; (n,) and (n, 1) mean the same."""
    if targets.shape == outputs.shape and targets.dtype == outputs.dtype:
        return targets
    samples, wanted = outputs.shape[0], tuple(outputs.shape)
    if targets.dim() and targets.shape[0] == samples and targets.numel() == outputs.numel():
        return targets.reshape(wanted).to(outputs.dtype)
    classes = targets.shape == outputs.shape[:1] and not targets.is_floating_point()
    fix = f"torch.nn.functional.one_hot(targets, {wanted[-1]})" if classes else f"targets of shape {wanted}"
    raise BadArgument("targets", f"shape is {tuple(targets.shape)}, the model's outputs have {wanted}", fix)


def one_hot(targets: Tensor, outputs: Tensor) -> Tensor:
    """Class indices as one-hot rows, in the outputs' shape."""
    classes = outputs.shape[-1]
    if targets.is_floating_point() or targets.shape != outputs.shape[:-1]:
        return match_targets(outputs, targets)
    try:
        return F.one_hot(targets.long(), classes).to(outputs.dtype)
    except RuntimeError as error:
        found = f"from {int(targets.min())} to {int(targets.max())}"
        raise BadArgument("targets", f"classes are {found}, the model has outputs 0 to {classes - 1}") from error


def classes_last(targets: Tensor, rank: int, axis: int) -> Tensor:
    """Targets for outputs of `rank` dims whose classes were moved from `axis` to the last dim."""
    return targets.movedim(axis, -1) if targets.is_floating_point() and targets.dim() == rank else targets


def per_sample(loss: "Loss", outputs: Tensor, weights: Tensor | None) -> Tensor | float:
    """The weight of each sample, by default 1 / samples, broadcastable to outputs."""
    if weights is None:
        return 1 / outputs.shape[0]
    if couples_samples(loss) and bool((weights != weights[0]).any()):
        what = f"{loss.name} compares samples of a batch with one another, and these are samples of several clients"
        raise BadArgument("weights", what, "one client_step per client: their batches cannot be fused")
    return weights.to(outputs).reshape(-1, *[1] * (outputs.dim() - 1))


class _Elementwise:
    """A loss that compares every output with its own target number."""

    def settings(self) -> dict[str, Any]:
        """None."""
        return {}

    def dense(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """In the outputs' shape."""
        return match_targets(outputs, targets)


@dataclass(frozen=True)
class SquaredError(_Elementwise):
    """Half the squared distance (paper, Eq. 6)."""

    name: ClassVar[str] = "squared_error"

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of (y - target)^2 / 2."""
        return (outputs - targets).square().flatten(1).sum(1) / 2

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The residual, y - target."""
        return outputs - targets


@dataclass(frozen=True)
class BinaryCrossEntropy(_Elementwise):
    """Cross-entropy of independent yes/no outputs, given as logits; targets from 0 to 1."""

    name: ClassVar[str] = "binary_cross_entropy"

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Summed over outputs."""
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").flatten(1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """sigmoid(y) - target."""
        return torch.sigmoid(outputs) - targets


@dataclass(frozen=True)
class LogCosh(_Elementwise):
    """log cosh (y - target): squared error near 0, absolute error far away, smooth everywhere."""

    name: ClassVar[str] = "log_cosh"

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log((e^x + e^-x) / 2) without overflow."""
        x = outputs - targets
        return (x + F.softplus(-2 * x) - math.log(2)).flatten(1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """tanh(y - target)."""
        return torch.tanh(outputs - targets)


@dataclass(frozen=True)
class Poisson(_Elementwise):
    """Negative log likelihood of counts with rate exp(output); nodes work for logit shifts of about 3 at most."""

    name: ClassVar[str] = "poisson"

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Without the constant log(target!)."""
        return (outputs.exp() - targets * outputs).flatten(1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """exp(y) - target."""
        return outputs.exp() - targets


@dataclass(frozen=True)
class AbsoluteError(_Elementwise):
    """Sum of |y - target|."""

    name: ClassVar[str] = "absolute_error"

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Summed over outputs."""
        return (outputs - targets).abs().flatten(1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sign of y - target."""
        return (outputs - targets).sign()


@dataclass(frozen=True)
class Huber(_Elementwise):
    """Half the squared distance up to `delta`, and beyond it delta times (distance - delta / 2)."""

    delta: float = 1.0
    name: ClassVar[str] = "huber"

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise BadArgument("Huber", f"delta must be a number above 0, got {self.delta}")

    def settings(self) -> dict[str, Any]:
        """The point where the loss becomes linear."""
        return {"delta": self.delta}

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Summed over outputs."""
        return F.huber_loss(outputs, targets, reduction="none", delta=self.delta).flatten(1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The residual y - target, from -delta to delta."""
        return (outputs - targets).clamp(-self.delta, self.delta)


@dataclass(frozen=True)
class Hinge:
    """Sum over the other classes of max(0, 1 - y_target + y_other); targets are class indices or one-hot rows."""

    name: ClassVar[str] = "hinge"

    def settings(self) -> dict[str, Any]:
        """None."""
        return {}

    def dense(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """One-hot, in the outputs' shape."""
        return one_hot(targets, outputs)

    def _margins(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (1 - targets) * (1 + outputs - (targets * outputs).sum(-1, keepdim=True))

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Like torch's multi_margin_loss, not divided by the number of classes."""
        return self._margins(outputs, targets).relu().flatten(1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """1 for every class within the margin, and minus their number for the target."""
        inside = (self._margins(outputs, targets) > 0).to(outputs.dtype)
        return inside - targets * inside.sum(-1, keepdim=True)


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy; targets are class indices, or one row of probabilities per sample.

    Args:
        weight: one factor per class; the mean is over the number of samples, not over their weights.
        label_smoothing: share of every target that is spread over all classes.
    """

    weight: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    name: ClassVar[str] = "cross_entropy"

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            what = f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}"
            raise BadArgument("CrossEntropy", what)
        if self.weight is not None:
            weight = tuple(float(w) for w in self.weight)
            if not all(math.isfinite(w) and w >= 0 for w in weight):
                raise BadArgument("CrossEntropy", "class weights must be finite and not negative")
            object.__setattr__(self, "weight", weight)

    def settings(self) -> dict[str, Any]:
        """Both arguments."""
        return {"weight": list(self.weight) if self.weight else None, "label_smoothing": self.label_smoothing}

    def dense(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Probabilities in the outputs' shape."""
        return one_hot(targets, outputs)

    def _wanted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets, smoothed and weighted."""
        classes = outputs.shape[-1]
        if self.label_smoothing:
            targets = targets * (1 - self.label_smoothing) + self.label_smoothing / classes
        if self.weight is not None:
            if len(self.weight) != classes:
                what = f"there are {len(self.weight)} class weights, the model has {classes} outputs"
                raise BadArgument("CrossEntropy", what)
            targets = targets * torch.tensor(self.weight, dtype=targets.dtype, device=targets.device)
        return targets

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """- sum_c w_c p_c log softmax(y)_c."""
        return -(self._wanted(outputs, targets) * outputs.log_softmax(-1)).flatten(1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """softmax(y) sum_c w_c p_c - w o p."""
        wanted = self._wanted(outputs, targets)
        return outputs.softmax(-1) * wanted.sum(-1, keepdim=True) - wanted


@dataclass(frozen=True)
class _Own(ABC):
    """A user's function."""

    function: Function

    @property
    def name(self) -> str:
        """The function's."""
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    def settings(self) -> dict[str, Any]:
        """None: a function cannot be sent."""
        return {}

    def dense(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Unchanged."""
        return targets

    @abstractmethod
    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One number per sample."""

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """By autograd."""
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            value = self.values(leaf, targets).sum()
            if not value.requires_grad:
                raise BadArgument(f"loss {self.name}", "it does not depend on the outputs, so it has no gradient")
            (found,) = torch.autograd.grad(value, leaf)
        return found


@dataclass(frozen=True)
class Custom(_Own):
    """A user's function (outputs, targets) -> one value per sample."""

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What the function returns."""
        found = self.function(outputs, targets)
        if not isinstance(found, Tensor) or found.shape != outputs.shape[:1]:
            what = (
                f"it returned {_shape_of(found)} for outputs of shape {tuple(outputs.shape)}, not one value per sample"
            )
            fix = "return a tensor of shape (samples,), with reduction='none' and a sum over other dims"
            if isinstance(found, Tensor) and not found.dim():
                fix += "; or, if it compares samples with one another, fedveil.BatchLoss(function)"
            raise BadArgument(f"loss {self.name}", what, fix)
        return found


@dataclass(frozen=True)
class BatchLoss(_Own):
    """A user's function (outputs, targets) -> one number for the whole batch, such as a contrastive or ranking loss.

    Each client's loss couples the samples of its own batch. So a veil equals plain federated training, not training on
    all clients' batches together, and batches are never fused.
    """

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The batch's value, repeated per sample: their mean is the loss."""
        found = self.function(outputs, targets)
        if not isinstance(found, Tensor) or found.dim():
            what = f"it returned {_shape_of(found)}, not one number for the batch"
            raise BadArgument(f"loss {self.name}", what, "return a tensor of shape (), such as a mean over pairs")
        return found.expand(outputs.shape[0])


def _shape_of(found: object) -> str:
    return f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"


def couples_samples(loss: Loss) -> bool:
    """Whether a loss couples the samples of a batch, so that clients' batches must not be fused."""
    return isinstance(loss, BatchLoss)


USERS = (Custom, BatchLoss)
OF_CLASSES = (CrossEntropy, Hinge)  # losses that compare classes with one another
SMOOTH = (SquaredError, CrossEntropy, BinaryCrossEntropy, LogCosh, Poisson)
KINKED = (AbsoluteError, Huber, Hinge)
LOSSES: dict[str, Callable[..., Loss]] = {kind.name: kind for kind in (*SMOOTH, *KINKED)}
TORCHS_KINKED = (F.l1_loss, nn.L1Loss, F.hinge_embedding_loss, nn.HingeEmbeddingLoss, F.multi_margin_loss,
    nn.MultiMarginLoss, F.huber_loss, nn.HuberLoss, F.smooth_l1_loss, nn.SmoothL1Loss)  # fmt: skip


def has_a_kink(loss: Loss) -> bool:
    """Whether a loss is known to have a kink, which no number of nodes can interpolate."""
    function = getattr(loss, "function", None)
    return isinstance(loss, KINKED) or function in TORCHS_KINKED or type(function) in TORCHS_KINKED


def find_loss(loss: "str | Loss | Function") -> Loss:
    """The loss of that name, a loss object unchanged, or a user's function as a loss."""
    if isinstance(loss, str):
        if loss not in LOSSES:
            known = ", ".join(f'"{name}"' for name in LOSSES)
            raise BadArgument("loss", f"there is no loss {loss!r}", f"use one of {known}, or a function")
        return LOSSES[loss]()
    if isinstance(loss, (*SMOOTH, *KINKED, *USERS)):
        return loss
    if not callable(loss):
        raise BadArgument("loss", f"a {type(loss).__name__} is not a loss", "a name, or a function (outputs, targets)")
    return Custom(loss)


def named_loss(name: str, settings: Mapping[str, Any]) -> Loss | None:
    """The loss that another process named, or None if it is a user's function."""
    if name not in LOSSES:
        return None
    try:
        return LOSSES[name](**settings)
    except TypeError as error:
        raise BadArgument("loss", f"{name} has no settings {sorted(settings)}: {error}") from error
