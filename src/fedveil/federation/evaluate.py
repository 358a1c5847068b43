"""How good a model is on held-out data."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


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


def metrics(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Accuracy for class indices; mean squared error for numbers."""
    if targets.is_floating_point():
        return {"mse": float((outputs.reshape(targets.shape) - targets).double().pow(2).mean())}
    return {"accuracy": float((outputs.argmax(1) == targets).double().mean())}


def better(name: str, new: float, old: float | None) -> bool:
    """Whether a metric improved: errors should fall, all others rise."""
    return old is None or (new < old if name == "mse" else new > old)
