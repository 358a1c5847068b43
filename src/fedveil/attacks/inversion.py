"""Generative model inversion, GMI (Zhang et al. 2020, arXiv 1911.07135): find images of a class, given only a model.

The images come from the generator of a Wasserstein GAN with gradient penalty, trained on the attacker's public images.
Networks and settings follow the GMI paper and code, unless stated otherwise.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks.similarity import total_variation
from fedveil.errors import BadArgument
from fedveil.federation.checkpoint import load_keyed, save_keyed
from fedveil.federation.evaluate import evaluation_mode
from fedveil.progress import Progress, ignore_progress
from fedveil.records.shards import generator as make_rng

CODE_SIZE = 100  # dimension of a code z
MIN_SIDE = 4  # side length of the first hidden image, in pixels
LR, BETAS, BATCH, CRITIC_STEPS, PENALTY = 2e-4, (0.5, 0.999), 64, 5, 10.0
IDENTITY, MOMENTUM, BOUND = 100.0, 0.9, 1.0
PIXEL_LR, SMOOTH = 0.05, 1.0

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Gan:
    """A generator, which maps codes to pixels in [0, 1], and a critic, whose output is larger for real images."""

    generator: nn.Module
    critic: nn.Module


def widths(size: int, width: int) -> list[int]:
    """Return the number of channels of each hidden image, smallest image first; each is half of the previous number."""
    doublings = (size // MIN_SIDE).bit_length() - 1
    if size != MIN_SIDE * 2**doublings or doublings < 1:
        raise BadArgument("generator", f"images have a side length of {size} pixels", "use 8, 16, 32, 64 or 128 pixels")
    return [width * 2**k for k in reversed(range(doublings))]


def make_generator(channels: int, size: int, width: int) -> nn.Sequential:
    """Build the generator.

    It consists of a Linear that maps the code to a 4 x 4 image, transposed 5 x 5 convolutions with stride 2, BatchNorm
    and ReLU, and a final sigmoid.
    """
    counts = widths(size, width)
    features = counts[0] * MIN_SIDE**2
    upsample = functools.partial(nn.ConvTranspose2d, kernel_size=5, stride=2, padding=2, output_padding=1)
    layers: list[nn.Module] = [nn.Linear(CODE_SIZE, features, bias=False), nn.BatchNorm1d(features), nn.ReLU()]
    layers.append(nn.Unflatten(1, (counts[0], MIN_SIDE, MIN_SIDE)))
    for inputs, outputs in itertools.pairwise(counts):
        layers += [upsample(inputs, outputs, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, upsample(counts[-1], channels), nn.Sigmoid())


def make_critic(channels: int, size: int, width: int) -> nn.Sequential:
    """Build the critic.

    It consists of 5 x 5 convolutions with stride 2, instance norm (except after the first) and LeakyReLU 0.2, and a
    convolution with a single output.
    """
    counts = widths(size, width)[::-1]
    downsample = functools.partial(nn.Conv2d, kernel_size=5, stride=2, padding=2)
    layers: list[nn.Module] = [downsample(channels, counts[0]), nn.LeakyReLU(0.2)]
    for inputs, outputs in itertools.pairwise(counts):
        layers += [downsample(inputs, outputs), nn.InstanceNorm2d(outputs, affine=True), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(counts[-1], 1, MIN_SIDE), nn.Flatten(0))


def penalty(critic: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    """Return the gradient penalty E (|| grad_x D(x) || - 1)^2 of Gulrajani et al. (2017, Eq. 3).

    Each x is a random point on the line between a real and a fake image; `mix` contains the weights.
    """
    interpolated = (real + mix.view(-1, 1, 1, 1) * (fake - real)).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(interpolated).sum(), interpolated, create_graph=True)
    result: Tensor = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
    return result


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take one optimizer step; only the optimizer's own parameters receive gradients."""
    parameters = optimizer.param_groups[0]["params"]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()


def _train_step(
    gan: Gan, optimizers: list[torch.optim.Adam], real: Tensor, rng: torch.Generator, *, train_generator: bool
) -> float:
    """Train the critic for one step and, if `train_generator`, the generator too; return the critic's distance."""

    def codes() -> Tensor:
        return torch.randn(len(real), CODE_SIZE, generator=rng).to(real.device)

    with torch.no_grad():
        fake = gan.generator(codes())
    mix = torch.rand(len(real), generator=rng).to(real.device)
    distance = gan.critic(real).mean() - gan.critic(fake).mean()
    _descend(optimizers[1], PENALTY * penalty(gan.critic, real, fake, mix) - distance)
    if train_generator:
        _descend(optimizers[0], -gan.critic(gan.generator(codes())).mean())
    return float(distance.detach())


def train_gan(
    images: Tensor,
    epochs: int,
    *,
    width: int = 16,
    lr: float = LR,
    seed: int = 0,
    path: Path | None = None,
    data_key: str = "",
    progress: Progress = ignore_progress,
) -> tuple[Gan, list[float]]:
    """Train a GAN on public images; return it with the critic's mean distance in each epoch.

    The objective is min_G max_D  E D(x) - E D(G(z)) - 10 penalty, with z ~ N(0, I) in 100 dimensions. D is trained for
    five steps per step of G, with batches of 64 and Adam (lr 2e-4, betas (0.5, 0.999)). The original uses width 64 and
    100 epochs for 32 x 32 images.

    `images` has shape (n, channels, size, size), with pixels in [0, 1], and is on the device used for training. `width`
    is the number of channels of the largest hidden image. With few epochs, use a larger `lr` than the original. The
    random numbers of an epoch depend only on `seed` and the epoch. If `path` is given, the state is saved there every
    second epoch, and interrupted training resumes from it, provided that it was saved for the same images; `data_key`
    identifies them.
    """
    if len(images) < 2 or epochs < 1:
        raise BadArgument(
            "generator", f"got {len(images)} images and {epochs} epochs", "use at least 2 images and 1 epoch"
        )
    sizes = images.shape[1], images.shape[-1], width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        nets = [make(*sizes).to(images.device) for make in (make_generator, make_critic)]
    gan, optimizers = Gan(*nets), [torch.optim.Adam(net.parameters(), lr, betas=BETAS) for net in nets]
    key, distances = repr((data_key, tuple(images.shape), width, lr, seed)), list[float]()
    state = load_keyed(path, key, images.device) if path else None
    if state and len(state["distances"]) <= epochs:
        for net, optimizer, *values in zip(nets, optimizers, state["nets"], state["optimizers"], strict=True):
            net.load_state_dict(values[0])
            optimizer.load_state_dict(values[1])
        distances = list(state["distances"])
    for epoch in range(len(distances), epochs):
        rng = make_rng("gan", seed, epoch)
        order = torch.randperm(len(images), generator=rng).to(images.device)
        batches = [rows for rows in torch.split(order, BATCH) if len(rows) > 1]
        batch_distances = []
        for index, rows in enumerate(batches):
            trains_generator = (epoch * len(batches) + index + 1) % CRITIC_STEPS == 0
            batch_distances.append(_train_step(gan, optimizers, images[rows], rng, train_generator=trains_generator))
            progress((epoch + index / len(batches)) / epochs, f"generator, epoch {epoch + 1}/{epochs}")
        distances.append(sum(batch_distances) / len(batch_distances))
        if path and (epoch % 2 or epoch + 1 == epochs):
            states = {"nets": [net.state_dict() for net in nets], "distances": distances}
            save_keyed(path, key, {**states, "optimizers": [optimizer.state_dict() for optimizer in optimizers]})
    for net in nets:
        net.eval()
    return gan, distances


@dataclass(frozen=True, eq=False)
class ClassImages:
    """One image with pixels in [0, 1] for each requested class, and the attacked model's output for that class."""

    images: Tensor
    scores: Tensor


def search(
    model: Model,
    gan: Gan,
    classes: Tensor,
    *,
    steps: int,
    restarts: int,
    seed: int = 0,
    progress: Progress = ignore_progress,
) -> ClassImages:
    """For each requested class, search for a generated image that the model T assigns to that class.

    The search solves

        min_z  (1 / classes) sum_i  -D(G(z_i)) + 100 CE(T(G(z_i)), c_i)

    with Nesterov momentum 0.9, starting at z ~ N(0, I); z is clipped to [-1, 1] after each step. For each image, the
    restart with the largest output of T for its class is kept. The outputs of T are treated as logits, whichever loss T
    was trained with. After training with squared error, they are near 0 and 1, so the cross-entropy never vanishes and
    the search continues.

    There are two differences from the original. The original takes the mean over a batch with one code per class, so
    the step of a code depends on the number of classes; here, any number of codes is optimised together, with the same
    step. In the original, the maximum over restarts starts at 0, so an image is never kept if all of its outputs are
    negative; here, it starts at minus infinity.

    T maps pixels in [0, 1] to one output per class, independently for each image. Image i of restart k starts from the
    same code for every model.
    """
    gan.generator.eval()
    gan.critic.eval()
    scale = 1 / len(set(classes.tolist()))
    best = torch.full(classes.shape, -torch.inf, device=classes.device)
    codes = torch.zeros(len(classes), CODE_SIZE, device=classes.device)
    for restart in range(restarts):
        z = torch.randn(len(classes), CODE_SIZE, generator=make_rng("codes", seed, restart)).to(classes.device)
        velocity = torch.zeros_like(z)
        for step in range(steps):
            z.requires_grad_()
            images = gan.generator(z)
            identity = F.cross_entropy(model(images), classes, reduction="sum")
            loss = scale * (IDENTITY * identity - gan.critic(images).sum())
            (gradient,) = torch.autograd.grad(loss, z)
            rate = 0.02 if images.shape[-1] >= 64 else 0.01  # the original's rates for faces and for digits
            previous_velocity, velocity = velocity, MOMENTUM * velocity - rate * gradient
            z = (z.detach() - MOMENTUM * previous_velocity + (1 + MOMENTUM) * velocity).clamp(-BOUND, BOUND)
            progress((restart + step / steps) / restarts, f"codes, restart {restart + 1}/{restarts}")
        score = _class_scores(model, gan.generator(z.detach()), classes)
        is_better = score > best
        best = torch.where(is_better, score, best)
        codes = torch.where(is_better[:, None], z.detach(), codes)
    with torch.no_grad():
        return ClassImages(gan.generator(codes), best)


@torch.no_grad()
def _class_scores(model: Model, images: Tensor, classes: Tensor) -> Tensor:
    return model(images).gather(1, classes[:, None])[:, 0]


def search_pixels(
    model: Model,
    shape: tuple[int, ...],
    classes: Tensor,
    *,
    steps: int,
    seed: int = 0,
    progress: Progress = ignore_progress,
) -> ClassImages:
    """Search for pixels without a generator; a smoothness penalty replaces the public images.

    The search minimises CE(T(x), c) + TV(x) with Adam (lr 0.05), starting from grey images with noise; x is clipped to
    [0, 1] after each step.
    """
    noise = torch.randn(len(classes), *shape, generator=make_rng("pixels", seed))
    x = (0.5 + 0.1 * noise).clamp(0, 1).to(classes.device).requires_grad_()
    optimizer = torch.optim.Adam([x], PIXEL_LR)
    for step in range(steps):
        loss = F.cross_entropy(model(x), classes, reduction="sum") + SMOOTH * total_variation(x, (1, 2, 3)).sum()
        (x.grad,) = torch.autograd.grad(loss, x)
        optimizer.step()
        with torch.no_grad():
            x.clamp_(0, 1)
        progress(step / steps, "pixels")
    return ClassImages(x.detach(), _class_scores(model, x.detach(), classes))


def accept_pixels(model: nn.Module, scale: Callable[[Tensor], Tensor]) -> Model:
    """Return a function that scales pixels and applies the model to them in evaluation mode."""

    def predict(pixels: Tensor) -> Tensor:
        with evaluation_mode(model):
            outputs: Tensor = model(scale(pixels))
        return outputs

    return predict
