"""A generator of images like the attacker's public ones: a Wasserstein GAN with gradient penalty.

Networks and settings are those of GMI (Zhang et al. 2020, arXiv 1911.07135, and its code) unless stated otherwise.
"""

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument
from fedveil.federation.checkpoint import load_for, save_for
from fedveil.progress import Progress
from fedveil.records.shards import generator as source

CODE = 100  # dimensions of a code z
SMALLEST = 4  # pixels per side of the first hidden image
LR, BETAS, BATCH, CRITIC_STEPS, PENALTY = 2e-4, (0.5, 0.999), 64, 5, 10.0


@dataclass(frozen=True, eq=False)
class Gan:
    """A generator from codes to pixels in [0, 1], and a critic of pixels (larger: more real)."""

    generator: nn.Module
    critic: nn.Module


def widths(size: int, width: int) -> list[int]:
    """Return the channels from the smallest image to the full one: twice as many where the side is half."""
    doublings = (size // SMALLEST).bit_length() - 1
    if size != SMALLEST * 2**doublings or doublings < 1:
        raise BadArgument("generator", f"images have {size} pixels per side", "use 8, 16, 32, 64 or 128")
    return [width * 2**k for k in reversed(range(doublings))]


def make_generator(channels: int, size: int, width: int) -> nn.Sequential:
    """Build code -> linear layer to 4 x 4 -> transposed 5 x 5 convolutions of stride 2, BatchNorm, ReLU -> sigmoid."""
    sides = widths(size, width)
    first = sides[0] * SMALLEST**2
    doubled = functools.partial(nn.ConvTranspose2d, kernel_size=5, stride=2, padding=2, output_padding=1)
    layers: list[nn.Module] = [
        nn.Linear(CODE, first, bias=False),
        nn.BatchNorm1d(first),
        nn.ReLU(),
        nn.Unflatten(1, (sides[0], SMALLEST, SMALLEST)),
    ]
    for before, after in itertools.pairwise(sides):
        layers += [doubled(before, after, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, doubled(sides[-1], channels), nn.Sigmoid())


def make_critic(channels: int, size: int, width: int) -> nn.Sequential:
    """Build 5 x 5 convolutions of stride 2 with instance norm (except the first) and LeakyReLU 0.2 -> one number."""
    sides = widths(size, width)[::-1]
    layers: list[nn.Module] = [nn.Conv2d(channels, sides[0], 5, stride=2, padding=2), nn.LeakyReLU(0.2)]
    for before, after in itertools.pairwise(sides):
        halved = nn.Conv2d(before, after, 5, stride=2, padding=2)
        layers += [halved, nn.InstanceNorm2d(after, affine=True), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(sides[-1], 1, SMALLEST), nn.Flatten(0))


def penalty(critic: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    """Return E (|| grad_x D(x) || - 1)^2 between real and fake images (Gulrajani et al. 2017, Eq. 3)."""
    between = (real + mix.view(-1, 1, 1, 1) * (fake - real)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    found: Tensor = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    return found


class _Training:
    """Both networks, their optimizers, and the critic's distance in each epoch so far."""

    def __init__(self, gan: Gan, lr: float) -> None:
        self.generator, self.critic = self.nets = gan.generator, gan.critic
        self.optimizers = [torch.optim.Adam(net.parameters(), lr, betas=BETAS) for net in self.nets]
        self.distances: list[float] = []

    def save(self, path: Path, key: str) -> None:
        nets, optimizers = ([part.state_dict() for part in parts] for parts in (self.nets, self.optimizers))
        save_for(path, key, {"nets": nets, "optimizers": optimizers, "distances": self.distances})

    def resume(self, path: Path, key: str, epochs: int, device: torch.device) -> None:
        """Load what was saved for the same key, unless it was trained for more epochs."""
        state = load_for(path, key, device)
        if state and len(state["distances"]) <= epochs:
            for net, values in zip(self.nets, state["nets"], strict=True):
                net.load_state_dict(values)
            for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(values)
            self.distances = list(state["distances"])

    def step(self, real: Tensor, random: torch.Generator, *, both: bool) -> float:
        """Take one step of the critic, and one of the generator if `both`; return the critic's distance."""

        def codes() -> Tensor:
            return torch.randn(len(real), CODE, generator=random).to(real.device)

        with torch.no_grad():
            fake = self.generator(codes())
        mix = torch.rand(len(real), generator=random).to(real.device)
        distance = self.critic(real).mean() - self.critic(fake).mean()
        _descend(self.optimizers[1], PENALTY * penalty(self.critic, real, fake, mix) - distance)
        if both:
            _descend(self.optimizers[0], -self.critic(self.generator(codes())).mean())
        return float(distance.detach())


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take a step of one network; the other one gets no gradients."""
    parameters = optimizer.param_groups[0]["params"]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()


def train_gan(
    images: Tensor,
    epochs: int,
    *,
    width: int = 16,
    lr: float = LR,
    seed: int = 0,
    path: Path | None = None,
    asked: str = "",
    progress: Progress = lambda fraction, what: None,
) -> tuple[Gan, list[float]]:
    """Train on public images; return both networks, and the critic's distance in each epoch.

    min_G max_D  E D(x) - E D(G(z)) - 10 penalty,  z ~ N(0, I) in 100 dimensions; five steps of D for one of G, batches
    of 64, Adam 2e-4 with betas (0.5, 0.999). The original has width 64 and 100 epochs for 32 x 32 images.

    Images are (n, channels, size, size) with pixels in [0, 1], on the device to train on. `width` is the number of
    channels of the largest hidden image; few epochs need a larger `lr` than the original's. An epoch's draws depend
    only on `seed` and the epoch: interrupted training resumes from `path`, where the state is saved every second
    epoch, if it was saved for the same images, which `asked` identifies.
    """
    channels, size = images.shape[1], images.shape[-1]
    if len(images) < 2 or epochs < 1:
        raise BadArgument("generator", f"{len(images)} images, {epochs} epochs", "use at least 2 images and 1 epoch")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        nets = make_generator(channels, size, width), make_critic(channels, size, width)
    gan = Gan(*(net.to(images.device) for net in nets))
    training, key = _Training(gan, lr), repr((asked, tuple(images.shape), width, lr, seed))
    if path:
        training.resume(path, key, epochs, images.device)
    for epoch in range(len(training.distances), epochs):
        random = source("gan", seed, epoch)
        order = torch.randperm(len(images), generator=random).to(images.device)
        batches = [rows for rows in torch.split(order, BATCH) if len(rows) > 1]
        found = []
        for number, rows in enumerate(batches):
            fifth = (epoch * len(batches) + number + 1) % CRITIC_STEPS == 0
            found.append(training.step(images[rows], random, both=fifth))
            progress((epoch + number / len(batches)) / epochs, f"generator, epoch {epoch + 1}/{epochs}")
        training.distances.append(sum(found) / len(found))
        if path and (epoch % 2 or epoch + 1 == epochs):
            training.save(path, key)
    for net in nets:
        net.eval()
    return gan, training.distances
