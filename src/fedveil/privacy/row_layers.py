"""Find the Linear layers whose input has one row per record, and avoid computing their per-record gradients.

The gradient of such a layer for one record is the outer product of the output's cotangent and the input. To obtain the
cotangent, a tensor of zeros, called the *tap*, is added to the output: the gradient of the tap is the cotangent.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


TINY = torch.finfo(torch.float64).tiny


def norms(rows: Tensor) -> Tensor:
    """Return the norms of the rows in float64. Scaling the rows first avoids underflow and overflow of squares."""
    if not rows.shape[-1]:
        return rows.new_zeros(rows.shape[:-1], dtype=torch.float64)
    largest = rows.abs().amax(-1, keepdim=True).double().clamp_min(TINY)
    result: Tensor = torch.linalg.vector_norm(rows.double() / largest, dim=-1)
    return largest.squeeze(-1) * result


@dataclass(frozen=True, eq=False)
class Product:
    """The per-record gradients of a Linear layer, as products of output cotangents and inputs.

    Attributes:
        weight, bias: names of the parameters that receive a gradient.
        cotangents: output cotangents, with dims (candidates, records, outputs).
        inputs: layer inputs, with dims (records, inputs).
    """

    weight: str | None
    bias: str | None
    cotangents: Tensor
    inputs: Tensor

    @classmethod
    def from_layer(
        cls, task: "RecordGradients", weight: str, bias: str | None, cotangents: Tensor, inputs: Tensor
    ) -> "Product":
        """Return the products of a layer, without alpha's part and without frozen parameters."""
        if task.head is not None and weight == task.head.weight:
            cotangents = cotangents[..., : len(task.head.direction)]
        names = [name if name in task.trainable else None for name in (weight, bias)]
        return cls(names[0], names[1], cotangents, inputs)

    def squares(self) -> Tensor:
        """Return the squared norms, with dims (candidates, records)."""
        # not squared yet, because the squares may underflow
        cotangents, inputs = norms(self.cotangents), norms(self.inputs)
        return torch.square(cotangents * inputs * bool(self.weight)) + torch.square(cotangents * bool(self.bias))

    def sums(self, factors: Tensor, all_included: bool) -> Tensors:
        """Return sums weighted by factors with dims (candidates, records); a factor of 0 excludes a record."""
        scaled, inputs, result = self.cotangents * factors.unsqueeze(2), self.inputs.double(), Tensors()
        if not all_included:
            scaled = scaled.masked_fill_((factors == 0).unsqueeze(2), 0.0)
            inputs = inputs.nan_to_num(0.0, 0.0, 0.0)  # inputs of excluded records may not be finite
        if self.weight:
            result[self.weight] = torch.bmm(scaled.transpose(1, 2), inputs.expand(len(scaled), -1, -1))
        if self.bias:
            result[self.bias] = scaled.sum(1)
        return result


class ReplaceLinear(TorchFunctionMode):
    """A mode in which `replacement` is called instead of torch.nn.functional.linear."""

    def __init__(self, replacement: Callable[..., Tensor]) -> None:
        super().__init__()
        self._replacement = replacement

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Named | None = None
    ) -> object:
        """Call the function or its replacement."""
        return (self._replacement if func is F.linear else func)(*args, **(kwargs or {}))


class RowLayer(NamedTuple):
    """A Linear layer with one row per record, whose parameters are used only once; `tap` contains zeros."""

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
    names = {id(leaf): name for name, leaf in leaves.items()}
    layers: list[RowLayer] = []

    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        name, bias_name = names.get(id(weight)), names.get(id(bias))
        if name is None or inputs.numel() != inputs.shape[-1]:
            return F.linear(inputs, weight, bias)
        result = F.linear(inputs, weight.detach(), bias.detach() if bias is not None and bias_name else bias)
        layers.append(RowLayer(name, bias_name, torch.zeros_like(result)))
        return result

    with ReplaceLinear(lambda input, weight, bias=None: linear(input, weight, bias)):
        outputs = compute_outputs(task.model, each(lambda tensor: tensor[:1], inputs), task.fresh_values(leaves))
    uses = Counter([name for layer in layers for name in (layer.weight, layer.bias) if name])
    if outputs.requires_grad and uses:
        direct_gradients = torch.autograd.grad(outputs.sum(), [leaves[name] for name in uses], allow_unused=True)
        uses.update([name for name, value in zip(list(uses), direct_gradients, strict=True) if value is not None])
    return [layer for layer in layers if uses[layer.weight] == uses[layer.bias or layer.weight] == 1], outputs.detach()


class ForwardVaries(Exception):
    """The calls of a layer differ from its calls for the first record."""


def run_with_taps(task: "RecordGradients", leaves: Tensors, taps: Tensors, record: Inputs) -> tuple[Tensor, Tensors]:
    """Run the model for one record, with taps added to layer outputs; return its outputs and the layers' inputs."""
    names = {id(task.values[name]): name for name in taps}
    inputs_by_layer: Tensors = {}

    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result, name = F.linear(inputs, weight, bias), names.get(id(weight))
        if name is None:
            return result
        if name in inputs_by_layer or result.shape != taps[name].shape:
            raise ForwardVaries
        inputs_by_layer[name] = inputs
        return result + taps[name]

    with ReplaceLinear(lambda input, weight, bias=None: linear(input, weight, bias)):
        outputs = compute_outputs(
            task.model, each(lambda tensor: tensor.unsqueeze(0), record), task.fresh_values(leaves)
        )
    if len(inputs_by_layer) != len(taps):
        raise ForwardVaries
    return outputs.squeeze(0), inputs_by_layer
