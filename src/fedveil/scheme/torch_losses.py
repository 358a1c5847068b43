"""Use torch's loss modules as losses: a client minimises the module's value for its batch."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules import loss as torch_loss

from fedveil.checks import check_choice
from fedveil.errors import BadArgument
from fedveil.scheme.losses import IGNORED, AutogradLoss, CrossEntropy, Loss, match_targets
from fedveil.wire import Values

PREFIX = "torch.nn."  # prefix of the modules' names in messages
INDEX_LOSSES = ("CrossEntropyLoss", "MultiLabelMarginLoss", "MultiMarginLoss", "NLLLoss")
REDUCTIONS = ("none", "mean", "sum", "batchmean")
DEPRECATED_ARGUMENTS = ("size_average", "reduce")  # deprecated arguments of torch's modules


@dataclass(frozen=True, eq=False)
class TorchLoss(AutogradLoss):
    """A torch loss module, and the same module without a reduction.

    A client minimises the module's value for its batch, or for all its records if it uses all of them in one round.
    """

    module: nn.Module
    unreduced: nn.Module
    reduction: str

    @property
    def name(self) -> str:
        """The module's name."""
        return PREFIX + type(self.module).__name__

    @property
    def couples(self) -> bool:
        """Whether the module computes a sum, or a mean over class indices, which divides by their total weight."""
        return self.reduction == "sum" or (self.reduction == "mean" and hasattr(self.module, "ignore_index"))

    def settings(self) -> Values:
        """Return the module's options as plain values."""
        names = [name for name in inspect.signature(type(self.module)).parameters if name not in DEPRECATED_ARGUMENTS]
        options = {name: getattr(self.module, name) for name in names}
        return {name: option.tolist() if isinstance(option, Tensor) else option for name, option in options.items()}

    def weigh_part(self, weights: Tensor) -> Tensor:
        """Return weights for which partial sums add up; refuse part of a mean, because its divisor is unknown."""
        equal_weights = torch.full_like(weights, 1 / len(weights))
        if self.reduction != "sum" and not torch.equal(weights, equal_weights):
            message = "its mean divides by the weights of all samples, but this batch contains only some of them"
            fix = "choose a batch_size that covers all records of a client, or a loss that averages over samples"
            raise BadArgument(f"loss {self.name}", message, f"{fix}, such as fedveil.CrossEntropy(weight=...)")
        return equal_weights

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return values whose mean is the module's value: one per sample, or the batch's value for every sample."""
        if type(self.module).__name__ not in INDEX_LOSSES:
            targets = match_targets(outputs, targets)
        if self.couples:
            return self._call(self.module, outputs, targets).expand(outputs.shape[0])
        if any(buffer.dim() >= outputs.dim() and len(buffer) > 1 for buffer in self.module.buffers()):
            message, fix = "its weight has one number per sample of a batch", f"use fedveil.BatchLoss({self.name}(...))"
            raise BadArgument(f"loss {self.name}", message, fix)
        rows = self._call(self.unreduced, outputs, targets).reshape(outputs.shape[0], -1)
        return rows.mean(1) if self.reduction == "mean" else rows.sum(1)

    def _call(self, module: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        buffers = {name: buffer.to(outputs) for name, buffer in module.named_buffers()}
        try:
            result: Tensor = torch.func.functional_call(module, buffers, (outputs, targets))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:  # its message may contain a target
            forms = [f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in (targets, outputs)]
            message = f"{self.name} does not accept targets {forms[0]} for outputs {forms[1]}, or rejects their values"
            raise BadArgument("targets", message, "see torch's error above, which caused this one") from error
        return result


def read_module(loss: object) -> Loss | None:
    """Convert a torch loss module to a loss; return None for any other object.

    Cross-entropy without weights is replaced by `CrossEntropy`.
    """
    if not isinstance(loss, nn.Module) or type(loss).__module__ != torch_loss.__name__:
        return None
    result = _wrap(loss)
    smoothing = getattr(loss, "label_smoothing", None)
    defaults = {"weight": None, "ignore_index": IGNORED, "reduction": "mean", "label_smoothing": smoothing}
    if isinstance(smoothing, float) and smoothing < 1 and result.settings() == defaults:
        return CrossEntropy(label_smoothing=smoothing, average_positions=True)
    return result


def _wrap(module: nn.Module) -> TorchLoss:
    if len(inspect.signature(module.forward).parameters) != 2 or next(module.parameters(), None) is not None:
        fix = "pass a function (outputs, targets) that calls it and returns one value per sample"
        raise BadArgument("loss", f"{type(module).__name__} requires more than outputs and targets", fix)
    unreduced = copy.deepcopy(module)
    vars(unreduced)["reduction"] = "none"
    return TorchLoss(module, unreduced, check_choice("loss", "reduction", str(module.reduction), REDUCTIONS))


def is_module(name: str) -> bool:
    """Return whether this is the name of a torch loss module."""
    return name.startswith(PREFIX) and name.removeprefix(PREFIX) in torch_loss.__all__


def build_module(name: str, options: Mapping[str, bool | int | float | str | tuple[float, ...] | None]) -> TorchLoss:
    """Build a torch loss module from its name and options."""
    options_by_name = {
        key: torch.tensor(v, dtype=torch.float64) if isinstance(v, tuple) else v for key, v in options.items()
    }
    return _wrap(getattr(torch_loss, name.removeprefix(PREFIX))(**options_by_name))
