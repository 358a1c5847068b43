"""How good a model is on held-out data."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedveil.scheme.losses import BinaryCrossEntropy, Loss, SquaredError, match_targets

METRICS = ("accuracy", "mse", "loss")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def answers(model: nn.Module, inputs: Tensor, *, batch_size: int = 1000) -> Tensor:
    """The model's outputs."""
    with torch.no_grad(), evaluating(model):
        return torch.cat([model(part) for part in torch.split(inputs, batch_size)])


def metrics(outputs: Tensor, targets: Tensor, loss: Loss | None = None) -> dict[str, float]:
    """Accuracy for classes and yes/no targets, mean squared error for numbers; the first counts.

    The loss comes with it, unless it is squared error, which the others show already.
    """
    if isinstance(loss, BinaryCrossEntropy):
        asked = match_targets(outputs, targets)
        found = {"accuracy": float(((outputs > 0) == (asked > 0.5)).double().mean())}
    elif not targets.is_floating_point():
        found = {"accuracy": float((outputs.argmax(-1) == targets).double().mean())}
    else:
        found = {"mse": float((outputs.reshape(targets.shape) - targets).double().pow(2).mean())}
    if loss is None or isinstance(loss, SquaredError):
        return found
    value = float(loss.values(outputs.double(), loss.dense(targets, outputs)).double().mean())
    return found | {"loss": value} if "accuracy" in found else {"loss": value} | found


def better(name: str, new: float, old: float | None) -> bool:
    """Whether a metric improved: errors should fall, all others rise."""
    return old is None or (new < old if name in ("mse", "loss") else new > old)
