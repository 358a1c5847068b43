"""A toy defence: what a client gets answers wrongly, and still the server has the true gradient.

In every round the server draws a direction r, which it sends, and a number s, which it keeps, and adds s r to the bias
of the last layer. For squared error, 0.5 |u - y|^2, a client that gets u + s r computes

    gradient with slope u + s r - y  =  true gradient + s (gradient with slope r)

It sends both gradients, and the server subtracts. No accuracy is lost, and the model as received is of no use.
"""

import copy
import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.defences import Plain
from fedveil.defences.interface import Aggregate, Samples
from fedveil.defences.plain import PlainUpdate
from fedveil.scheme.losses import per_sample


def last_bias(model: nn.Module) -> Tensor:
    """The bias of the model's last Linear."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1].bias


@dataclass(frozen=True, eq=False)
class Sent:
    """What clients get: a network with shifted outputs, and in which direction they are shifted."""

    network: nn.Module
    direction: Tensor


@dataclass(frozen=True, eq=False)
class Answer:
    """What clients send: the gradient of their loss, and that of their outputs along the direction."""

    update: PlainUpdate
    along: PlainUpdate


class Shifted(Plain):
    """Adds a secret multiple of a public direction to the outputs; for squared error only.

    Args:
        size: standard deviation of the secret number.
    """

    fuses = False

    def __init__(self, size: float = 10.0) -> None:
        super().__init__()
        self.name, self.size = "shifted", size
        self._chance = torch.Generator().manual_seed(secrets.randbits(63))
        self._secret = 0.0

    def broadcast(self, model: nn.Module) -> Sent:
        """A copy of the model with shifted outputs."""
        network = copy.deepcopy(model)
        bias = last_bias(network)
        direction = torch.randn(bias.shape, generator=self._chance).to(bias)
        self._secret = self.size * float(torch.randn((), generator=self._chance))
        with torch.no_grad():
            bias += self._secret * direction
        return Sent(network, direction)

    def client_step(self, model: nn.Module, broadcast: Sent, samples: Samples, client: int = 0) -> Answer:
        """Both gradients, with the same weight for each sample."""
        update = super().client_step(model, broadcast.network, samples)
        outputs = broadcast.network(samples.inputs)
        along = (outputs * broadcast.direction * per_sample(self._loss, outputs, samples.weights)).sum()
        gradients = torch.autograd.grad(along, list(broadcast.network.parameters()))
        names = [name for name, _ in broadcast.network.named_parameters()]
        return Answer(update, PlainUpdate(dict(zip(names, gradients, strict=True)), {}))

    def accumulate(self, broadcast: Sent, total: Answer | None, update: Answer) -> tuple[Sent, Answer]:
        """Sums of both."""
        network, first = super().accumulate(broadcast.network, total and total.update, update.update)
        _, second = super().accumulate(broadcast.network, total and total.along, update.along)
        return dataclasses.replace(broadcast, network=network), Answer(first, second)

    def aggregate(self, updates: Sequence[Answer], weights: Sequence[float]) -> Aggregate:
        """The true gradient."""
        seen = super().aggregate([answer.update for answer in updates], weights)
        along = super().aggregate([answer.along for answer in updates], weights).gradients
        true = {name: value - self._secret * along[name] for name, value in seen.gradients.items()}
        return dataclasses.replace(seen, gradients=true)

    def forget(self) -> None:
        """Drop the round's secret."""
        self._secret = 0.0

    def client_view(self, model: nn.Module, broadcast: Sent) -> nn.Module:
        """The network as received."""
        return copy.deepcopy(broadcast.network)
