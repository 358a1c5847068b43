"""Evaluation metrics on held-out data."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.errors import BadArgument
from fedveil.graph.inputs import Inputs, count, each
from fedveil.records.sources import Rows, Source, check_finite, check_range
from fedveil.scheme.losses import (
    AUTOGRAD_LOSSES,
    CLASS_LOSSES,
    IGNORED,
    BinaryCrossEntropy,
    Loss,
    SquaredError,
    match_targets,
)
from fedveil.scheme.outputs import are_class_indices, class_axis, compute_outputs, values
from fedveil.scheme.token_losses import TokenCrossEntropy

METRICS = ("accuracy", "auc", "mse", "loss")
PRIMARY = ("accuracy", "loss", "mse")  # the first of these that is available determines the best model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def slice_inputs(inputs: Inputs, start: int, stop: int | None) -> Inputs:
    """Return the inputs of records `start` to `stop`, with the same structure."""
    return inputs[start:stop] if isinstance(inputs, Tensor) else each(lambda tensor: tensor[start:stop], inputs)


def move_inputs(inputs: Inputs, device: torch.device, dtype: torch.dtype | None = None) -> Inputs:
    """Move inputs to a device and cast floating-point tensors to `dtype`, if given; other tensors keep their dtype."""
    return each(lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None), inputs)


def predict(model: nn.Module, inputs: Inputs, *, batch_size: int = 1000) -> Tensor:
    """Return the model's outputs."""
    starts = range(0, max(1, count(inputs)), batch_size)
    with torch.no_grad(), evaluating(model):
        return torch.cat([compute_outputs(model, slice_inputs(inputs, start, start + batch_size)) for start in starts])


def predict_source(model: nn.Module, source: Source, *, batch_size: int = 256) -> tuple[Tensor, Tensor]:
    """Return the model's outputs and the targets for all records of a source; streams are read in batches."""
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
    return _join_rows([outputs for outputs, _ in found], 0), _join_rows([targets for _, targets in found], IGNORED)


def _join_rows(parts: list[Tensor], filler: int) -> Tensor:
    """Concatenate batches; those of class indices and their outputs may be padded to different lengths."""
    if filler and parts[0].is_floating_point():
        return torch.cat(parts)
    sizes = [max(own) for own in zip(*(part.shape[1:] for part in parts), strict=True)]
    widths = [[n for size, own in zip(sizes, part.shape[1:], strict=True) for n in (size - own, 0)] for part in parts]
    return torch.cat([F.pad(part, width[::-1], value=filler) for part, width in zip(parts, widths, strict=True)])


def predict_classes(outputs: Tensor, targets: Tensor, axis: int | None = None) -> Tensor:
    """Return the predicted class for each target."""
    return outputs.argmax(class_axis(outputs, targets, axis))


def metrics(outputs: Tensor, targets: Tensor, loss: Loss | None = None, *, axis: int | None = None) -> dict[str, float]:
    """Return the accuracy for classes and binary targets, the AUC if there are two classes, and the MSE for quantities.

    Targets are numbers in the shape of the outputs, or class indices in that shape without the class axis. If the
    shapes do not determine the class axis, as for outputs (n, c, c), it is `axis`, by default the last. For losses that
    compare classes, a row of probabilities counts as its most probable class. With several positions per record, as in
    segmentation, the accuracy is the fraction of correct positions. The loss is included unless it is squared error,
    for which there is the MSE; for other targets that a custom loss accepts, it is the only metric. Built-in losses are
    computed in float64, custom losses in the dtype of the outputs, as in training.
    """
    if isinstance(loss, TokenCrossEntropy):
        outputs, targets = loss.select(outputs, targets)
        loss = TokenCrossEntropy(loss.label_smoothing)  # positions are aligned already
    if isinstance(loss, BinaryCrossEntropy):
        expected = match_targets(outputs, targets)
        found = {"accuracy": float(((outputs > 0) == (expected > 0.5)).double().mean())}
        found |= roc_auc(outputs, expected > 0.5) if outputs[0].numel() == 1 else {}
    elif are_class_indices(outputs, targets):
        found = {"accuracy": float((predict_classes(outputs, targets, axis) == targets).double().mean())}
        found |= roc_auc(outputs[:, 1] - outputs[:, 0], targets == 1) if outputs.shape[1:] == (2,) else {}
    elif isinstance(loss, CLASS_LOSSES) and targets.shape == outputs.shape:
        dim = class_axis(outputs, targets, axis)
        found = {"accuracy": float((outputs.argmax(dim) == targets.argmax(dim)).double().mean())}
    elif targets.numel() == outputs.numel():
        found = {"mse": float((outputs.reshape(targets.shape) - targets).double().pow(2).mean())}
    elif isinstance(loss, AUTOGRAD_LOSSES):
        found = {}
    else:
        what = f"shape is {tuple(targets.shape)}, but the model's outputs have shape {tuple(outputs.shape)}"
        raise BadArgument("targets", what, "use class indices without the class axis, or numbers in the outputs' shape")
    if loss is None or isinstance(loss, SquaredError):
        return found
    if isinstance(loss, AUTOGRAD_LOSSES):  # tensors of the loss, such as class weights, have the training dtype
        expected = targets.to(outputs.dtype) if targets.is_floating_point() else targets
        return found | {"loss": float(values(loss, outputs, expected, axis).double().mean())}
    return found | {"loss": float(values(loss, outputs.double(), targets, axis).mean())}


def roc_auc(scores: Tensor, positive: Tensor) -> dict[str, float]:
    """Return the area under the ROC curve as "auc", or an empty dict if either class is missing."""
    positives, negatives = scores[positive].double(), scores[~positive].double().sort().values
    if not (len(positives) and len(negatives)):
        return {}
    lower, upper = torch.searchsorted(negatives, positives), torch.searchsorted(negatives, positives, right=True)
    return {"auc": float((lower + upper).double().mean()) / (2 * len(negatives))}


def deciding_metric(values: Mapping[str, float]) -> str:
    """Return the name of the metric that determines the best model."""
    return next(name for name in PRIMARY if name in values)


def better(name: str, new: float, old: float | None) -> bool:
    """Return whether a metric has improved: lower is better for errors, higher for all other metrics."""
    return old is None or (new < old if name in ("mse", "loss") else new > old)
