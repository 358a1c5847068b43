"""Find the Linear layers whose input has one row per record, and avoid computing their per-record gradients.

The gradient of such a layer for one record is the outer product of the output's cotangent and the input. To obtain the
cotangent, a tensor of zeros, called the *tap*, is added to the output: the gradient of the tap is the cotangent.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedveil.graph.inputs import Inputs, Named, each
from fedveil.scheme.outputs import compute_outputs
from fedveil.wire import Tensors

if TYPE_CHECKING:
    from fedveil.privacy.gradients import RecordGradients


class ReplaceLinear(TorchFunctionMode):
    """Calls `replacement` in place of torch.nn.functional.linear."""

    def __init__(self, replacement: Callable[..., Tensor]) -> None:
        super().__init__()
        self._replacement = replacement

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Named | None = None
    ) -> object:
        """Call the function or its replacement."""
        return (self._replacement if func is F.linear else func)(*args, **(kwargs or {}))


class RowLayer(NamedTuple):
    """A Linear with one row per record whose parameters are used only once; `tap` contains zeros."""

    weight: str
    bias: str | None
    tap: Tensor


@torch.enable_grad()
def find_row_layers(task: "RecordGradients", inputs: Inputs) -> tuple[list[RowLayer], Tensor]:
    """Run the model for one record; return its row layers and its outputs.

    The parameters of such layers are detached in calls to F.linear, so they receive a gradient only if the model also
    uses them elsewhere.
    """
    leaves = {name: task.values[name].detach().requires_grad_() for name in task.trainable}
    names = {id(own): name for name, own in leaves.items()}
    layers: list[RowLayer] = []

    def linear(entered: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        name, other = names.get(id(weight)), names.get(id(bias))
        if name is None or entered.numel() != entered.shape[-1]:
            return F.linear(entered, weight, bias)
        found = F.linear(entered, weight.detach(), bias.detach() if bias is not None and other else bias)
        layers.append(RowLayer(name, other, torch.zeros_like(found)))
        return found

    with ReplaceLinear(lambda input, weight, bias=None: linear(input, weight, bias)):
        outputs = compute_outputs(task.model, each(lambda own: own[:1], inputs), task.fresh_values(leaves))
    used = Counter([name for layer in layers for name in (layer.weight, layer.bias) if name])
    if outputs.requires_grad and used:
        elsewhere = torch.autograd.grad(outputs.sum(), [leaves[name] for name in used], allow_unused=True)
        used.update([name for name, own in zip(list(used), elsewhere, strict=True) if own is not None])
    return [own for own in layers if used[own.weight] == used[own.bias or own.weight] == 1], outputs.detach()


class ForwardVaries(Exception):
    """The calls to a layer differ from those for the first record."""


def run_with_taps(task: "RecordGradients", leaves: Tensors, taps: Tensors, record: Inputs) -> tuple[Tensor, Tensors]:
    """Run the model for one record, with taps added to layer outputs; return its outputs and the layers' inputs."""
    names = {id(task.values[name]): name for name in taps}
    seen: Tensors = {}

    def linear(entered: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found, name = F.linear(entered, weight, bias), names.get(id(weight))
        if name is None:
            return found
        if name in seen or found.shape != taps[name].shape:
            raise ForwardVaries
        seen[name] = entered
        return found + taps[name]

    with ReplaceLinear(lambda input, weight, bias=None: linear(input, weight, bias)):
        outputs = compute_outputs(task.model, each(lambda own: own.unsqueeze(0), record), task.fresh_values(leaves))
    if len(seen) != len(taps):
        raise ForwardVaries
    return outputs.squeeze(0), seen
