"""Features of a record under a model: outputs of its last layers, its loss, the gradient of the last layer."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool1d, adaptive_avg_pool2d

from fedveil.errors import BadArgument
from fedveil.federation.evaluate import evaluating
from fedveil.graph.inputs import ModuleCall, record_calls
from fedveil.scheme.losses import USERS, BinaryCrossEntropy, Loss, one_hot

LAYERS = ("last", "second", "third")  # counted from the end
SIDE = 8  # maps are limited to 8 x 8 pixels and sequences to 64 steps; larger ones are averaged down to that
BATCH = 500


def _weighted_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold a weight: a parameter of two dimensions or more."""
    return [m for m in model.modules() if any(p is not None and p.dim() > 1 for p in m._parameters.values())]


@torch.no_grad()
def _run(
    model: nn.Module, inputs: Tensor, modules: Iterable[nn.Module], batch_size: int = BATCH
) -> Iterator[tuple[Tensor, list[ModuleCall]]]:
    """Yield a model's outputs in evaluation mode, and the calls to some of its modules, batch by batch."""
    device = next((p.device for p in model.parameters()), inputs.device)
    for part in torch.split(inputs, batch_size):
        with evaluating(model), record_calls(modules) as calls:
            outputs = model(part.to(device))
        yield outputs, calls


def _limit_size(values: Tensor, records: int) -> Tensor:
    """Average maps (channels, height, width) and sequences (steps, features) down to SIDE; flatten all others."""
    if len(values) != records:
        what = f"a layer takes {tuple(values.shape)} for {records} records"
        raise BadArgument("features", what, "use a model whose layers all have records in their first dimension")
    if values.dim() > 3:
        maps = values.flatten(3)
        return adaptive_avg_pool2d(maps, (min(SIDE, maps.shape[2]), min(SIDE, maps.shape[3])))
    if values.dim() == 3:
        steps = min(SIDE**2, values.shape[1])
        return adaptive_avg_pool1d(values.transpose(1, 2), steps).transpose(1, 2)
    return values.reshape(records, -1)


def layer_outputs(model: nn.Module, inputs: Tensor, *, batch_size: int = BATCH) -> tuple[Tensor, ...]:
    """Return the outputs of the last layers, the last one first; fewer if the model has fewer layers.

    A layer is a module with a weight and the activation, norm and pooling that follow. Its output, the paper's y^(l),
    is the input of the next such module: (records, features), (records, channels, height, width) with at most 8 x 8
    pixels, or (records, steps, features) with at most 64 steps. Maps that `nn.Flatten` flattens stay maps.
    """
    flat, weighted = [m for m in model.modules() if isinstance(m, nn.Flatten)], _weighted_modules(model)
    found = []
    for outputs, calls in _run(model, inputs, [*weighted, *flat], batch_size):
        maps = [call for call in calls if call.module in flat]
        taken = [call.entered for call in calls if call.module in weighted]
        entered = [next((m.entered for m in maps if m.output is value), value) for value in taken]
        last = entered[:0:-1][: len(LAYERS) - 1]  # without the first layer's input, which is the record itself
        found.append([_limit_size(value, len(outputs)).cpu() for value in (outputs, *last)])
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def dense_targets(loss: Loss, targets: Tensor, outputs: Tensor) -> Tensor:
    """Return targets as the federation's loss takes them: class indices become one-hot rows."""
    if targets.is_floating_point() or isinstance(loss, (*USERS, BinaryCrossEntropy)):
        return loss.dense(targets, outputs)
    return one_hot(targets, outputs)


def losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the federation's loss for each record, in float64."""
    outputs = outputs.double()
    return loss.values(outputs, dense_targets(loss, targets, outputs))


def labels(targets: Tensor) -> Tensor:
    """Return class indices, from indices or from rows of class scores."""
    return targets.argmax(-1) if targets.dim() > 1 else targets.long()


def _final_linear(model: nn.Module, example: Tensor) -> nn.Linear | None:
    """Return the Linear whose outputs, one row per record, are the model's; None if there is no such module."""
    ((outputs, calls),) = _run(model, example[:2], _weighted_modules(model))
    final = calls[-1].module if calls and calls[-1].output is outputs and outputs.dim() == 2 else None
    return final if isinstance(final, nn.Linear) else None


def record_features(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, *, full: bool = True
) -> dict[str, Tensor]:
    """Return the outputs of the last layers by name; if `full`, also label, loss and gradient of the final Linear.

    That gradient, (records, outputs, features + 1), is delta (h, 1)^T, with the loss's gradient delta in the outputs
    and the layer's input h: no backward pass. A model whose outputs are not those of a Linear has none.
    """
    outputs = layer_outputs(model, inputs)
    found = dict(zip(LAYERS, outputs, strict=False))
    last, targets = outputs[0], targets.cpu()
    if full:
        found["label"] = dense_targets(loss, targets, last).reshape(len(last), -1)
        found["loss"] = losses(loss, last, targets).to(last.dtype).unsqueeze(1)
    if full and (final := _final_linear(model, inputs)):
        hidden = torch.cat([call.entered.cpu() for _, calls in _run(model, inputs, [final]) for call in calls])
        delta = loss.gradient(last, dense_targets(loss, targets, last))
        with_bias = torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)
        found["gradient"] = delta.unsqueeze(2) * with_bias.unsqueeze(1)
    return found
