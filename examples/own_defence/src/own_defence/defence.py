"""A toy defence: clients receive a model with wrong predictions, but the server obtains the true gradient.

In every round the server draws a public direction r and a secret number s, and adds s r to the bias of the last layer.
For squared error, 0.5 |u - y|^2, a client that sees u + s r computes

    gradient with slope u + s r - y  =  true gradient + s (gradient with slope r)

The client sends both gradients, and the server subtracts the second, times s. No accuracy is lost, and the model as
received is useless.
"""

import copy
import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil import Aggregate
from fedveil.defences import Defence, DefenceClient, DefenceRound, DefenceServer, Samples
from fedveil.defences.plain import PlainClient, PlainUpdate, average
from fedveil.graph.inputs import Inputs
from fedveil.scheme.losses import Loss, sample_weights


def last_bias(model: nn.Module) -> Tensor:
    """Return the bias of the model's last Linear."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1].bias


@dataclass(frozen=True, eq=False)
class Sent:
    """A broadcast: a network with shifted outputs, and the direction of the shift."""

    network: nn.Module
    direction: Tensor


@dataclass(frozen=True, eq=False)
class Answer:
    """A client's update: the gradient of its loss, and the gradient of its outputs along the direction."""

    update: PlainUpdate
    along: PlainUpdate


class Shifted(Defence[Sent, Answer]):
    """A defence that adds a secret multiple of a public direction to the outputs, for squared error only.

    Args:
        size: standard deviation of the secret number.
    """

    fusable = False

    def __init__(self, size: float = 10.0) -> None:
        self.name, self.size = "shifted", size

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> "ShiftedServer":
        """Prepare the server for a run."""
        return ShiftedServer(self.size)

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> "ShiftedClient":
        """Prepare clients for a run."""
        return ShiftedClient(PlainClient(model, loss))

    def client_view(self, model: nn.Module, broadcast: Sent) -> nn.Module:
        """Return the network as received."""
        return copy.deepcopy(broadcast.network)


class ShiftedServer(DefenceServer[Sent, Answer]):
    """A server that draws a new direction and a new secret number for each broadcast."""

    def __init__(self, size: float) -> None:
        self._size = size
        self._generator = torch.Generator().manual_seed(secrets.randbits(63))

    def start_round(self, model: nn.Module, members: Sequence[int] | None = None) -> "ShiftedRound":
        """Copy the model and shift the outputs of the copy."""
        network = copy.deepcopy(model)
        bias = last_bias(network)
        direction = torch.randn(bias.shape, generator=self._generator).to(bias)
        secret = self._size * float(torch.randn((), generator=self._generator))
        with torch.no_grad():
            bias += secret * direction
        return ShiftedRound(Sent(network, direction), secret)


class ShiftedRound(DefenceRound[Sent, Answer]):
    """A broadcast and the secret number used to create it."""

    def __init__(self, broadcast: Sent, secret: float) -> None:
        self.broadcast, self._secret = broadcast, secret

    def recover(self, updates: Sequence[Answer], weights: Sequence[float]) -> Aggregate:
        """Return the true gradient."""
        seen = average([answer.update for answer in updates], weights, {})
        along = average([answer.along for answer in updates], weights, {}).gradients
        true = {name: value - self._secret * along[name] for name, value in seen.gradients.items()}
        return dataclasses.replace(seen, gradients=true)

    def release(self, *, reuse: bool = False) -> None:
        """Drop the secret."""
        self._secret = 0.0


class ShiftedClient(DefenceClient[Sent, Answer]):
    """A client that computes two gradients."""

    def __init__(self, plain: PlainClient) -> None:
        self._plain = plain

    def step(self, broadcast: Sent, samples: Samples, client: int = 0) -> Answer:
        """Compute both gradients, with the same weight for each sample."""
        update = self._plain.step(broadcast.network, samples)
        outputs = broadcast.network(samples.inputs)
        along = (outputs * broadcast.direction * sample_weights(outputs, samples.weights, self._plain.loss)).sum()
        gradients = torch.autograd.grad(along, list(broadcast.network.parameters()))
        names = [name for name, _ in broadcast.network.named_parameters()]
        return Answer(update, PlainUpdate(dict(zip(names, gradients, strict=True)), {}))

    def accumulate(self, broadcast: Sent, total: Answer | None, update: Answer) -> tuple[Sent, Answer]:
        """Sum both gradients."""
        network, first = self._plain.accumulate(broadcast.network, total and total.update, update.update)
        _, second = self._plain.accumulate(broadcast.network, total and total.along, update.along)
        return dataclasses.replace(broadcast, network=network), Answer(first, second)
