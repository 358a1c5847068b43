"""A generator of images like the attacker's public ones: a Wasserstein GAN with gradient penalty.

Networks and settings are those of GMI (Zhang et al. 2020, arXiv 1911.07135, and its code) unless stated otherwise.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument
from fedveil.federation.checkpoint import load_for, save_for
from fedveil.federation.shards import generator as source

CODE = 100  # numbers in a code z
SMALLEST = 4  # pixels per side of the first hidden image
LR, BETAS, BATCH, CRITIC_STEPS, PENALTY = 2e-4, (0.5, 0.999), 64, 5, 10.0


@dataclass(frozen=True, eq=False)
class Gan:
    """A generator from codes to pixels in [0, 1], and a critic of pixels (larger: more real)."""

    generator: nn.Module
    critic: nn.Module


def widths(size: int, width: int) -> list[int]:
    """Channels from the smallest image to the full one: twice as many where the side is half."""
    doublings = (size // SMALLEST).bit_length() - 1
    if size != SMALLEST * 2**doublings or doublings < 1:
        raise BadArgument("generator", f"images have {size} pixels per side", "8, 16, 32, 64 or 128 pixels per side")
    return [width * 2**k for k in reversed(range(doublings))]


def make_generator(channels: int, size: int, width: int) -> nn.Sequential:
    """Code -> a linear layer to 4 x 4 -> transposed 5 x 5 convolutions of stride 2, BatchNorm, ReLU -> sigmoid."""
    sides = widths(size, width)
    first = sides[0] * SMALLEST**2
    layers: list[nn.Module] = [
        nn.Linear(CODE, first, bias=False),
        nn.BatchNorm1d(first),
        nn.ReLU(),
        nn.Unflatten(1, (sides[0], SMALLEST, SMALLEST)),
    ]
    for before, after in itertools.pairwise(sides):
        layers += [_doubled(before, after, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, _doubled(sides[-1], channels, bias=True), nn.Sigmoid())


def _doubled(before: int, after: int, *, bias: bool) -> nn.Module:
    """A transposed convolution to twice the side."""
    return nn.ConvTranspose2d(before, after, 5, stride=2, padding=2, output_padding=1, bias=bias)


def make_critic(channels: int, size: int, width: int) -> nn.Sequential:
    """5 x 5 convolutions of stride 2 with instance norm (except the first) and LeakyReLU 0.2 -> one number."""
    sides = widths(size, width)[::-1]
    layers: list[nn.Module] = [nn.Conv2d(channels, sides[0], 5, stride=2, padding=2), nn.LeakyReLU(0.2)]
    for before, after in itertools.pairwise(sides):
        layers += [
            nn.Conv2d(before, after, 5, stride=2, padding=2),
            nn.InstanceNorm2d(after, affine=True),
            nn.LeakyReLU(0.2),
        ]
    return nn.Sequential(*layers, nn.Conv2d(sides[-1], 1, SMALLEST), nn.Flatten(0))


def penalty(critic: nn.Module, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
    """E (|| grad_x D(x) || - 1)^2 between real and fake images (Gulrajani et al. 2017, Eq. 3)."""
    between = (real + share.view(-1, 1, 1, 1) * (fake - real)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    found: Tensor = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    return found


@dataclass(eq=False)
class _Training:
    """Both networks, their optimisers, and the progress so far."""

    gan: Gan
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer]  # of the generator and of the critic
    epoch: int = 0
    steps: int = 0
    distances: list[float] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        nets = [self.gan.generator.state_dict(), self.gan.critic.state_dict()]
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return {
            "nets": nets,
            "optimizers": optimizers,
            "epoch": self.epoch,
            "steps": self.steps,
            "distances": self.distances,
        }

    def restore(self, state: dict[str, Any]) -> None:
        for net, values in zip((self.gan.generator, self.gan.critic), state["nets"], strict=True):
            net.load_state_dict(values)
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.epoch, self.steps, self.distances = state["epoch"], state["steps"], list(state["distances"])

    def step(self, real: Tensor, random: torch.Generator) -> float:
        """One step of the critic, and after every fifth one step of the generator; returns the critic's distance."""
        generator, critic = self.gan.generator, self.gan.critic
        with torch.no_grad():
            fake = generator(_codes(len(real), random).to(real.device))
        share = torch.rand(len(real), generator=random).to(real.device)
        distance = critic(real).mean() - critic(fake).mean()
        _descend(self.optimizers[1], PENALTY * penalty(critic, real, fake, share) - distance, critic)
        self.steps += 1
        if self.steps % CRITIC_STEPS == 0:
            images = generator(_codes(len(real), random).to(real.device))
            _descend(self.optimizers[0], -critic(images).mean(), generator)
        return float(distance.detach())


def _codes(count: int, random: torch.Generator) -> Tensor:
    return torch.randn(count, CODE, generator=random)


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor, net: nn.Module) -> None:
    """A step of one network; the other one gets no gradients."""
    parameters = list(net.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()


def _start(channels: int, size: int, width: int, lr: float, seed: int, device: torch.device) -> _Training:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        nets = make_generator(channels, size, width), make_critic(channels, size, width)
    gan = Gan(*(net.to(device) for net in nets))
    generator, critic = (torch.optim.Adam(net.parameters(), lr, betas=BETAS) for net in nets)
    return _Training(gan, (generator, critic))


def train_gan(
    images: Tensor,
    epochs: int,
    *,
    width: int = 16,
    lr: float = LR,
    seed: int = 0,
    path: Path | None = None,
    asked: str = "",
    every: int = 2,
    tell: Callable[[float, str], None] = lambda share, what: None,
) -> tuple[Gan, list[float]]:
    """Train on public images; returns both networks, and the critic's distance in each epoch.

    min_G max_D  E D(x) - E D(G(z)) - 10 penalty,  z ~ N(0, I) of 100 numbers; five steps of D for one of G, batches of
    64, Adam 2e-4 with betas (0.5, 0.999). The original has width 64 and 100 epochs for 32 x 32 images.

    Args:
        images: pixels in [0, 1], (n, channels, size, size), on the device to train on.
        epochs: times through the images.
        width: channels of the largest hidden image.
        lr: of both networks; few epochs need a larger one than the original's.
        seed: of start, order and codes; an epoch's draws depend only on it and the epoch.
        path: where the state is saved; interrupted training resumes from it.
        asked: identifies the images; a state saved for anything else is not used.
        every: epochs between two saved states.
        tell: called with the share done and the current step.
    """
    channels, size = images.shape[1], images.shape[-1]
    if len(images) < 2 or epochs < 1:
        raise BadArgument("generator", f"{len(images)} images, {epochs} epochs", "at least 2 images and 1 epoch")
    key = repr((asked, tuple(images.shape), width, lr, seed))
    training = _start(channels, size, width, lr, seed, images.device)
    old = load_for(path, key, images.device) if path else None
    if old and old["epoch"] <= epochs:
        training.restore(old)
    for epoch in range(training.epoch, epochs):
        random = source("gan", seed, epoch)
        order = torch.randperm(len(images), generator=random).to(images.device)
        batches = [rows for rows in torch.split(order, BATCH) if len(rows) > 1]
        found = []
        for number, rows in enumerate(batches):
            found.append(training.step(images[rows], random))
            tell((epoch + number / len(batches)) / epochs, f"generator, epoch {epoch + 1}/{epochs}")
        training.epoch, training.distances = epoch + 1, [*training.distances, sum(found) / len(found)]
        if path and (training.epoch % every == 0 or training.epoch == epochs):
            save_for(path, key, training.state())
    training.gan.generator.eval()
    training.gan.critic.eval()
    return training.gan, training.distances
