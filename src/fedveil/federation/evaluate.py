"""Metrics of a model on held-out data."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument
from fedveil.graph.inputs import Inputs, count, each
from fedveil.records.sources import Rows, Source, check_finite, check_range
from fedveil.scheme.losses import AUTOGRAD_LOSSES, CLASS_LOSSES, BinaryCrossEntropy, Loss, SquaredError, match_targets
from fedveil.scheme.outputs import are_class_indices, class_axis, compute_outputs, values

METRICS = ("accuracy", "auc", "mse", "loss")
PRIMARY = ("accuracy", "loss", "mse")  # the first of these that was measured decides which model is best


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def slice_inputs(inputs: Inputs, start: int, stop: int | None) -> Inputs:
    """Return the inputs of a range of records, in the same form."""
    return inputs[start:stop] if isinstance(inputs, Tensor) else each(lambda tensor: tensor[start:stop], inputs)


def move_inputs(inputs: Inputs, device: torch.device, dtype: torch.dtype | None = None) -> Inputs:
    """Move inputs to a device, and cast floats to a dtype if one is given; integers keep their dtype."""
    return each(lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None), inputs)


def predict(model: nn.Module, inputs: Inputs, *, batch_size: int = 1000) -> Tensor:
    """Return the model's outputs."""
    starts = range(0, max(1, count(inputs)), batch_size)
    with torch.no_grad(), evaluating(model):
        return torch.cat([compute_outputs(model, slice_inputs(inputs, start, start + batch_size)) for start in starts])


def predict_source(model: nn.Module, source: Source, *, batch_size: int = 256) -> tuple[Tensor, Tensor]:
    """Return the model's outputs for records, and their targets; records that are not in memory are read in batches."""
    first = next(model.parameters())
    if isinstance(source, Rows):
        return predict(model, move_inputs(source.inputs, first.device, first.dtype)), source.targets.to(first.device)
    found = []
    for start in range(0, len(source), batch_size):
        numbers = range(start, min(start + batch_size, len(source)))
        inputs, targets = source.take(numbers)
        check_finite(source.owner, (inputs, targets), numbers)
        check_range(source.owner, (inputs, targets), numbers, first.dtype)
        found.append((predict(model, move_inputs(inputs, first.device, first.dtype)), targets.to(first.device)))
    return torch.cat([outputs for outputs, _ in found]), torch.cat([targets for _, targets in found])


def predict_classes(outputs: Tensor, targets: Tensor, axis: int | None = None) -> Tensor:
    """Return the predicted class for each target."""
    return outputs.argmax(class_axis(outputs, targets, axis))


def metrics(outputs: Tensor, targets: Tensor, loss: Loss | None = None, *, axis: int | None = None) -> dict[str, float]:
    """Return accuracy for classes and binary targets, with AUC if there are two classes, and MSE for quantities.

    If the loss compares classes, rows of probabilities count as their most probable class. Targets are numbers in the
    shape of the outputs, or class indices in that shape without its class axis; if shapes do not determine that axis,
    as for outputs (n, c, c), it is `axis`, by default the last. With several positions per record, as in segmentation,
    accuracy is the fraction of correct positions. The loss is included, unless it is squared error, which MSE already
    shows; for other targets, which a custom loss may accept, it is the only metric. Built-in losses are computed in
    float64, custom losses in the dtype of the outputs, as in training.
    """
    if isinstance(loss, BinaryCrossEntropy):
        asked = match_targets(outputs, targets)
        found = {"accuracy": float(((outputs > 0) == (asked > 0.5)).double().mean())}
        found |= area(outputs, asked > 0.5) if outputs[0].numel() == 1 else {}
    elif are_class_indices(outputs, targets):
        found = {"accuracy": float((predict_classes(outputs, targets, axis) == targets).double().mean())}
        found |= area(outputs[:, 1] - outputs[:, 0], targets == 1) if outputs.shape[1:] == (2,) else {}
    elif isinstance(loss, CLASS_LOSSES) and targets.shape == outputs.shape:
        place = class_axis(outputs, targets, axis)
        found = {"accuracy": float((outputs.argmax(place) == targets.argmax(place)).double().mean())}
    elif targets.numel() == outputs.numel():
        found = {"mse": float((outputs.reshape(targets.shape) - targets).double().pow(2).mean())}
    elif isinstance(loss, AUTOGRAD_LOSSES):
        found = {}
    else:
        what = f"shape is {tuple(targets.shape)}, the model's outputs have {tuple(outputs.shape)}"
        raise BadArgument("targets", what, "use class indices without the class axis, or numbers in the outputs' shape")
    if loss is None or isinstance(loss, SquaredError):
        return found
    if isinstance(loss, AUTOGRAD_LOSSES):  # its tensors, such as class weights, have the dtype of training
        asked = targets.to(outputs.dtype) if targets.is_floating_point() else targets
        return found | {"loss": float(values(loss, outputs, asked, axis).double().mean())}
    return found | {"loss": float(values(loss, outputs.double(), targets, axis).mean())}


def area(scores: Tensor, positive: Tensor) -> dict[str, float]:
    """Return the area under the ROC curve, P(positive's score > negative's); empty if either class is missing."""
    yes, no = scores[positive].double(), scores[~positive].double().sort().values
    if not (len(yes) and len(no)):
        return {}
    below, upto = torch.searchsorted(no, yes), torch.searchsorted(no, yes, right=True)
    return {"auc": float((below + upto).double().mean()) / (2 * len(no))}


def deciding_metric(values: Mapping[str, float]) -> str:
    """Return the name of the metric that decides which model is best."""
    return next(name for name in PRIMARY if name in values)


def better(name: str, new: float, old: float | None) -> bool:
    """Return whether a metric improved: errors should fall, all others rise."""
    return old is None or (new < old if name in ("mse", "loss") else new > old)
