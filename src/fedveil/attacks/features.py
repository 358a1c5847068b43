"""What a model reveals about a record: outputs of its last layers, its loss, its last layer's gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool1d, adaptive_avg_pool2d

from fedveil.errors import BadArgument
from fedveil.federation.evaluate import evaluating
from fedveil.graph.inputs import calls_of
from fedveil.scheme.losses import USERS, BinaryCrossEntropy, Loss, one_hot

LAYERS = ("last", "second", "third")  # to last
SIDE = 8  # maps are kept up to 8 x 8 pixels, sequences up to 64 steps; larger ones are averaged down to that


def _weighted(model: nn.Module) -> list[nn.Module]:
    """The modules that hold a weight: a parameter of two dimensions or more."""
    return [m for m in model.modules() if any(p is not None and p.dim() > 1 for p in m._parameters.values())]


def _entered(model: nn.Module, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The model's outputs, and what enters each of its weighted modules; of what nn.Flatten made of maps, the maps."""
    flat, weighted = [m for m in model.modules() if isinstance(m, nn.Flatten)], _weighted(model)
    with calls_of([*weighted, *flat]) as calls:
        outputs = model(inputs)
    maps = [call for call in calls if call.module in flat]
    taken = [call.entered for call in calls if call.module in weighted]
    return outputs, [next((m.entered for m in maps if m.output is entered), entered) for entered in taken]


def _kept(values: Tensor, records: int) -> Tensor:
    """A row per record, a map as (channels, height, width) and a sequence as (steps, features), no larger than SIDE."""
    if len(values) != records:
        what = f"a layer takes {tuple(values.shape)} for {records} records"
        raise BadArgument("features", what, "a model whose first dimension is that of records in every layer")
    if values.dim() > 3:
        maps = values.flatten(3)
        return adaptive_avg_pool2d(maps, (min(SIDE, maps.shape[2]), min(SIDE, maps.shape[3])))
    if values.dim() == 3:
        steps = min(SIDE**2, values.shape[1])
        return adaptive_avg_pool1d(values.transpose(1, 2), steps).transpose(1, 2)
    return values.reshape(records, -1)


@torch.no_grad()
def layer_outputs(
    model: nn.Module, inputs: Tensor, *, layers: int = len(LAYERS), batch_size: int = 500
) -> tuple[Tensor, ...]:
    """Outputs of the last layers, the very last first; fewer if the model has fewer layers.

    A layer is a module with a weight and the activation, norm and pooling that follow: its output, the paper's y^(l),
    is the input of the next such module: (records, features), (records, channels, height, width) with at most 8 x 8
    pixels, or (records, steps, features) with at most 64 steps.
    """
    device = next((p.device for p in model.parameters()), inputs.device)
    found: list[tuple[Tensor, ...]] = []
    with evaluating(model):
        for part in torch.split(inputs, batch_size):
            outputs, entered = _entered(model, part.to(device))
            entered = entered[:0:-1]  # the first layer takes in the record itself
            found.append(tuple(_kept(value, len(part)).cpu() for value in (outputs, *entered[: layers - 1])))
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


def _final_linear(model: nn.Module, example: Tensor) -> nn.Linear | None:
    """The Linear whose outputs, one row per record, are the model's; None if there is no such one."""
    device = next((p.device for p in model.parameters()), example.device)
    with evaluating(model), torch.no_grad(), calls_of(_weighted(model)) as calls:
        outputs = model(example[:2].to(device))
    final = calls[-1].module if calls and calls[-1].output is outputs and outputs.dim() == 2 else None
    return final if isinstance(final, nn.Linear) else None


def ends_in_linear(model: nn.Module, example: Tensor) -> bool:
    """Whether the model's outputs are those of a Linear that takes one row per record."""
    return _final_linear(model, example) is not None


@torch.no_grad()
def _inputs_of(module: nn.Module, model: nn.Module, inputs: Tensor, batch_size: int = 500) -> Tensor:
    """What enters a module of the model, one row per record: not averaged, whatever the layer before it gives."""
    device = next((p.device for p in model.parameters()), inputs.device)
    with evaluating(model), calls_of([module]) as calls:
        for part in torch.split(inputs, batch_size):
            model(part.to(device))
    return torch.cat([call.entered.cpu() for call in calls])


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
        elif name == "gradient" and len(outputs) > 1 and (final := _final_linear(model, inputs)):
            found[name] = head_gradients(loss, last, _inputs_of(final, model, inputs), targets)
        elif name == "gradient":
            raise BadArgument("features", "the last layer's gradient is taken of a model that ends in nn.Linear")
        else:
            raise BadArgument("features", f"there is no feature {name!r}", "label, loss or gradient")
    return found
