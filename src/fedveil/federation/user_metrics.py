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
RESERVED_NAMES = ("accuracy", "loss", "mse", "round", "epoch", "error", "lr", "seconds", "evaluated", "epsilon")
PREDICTION_NAMES = (
    "input",
    "logits",
    "output",
    "outputs",
    "pred",
    "predictions",
    "preds",
    "y_pred",
    "y_prob",
    "y_score",
)
PROBABILITY_NAMES = (
    "y_prob",
    "y_proba",
    "y_score",
)  # names of the second parameter of functions that do not take classes


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
    """Refuse names that are already used in records, and metrics that are neither functions nor metric objects."""
    if not isinstance(metrics, Mapping):
        raise BadArgument(
            "fit", f"metrics must be a dict, got {type(metrics).__name__}", 'pass a dict: metrics={"f1": f1}'
        )
    for name, metric in metrics.items():
        where = f"metrics[{name!r}]"
        if not isinstance(name, str) or not name or name in RESERVED_NAMES or name.startswith("validation_"):
            raise BadArgument(where, "this name is reserved or empty", "choose another name")
        if isinstance(metric, type):
            raise BadArgument(where, f"{metric.__name__} is a class", f"pass an instance: {metric.__name__}(...)")
        if isinstance(metric, MetricObject):
            continue
        function = metric.function if isinstance(metric, Probabilities) else metric
        if not callable(function):
            fix = "pass a function (targets, predictions), or an object with update, compute and reset"
            raise BadArgument(where, f"a metric must be a function or an object, got {type(function).__name__}", fix)
        _check_order(where, function, isinstance(metric, Probabilities))


def _check_order(where: str, function: MetricFunction, takes_probabilities: bool) -> None:
    """Refuse a function whose parameter names show that it expects (predictions, targets) or scores."""
    try:
        names = list(inspect.signature(function).parameters)[:2]
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    function_name, parameters = getattr(function, "__name__", "f"), ", ".join(names)
    if names and names[0] in PREDICTION_NAMES:
        message = f"metrics are called as f(targets, predictions), but this function's parameters are ({parameters})"
        call = f"lambda targets, predictions: {function_name}(predictions, targets)"
        fix = f"pass {call}, or an object with update, compute and reset"
        raise BadArgument(where, message, fix)
    if not takes_probabilities and (function_name == "log_loss" or (names[1:] and names[1] in PROBABILITY_NAMES)):
        message = f"metrics receive predicted classes, not scores, but this function's parameters are ({parameters})"
        raise BadArgument(where, message, f"pass fedveil.federation.Probabilities({function_name})")


def compute_metrics(
    metrics: Mapping[str, Metric], outputs: Tensor, targets: Tensor, loss: Loss, axis: int | None
) -> dict[str, float]:
    """Return the value of each metric.

    A function is called as f(targets, predictions), on the CPU: in classification, predictions are the indices of the
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
            value = _compute_metric(
                where, metric, _as_torchmetrics(outputs, expected, classes is not None, axis), expected
            )
        else:
            predictions = outputs if classes is None else classes.predicted
            value = _call(where, metric, expected, predictions.reshape(expected.shape))
        result[name] = _as_number(where, value)
    return result


def _as_torchmetrics(outputs: Tensor, expected: Tensor, are_classes: bool, axis: int | None) -> Tensor:
    """Return outputs with classes on axis 1, or in the shape of the targets if there is one output per target."""
    if outputs.numel() == expected.numel():
        return outputs.reshape(expected.shape)
    return outputs.movedim(class_axis(outputs, expected, axis), 1) if are_classes and outputs.dim() > 2 else outputs


def _probabilities(where: str, outputs: Tensor, targets: Tensor, loss: Loss, axis: int | None) -> Tensor:
    """Return the probability of class 1, or a row of probabilities for each position."""
    if is_binary_loss(loss):
        return outputs.double().sigmoid().flatten()
    if not isinstance(loss, CrossEntropy | TokenCrossEntropy) and loss.name not in LOG_PROBABILITIES:
        message = f"outputs trained with {loss.name} are not probabilities"
        raise BadArgument(where, message, 'train with loss="cross_entropy", or pass an object that takes outputs')
    if (ranking := rank_outputs(outputs, targets, loss)) is not None:
        return ranking.double().sigmoid()
    logits = outputs.double().movedim(class_axis(outputs, targets, axis), -1)
    return logits.softmax(-1).reshape(-1, logits.shape[-1])


def _call(where: str, function: MetricFunction, targets: Tensor, predictions: Tensor) -> object:
    message = f"{getattr(function, '__name__', 'the function')} failed when called as f(targets, predictions)"
    fix = "pass a function of two arguments, such as lambda targets, predictions: f1_score(targets, predictions, ...)"
    with refuse_failure(where, message, fix):
        return function(targets, predictions)


def _compute_metric(where: str, metric: MetricObject, outputs: Tensor, targets: Tensor) -> object:
    device = getattr(metric, "device", CPU)
    message, fix = f"{type(metric).__name__} failed", "choose its task and number of classes to fit the model's outputs"
    with refuse_failure(where, message, fix), torch.no_grad():
        metric.reset()
        metric.update(outputs.to(device), targets.to(device))
        result = metric.compute()
        metric.reset()
    return result


def _as_number(where: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"the metric must return one number, got {type(value).__name__}"
        fix = 'return one number, for example the mean over classes (average="macro")'
        raise BadArgument(where, message, fix) from error
