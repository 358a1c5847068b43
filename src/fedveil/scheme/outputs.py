"""Compute a model's outputs, and find their class axis: the last one, or axis 1 if the model ends with a convolution.

Losses expect classes on the last axis. These functions move the class axis there and back, so that a segmentation
network with outputs (n, classes, height, width) and targets (n, height, width) can be trained with the same losses as
any other.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedveil.graph.inputs import Inputs, arguments, call
from fedveil.graph.outputs import find_predictions
from fedveil.scheme.losses import AUTOGRAD_LOSSES, CLASS_LOSSES, CrossEntropy, Loss, one_hot


def compute_outputs(model: nn.Module, inputs: Inputs, buffers: dict[str, Tensor] | None = None) -> Tensor:
    """Return the model's predictions; if `buffers` are passed, they are used and updated instead of the model's."""
    if not buffers:
        return call(model, inputs)
    args, kwargs = arguments(inputs)
    return find_predictions(model, torch.func.functional_call(model, buffers, args, kwargs))


def head_axis(model: nn.Module) -> int | None:
    """Return the class axis of the model's last Linear (-1) or convolution (1); None if it has neither."""
    for module in reversed(list(model.modules())):
        if isinstance(module, _ConvNd | nn.Linear):
            return 1 if isinstance(module, _ConvNd) else -1
    return None


def class_axis(outputs: Tensor, targets: Tensor, axis: int | None = None) -> int:
    """Return the class axis of the outputs, 1 or -1.

    Class indices have the shape of the outputs without the class axis. If both axes match, as for outputs (n, c, c), or
    neither does, because targets are dense, return `axis`, which defaults to the last axis.
    """
    if outputs.dim() < 3:
        return -1
    last_matches, second_matches = (targets.shape == remove_axis(outputs.shape, candidate) for candidate in (-1, 1))
    if last_matches != second_matches:
        return -1 if last_matches else 1
    return -1 if axis is None else axis


def remove_axis(shape: torch.Size, axis: int) -> torch.Size:
    """Return the shape without one of its axes."""
    axis %= max(1, len(shape))
    return shape[:axis] + shape[axis + 1 :]


def are_class_indices(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether targets are class indices for these outputs."""
    shape_matches = targets.shape in (remove_axis(outputs.shape, -1), remove_axis(outputs.shape, 1))
    return shape_matches and not targets.is_floating_point()


def expand_classes(targets: Tensor, outputs: Tensor, axis: int | None = None) -> Tensor:
    """Convert class indices to one-hot targets along the class axis, with the shape of the outputs."""
    result = class_axis(outputs, targets, axis)
    return one_hot(targets, outputs.movedim(result, -1)).movedim(-1, result)


def _move_classes_last(loss: Loss, outputs: Tensor, targets: Tensor, axis: int | None) -> tuple[Tensor, Tensor, int]:
    """Return outputs with classes last if the loss compares them, dense targets, and the original class axis."""
    if isinstance(loss, CLASS_LOSSES):
        classes_second = isinstance(loss, CrossEntropy) and loss.average_positions and outputs.dim() > 2
        source = 1 if classes_second else class_axis(outputs, targets, axis)
        if source != -1:
            moved_outputs = outputs.movedim(source, -1)
            moved_targets = targets.movedim(source, -1) if targets.shape == outputs.shape else targets
            return moved_outputs, loss.dense(moved_targets, moved_outputs), source
    elif (
        targets.numel() != outputs.numel()
        and not isinstance(loss, AUTOGRAD_LOSSES)
        and are_class_indices(outputs, targets)
    ):
        return outputs, expand_classes(targets, outputs, axis), -1
    return outputs, loss.dense(targets, outputs), -1


def output_gradient(loss: Loss, outputs: Tensor, targets: Tensor, axis: int | None = None) -> Tensor:
    """Return the derivative of the loss with respect to the outputs."""
    moved_outputs, moved_targets, source = _move_classes_last(loss, outputs, targets, axis)
    result = loss.gradient(moved_outputs, moved_targets)
    return result if source == -1 else result.movedim(-1, source)


def loss_values(loss: Loss, outputs: Tensor, targets: Tensor, axis: int | None = None) -> Tensor:
    """Return the loss of each sample, summed over positions."""
    moved_outputs, moved_targets, _ = _move_classes_last(loss, outputs, targets, axis)
    return loss.values(moved_outputs, moved_targets)
