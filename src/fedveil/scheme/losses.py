"""Losses: one value per sample, and its derivative with respect to the model's outputs.

The last axis of the outputs is that of classes or target numbers. Values at further positions of a sample are summed;
the caller averages over samples.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fedveil.errors import BadArgument
from fedveil.scheme.torch_losses import refuse_reduced

Function = Callable[[Tensor, Tensor], Tensor]


class Loss(Protocol):
    """A loss that clients minimise."""

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
    if targets.shape == outputs.shape[:1] and targets.is_floating_point():
        fix += "; for classes, whole numbers: targets.long()"
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
        what, fix = (
            f"classes are {found}, the model has outputs 0 to {classes - 1}",
            (f"whole numbers from 0 to {classes - 1}, or a model with more outputs"),
        )
        raise BadArgument("targets", what, fix) from error


def per_sample(loss: "Loss", outputs: Tensor, weights: Tensor | None) -> Tensor | float:
    """The weight of each sample, by default 1 / samples, broadcastable to outputs."""
    if weights is None:
        return 1 / outputs.shape[0]
    if couples_samples(loss) and bool((weights != weights[0]).any()):
        what = f"{loss.name} compares samples of a batch with one another, and these are samples of several clients"
        raise BadArgument("weights", what, "one client_step per client: their batches cannot be fused")
    return weights.to(outputs).reshape(-1, *[1] * (outputs.dim() - 1))


class _Named(ABC):
    """A loss that travels by its name: a sum over outputs, by default each compared with its own target number."""

    name: ClassVar[str]

    def settings(self) -> dict[str, Any]:
        return dict(vars(self))

    def dense(self, targets: Tensor, outputs: Tensor) -> Tensor:
        return match_targets(outputs, targets)

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._terms(outputs, targets).flatten(1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._slope(outputs, targets)

    @abstractmethod
    def _terms(self, y: Tensor, target: Tensor) -> Tensor: ...

    @abstractmethod
    def _slope(self, y: Tensor, target: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class SquaredError(_Named):
    """Half the squared distance (paper, Eq. 6)."""

    name = "squared_error"

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square() / 2

    def _slope(self, y: Tensor, target: Tensor) -> Tensor:
        return y - target


@dataclass(frozen=True)
class BinaryCrossEntropy(_Named):
    """Cross-entropy of independent yes/no outputs, given as logits; targets from 0 to 1."""

    name = "binary_cross_entropy"

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(y, target, reduction="none")

    def _slope(self, y: Tensor, target: Tensor) -> Tensor:
        return torch.sigmoid(y) - target


@dataclass(frozen=True)
class LogCosh(_Named):
    """log cosh (y - target): squared error near 0, absolute error far away, smooth everywhere."""

    name = "log_cosh"

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        x = y - target
        return x + F.softplus(-2 * x) - math.log(2)  # cannot overflow

    def _slope(self, y: Tensor, target: Tensor) -> Tensor:
        return torch.tanh(y - target)


@dataclass(frozen=True)
class Poisson(_Named):
    """Negative log likelihood of counts whose rate is exp(output), without the constant log(target!)."""

    name = "poisson"

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        return y.exp() - target * y

    def _slope(self, y: Tensor, target: Tensor) -> Tensor:
        return y.exp() - target


@dataclass(frozen=True)
class AbsoluteError(_Named):
    """Sum of |y - target|."""

    name = "absolute_error"

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        return (y - target).abs()

    def _slope(self, y: Tensor, target: Tensor) -> Tensor:
        return (y - target).sign()


@dataclass(frozen=True)
class Huber(_Named):
    """Half the squared distance up to `delta`, and beyond it delta times (distance - delta / 2)."""

    delta: float = 1.0
    name = "huber"

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise BadArgument("Huber", f"delta must be a number above 0, got {self.delta}")

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        return F.huber_loss(y, target, reduction="none", delta=self.delta)

    def _slope(self, y: Tensor, target: Tensor) -> Tensor:
        return (y - target).clamp(-self.delta, self.delta)


class _OfClasses(_Named):
    """A loss that compares classes with one another."""

    def dense(self, targets: Tensor, outputs: Tensor) -> Tensor:
        return one_hot(targets, outputs)


@dataclass(frozen=True)
class Hinge(_OfClasses):
    """Sum over the other classes of max(0, 1 - y_target + y_other); targets are class indices or one-hot rows.

    Like torch's multi_margin_loss, not divided by the number of classes.
    """

    name = "hinge"

    def _margins(self, y: Tensor, target: Tensor) -> Tensor:
        return (1 - target) * (1 + y - (target * y).sum(-1, keepdim=True))

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        return self._margins(y, target).relu()

    def _slope(self, y: Tensor, target: Tensor) -> Tensor:
        inside = (self._margins(y, target) > 0).to(y.dtype)
        return inside - target * inside.sum(-1, keepdim=True)


@dataclass(frozen=True)
class CrossEntropy(_OfClasses):
    """Softmax cross-entropy; targets are class indices, or one row of probabilities per sample.

    Args:
        weight: one factor per class; the mean is over the number of samples, not over their weights.
        label_smoothing: share of every target that is spread over all classes.
    """

    weight: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    name = "cross_entropy"

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            what = f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}"
            raise BadArgument("CrossEntropy", what)
        if self.weight is not None:
            weight = tuple(float(w) for w in self.weight)
            if not all(math.isfinite(w) and w >= 0 for w in weight):
                raise BadArgument("CrossEntropy", "class weights must be finite and not negative")
            object.__setattr__(self, "weight", weight)

    def _wanted(self, target: Tensor) -> Tensor:
        classes = target.shape[-1]
        if self.label_smoothing:
            target = target * (1 - self.label_smoothing) + self.label_smoothing / classes
        if self.weight is not None:
            if len(self.weight) != classes:
                what = f"there are {len(self.weight)} class weights, the model has {classes} outputs"
                raise BadArgument("CrossEntropy", what)
            target = target * torch.tensor(self.weight, dtype=target.dtype, device=target.device)
        return target

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        return -self._wanted(target) * y.log_softmax(-1)

    def _slope(self, y: Tensor, target: Tensor) -> Tensor:
        wanted = self._wanted(target)
        return y.softmax(-1) * wanted.sum(-1, keepdim=True) - wanted


@dataclass(frozen=True)
class Custom:
    """A user's function (outputs, targets) -> one value per sample; values per output or position are summed."""

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

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The function's values, summed over a sample's outputs and positions.

        Other shapes are refused: (n, n) for outputs (n, 1) compares each output with the targets of all samples.
        """
        found, first, others = self.function(outputs, targets), outputs.shape[:1], outputs.shape[1:]
        known = (first, first + others, first + others[:-1], first + others[1:])
        if not isinstance(found, Tensor) or found.shape not in known:
            what = f"it returned {_shape_of(found)} for outputs of {_shape_of(outputs)}, not one value per sample"
            fix = "return a tensor of shape (samples,), with reduction='none' and a sum over other dims"
            if isinstance(found, Tensor) and not found.dim():
                fix += "; or, if it compares samples with one another, fedveil.BatchLoss(function)"
            raise BadArgument(f"loss {self.name}", what, fix)
        return found.flatten(1).sum(1) if found.dim() > 1 else found

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """By autograd."""
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            value = self.values(leaf, targets).sum()
            if not value.requires_grad:
                raise BadArgument(f"loss {self.name}", "it does not depend on the outputs, so it has no gradient")
            (found,) = torch.autograd.grad(value, leaf)
        return found


class BatchLoss(Custom):
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
OF_CLASSES = (CrossEntropy, Hinge)
LOSSES: dict[str, Callable[..., Loss]] = {
    kind.name: kind
    for kind in (SquaredError, CrossEntropy, BinaryCrossEntropy, LogCosh, Poisson, AbsoluteError, Huber, Hinge)
}


def find_loss(loss: "str | Loss | Function") -> Loss:
    """The loss of that name, a loss object unchanged, or a user's function as a loss."""
    if isinstance(loss, str):
        if loss not in LOSSES:
            known = ", ".join(f'"{name}"' for name in LOSSES)
            raise BadArgument("loss", f"there is no loss {loss!r}", f"use one of {known}, or a function")
        return LOSSES[loss]()
    if isinstance(loss, _Named | Custom):
        return loss
    if isinstance(loss, type):
        raise BadArgument("loss", f"{loss.__name__} is a class", 'an object of it, or a name such as "cross_entropy"')
    if not callable(loss):
        raise BadArgument("loss", f"a {type(loss).__name__} is not a loss", "a name, or a function (outputs, targets)")
    refuse_reduced(loss)
    return Custom(loss)
