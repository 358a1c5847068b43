"""A victim's gradient from the first step of Adam under a veil: the signs of all its numbers, and the factors.

Adam's first step is lr g / (|g| + eps), the learning rate with the sign of g. In canonical form (see
`attacks.canonical_gradient` for the symbols) every block then has

    C' = a (C - lr f s),        s = sign(g) in {-1, 0, 1},

two unknown numbers a and lr f a for all of a block's elements. Least squares, in turns with s, finds them, and their
logarithms are linear in one number per unit. So the step gives every sign away, and the factors f with it.

With g = share own + (1 - share) h, the signs bound h from one side: s (share own + (1 - share) h) >= 0. The bounds are
close where the attacker's own part is small. A search minimises their squared violation, which is 0 at the truth.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.attacks.blocks import TINY, Blocks
from fedveil.attacks.canonical_rounds import Pair, own_part
from fedveil.attacks.leaks import Gradients, Leak, gradients_of
from fedveil.attacks.observed import Observed
from fedveil.graph.layout import Entry, flatten

LEAST = 4  # elements of a block that measures a factor: two unknown numbers, and more to check them
TURNS = 30
VIOLATION = 10.0  # weight of violated bounds beside the total variation, which is made for cosines
FAR = 8.0  # deviations


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps in units of the learning rate, rounded.

    Attributes:
        signs: -1, 0 or 1 for each trainable element.
        misfit: the share of the steps' energy that rounding changed; about 0 if they are signs.
    """

    signs: Tensor
    misfit: float


@dataclass(frozen=True, eq=False)
class Bounds:
    """How far a gradient violates the bounds that signs set, squared, over the squared size of both parts."""

    signs: Tensor
    own: Tensor
    share: float
    entries: tuple[Entry, ...]

    def __call__(self, found: Gradients) -> Tensor:
        """The distance of a gradient that was found."""
        others = (1 - self.share) * flatten(found, self.entries)
        own = self.share * self.own.to(others)
        wrong = torch.relu(-self.signs.to(others) * (own + others)).square().sum()
        return VIOLATION * wrong / (own.square().sum() + others.square().sum())


def signed_steps(blocks: Blocks, before: Tensor, after: Tensor, lr: float) -> Steps:
    """The steps between two rounds, if all of them were +lr, 0 or -lr before factors changed them."""
    usable = blocks.scaled & (blocks.sizes >= LEAST)
    gauge = torch.ones_like(blocks.sizes)
    for _ in range(TURNS):
        gap = gauge[blocks.number] * before - after
        mean = blocks.inner(gap, gap.sign()) / blocks.sizes
        signs = gap.sign() * (gap.abs() > mean[blocks.number] / 2)
        cc, cs, ss = blocks.inner(before, before), blocks.inner(before, signs), blocks.inner(signs, signs)
        cy, sy = blocks.inner(before, after), blocks.inner(signs, after)
        spread = cc * ss - cs.square()
        solved = usable & (spread > TINY)
        gauge = torch.where(solved, (cy * ss - cs * sy) / spread.clamp_min(TINY), 1.0)
        step = torch.where(solved, (cs * cy - cc * sy) / spread.clamp_min(TINY), lr)
    solved &= (gauge > 0) & (step > 0)
    gap = (gauge[blocks.number] * before - after) / step[blocks.number]
    weights = torch.where(solved, 1 / (blocks.inner(gap - signs, gap - signs) / blocks.sizes + TINY), 0.0)
    weights = weights / weights.max().clamp_min(TINY)
    ones = torch.ones_like(gauge)
    gauges = blocks.fitted(torch.where(solved, gauge, ones).log(), weights)
    factors = blocks.fitted(torch.where(solved, step / gauge / lr, ones).log(), weights)
    steps = (before - after / gauges[blocks.number]) / (lr * factors[blocks.number])
    rounded = steps.round().clamp(-1, 1)
    return Steps(rounded, float((steps - rounded).square().sum() / steps.square().sum().clamp_min(TINY)))


def by_signs_of_steps(observed: Observed, pair: Pair, signs: Tensor, at: int = -2) -> Leak:
    """The gradient behind a step of Adam: bounds, and the mean within them for labels.

    The mean is that of a normal distribution with mean 0 and the size of the attacker's own records' gradients, cut off
    at the bound. The head's bias is left out: one number per class is bounded too loosely; rows of weights are many.
    """
    model, share = pair.model(observed.architecture), observed.share
    own = own_part(observed, model, pair, at)
    kept = signs * pair.kept
    within = cut_mean(kept, share / (1 - share) * own, deviations(observed, model, pair))
    found = {name: value for name, value in pair.named(within).items() if value.dim() > 1}
    return Leak(model, found, observed.loss, compare=Bounds(kept, own, share, pair.entries))


def deviations(observed: Observed, model: torch.nn.Module, pair: Pair) -> Tensor:
    """The root mean square of the gradients of the attacker's records, one by one, for each element."""
    total = torch.zeros_like(pair.weights[0])
    for row in range(len(observed.inputs)):
        one = gradients_of(model, observed.loss, observed.inputs[row : row + 1], observed.targets[row : row + 1])
        total += pair.flat(one).double().square()
    size: Tensor = (total / len(observed.inputs)).sqrt()
    return size


def cut_mean(signs: Tensor, bound: Tensor, deviation: Tensor) -> Tensor:
    """The mean of h ~ N(0, deviation^2), given that signs (bound + h) > 0; 0 where there is no sign."""
    edge = (-signs * bound / deviation.clamp_min(TINY)).clamp(-FAR, FAR)
    density = torch.exp(-edge.square() / 2) / (2 * torch.pi) ** 0.5
    found: Tensor = signs * deviation * density / torch.special.ndtr(-edge)
    return found
