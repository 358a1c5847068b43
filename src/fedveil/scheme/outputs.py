"""A model's outputs and their class axis: the last one, or axis 1 if the model ends in a convolution.

Losses need classes on the last axis. These functions move them there and back, so that a segmentation network with
outputs (n, classes, height, width) and targets (n, height, width) trains with the same losses as any other.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedveil.errors import BadArgument
from fedveil.graph.inputs import Inputs, arguments
from fedveil.scheme.losses import OF_CLASSES, USERS, CrossEntropy, Loss, one_hot


def compute_outputs(model: nn.Module, inputs: Inputs, buffers: dict[str, Tensor] | None = None) -> Tensor:
    """Return the model's outputs; with `buffers`, use and update these instead of its own."""
    args, kwargs = arguments(inputs)
    outputs = torch.func.functional_call(model, buffers, args, kwargs) if buffers else model(*args, **kwargs)
    if not isinstance(outputs, Tensor):
        what = f"its forward returns {type(outputs).__name__}, not one tensor"
        raise BadArgument(type(model).__name__, what, "let forward return only the outputs that the loss takes")
    return outputs


def head_axis(model: nn.Module) -> int | None:
    """Return the class axis of the model's last layer: 1 for a convolution, -1 for a Linear; None if it has neither."""
    for module in reversed(list(model.modules())):
        if isinstance(module, _ConvNd | nn.Linear):
            return 1 if isinstance(module, _ConvNd) else -1
    return None


def class_axis(outputs: Tensor, targets: Tensor, axis: int | None = None) -> int:
    """Return the class axis of the outputs, 1 or -1.

    Class indices have the outputs' shape without that axis. If both axes fit, as for outputs (n, c, c), or neither
    does, because targets are dense, `axis` decides; the default is the last.
    """
    if outputs.dim() < 3:
        return -1
    last, second = (targets.shape == without(outputs.shape, place) for place in (-1, 1))
    if last != second:
        return -1 if last else 1
    return -1 if axis is None else axis


def without(shape: torch.Size, axis: int) -> torch.Size:
    """Return the shape without an axis."""
    axis %= max(1, len(shape))
    return shape[:axis] + shape[axis + 1 :]


def are_class_indices(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether targets are class indices for these outputs."""
    fits = targets.shape in (without(outputs.shape, -1), without(outputs.shape, 1))
    return fits and not targets.is_floating_point()


def spread(targets: Tensor, outputs: Tensor, axis: int | None = None) -> Tensor:
    """Return class indices as one-hot targets along the class axis, in the outputs' shape."""
    place = class_axis(outputs, targets, axis)
    return one_hot(targets, outputs.movedim(place, -1)).movedim(-1, place)


def _classes_last(loss: Loss, outputs: Tensor, targets: Tensor, axis: int | None) -> tuple[Tensor, Tensor, int]:
    """Return outputs, with classes last if the loss compares classes; dense targets; and the axis that was moved."""
    if isinstance(loss, OF_CLASSES):
        torchs = isinstance(loss, CrossEntropy) and loss.average_positions and outputs.dim() > 2
        place = 1 if torchs else class_axis(outputs, targets, axis)
        if place != -1:
            moved = outputs.movedim(place, -1)
            wanted = targets.movedim(place, -1) if targets.shape == outputs.shape else targets
            return moved, loss.dense(wanted, moved), place
    elif targets.numel() != outputs.numel() and not isinstance(loss, USERS) and are_class_indices(outputs, targets):
        return outputs, spread(targets, outputs, axis), -1
    return outputs, loss.dense(targets, outputs), -1


def slope(loss: Loss, outputs: Tensor, targets: Tensor, axis: int | None = None) -> Tensor:
    """Return the derivative of the loss with respect to the outputs, in their shape."""
    moved, wanted, place = _classes_last(loss, outputs, targets, axis)
    found = loss.gradient(moved, wanted)
    return found if place == -1 else found.movedim(-1, place)


def values(loss: Loss, outputs: Tensor, targets: Tensor, axis: int | None = None) -> Tensor:
    """Return one number per sample: the loss, summed over positions."""
    moved, wanted, _ = _classes_last(loss, outputs, targets, axis)
    return loss.values(moved, wanted)
