"""Evaluation metrics on held-out data."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
    Poisson,
    SquaredError,
    match_targets,
)
from fedveil.scheme.outputs import are_class_indices, class_axis, compute_outputs, loss_values
from fedveil.scheme.token_losses import TokenCrossEntropy

METRICS = ("accuracy", "auc", "mse", "loss")
LOGITS = "torch.nn.BCEWithLogitsLoss"
LOG_PROBABILITIES = ("torch.nn.CrossEntropyLoss", "torch.nn.NLLLoss")  # softmax turns their outputs into probabilities
PRIMARY = ("accuracy", "loss", "mse")  # the first of these that is available determines the best model


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode and restore the mode of every module afterwards."""
    training_modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in training_modes:
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
    with torch.no_grad(), evaluation_mode(model):
        return torch.cat([compute_outputs(model, slice_inputs(inputs, start, start + batch_size)) for start in starts])


def predict_source(model: nn.Module, source: Source, *, batch_size: int = 256) -> tuple[Tensor, Tensor]:
    """Return the model's outputs and the targets for all records of a source; streams are read in batches."""
    parameter = next(model.parameters())
    if isinstance(source, Rows):
        return predict(model, move_inputs(source.inputs, parameter.device, parameter.dtype)), source.targets.to(
            parameter.device
        )
    result = []
    for start in range(0, len(source), batch_size):
        indices = range(start, min(start + batch_size, len(source)))
        inputs, targets = source.take(indices)
        check_finite(source.owner, (inputs, targets), indices)
        check_range(source.owner, (inputs, targets), indices, parameter.dtype)
        result.append(
            (predict(model, move_inputs(inputs, parameter.device, parameter.dtype)), targets.to(parameter.device))
        )
    return _join_rows([outputs for outputs, _ in result], 0), _join_rows([targets for _, targets in result], IGNORED)


def _join_rows(parts: list[Tensor], filler: int) -> Tensor:
    """Concatenate batches; pad class indices and outputs whose lengths differ."""
    if filler and parts[0].is_floating_point():
        return torch.cat(parts)
    sizes = [max(lengths) for lengths in zip(*(part.shape[1:] for part in parts), strict=True)]
    paddings = [
        [padding for size, length in zip(sizes, part.shape[1:], strict=True) for padding in (size - length, 0)]
        for part in parts
    ]
    return torch.cat(
        [F.pad(part, part_padding[::-1], value=filler) for part, part_padding in zip(parts, paddings, strict=True)]
    )


def predict_classes(outputs: Tensor, targets: Tensor, axis: int | None = None) -> Tensor:
    """Return the predicted class for each target."""
    return outputs.argmax(class_axis(outputs, targets, axis))


def metrics(outputs: Tensor, targets: Tensor, loss: Loss | None = None, *, axis: int | None = None) -> dict[str, float]:
    """Return the accuracy for classes and binary targets, the AUC if there are two classes, and the MSE for quantities.

    Targets are numbers in the shape of the outputs, or class indices in that shape without the class axis. If the
    shapes do not determine the class axis, as for outputs of shape (n, c, c), `axis` does (by default, the last axis).
    For losses that compare classes, a row of target probabilities counts as its most probable class. With several
    positions per record, as in segmentation, the accuracy is the fraction of correct positions. The loss is included,
    except for squared error, which the MSE replaces; for other targets that a custom loss accepts, the loss is the only
    metric. Built-in losses are computed in float64, custom losses in the dtype of the outputs, as in training.
    """
    outputs, targets, loss = select_positions(outputs, targets, loss)
    classes = find_classes(outputs, targets, loss, axis)
    if classes is not None:
        result = {"accuracy": float((classes.predicted == classes.expected).double().mean())}
        if (ranking := rank_outputs(outputs, targets, loss)) is not None:
            result |= roc_auc(ranking, classes.expected.reshape(ranking.shape) == 1)
    elif targets.numel() == outputs.numel():
        result = {"mse": float((outputs.reshape(targets.shape) - targets).double().pow(2).mean())}
    elif isinstance(loss, AUTOGRAD_LOSSES):
        result = {}
    else:
        message = f"shape {tuple(targets.shape)} does not match the shape {tuple(outputs.shape)} of the model's outputs"
        raise BadArgument(
            "targets", message, "use class indices without the class axis, or numbers in the outputs' shape"
        )
    if loss is None or isinstance(loss, SquaredError):
        return result
    if isinstance(loss, AUTOGRAD_LOSSES):  # tensors of the loss, such as class weights, have the training dtype
        expected = targets.to(outputs.dtype) if targets.is_floating_point() else targets
        return result | {"loss": float(loss_values(loss, outputs, expected, axis).double().mean())}
    return result | {"loss": float(loss_values(loss, outputs.double(), targets, axis).mean())}


def measure(outputs: Tensor, targets: Tensor, loss: Loss | None = None, *, axis: int | None = None) -> dict[str, float]:
    """Return `metrics(...)` plus the balanced accuracy and mean F1 of classes, or the MAE and R2 of quantities.

    Metrics of classes are defined as in scikit-learn: the balanced accuracy is the mean recall of the classes that
    the targets contain, and F1 is the mean over all classes that the targets or the predictions contain. R2 is the
    fraction of the targets' variance that the outputs explain; it is omitted if all targets are equal.
    """
    result = metrics(outputs, targets, loss, axis=axis)
    outputs, targets, loss = select_positions(outputs, targets, loss)
    classes = find_classes(outputs, targets, loss, axis)
    if classes is not None and classes.exclusive:
        scores = score_classes(classes)
        in_targets, in_either = scores.records > 0, scores.records + scores.predictions > 0
        return result | {
            "balanced_accuracy": float(scores.recall[in_targets].mean()),
            "f1": float(scores.f1[in_either].mean()),
        }
    if "mse" not in result or isinstance(loss, Poisson):  # Poisson outputs are logarithms
        return result
    expected = targets.double()
    errors = outputs.reshape(targets.shape).double() - expected
    result |= {"mae": float(errors.abs().mean())}
    total = float((expected - expected.mean(0)).pow(2).sum())
    return result | ({"r2": 1 - float(errors.pow(2).sum()) / total} if total > 0 else {})


def metric_names(outputs: Tensor, targets: Tensor, loss: Loss, *, axis: int | None = None) -> set[str]:
    """Return the names of an evaluation's metrics, including those that are undefined for some records."""
    result = set(measure(outputs, targets, loss, axis=axis))
    result |= {"auc"} if rank_outputs(outputs, targets, loss) is not None else set()
    return result | ({"r2"} if "mae" in result else set())


def select_positions(outputs: Tensor, targets: Tensor, loss: Loss | None) -> tuple[Tensor, Tensor, Loss | None]:
    """Return the outputs and targets of labelled positions, if the loss ignores all other positions."""
    if not isinstance(loss, TokenCrossEntropy):
        return outputs, targets, loss
    return *loss.select(outputs, targets), TokenCrossEntropy(loss.label_smoothing)  # the positions are already aligned


@dataclass(frozen=True)
class Classes:
    """The predicted and the true class of each position, as indices."""

    predicted: Tensor
    expected: Tensor
    count: int  # number of classes
    exclusive: bool = True  # False for several binary targets per record


def is_binary_loss(loss: Loss | None) -> bool:
    """Return whether a loss compares each output, as a logit, with 0 or 1."""
    return isinstance(loss, BinaryCrossEntropy) or (loss is not None and loss.name == LOGITS)


def find_classes(outputs: Tensor, targets: Tensor, loss: Loss | None, axis: int | None) -> Classes | None:
    """Return the predicted and true classes, 0 and 1 for binary targets; None if the targets are not classes."""
    if is_binary_loss(loss):
        expected = match_targets(outputs, targets)
        return Classes((outputs > 0).long(), (expected > 0.5).long(), 2, outputs[0].numel() == 1)
    dim = class_axis(outputs, targets, axis)
    if are_class_indices(outputs, targets):
        return Classes(
            predict_classes(outputs, targets, axis), targets.long(), outputs.shape[dim]
        )  # targets may be bool
    if isinstance(loss, CLASS_LOSSES) and targets.shape == outputs.shape:
        return Classes(outputs.argmax(dim), targets.argmax(dim), outputs.shape[dim])
    return None


def rank_outputs(outputs: Tensor, targets: Tensor, loss: Loss | None) -> Tensor | None:
    """Return a score for class 1 per record, for ranking; None unless there are two classes."""
    if is_binary_loss(loss):
        return outputs.flatten() if outputs[0].numel() == 1 else None
    has_two_classes = outputs.shape[1:] == (2,) and are_class_indices(outputs, targets)
    return outputs[:, 1] - outputs[:, 0] if has_two_classes else None


@dataclass(frozen=True)
class ClassScores:
    """Scores by class; a class that is never predicted or does not occur scores 0, as in scikit-learn."""

    precision: Tensor
    recall: Tensor
    f1: Tensor
    records: Tensor  # number of positions of this class
    predictions: Tensor  # number of positions predicted to be of this class


def score_classes(classes: Classes) -> ClassScores:
    """Return the precision, recall and F1 of each class; positions without a class, such as -100, do not count."""
    has_class = (classes.expected >= 0) & (classes.expected < classes.count)
    predicted, expected = classes.predicted[has_class], classes.expected[has_class]
    index_groups = (expected[predicted == expected], expected, predicted)
    hits, records, predictions = (torch.bincount(indices, minlength=classes.count).double() for indices in index_groups)
    precision, recall = hits / predictions.clamp(min=1), hits / records.clamp(min=1)
    f1 = 2 * hits / (records + predictions).clamp(min=1)
    return ClassScores(precision, recall, f1, records, predictions)


def roc_auc(scores: Tensor, is_positive: Tensor) -> dict[str, float]:
    """Return the area under the ROC curve as "auc", or an empty dict if either class is missing."""
    positives, negatives = scores[is_positive].double(), scores[~is_positive].double().sort().values
    if not (len(positives) and len(negatives)):
        return {}
    lower, upper = torch.searchsorted(negatives, positives), torch.searchsorted(negatives, positives, right=True)
    return {"auc": float((lower + upper).double().mean()) / (2 * len(negatives))}
