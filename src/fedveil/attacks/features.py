"""Features of a record, computed with a model: outputs of the last layers, the loss, and the last layer's gradient."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool1d, adaptive_avg_pool2d

from fedveil.errors import BadArgument
from fedveil.federation.evaluate import evaluation_mode
from fedveil.graph.inputs import ModuleCall, record_calls
from fedveil.scheme.losses import AUTOGRAD_LOSSES, BinaryCrossEntropy, Loss, one_hot

LAYERS = ("last", "second", "third")  # counted from the end
MAX_SIDE = 8  # maps larger than 8 x 8 pixels, and sequences longer than 64 steps, are averaged to this size
BATCH_SIZE = 500


def _weighted_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules with a weight, which is any parameter with at least two dimensions."""
    return [m for m in model.modules() if any(p is not None and p.dim() > 1 for p in m._parameters.values())]


@torch.no_grad()
def _run(
    model: nn.Module, inputs: Tensor, modules: Iterable[nn.Module], batch_size: int = BATCH_SIZE
) -> Iterator[tuple[Tensor, list[ModuleCall]]]:
    """Yield a model's outputs in evaluation mode, and the calls to some of its modules, batch by batch."""
    device = next((p.device for p in model.parameters()), inputs.device)
    for part in torch.split(inputs, batch_size):
        with evaluation_mode(model), record_calls(modules) as calls:
            outputs = model(part.to(device))
        yield outputs, calls


def _limit_size(values: Tensor, records: int) -> Tensor:
    """Average maps to at most MAX_SIDE**2 pixels and sequences to at most MAX_SIDE**2 steps; flatten other values."""
    if len(values) != records:
        message = f"expected a layer's input to have {records} rows, one per record, got shape {tuple(values.shape)}"
        raise BadArgument(
            "features", message, "use a model whose layers all take inputs with the batch dimension first"
        )
    if values.dim() > 3:
        maps = values.flatten(3)
        return adaptive_avg_pool2d(maps, (min(MAX_SIDE, maps.shape[2]), min(MAX_SIDE, maps.shape[3])))
    if values.dim() == 3:
        steps = min(MAX_SIDE**2, values.shape[1])
        return adaptive_avg_pool1d(values.transpose(1, 2), steps).transpose(1, 2)
    return values.reshape(records, -1)


def layer_outputs(model: nn.Module, inputs: Tensor, *, batch_size: int = BATCH_SIZE) -> tuple[Tensor, ...]:
    """Return the outputs of the last three layers, or of all layers if there are fewer, starting with the last one.

    A layer is a module with a weight, together with the activation, norm and pooling that follow. Its output, the
    paper's y^(l), is the input of the next module with a weight. Its shape is (records, features), (records, channels,
    height, width) with at most 8 x 8 pixels, or (records, steps, features) with at most 64 steps. Maps keep the
    shape that they have before an `nn.Flatten`.
    """
    flatten_modules, weighted_modules = (
        [m for m in model.modules() if isinstance(m, nn.Flatten)],
        _weighted_modules(model),
    )
    result = []
    for outputs, calls in _run(model, inputs, [*weighted_modules, *flatten_modules], batch_size):
        maps = [call for call in calls if call.module in flatten_modules]
        layer_inputs = [call.first_input for call in calls if call.module in weighted_modules]
        map_inputs = [next((m.first_input for m in maps if m.output is value), value) for value in layer_inputs]
        hidden_outputs = map_inputs[:0:-1][
            : len(LAYERS) - 1
        ]  # the first layer's input is excluded, because it is the record itself
        result.append([_limit_size(value, len(outputs)).cpu() for value in (outputs, *hidden_outputs)])
    return tuple(torch.cat(parts) for parts in zip(*result, strict=True))


def dense_targets(loss: Loss, targets: Tensor, outputs: Tensor) -> Tensor:
    """Return targets in the form that the federation's loss expects: class indices become one-hot rows."""
    if targets.is_floating_point() or isinstance(loss, (*AUTOGRAD_LOSSES, BinaryCrossEntropy)):
        return loss.dense(targets, outputs)
    return one_hot(targets, outputs)


def losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the federation's loss for each record, in float64."""
    outputs = outputs.double()
    return loss.values(outputs, dense_targets(loss, targets, outputs))


def labels(targets: Tensor) -> Tensor:
    """Return class indices; rows of class scores are replaced by the index of their maximum."""
    return targets.argmax(-1) if targets.dim() > 1 else targets.long()


def _final_linear(model: nn.Module, example: Tensor) -> nn.Linear | None:
    """Return the Linear that computes the model's outputs, one row per record; None if there is no such module."""
    ((outputs, calls),) = _run(model, example[:2], _weighted_modules(model))
    last_module = calls[-1].module if calls and calls[-1].output is outputs and outputs.dim() == 2 else None
    return last_module if isinstance(last_module, nn.Linear) else None


def record_features(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, *, full: bool = True
) -> dict[str, Tensor]:
    """Return the outputs of the last layers by name; if `full`, also the label, the loss and the last gradient.

    The last gradient is delta (h, 1)^T with shape (records, outputs, features + 1), where delta is the gradient of the
    loss with respect to the outputs and h is the input of the final Linear. Computing it needs no backward pass. It is
    omitted if the model does not end with a Linear.
    """
    outputs = layer_outputs(model, inputs)
    result = dict(zip(LAYERS, outputs, strict=False))
    last_outputs, targets = outputs[0], targets.cpu()
    if full:
        result["label"] = dense_targets(loss, targets, last_outputs).reshape(len(last_outputs), -1)
        result["loss"] = losses(loss, last_outputs, targets).to(last_outputs.dtype).unsqueeze(1)
    if full and (final_linear := _final_linear(model, inputs)):
        hidden = torch.cat(
            [call.first_input.cpu() for _, calls in _run(model, inputs, [final_linear]) for call in calls]
        )
        delta = loss.gradient(last_outputs, dense_targets(loss, targets, last_outputs))
        hidden_and_one = torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)
        result["gradient"] = delta.unsqueeze(2) * hidden_and_one.unsqueeze(1)
    return result
