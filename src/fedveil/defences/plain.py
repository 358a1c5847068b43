"""No defence: clients get the model and send gradients (the paper's FedAvg)."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.defences.interface import Aggregate, Stateless
from fedveil.errors import NonFiniteUpdate
from fedveil.graph.inputs import Inputs
from fedveil.scheme import Loss, SquaredError
from fedveil.scheme.losses import per_sample
from fedveil.scheme.outputs import head_axis, outputs_of, slope


@dataclass(frozen=True, eq=False)
class PlainUpdate:
    """Gradients and buffers, as they are."""

    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Plain(Stateless):
    """Weighted mean of plain gradients.

    Args:
        rounding: a seed makes it a rounding control (docs/maths.md, 'What "equal" means'): every gradient tensor gets
            noise of one unit in the last place, to show what floating point alone does to a run.
    """

    def __init__(self, rounding: int | None = None) -> None:
        self.name = "plain" if rounding is None else "rounding control"
        self._noise = None if rounding is None else torch.Generator().manual_seed(rounding)

        self._loss: Loss = SquaredError()
        self._axis: int | None = None
        self._bytes: dict[str, float] = {}

    def prepare(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """Remember the loss, where classes are, and how much travels."""
        self._loss, self._axis = loss, head_axis(model)
        trainable, buffers = tensors_of(model)
        up = size_of([*trainable.values(), *buffers.values()])
        self._bytes = {"bytes_down": size_of([*model.parameters(), *buffers.values()]), "bytes_up": up}

    prepare_client = prepare

    def broadcast(self, model: nn.Module) -> nn.Module:
        """The model itself: in one process nothing needs to be copied."""
        return model

    def client_step(
        self,
        model: nn.Module,
        broadcast: nn.Module,
        inputs: Inputs,
        targets: Tensor,
        weights: Tensor | None = None,
        client: int = 0,
    ) -> PlainUpdate:
        """Gradients of the loss; buffers are the client's own copies."""
        trainable, own = tensors_of(broadcast)
        outputs = outputs_of(broadcast, inputs, own)
        with torch.no_grad():
            delta = slope(self._loss, outputs, targets, self._axis) * per_sample(self._loss, outputs, weights)
        return PlainUpdate(gradients_of(trainable, outputs, delta), own)

    def accumulate(
        self, broadcast: nn.Module, total: PlainUpdate | None, update: PlainUpdate
    ) -> tuple[nn.Module, PlainUpdate]:
        """Sum of gradients; statistics go on from where the last batch left them."""
        if update.buffers:
            broadcast = copy.deepcopy(broadcast)
            broadcast.load_state_dict(update.buffers, strict=False)
        if total is not None:
            summed = {name: total.gradients[name] + g for name, g in update.gradients.items()}
            update = PlainUpdate(summed, update.buffers)
        return broadcast, update

    def aggregate(self, updates: Sequence[PlainUpdate], weights: Sequence[float]) -> Aggregate:
        """sum_k |D_k| / |D| times client k's gradients and floating buffers."""
        shares = [weight / sum(weights) for weight in weights]
        gradients = _mean([update.gradients for update in updates], shares)
        if not math.isfinite(float(torch.stack(torch._foreach_norm(list(gradients.values()))).sum())):
            for position, update in enumerate(updates):
                _refuse_non_finite(position, update.gradients)
        if self._noise is not None:
            gradients = {name: self._rounded(g) for name, g in gradients.items()}
        buffers = _mean([update.buffers for update in updates], shares)
        return Aggregate(gradients, buffers, 0.0, self._bytes)

    def _rounded(self, gradient: Tensor) -> Tensor:
        draw = torch.randn(gradient.shape, generator=self._noise, dtype=gradient.dtype).to(gradient.device)
        return gradient + torch.finfo(gradient.dtype).eps * gradient.pow(2).mean().sqrt() * draw

    def client_view(self, model: nn.Module, broadcast: nn.Module) -> nn.Module:
        """The true model."""
        return copy.deepcopy(broadcast)


def tensors_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters that want gradients, and a client's own copies of the buffers."""
    trainable: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return trainable, {name: buffer.clone() for name, buffer in model.named_buffers()}


def gradients_of(
    trainable: Mapping[str, Tensor], roots: Tensor | Sequence[Tensor], slopes: Tensor | Sequence[Tensor]
) -> dict[str, Tensor]:
    """By name; 0 for a parameter that this pass did not use."""
    found = torch.autograd.grad(roots, list(trainable.values()), slopes, allow_unused=True)
    pairs = zip(trainable.items(), found, strict=True)
    return {name: torch.zeros_like(p) if gradient is None else gradient for (name, p), gradient in pairs}


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _mean(dicts: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
    """Weighted mean by name; of counters the largest."""
    if len(dicts) == 1:
        return dict(dicts[0])
    mean = {}
    for name, first in dicts[0].items():
        tensors = [tensors[name] for tensors in dicts]
        if first.is_floating_point():
            mean[name] = torch.stack([t * share for t, share in zip(tensors, shares, strict=True)]).sum(0)
        else:
            mean[name] = torch.stack(tensors).amax(0)
    return mean


def _refuse_non_finite(position: int, own: Mapping[str, Tensor]) -> None:
    """Name the client and its first gradient that is not finite."""
    for name, gradient in own.items():
        if not torch.isfinite(gradient).all():
            raise NonFiniteUpdate(f"client {position}", f"gradient {name} holds NaN or infinity")
