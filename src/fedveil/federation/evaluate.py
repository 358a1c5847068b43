"""How good a model is on held-out data."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument
from fedveil.graph.inputs import Inputs, count, each
from fedveil.scheme.losses import USERS, BinaryCrossEntropy, Loss, SquaredError, match_targets
from fedveil.scheme.outputs import are_classes, class_axis, outputs_of, values

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


def rows_of(inputs: Inputs, start: int, stop: int | None) -> Inputs:
    """The inputs of some records, in the same form."""
    return inputs[start:stop] if isinstance(inputs, Tensor) else each(lambda tensor: tensor[start:stop], inputs)


def moved(inputs: Inputs, device: torch.device, dtype: torch.dtype | None = None) -> Inputs:
    """The inputs on a device, floating numbers in another dtype if one is given; whole numbers stay what they are."""
    return each(lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None), inputs)


def predict(model: nn.Module, inputs: Inputs, *, batch_size: int = 1000) -> Tensor:
    """The model's outputs."""
    starts = range(0, max(1, count(inputs)), batch_size)
    with torch.no_grad(), evaluating(model):
        return torch.cat([outputs_of(model, rows_of(inputs, start, start + batch_size)) for start in starts])


def predicted(outputs: Tensor, targets: Tensor, axis: int | None = None) -> Tensor:
    """The class that the model chooses for each target."""
    return outputs.argmax(class_axis(outputs, targets, axis))


def metrics(outputs: Tensor, targets: Tensor, loss: Loss | None = None, *, axis: int | None = None) -> dict[str, float]:
    """Accuracy for classes and yes/no targets, mean squared error for numbers; the first counts.

    Targets are numbers in the outputs' shape, or class indices in that shape without its class axis; where shapes leave
    that axis open, as for outputs (n, c, c), it is `axis`, by default the last. At several positions of a record, as in
    segmentation, accuracy is the share of right positions. The loss comes with it, unless it is squared error, which
    the others show already; and alone where targets are neither, as a user's own loss may have them.
    """
    if isinstance(loss, BinaryCrossEntropy):
        asked = match_targets(outputs, targets)
        found = {"accuracy": float(((outputs > 0) == (asked > 0.5)).double().mean())}
    elif are_classes(outputs, targets):
        found = {"accuracy": float((predicted(outputs, targets, axis) == targets).double().mean())}
    elif targets.numel() == outputs.numel():
        found = {"mse": float((outputs.reshape(targets.shape) - targets).double().pow(2).mean())}
    elif isinstance(loss, USERS):
        found = {}
    else:
        what = f"shape is {tuple(targets.shape)}, the model's outputs have {tuple(outputs.shape)}"
        raise BadArgument("targets", what, "class indices without the class axis, or numbers in the outputs' shape")
    if loss is None or isinstance(loss, SquaredError):
        return found
    value = float(values(loss, outputs.double(), targets, axis).double().mean())
    return found | {"loss": value} if "accuracy" in found else {"loss": value} | found


def better(name: str, new: float, old: float | None) -> bool:
    """Whether a metric improved: errors should fall, all others rise."""
    return old is None or (new < old if name in ("mse", "loss") else new > old)
