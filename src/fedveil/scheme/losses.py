"""Losses: a value a sample, and its derivative with respect to the model's outputs.

The last axis of the outputs is that of classes or target numbers. What a loss has at further positions of a sample is
summed; what samples have is averaged by whoever calls.
"""

import math
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
        """How it is called in messages."""

    def settings(self) -> dict[str, Any]:
        """Plain values that make an equal loss at the other end of a wire."""

    def dense(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Targets as this loss compares them with `outputs`; those that are dense already stay as they are."""

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One number a sample."""

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The derivative of values with respect to the outputs, for dense targets."""


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
    """Class indices as rows of zeros and a one, in the outputs' shape."""
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


def per_sample(outputs: Tensor, weights: Tensor | None) -> Tensor | float:
    """The weight of each sample, to multiply outputs with: 1 / samples unless given."""
    if weights is None:
        return 1 / outputs.shape[0]
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
    """Negative log likelihood of counts, exp(y) - target y, whose rate is exp(output).

    It grows so fast that a veil needs many nodes for it: logit shifts of about 3 are the most it carries.
    """

    name: ClassVar[str] = "poisson"

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Up to log(target!), which no gradient sees."""
        return (outputs.exp() - targets * outputs).flatten(1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """exp(y) - target."""
        return outputs.exp() - targets


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy; targets are class indices, or a row of probabilities a sample.

    Args:
        weight: one number a class, multiplied with that class's part; samples are averaged by their number, not by
            their weights.
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
                raise BadArgument("CrossEntropy", "class weights must be finite and not below 0")
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
class Custom:
    """A user's function (outputs, targets) -> one value a sample, smooth in the outputs."""

    function: Function

    @property
    def name(self) -> str:
        """The function's."""
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    def settings(self) -> dict[str, Any]:
        """None: a function does not travel."""
        return {}

    def dense(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """As they are."""
        return targets

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What the function returns."""
        found = self.function(outputs, targets)
        if not isinstance(found, Tensor) or found.shape != outputs.shape[:1]:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            what = f"it returned {shape} for outputs of shape {tuple(outputs.shape)}, not one value a sample"
            raise BadArgument(f"loss {self.name}", what, "return a tensor of shape (samples,): reduction='none'")
        return found

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """By autograd."""
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            (found,) = torch.autograd.grad(self.values(leaf, targets).sum(), leaf)
        return found


KINKED = {
    "absolute_error": (F.l1_loss, nn.L1Loss),
    "hinge": (F.hinge_embedding_loss, nn.HingeEmbeddingLoss, F.multi_margin_loss, nn.MultiMarginLoss),
    "huber": (F.huber_loss, nn.HuberLoss, F.smooth_l1_loss, nn.SmoothL1Loss),
}
KINDS = (SquaredError, CrossEntropy, BinaryCrossEntropy, LogCosh, Poisson)
LOSSES: dict[str, Callable[..., Loss]] = {kind.name: kind for kind in KINDS}


def _refuse_kinks(loss: object) -> None:
    """A loss with a kink is not the polynomial that nodes see, however many there are."""
    for name, known in KINKED.items():
        if loss == name or loss in known or type(loss) in known:
            what = f"{name} has a kink, and a veil recovers smooth losses only"
            raise BadArgument("loss", what, 'use "log_cosh", which is smooth and as robust; or defence "plain"')


def find_loss(loss: "str | Loss | Function") -> Loss:
    """The loss of that name, a loss as it is, or a user's function."""
    _refuse_kinks(loss)
    if isinstance(loss, str):
        if loss not in LOSSES:
            known = ", ".join(f'"{name}"' for name in LOSSES)
            raise BadArgument("loss", f"there is no loss {loss!r}", f"use one of {known}, or a function")
        return LOSSES[loss]()
    if isinstance(loss, (*KINDS, Custom)):
        return loss
    if not callable(loss):
        raise BadArgument("loss", f"a {type(loss).__name__} is no loss", "a name, or a function of outputs and targets")
    return Custom(loss)


def named_loss(name: str, settings: Mapping[str, Any]) -> Loss | None:
    """The loss that another process named, or None if it is a user's function."""
    if name not in LOSSES:
        return None
    try:
        return LOSSES[name](**settings)
    except TypeError as error:
        raise BadArgument("loss", f"{name} has no settings {sorted(settings)}: {error}") from error
