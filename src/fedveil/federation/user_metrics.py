"""Users' metrics: functions like those of scikit-learn, and objects like those of torchmetrics."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from fedveil.errors import BadArgument
from fedveil.federation.evaluate import LOG_PROBABILITIES, find_classes, is_binary_loss, rank_outputs, select_positions
from fedveil.federation.targets import refuse_failure
from fedveil.scheme.losses import CrossEntropy, Loss
from fedveil.scheme.outputs import class_axis
from fedveil.scheme.token_losses import TokenCrossEntropy

CPU = torch.device("cpu")
RESERVED = ("accuracy", "loss", "mse", "round", "epoch", "error", "lr", "seconds", "evaluated", "epsilon")
PREDICTIONS = ("input", "logits", "output", "outputs", "pred", "predictions", "preds", "y_pred", "y_prob", "y_score")
PROBABILITIES = ("y_prob", "y_proba", "y_score")  # second parameters of functions that do not take classes


@runtime_checkable
class MetricObject(Protocol):
    """A stateful metric, such as a `torchmetrics.Metric`."""

    def update(self, outputs: Tensor, targets: Tensor, /) -> object:
        """Add a batch."""

    def compute(self) -> object:
        """Return the value for all batches since the last reset."""

    def reset(self) -> object:
        """Forget all batches."""


MetricFunction: TypeAlias = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class Probabilities:
    """A function (targets, probabilities) as a metric, such as scikit-learn's `roc_auc_score` or `log_loss`.

    With two classes, the function receives the probability of class 1 for each record; with more, one column per class.
    """

    function: MetricFunction


Metric: TypeAlias = MetricFunction | MetricObject | Probabilities


def check_metrics(metrics: Mapping[str, Metric]) -> None:
    """Refuse names that records already have, and metrics that are neither functions nor objects."""
    if not isinstance(metrics, Mapping):
        raise BadArgument("fit", f"metrics is a {type(metrics).__name__}", 'pass a dict: metrics={"f1": f1}')
    for name, metric in metrics.items():
        where = f"metrics[{name!r}]"
        if not isinstance(name, str) or not name or name in RESERVED or name.startswith("validation_"):
            raise BadArgument(where, "this name is reserved or empty", "choose another name")
        if isinstance(metric, type):
            raise BadArgument(where, f"{metric.__name__} is a class", f"pass an instance: {metric.__name__}(...)")
        if isinstance(metric, MetricObject):
            continue
        inner = metric.function if isinstance(metric, Probabilities) else metric
        if not callable(inner):
            fix = "pass a function (targets, predictions), or an object with update, compute and reset"
            raise BadArgument(where, f"it is a {type(inner).__name__}", fix)
        _check_order(where, inner, isinstance(metric, Probabilities))


def _check_order(where: str, function: MetricFunction, probabilities: bool) -> None:
    """Refuse a function whose parameter names show that it expects (predictions, targets) or scores."""
    try:
        names = list(inspect.signature(function).parameters)[:2]
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    called, parameters = getattr(function, "__name__", "f"), ", ".join(names)
    if names and names[0] in PREDICTIONS:
        what = f"its parameters are ({parameters}), but a function is called as f(targets, predictions)"
        fix = f"pass lambda targets, predictions: {called}(predictions, targets), or an object with update and compute"
        raise BadArgument(where, what, fix)
    if not probabilities and (called == "log_loss" or (names[1:] and names[1] in PROBABILITIES)):
        what = f"its parameters are ({parameters}), but a function receives predicted classes, not scores"
        raise BadArgument(where, what, f"pass fedveil.federation.Probabilities({called})")


def compute_metrics(
    metrics: Mapping[str, Metric], outputs: Tensor, targets: Tensor, loss: Loss, axis: int | None
) -> dict[str, float]:
    """Return the value of each metric.

    A function is called as f(targets, predictions), on the CPU: for classes, predictions are the indices of the
    predicted classes. An object is called as update(outputs, targets), then compute(), with classes on axis 1.
    """
    outputs, targets, _ = select_positions(outputs, targets, loss)
    outputs, targets = outputs.detach().cpu(), targets.detach().cpu()
    classes = find_classes(outputs, targets, loss, axis)
    expected = targets if classes is None else classes.expected
    if classes is None and outputs.numel() == targets.numel():
        outputs = outputs.reshape(targets.shape)
    result = {}
    for name, metric in metrics.items():
        where = f"metrics[{name!r}]"
        if isinstance(metric, Probabilities):
            arguments = expected.flatten(), _probabilities(where, outputs, targets, loss, axis)
            value = _call(where, metric.function, *arguments)
        elif isinstance(metric, MetricObject):
            value = _update(where, metric, _as_torchmetrics(outputs, expected, classes is not None, axis), expected)
        else:
            predicted = outputs if classes is None else classes.predicted
            value = _call(where, metric, expected, predicted.reshape(expected.shape))
        result[name] = _as_number(where, value)
    return result


def _as_torchmetrics(outputs: Tensor, expected: Tensor, classes: bool, axis: int | None) -> Tensor:
    """Return outputs with classes on axis 1, or in the shape of the targets if there is one output per target."""
    if outputs.numel() == expected.numel():
        return outputs.reshape(expected.shape)
    return outputs.movedim(class_axis(outputs, expected, axis), 1) if classes and outputs.dim() > 2 else outputs


def _probabilities(where: str, outputs: Tensor, targets: Tensor, loss: Loss, axis: int | None) -> Tensor:
    """Return the probability of class 1, or a row of probabilities for each position."""
    if is_binary_loss(loss):
        return outputs.double().sigmoid().flatten()
    if not isinstance(loss, CrossEntropy | TokenCrossEntropy) and loss.name not in LOG_PROBABILITIES:
        what = f"outputs trained with {loss.name} are not probabilities"
        raise BadArgument(where, what, 'train with loss="cross_entropy", or pass an object that takes outputs')
    if (ranking := rank_outputs(outputs, targets, loss)) is not None:
        return ranking.double().sigmoid()
    moved_outputs = outputs.double().movedim(class_axis(outputs, targets, axis), -1)
    return moved_outputs.softmax(-1).reshape(-1, moved_outputs.shape[-1])


def _call(where: str, function: MetricFunction, targets: Tensor, predictions: Tensor) -> object:
    what = f"{getattr(function, '__name__', 'the function')} fails as f(targets, predictions)"
    fix = "pass a function of these two, such as lambda targets, predictions: f1_score(targets, predictions, ...)"
    with refuse_failure(where, what, fix):
        return function(targets, predictions)


def _update(where: str, metric: MetricObject, outputs: Tensor, targets: Tensor) -> object:
    device = getattr(metric, "device", CPU)
    what, fix = f"{type(metric).__name__} fails", "choose its task and number of classes to fit the model's outputs"
    with refuse_failure(where, what, fix), torch.no_grad():
        metric.reset()
        metric.update(outputs.to(device), targets.to(device))
        result = metric.compute()
        metric.reset()
    return result


def _as_number(where: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"it returns a {type(value).__name__}, not one number"
        fix = 'return one number, for example the mean over classes (average="macro")'
        raise BadArgument(where, what, fix) from error
