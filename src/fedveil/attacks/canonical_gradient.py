"""Derive a victim's gradient from two veiled broadcasts, for any network that has a canonical form.

Bring both rounds to canonical form, with units in the same order: C = f W and C' = f' W', with unknown factors f and
f'. In every block, each is one number, and with plain SGD at the server, W' = W - lr g, where g is the mean gradient of
all clients. The gradient at the canonical model, which the attacker can compute for candidate records, is g_C = g / f.
So in every block, exactly and for a step of any size,

    C' = a (C - lr f^2 g_C),                           a = f' / f,
    Q C' = -k (1 - share) Q h,    k = a lr f^2,        g_C = share own + (1 - share) h,

where Q removes a block's part along C and along the attacker's own gradient, and h is the other clients' mean gradient,
of which all but two of a block's dimensions are left. Within one block, k > 0 is unknown. But log(k / lr) is a sum of
one number per unit, and the part of C' along the own gradient, about -k share |own|, measures k with an error of the
order (1 - share) / share. The attacker fits the units' numbers to all blocks. They only weight blocks against each
other: within each block, the direction of Q h is exact. Blocks without a factor need no Q; the head's bias is one of
them, and reveals the labels.

Adam's first step is lr g / (|g| + eps), the learning rate with the sign of g. Every block then has

    C' = a (C - lr f s),        s = sign(g) in {-1, 0, 1},

with two unknown numbers, a and lr f a, for all of a block's elements. Least squares, alternating with s, finds them,
and their logarithms are linear in one number per unit. So the step reveals every sign, and the factors f with it. With
g = share own + (1 - share) h, the signs bound h from one side: s (share own + (1 - share) h) >= 0. The bounds are tight
where the attacker's own part is small. A search minimises their squared violation, which is 0 at the truth.

The broadcasts reveal which of the two kinds of step it was.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.attacks.canonical import TINY, Blocks, canonical_form, find_blocks, flat_values, match_units
from fedveil.attacks.leaked_gradients import Gradients, Leak, mean_gradients
from fedveil.attacks.observation import DoesNotApply, Observation, copy_with_values
from fedveil.attacks.veil import analyse_architecture, calibrate, candidate_models
from fedveil.graph.plan import Entry, Plan, flatten, unflatten
from fedveil.scheme.messages import Broadcast, PublicHead

LEAST_SGD = 3  # minimum number of elements in a block that measures k: Q leaves one
LEAST_ADAM = 4  # the same for a and f: two unknown numbers, and more elements to check them
NOISE = 1e-6  # of a squared cosine that is 1 up to rounding
CLEAR = 0.05  # misfit below which steps are signs; a normal distribution rounded to three values has 0.2
TURNS = 30
VIOLATION = 10.0  # weight of violated bounds beside the total variation, which is scaled for cosines
FAR = 8.0  # standard deviations


@dataclass(frozen=True, eq=False)
class RoundPair:
    """Two consecutive rounds in canonical form, without the noise of their heads.

    Attributes:
        plan: the layers that can be perturbed.
        before, after: all tensors of both rounds as flat vectors in float64, units in the same order.
        known: 1 for each trainable element whose noise is known; 0 in a head whose noise is only estimated.
    """

    plan: Plan
    before: Tensor
    after: Tensor
    known: Tensor

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """The trainable parameters of both rounds."""
        return self.before[: self.plan.layout.weights], self.after[: self.plan.layout.weights]

    @property
    def distance(self) -> float:
        """The norm of the difference of all parameters."""
        return float((self.before - self.after)[: self.plan.layout.parameters].norm())

    def to_tensors(self, flat: Tensor, entries: tuple[Entry, ...]) -> Gradients:
        """Return the pieces of a flat vector in the model's dtype."""
        return {name: value.to(self.plan.layout.dtype) for name, value in unflatten(flat, entries).items()}


@dataclass(frozen=True, eq=False)
class PartialDistance:
    """1 - cosine similarity of a gradient and the leaked one, over the part that two broadcasts reveal."""

    blocks: Blocks
    hidden: tuple[Tensor, ...]  # unobserved directions, one in each block; orthogonal to each other
    known: Tensor
    wanted: Tensor
    entries: tuple[Entry, ...]

    def __call__(self, found: Gradients) -> Tensor:
        """Return the distance of a gradient."""
        flat = flatten(found, self.entries)
        for directions in self.hidden:
            flat = self.blocks.project_out(flat, directions.to(flat))
        return 1 - torch.nn.functional.cosine_similarity(flat * self.known.to(flat), self.wanted.to(flat), dim=0)


@dataclass(frozen=True, eq=False)
class SignViolation:
    """The squared violation of the bounds that signs set on a gradient, over the squared norm of both parts."""

    signs: Tensor
    own: Tensor
    share: float
    entries: tuple[Entry, ...]

    def __call__(self, found: Gradients) -> Tensor:
        """Return the distance of a gradient."""
        others = (1 - self.share) * flatten(found, self.entries)
        own = self.share * self.own.to(others)
        wrong = torch.relu(-self.signs.to(others) * (own + others)).square().sum()
        return VIOLATION * wrong / (own.square().sum() + others.square().sum())


def from_canonical_difference(observed: Observation) -> Leak:
    """Derive the mean gradient of all other clients at the canonical model, as far as two veiled broadcasts reveal it.

    Needs the last round that the attacker answered, and the one after it. The server uses plain SGD, or Adam in its
    first round. If heads have candidates for their noise, the pair whose difference is a step of Adam is used or, if
    there is none, the closest pair: decoys are redrawn in each round, and the model hardly changes.
    """
    batch = observed.own_batch(observed.consecutive()[0])
    pairs = canonical_pairs(observed)
    blocks, lr = find_blocks(pairs[0].plan), observed.learning_rate
    fits = [fit_signs(blocks, *pair.weights, lr) for pair in pairs]
    (misfit, signs), signed = min(zip(fits, pairs, strict=True), key=lambda both: both[0][0])
    pair = signed if misfit < CLEAR else min(pairs, key=lambda one: one.distance)
    model = copy_with_values(observed.architecture, pair.to_tensors(pair.before, pair.plan.layout.entries))
    own = flatten(mean_gradients(model, observed.loss, *batch), pair.plan.layout.trainable).double()
    if misfit < CLEAR:
        return leak_from_signs(observed, model, pair, own, signs)
    return leak_from_directions(observed, model, pair, own, blocks)


def canonical_pairs(observed: Observation) -> list[RoundPair]:
    """Bring the last two rounds to canonical form: one pair for every two candidates."""
    first, second = (seen.broadcast for seen in observed.consecutive())
    if not isinstance(first, Broadcast) or not isinstance(second, Broadcast):
        raise DoesNotApply("two broadcasts", "these broadcasts are not veiled")
    plan = analyse_architecture(observed)
    forms = []
    for sent in (first, second):  # without the noise of the head: for each candidate, or fitted with own labels
        models = candidate_models(observed, sent) or [calibrate(observed, sent)]
        forms.append([canonical_form(plan, flat_values(plan, model)).flat for model in models])
    known = known_elements(plan, first.head).to(forms[0][0])
    return [RoundPair(plan, one, match_units(plan, other, one), known) for one, other in itertools.product(*forms)]


def known_elements(plan: Plan, head: PublicHead | None) -> Tensor:
    """For each trainable element, return whether its noise is known exactly: one of a few candidates, or no noise."""
    names = () if head is None or head.decoys else (head.weight, head.bias if head.noisy_bias else None)
    return torch.cat([torch.full((e.shape.numel(),), e.name not in names) for e in plan.layout.trainable])


def leak_from_directions(observed: Observation, model: nn.Module, pair: RoundPair, own: Tensor, blocks: Blocks) -> Leak:
    """Derive the gradient behind a step of plain SGD, without two directions in each block."""
    (before, after), share, entries = pair.weights, observed.share, pair.plan.layout.trainable
    along = blocks.directions(before)
    moved, rest = blocks.project_out(after - before, along), blocks.project_out(own, along)
    rates = observed.learning_rate * step_sizes(blocks, moved, rest, observed)
    hidden = along, blocks.directions(rest)
    seen = -blocks.project_out(moved, hidden[1]) / rates[blocks.number]
    exact = (before - after) / observed.learning_rate - share * own
    others = torch.where(blocks.scaled[blocks.number], seen, exact) / (1 - share)
    compare = PartialDistance(blocks, hidden, pair.known, others * pair.known, entries)
    return Leak(model, pair.to_tensors(others, entries), observed.loss, compare=compare)


def step_sizes(blocks: Blocks, moved: Tensor, own: Tensor, observed: Observation) -> Tensor:
    """Return the step of each block for a gradient of norm 1, over the learning rate: k / lr, fitted to units.

    It is measured along the attacker's own part. The closer a block's step is to that direction, the larger its weight.
    """
    along, size = -blocks.inner(moved, own), blocks.inner(own, own)
    cosines = along.square() / (size * blocks.inner(moved, moved)).clamp_min(TINY)
    usable = blocks.scaled & (blocks.sizes >= LEAST_SGD) & (along > 0) & (size > 0)
    measured = along / (observed.learning_rate * observed.share * size).clamp_min(TINY)
    weights = torch.where(usable, blocks.sizes * cosines / (1 - cosines + NOISE), 0.0)
    return blocks.fit_factors(torch.where(usable, measured, 1.0).log(), weights)


def fit_signs(blocks: Blocks, before: Tensor, after: Tensor, lr: float) -> tuple[float, Tensor]:
    """Fit the steps between two rounds, assuming that all were +lr, 0 or -lr before factors changed them.

    Returns the fraction of the steps' energy that rounding changed, about 0 if they are signs, and the signs: -1, 0 or
    1 for each trainable element.
    """
    usable = blocks.scaled & (blocks.sizes >= LEAST_ADAM)
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
    gauges = blocks.fit_factors(torch.where(solved, gauge, ones).log(), weights)
    factors = blocks.fit_factors(torch.where(solved, step / gauge / lr, ones).log(), weights)
    steps = (before - after / gauges[blocks.number]) / (lr * factors[blocks.number])
    rounded = steps.round().clamp(-1, 1)
    return float((steps - rounded).square().sum() / steps.square().sum().clamp_min(TINY)), rounded


def leak_from_signs(observed: Observation, model: nn.Module, pair: RoundPair, own: Tensor, signs: Tensor) -> Leak:
    """Derive bounds on the gradient behind a step of Adam, and its mean within them, which reveals labels.

    The mean is that of a normal distribution with mean 0 and the size of the attacker's own records' gradients,
    truncated at the bound. The head's bias is left out: one number per class is bounded too loosely, whereas rows of
    weights have many numbers.
    """
    share, entries = observed.share, pair.plan.layout.trainable
    known, total = signs * pair.known, torch.zeros_like(own)
    for batch in zip(torch.split(observed.inputs, 1), torch.split(observed.targets, 1), strict=True):
        total += flatten(mean_gradients(model, observed.loss, *batch), entries).double().square()
    deviations = (total / len(observed.inputs)).sqrt()
    within = truncated_mean(known, share / (1 - share) * own, deviations)
    found = {name: value for name, value in pair.to_tensors(within, entries).items() if value.dim() > 1}
    return Leak(model, found, observed.loss, compare=SignViolation(known, own, share, entries))


def truncated_mean(signs: Tensor, bound: Tensor, deviation: Tensor) -> Tensor:
    """Return the mean of h ~ N(0, deviation^2), given that signs (bound + h) > 0; 0 where there is no sign."""
    edge = (-signs * bound / deviation.clamp_min(TINY)).clamp(-FAR, FAR)
    density = torch.exp(-edge.square() / 2) / (2 * torch.pi) ** 0.5
    found: Tensor = signs * deviation * density / torch.special.ndtr(-edge)
    return found
