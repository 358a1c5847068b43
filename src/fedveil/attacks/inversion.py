"""Generative model inversion, GMI (Zhang et al. 2020, arXiv 1911.07135): images of a class from a model alone."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedveil.attacks.generator import CODE, Gan
from fedveil.attacks.similarity import total_variation
from fedveil.federation.evaluate import evaluating
from fedveil.progress import Progress
from fedveil.records.shards import generator as source

Model = Callable[[Tensor], Tensor]
IDENTITY, MOMENTUM, BOUND = 100.0, 0.9, 1.0
PIXEL_LR, SMOOTH = 0.05, 1.0


@dataclass(frozen=True, eq=False)
class ClassImages:
    """Pixels in [0, 1], one image for each wanted class, and the attacked model's output for that class."""

    images: Tensor
    scores: Tensor


def search(
    model: Model,
    gan: Gan,
    wanted: Tensor,
    *,
    steps: int = 1500,
    restarts: int = 5,
    seed: int = 0,
    progress: Progress = lambda fraction, what: None,
) -> ClassImages:
    """Search for one image of the generator for each wanted class that the model assigns to that class.

    min_z  (1 / classes) sum_i  -D(G(z_i)) + 100 CE(T(G(z_i)), c_i)

    by Nesterov's momentum 0.9 from z ~ N(0, I); z is clipped to [-1, 1] after each step. Each image keeps the restart
    with the largest output of T for its class. Outputs of T are taken as logits whatever loss it was trained with:
    after squared error they lie near 0 and 1, so the cross-entropy never vanishes and the search continues.

    Differs from the original: there, the mean is over a batch of one code per class, so a code's step depends on the
    number of classes; here any number of codes is optimised together with that same step. There, the maximum over
    restarts begins at 0, so an image whose outputs are all negative is never kept; here at minus infinity.

    T maps pixels in [0, 1] to one output per class, each image independently. Image i of restart k starts at the same
    code for every model.
    """
    gan.generator.eval()
    gan.critic.eval()
    scale = 1 / len(set(wanted.tolist()))
    best = torch.full(wanted.shape, -torch.inf, device=wanted.device)
    codes = torch.zeros(len(wanted), CODE, device=wanted.device)
    for restart in range(restarts):
        z = torch.randn(len(wanted), CODE, generator=source("codes", seed, restart)).to(wanted.device)
        velocity = torch.zeros_like(z)
        for step in range(steps):
            z.requires_grad_()
            images = gan.generator(z)
            identity = F.cross_entropy(model(images), wanted, reduction="sum")
            loss = scale * (IDENTITY * identity - gan.critic(images).sum())
            (slope,) = torch.autograd.grad(loss, z)
            rate = 0.02 if images.shape[-1] >= 64 else 0.01  # the original's for faces and for digits
            before, velocity = velocity, MOMENTUM * velocity - rate * slope
            z = (z.detach() - MOMENTUM * before + (1 + MOMENTUM) * velocity).clamp(-BOUND, BOUND)
            progress((restart + step / steps) / restarts, f"codes, restart {restart + 1}/{restarts}")
        score = _scores(model, gan.generator(z.detach()), wanted)
        better = score > best
        best = torch.where(better, score, best)
        codes = torch.where(better[:, None], z.detach(), codes)
    with torch.no_grad():
        return ClassImages(gan.generator(codes), best)


def _scores(model: Model, images: Tensor, wanted: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images).gather(1, wanted[:, None])[:, 0]


def search_pixels(
    model: Model,
    shape: tuple[int, int, int],
    wanted: Tensor,
    *,
    steps: int = 300,
    seed: int = 0,
    progress: Progress = lambda fraction, what: None,
) -> ClassImages:
    """Search without a generator: for pixels in place of codes, with smoothness in place of public images.

    min_x  CE(T(x), c) + TV(x)  by Adam 0.05 from noise around grey; x is clipped to [0, 1] after each step.
    """
    noise = torch.randn(len(wanted), *shape, generator=source("pixels", seed))
    x = (0.5 + 0.1 * noise).clamp(0, 1).to(wanted.device).requires_grad_()
    optimizer = torch.optim.Adam([x], PIXEL_LR)
    for step in range(steps):
        loss = F.cross_entropy(model(x), wanted, reduction="sum") + SMOOTH * total_variation(x, (1, 2, 3)).sum()
        (x.grad,) = torch.autograd.grad(loss, x)
        optimizer.step()
        with torch.no_grad():
            x.clamp_(0, 1)
        progress(step / steps, "pixels")
    return ClassImages(x.detach(), _scores(model, x.detach(), wanted))


def take_pixels(model: torch.nn.Module, scale: Callable[[Tensor], Tensor]) -> Model:
    """Turn a model of scaled inputs into a model of pixels, in evaluation mode."""

    def predict(pixels: Tensor) -> Tensor:
        with evaluating(model):
            outputs: Tensor = model(scale(pixels))
        return outputs

    return predict
