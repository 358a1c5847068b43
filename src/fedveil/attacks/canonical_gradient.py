"""A victim's gradient from two veiled broadcasts, for any network that has a canonical form.

Bring both rounds to canonical form, units in the same places: C = f W and C' = f' W' with unknown factors f and f'. In
every block (`attacks.blocks`) both are one number, and a server of plain SGD has W' = W - lr g, where g is the mean
gradient of all clients. The gradient at the canonical model, which the attacker can compute for records that it tries,
is g_C = g / f. So in every block, exactly and for a step of any size,

    C' = a (C - lr f^2 g_C),                           a = f' / f,
    Q C' = -k (1 - share) Q h,    k = a lr f^2,        g_C = share own + (1 - share) h,

where Q removes a block's part along C and along the attacker's own gradient, and h is the other clients' mean gradient,
of which all but two of a block's dimensions are left. In a block alone k > 0 is unknown. But log(k / lr) is a sum of
one number per unit, and the part of C' along the own gradient, about -k share |own|, measures k with an error of the
order (1 - share) / share. The attacker fits the numbers of units to all blocks. They only weigh blocks against one
another: within each block the direction of Q h is exact. Blocks without a factor need no Q; the head's bias is one of
them, and shows the labels.

Adam's first step shows signs only (`attacks.canonical_signs`). The broadcasts show which of the two it was.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.attacks.blocks import TINY, Blocks, blocks_of
from fedveil.attacks.canonical_rounds import Pair, canonical_pairs, own_part
from fedveil.attacks.canonical_signs import by_signs_of_steps, signed_steps
from fedveil.attacks.leaks import Gradients, Leak
from fedveil.attacks.observed import Observed
from fedveil.graph.layout import Entry, flatten

LEAST = 3  # elements of a block that measures a factor: Q leaves one
NOISE = 1e-6  # of a squared cosine that is 1 up to rounding
CLEAR = 0.05  # misfit of steps that are signs; a normal distribution cut into three steps has 0.2


@dataclass(frozen=True, eq=False)
class Part:
    """1 - cosine of a gradient and a leaked one, of the part that two broadcasts show."""

    blocks: Blocks
    hidden: tuple[Tensor, ...]  # directions that are not seen, one in each block; orthogonal to one another
    kept: Tensor
    wanted: Tensor
    entries: tuple[Entry, ...]

    def __call__(self, found: Gradients) -> Tensor:
        """The distance of a gradient that was found."""
        flat = flatten(found, self.entries)
        for directions in self.hidden:
            flat = self.blocks.without(flat, directions.to(flat))
        return 1 - torch.nn.functional.cosine_similarity(flat * self.kept.to(flat), self.wanted.to(flat), dim=0)


def from_canonical_difference(observed: Observed, at: int = -2) -> Leak:
    """The mean gradient of all other clients at the canonical model, as far as two veiled broadcasts show it.

    Needs the round `at`, which the attacker answered, and the one after it. The server uses plain SGD, or Adam in its
    first round. Where heads have candidates for their noise, the pair is taken whose difference is a step of Adam or,
    if none is, the closest: decoys are drawn anew in each round, and the model hardly changes.
    """
    pairs = canonical_pairs(observed, at)
    blocks = blocks_of(pairs[0].plan)
    steps = [signed_steps(blocks, *pair.weights, observed.learning_rate) for pair in pairs]
    signed = min(range(len(pairs)), key=lambda number: steps[number].misfit)
    if steps[signed].misfit < CLEAR:
        return by_signs_of_steps(observed, pairs[signed], steps[signed].signs, at)
    return by_directions(observed, blocks, min(pairs, key=lambda pair: pair.distance), at)


def by_directions(observed: Observed, blocks: Blocks, pair: Pair, at: int = -2) -> Leak:
    """The gradient behind a step of plain SGD, without two directions in each block."""
    model, (before, after), share = pair.model(observed.architecture), pair.weights, observed.share
    own = own_part(observed, model, pair, at)
    along = blocks.directions(before)
    moved, rest = blocks.without(after - before, along), blocks.without(own, along)
    rates = observed.learning_rate * step_sizes(blocks, moved, rest, observed)
    hidden = along, blocks.directions(rest)
    seen = -blocks.without(moved, hidden[1]) / rates[blocks.number]
    exact = (before - after) / observed.learning_rate - share * own
    others = torch.where(blocks.scaled[blocks.number], seen, exact) / (1 - share)
    compare = Part(blocks, hidden, pair.kept, others * pair.kept, pair.entries)
    return Leak(model, pair.named(others), observed.loss, compare=compare)


def step_sizes(blocks: Blocks, moved: Tensor, own: Tensor, observed: Observed) -> Tensor:
    """How far each block moves for a gradient of length 1, over the learning rate: k / lr, fitted to units.

    It is measured along the attacker's own part. A block counts the more, the closer its step is to that direction.
    """
    along, size = -blocks.inner(moved, own), blocks.inner(own, own)
    cosines = along.square() / (size * blocks.inner(moved, moved)).clamp_min(TINY)
    usable = blocks.scaled & (blocks.sizes >= LEAST) & (along > 0) & (size > 0)
    measured = along / (observed.learning_rate * observed.share * size).clamp_min(TINY)
    weights = torch.where(usable, blocks.sizes * cosines / (1 - cosines + NOISE), 0.0)
    return blocks.fitted(torch.where(usable, measured, 1.0).log(), weights)
