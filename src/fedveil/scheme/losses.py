"""Losses: the value for each sample, and its derivative with respect to the model's outputs.

The last axis of the outputs contains classes or predicted values. Values at several positions of a sample are summed;
the caller averages over samples. A torch loss or a user's function receives the outputs as the model returns them.

The derivatives of named losses are implemented explicitly. With autograd, a client's step would take 25 to 35 % longer
for batches of 32, and 7 to 10 % longer for batches of 512 (perceptron with three hidden layers of 50 units).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedveil.errors import BadArgument
from fedveil.wire import Values

Function = Callable[[Tensor, Tensor], Tensor]
IGNORED = -100  # torch's default ignore_index


class Loss(ABC):
    """A loss that clients minimise."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that identifies the loss in broadcasts and errors."""

    @property
    def couples(self) -> bool:
        """Whether a sample's value depends on the other samples in its batch, or on their number."""
        return False

    def settings(self) -> Values:
        """Return plain values from which another process can build the same loss; empty for a user's function."""
        return {}

    def dense(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Convert targets to the form that `values` and `gradient` expect; by default, return them unchanged."""
        return targets

    def weigh_part(self, weights: Tensor) -> Tensor:
        """Return the sample weights for a batch with only some of the samples, for a loss that couples samples."""
        return weights

    @abstractmethod
    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, for targets returned by `dense`."""

    @abstractmethod
    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the derivative of the sum of `values` with respect to the outputs, for targets returned by `dense`.

        For a named loss, outputs may have extra leading dims that share the same targets.
        """


def match_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return targets with the shape and dtype of the outputs; shapes (n,) and (n, 1) are equivalent."""
    if targets.shape == outputs.shape and targets.dtype == outputs.dtype:
        return targets
    samples, shape = outputs.shape[0], tuple(outputs.shape)
    if targets.dim() and targets.shape[0] == samples and targets.numel() == outputs.numel():
        return targets.reshape(shape).to(outputs.dtype)
    fix = f"use targets of shape {shape}"
    if targets.shape == outputs.shape[:1]:
        is_float = targets.is_floating_point()
        fix = f"{fix}, or targets.long() for classes" if is_float else f"use F.one_hot(targets, {shape[-1]})"
    raise BadArgument("targets", f"shape is {tuple(targets.shape)}, but the model's outputs have shape {shape}", fix)


def one_hot(targets: Tensor, outputs: Tensor) -> Tensor:
    """Return class indices as one-hot rows with the shape of the outputs."""
    if targets.is_floating_point() or targets.shape != outputs.shape[:-1]:
        return match_targets(outputs, targets)
    try:
        return F.one_hot(targets.long(), outputs.shape[-1]).to(outputs.dtype)
    except RuntimeError:
        check_classes(targets, outputs.shape[-1])
        raise


def check_classes(targets: Tensor, num_classes: int) -> None:
    """Refuse class indices for which the model has no output."""
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= num_classes:
        message = f"classes range from {low} to {high}, but the model has outputs 0 to {num_classes - 1}"
        fix = f"use class indices from 0 to {num_classes - 1}, or a model with more outputs"
        if low == IGNORED:
            fix = 'use loss="token_cross_entropy" or, for language models, "causal_cross_entropy"'
        raise BadArgument("targets", message, fix)


def sample_weights(outputs: Tensor, weights: Tensor | None, loss: Loss | None = None) -> Tensor | float:
    """Return the weight of each sample, by default 1 / samples, in a shape that broadcasts to the outputs.

    If a loss couples samples, the weights must be equal; weights other than 1 / samples mean that the batch
    contains only some of the samples.
    """
    if weights is None:
        return 1 / outputs.shape[0]
    if loss is not None and loss.couples:
        if bool((weights != weights[0]).any()):
            message = f"{loss.name} compares samples of a batch with each other, but these come from several clients"
            raise BadArgument("weights", message, "call client_step once per client; their batches cannot be fused")
        weights = loss.weigh_part(weights)
    return weights.to(outputs).reshape(-1, *[1] * (outputs.dim() - 1))


@dataclass(frozen=True)
class NamedLoss(Loss):
    """A loss that is sent by name; by default, a sum over outputs, each of which is compared with a target.

    Its settings are its dataclass fields; most losses have none.
    """

    def settings(self) -> Values:
        """Return the fields by name."""
        return dict(vars(self))

    def dense(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Return targets with the shape of the outputs."""
        return match_targets(outputs, targets)

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum the terms of each sample."""
        return self._terms(outputs, targets).flatten(1).sum(1)

    @abstractmethod
    def _terms(self, y: Tensor, target: Tensor) -> Tensor: ...


class SquaredError(NamedLoss):
    """Half the squared distance (paper, Eq. 6)."""

    name = "squared_error"

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square() / 2

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return y - target."""
        return outputs - targets


class BinaryCrossEntropy(NamedLoss):
    """Cross-entropy of independent binary outputs, given as logits; targets are between 0 and 1."""

    name = "binary_cross_entropy"

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(y, target, reduction="none")

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return sigmoid(y) - target."""
        return torch.sigmoid(outputs) - targets


class LogCosh(NamedLoss):
    """log cosh (y - target), which is smooth, close to half the squared error near 0, and linear far from 0."""

    name = "log_cosh"

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        x = y - target
        return x + F.softplus(-2 * x) - math.log(2)  # cannot overflow

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return tanh(y - target)."""
        return torch.tanh(outputs - targets)


class Poisson(NamedLoss):
    """Negative log-likelihood of counts whose rate is exp(output), without the constant log(target!)."""

    name = "poisson"

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        return y.exp() - target * y

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return exp(y) - target."""
        return outputs.exp() - targets


class AbsoluteError(NamedLoss):
    """Sum of |y - target|."""

    name = "absolute_error"

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        return (y - target).abs()

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sign of y - target."""
        return (outputs - targets).sign()


@dataclass(frozen=True)
class Huber(NamedLoss):
    """Half the squared distance if the distance is at most `delta`, otherwise delta times (distance - delta / 2)."""

    delta: float = 1.0
    name = "huber"

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise BadArgument("Huber", f"delta must be positive and finite, got {self.delta}")

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        return F.huber_loss(y, target, reduction="none", delta=self.delta)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return y - target, clipped to [-delta, delta]."""
        return (outputs - targets).clamp(-self.delta, self.delta)


class ClassLoss(NamedLoss):
    """A loss that compares classes with each other."""

    def dense(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Return class indices as one-hot rows."""
        return one_hot(targets, outputs)


class Hinge(ClassLoss):
    """Sum over the other classes of max(0, 1 - y_target + y_other); targets are class indices or one-hot rows.

    This is torch's multi_margin_loss without the division by the number of classes.
    """

    name = "hinge"

    def _margins(self, y: Tensor, target: Tensor) -> Tensor:
        return (1 - target) * (1 + y - (target * y).sum(-1, keepdim=True))

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        return self._margins(y, target).relu()

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 1 for each other class within the margin, and minus the number of such classes for the target."""
        violates = (self._margins(outputs, targets) > 0).to(outputs.dtype)
        return violates - targets * violates.sum(-1, keepdim=True)


@dataclass(frozen=True)
class CrossEntropy(ClassLoss):
    """Softmax cross-entropy; targets are class indices, or one row of probabilities per sample.

    Args:
        weight: one factor per class. The mean divides by the number of samples, not by the sum of their weights.
        label_smoothing: fraction of each target that is distributed equally over all classes.
        average_positions: whether to average over the positions of a sample, with classes on axis 1, as
            torch.nn.CrossEntropyLoss does; by default, positions are summed.
    """

    weight: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    average_positions: bool = False
    name = "cross_entropy"

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            message = f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}"
            raise BadArgument("CrossEntropy", message)
        if self.weight is not None:
            weight = tuple(float(w) for w in self.weight)
            if not all(math.isfinite(w) and w >= 0 for w in weight):
                raise BadArgument("CrossEntropy", "class weights must be finite and nonnegative")
            object.__setattr__(self, "weight", weight)

    def _weigh(self, target: Tensor) -> Tensor:
        num_classes = target.shape[-1]
        if self.label_smoothing:
            target = target * (1 - self.label_smoothing) + self.label_smoothing / num_classes
        if self.weight is not None:
            if len(self.weight) != num_classes:
                message = f"there are {len(self.weight)} class weights, but the model has {num_classes} outputs"
                raise BadArgument("CrossEntropy", message)
            target = target * torch.tensor(self.weight, dtype=target.dtype, device=target.device)
        positions = target.shape[1:-1].numel() if self.average_positions else 1
        return target if positions == 1 else target / positions

    def _terms(self, y: Tensor, target: Tensor) -> Tensor:
        return -self._weigh(target) * y.log_softmax(-1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return softmax(y) times the sum of the weighted targets, minus the weighted targets."""
        weighted = self._weigh(targets)
        return outputs.softmax(-1) * weighted.sum(-1, keepdim=True) - weighted


class AutogradLoss(Loss):
    """A loss that is differentiated by autograd and receives outputs and targets unchanged."""

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Differentiate the sum of the values."""
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            value = self.values(leaf, targets).sum()
            if not value.requires_grad:
                raise BadArgument(f"loss {self.name}", "it does not depend on the outputs, so it has no gradient")
            (result,) = torch.autograd.grad(value, leaf)
        return result


@dataclass(frozen=True)
class Custom(AutogradLoss):
    """A user's function (outputs, targets) that returns one value per sample; values per output are summed."""

    function: Function

    @property
    def name(self) -> str:
        """The function's name."""
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the function's values, summed over the outputs and positions of each sample.

        Other shapes are refused. For example, (n, n) for outputs of shape (n, 1) means that each output was compared
        with the targets of all samples.
        """
        result, samples, other_dims = self.function(outputs, targets), outputs.shape[:1], outputs.shape[1:]
        allowed_shapes = (samples, samples + other_dims, samples + other_dims[:-1], samples + other_dims[1:])
        if not isinstance(result, Tensor) or result.shape not in allowed_shapes:
            shape = tuple(outputs.shape)
            message = f"it returned {_describe(result)} for outputs of shape {shape}, not one value per sample"
            fix = "return a tensor of shape (samples,), with reduction='none' and a sum over the other dims"
            if isinstance(result, Tensor) and not result.dim():
                fix += "; or, if it compares samples with each other, use fedveil.BatchLoss(function)"
            raise BadArgument(f"loss {self.name}", message, fix)
        return result.flatten(1).sum(1) if result.dim() > 1 else result


class BatchLoss(Custom):
    """A user's function (outputs, targets) that returns one number per batch, such as a contrastive or ranking loss.

    The loss couples the samples of each client's batch. A veil is therefore equivalent to plain federated training, but
    not to training on the batches of all clients together, and batches are never fused.
    """

    couples = True

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the batch's value, repeated for each sample, so that the mean is the loss."""
        result = self.function(outputs, targets)
        if not isinstance(result, Tensor) or result.dim():
            message = f"it returned {_describe(result)}, not one number for the batch"
            raise BadArgument(f"loss {self.name}", message, "return a tensor of shape (), such as a mean over pairs")
        return result.expand(outputs.shape[0])


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def couples_samples(loss: Loss) -> bool:
    """Return whether a loss couples the samples of a batch, so that clients' batches must not be fused."""
    return loss.couples


AUTOGRAD_LOSSES = (AutogradLoss,)  # losses that receive targets unchanged
CLASS_LOSSES = (ClassLoss,)
LOSSES: dict[str, type[NamedLoss]] = {
    kind.name: kind
    for kind in (SquaredError, CrossEntropy, BinaryCrossEntropy, LogCosh, Poisson, AbsoluteError, Huber, Hinge)
}


def find_loss(loss: "str | Loss | Function") -> Loss:
    """Return the loss for a name, a `Loss`, a torch loss module or a function."""
    if isinstance(loss, str):
        from fedveil.scheme.token_losses import TOKEN_LOSSES  # imported here to avoid a circular import

        if loss not in LOSSES and loss not in TOKEN_LOSSES:
            names = ", ".join(f'"{name}"' for name in (*LOSSES, *TOKEN_LOSSES))
            raise BadArgument("loss", f"unknown loss {loss!r}", f"use one of {names}, or a function")
        return LOSSES[loss]() if loss in LOSSES else TOKEN_LOSSES[loss]()
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type):
        raise BadArgument("loss", f"{loss.__name__} is a class", f"pass an instance: {loss.__name__}()")
    if not callable(loss):
        fix = "pass a name, a torch loss module or a function (outputs, targets)"
        raise BadArgument("loss", f"expected a loss, got {type(loss).__name__}", fix)
    from fedveil.scheme.torch_losses import read_module  # imported here to avoid a circular import

    return read_module(loss) or Custom(loss)
