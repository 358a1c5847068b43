"""What a model reveals about a record: outputs of its last layers, its loss, its last layer's gradient."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument
from fedveil.federation.evaluate import evaluating
from fedveil.scheme.losses import USERS, BinaryCrossEntropy, Loss, one_hot

LAYERS = ("last", "second", "third")  # to last
Call = tuple[nn.Module, Tensor]


@contextmanager
def _entering(model: nn.Module) -> Iterator[list[Call]]:
    """Modules with a weight, in call order, with their inputs; for inputs from nn.Flatten the maps before it."""
    calls: list[Call] = []
    maps: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        entered = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if entered is not None:
            calls.append((module, next((before for before, after in maps if after is entered), entered)))

    def unfold(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        maps.append((args[0], output))

    weighted = [m for m in model.modules() if any(p is not None and p.dim() > 1 for p in m._parameters.values())]
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in weighted]
    handles += [m.register_forward_hook(unfold) for m in model.modules() if isinstance(m, nn.Flatten)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _rows(values: Tensor, records: int) -> Tensor:
    """One row per record: maps are averaged over their pixels, sequences over their steps."""
    if len(values) != records:
        what = f"a layer takes {tuple(values.shape)} for {records} records"
        raise BadArgument("features", what, "a model whose first dimension is that of records in every layer")
    if values.dim() > 3:
        return values.flatten(2).mean(2)
    return values.mean(1) if values.dim() == 3 else values.reshape(records, -1)


@torch.no_grad()
def layer_outputs(
    model: nn.Module, inputs: Tensor, *, layers: int = len(LAYERS), batch_size: int = 500
) -> tuple[Tensor, ...]:
    """Outputs of the last layers, the very last first, each (records, features); fewer if the model has fewer layers.

    A layer is a module with a weight and the activation, norm and pooling that follow: its output, the paper's y^(l),
    is the input of the next such module.
    """
    device = next((p.device for p in model.parameters()), inputs.device)
    found: list[tuple[Tensor, ...]] = []
    with evaluating(model):
        for part in torch.split(inputs, batch_size):
            with _entering(model) as calls:
                outputs = model(part.to(device))
            entered = [value for _, value in reversed(calls[1:])]  # the first layer takes in the record itself
            found.append(tuple(_rows(value, len(part)).cpu() for value in (outputs, *entered[: layers - 1])))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def dense_targets(loss: Loss, targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets as the federation compares them with outputs: class indices become one-hot rows."""
    if targets.is_floating_point() or isinstance(loss, (*USERS, BinaryCrossEntropy)):
        return loss.dense(targets, outputs)
    return one_hot(targets, outputs)


def losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The federation's loss of each record, in float64."""
    outputs = outputs.double()
    return loss.values(outputs, dense_targets(loss, targets, outputs))


def labels(targets: Tensor) -> Tensor:
    """Class indices, from indices or from rows of class scores."""
    return targets.argmax(-1) if targets.dim() > 1 else targets.long()


def head_gradients(loss: Loss, outputs: Tensor, hidden: Tensor, targets: Tensor) -> Tensor:
    """Gradient of each record's loss in the last Linear's weight and bias: (records, outputs, features + 1).

    It is delta (h, 1)^T with the loss's gradient delta in the outputs and the layer's input h: no backward pass.
    """
    delta = loss.gradient(outputs, dense_targets(loss, targets, outputs))
    with_bias = torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)
    return delta.unsqueeze(2) * with_bias.unsqueeze(1)


def ends_in_linear(model: nn.Module, example: Tensor) -> bool:
    """Whether the model's outputs are those of a Linear that takes one row per record."""
    device = next((p.device for p in model.parameters()), example.device)
    made: list[Tensor] = []

    def note(module: nn.Module, args: object, output: Tensor) -> None:
        made.append(output)

    with evaluating(model), torch.no_grad(), _entering(model) as calls:
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        handles = [m.register_forward_hook(note) for m in linears]
        try:
            outputs = model(example[:2].to(device))
        finally:
            for handle in handles:
                handle.remove()
    return bool(calls and made) and isinstance(calls[-1][0], nn.Linear) and made[-1] is outputs and outputs.dim() == 2


def record_features(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, *, extras: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Outputs of the last layers by name, and of `extras` "label", "loss" and "gradient" (of the last Linear)."""
    outputs = layer_outputs(model, inputs)
    found = dict(zip(LAYERS, outputs, strict=False))
    last, targets = outputs[0], targets.cpu()
    for name in extras:
        if name == "label":
            found[name] = dense_targets(loss, targets, last).reshape(len(last), -1)
        elif name == "loss":
            found[name] = losses(loss, last, targets).to(last.dtype).unsqueeze(1)
        elif name == "gradient" and len(outputs) > 1 and ends_in_linear(model, inputs):
            found[name] = head_gradients(loss, last, outputs[1], targets)
        elif name == "gradient":
            raise BadArgument("features", "the last layer's gradient is taken of a model that ends in nn.Linear")
        else:
            raise BadArgument("features", f"there is no feature {name!r}", "label, loss or gradient")
    return found
