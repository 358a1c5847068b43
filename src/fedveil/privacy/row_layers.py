"""Linear layers that take one row per record: found by a probe, and tapped while records run through vmap.

The gradient of this layer for one record is the product of the cotangent of its output and its input, so it need not
be formed: a zero added to the output, the *tap*, has the cotangent as its gradient.
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


class AtLinear(TorchFunctionMode):
    """Calls `act` in place of torch.nn.functional.linear."""

    def __init__(self, act: Callable[..., Tensor]) -> None:
        super().__init__()
        self._act = act

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Named | None = None
    ) -> object:
        """Run the function, or what replaces it."""
        return (self._act if func is F.linear else func)(*args, **(kwargs or {}))


class RowLayer(NamedTuple):
    """A Linear that takes one row per record, and whose parameters have no other use; `tap`: zeros like its output."""

    weight: str
    bias: str | None
    tap: Tensor


@torch.enable_grad()
def find_row_layers(task: "RecordGradients", inputs: Inputs) -> tuple[list[RowLayer], Tensor]:
    """Run the model for one record; return its layers of this kind and its outputs.

    The parameters of such layers are detached where F.linear takes them, so any gradient they get is of another use.
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

    with AtLinear(lambda input, weight, bias=None: linear(input, weight, bias)):
        outputs = compute_outputs(task.model, each(lambda own: own[:1], inputs), task.values | leaves)
    used = Counter([name for layer in layers for name in (layer.weight, layer.bias) if name])
    if outputs.requires_grad and used:
        elsewhere = torch.autograd.grad(outputs.sum(), [leaves[name] for name in used], allow_unused=True)
        used.update([name for name, own in zip(list(used), elsewhere, strict=True) if own is not None])
    return [own for own in layers if used[own.weight] == used[own.bias or own.weight] == 1], outputs.detach()


class ForwardVaries(Exception):
    """A layer is not called as it was for the first record."""


def run_with_taps(task: "RecordGradients", leaves: Tensors, taps: Tensors, record: Inputs) -> tuple[Tensor, Tensors]:
    """Return the outputs for one record with `taps` added to the outputs of layers, and the inputs of these."""
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

    with AtLinear(lambda input, weight, bias=None: linear(input, weight, bias)):
        outputs = compute_outputs(task.model, each(lambda own: own.unsqueeze(0), record), task.values | leaves)
    if len(seen) != len(taps):
        raise ForwardVaries
    return outputs.squeeze(0), seen
