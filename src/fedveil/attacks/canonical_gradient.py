"""A victim's gradient from two veiled broadcasts, for any network that has a canonical form.

Bring both rounds to canonical form, units in the same places: C = f W and C' = f' W' with unknown factors f and f'. In
every block (`attacks.blocks`) both are one number, and a server of plain SGD has W' = W - lr g, where g is the mean
gradient of all clients. The gradient at the canonical model, which the attacker can compute for records that it tries,
is g_C = g / f. So in every block, exactly and for a step of any size,

    C' = a (C - lr f^2 g_C),                           a = f' / f,
    Q C' = -k (1 - share) Q h,    k = a lr f^2,        g_C = share own + (1 - share) h,

if Q removes the block's part along C, which takes a C away, and along the attacker's own gradient, which takes own away.
h is the other clients' mean gradient, and all but two of a block's dimensions of it are left. In a block alone k > 0 is
unknown. But log k is log lr plus one number per unit, with the signs with which the unit's factor acts, and the part of
C' along own, -k share |own|, measures k in each block with an error of the order (1 - share) / share. The fit over all
blocks is only a weight of the blocks: where Q h points is exact. Blocks without a factor need no Q at all; the head's
bias is one of them, and shows the labels.

For a server of Adam see `attacks.canonical_signs`.
"""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.attacks.blocks import TINY, Blocks, blocks_of
from fedveil.attacks.canonical import canonical, matched
from fedveil.attacks.leaks import Gradients, Leak, gradients_of
from fedveil.attacks.observed import DoesNotApply, Observed
from fedveil.attacks.veil import base_of, calibrate, plan_of, with_values
from fedveil.graph.layout import Entry, flatten, unflatten
from fedveil.graph.plan import Plan
from fedveil.scheme.messages import Broadcast, PublicHead
from fedveil.scheme.perturb import move_head

LEAST = 3  # elements of a block that measures a factor: Q leaves one
NOISE = 1e-6  # of a squared cosine that is 1 up to rounding


@dataclass(frozen=True, eq=False)
class Pair:
    """Two consecutive rounds in canonical form.

    Attributes:
        model: of the first round.
        before, after: the trainable parameters of both as flat vectors in float64, units in the same places.
        own: the attacker's own gradient at `model`, as such a vector.
        blocks: see `Blocks`.
        entries: the names and places of the parameters.
        kept: 1 for each element whose difference can be trusted; 0 in a head whose noise is only estimated.
    """

    model: nn.Module
    before: Tensor
    after: Tensor
    own: Tensor
    blocks: Blocks
    entries: tuple[Entry, ...]
    kept: Tensor

    def named(self, flat: Tensor) -> Gradients:
        """A flat vector by parameter names, in the model's dtype."""
        return {name: value.to(self.model.get_parameter(name)) for name, value in unflatten(flat, self.entries).items()}


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

    Needs the round `at`, which the attacker answered, and the one after it; the server uses plain SGD.
    """
    pair = canonical_pair(observed, at)
    blocks, before, own, share = pair.blocks, pair.before, pair.own, observed.share
    along = blocks.directions(before)
    moved, rest = blocks.without(pair.after - before, along), blocks.without(own, along)
    rates = observed.learning_rate * step_sizes(blocks, moved, rest, observed)
    hidden = along, blocks.directions(rest)
    seen = -blocks.without(moved, hidden[1]) / rates[blocks.number]
    exact = (before - pair.after) / observed.learning_rate - share * own
    others = torch.where(blocks.scaled[blocks.number], seen, exact) / (1 - share)
    compare = Part(blocks, hidden, pair.kept, others * pair.kept, pair.entries)
    return Leak(pair.model, pair.named(others), observed.loss, compare=compare)


def step_sizes(blocks: Blocks, moved: Tensor, own: Tensor, observed: Observed) -> Tensor:
    """k / lr of each block: how far its gradient moved it, measured along the attacker's own part, fitted to units.

    A block counts for the fit as its squared cosine with the own part determines its size.
    """
    along, size = -blocks.inner(moved, own), blocks.inner(own, own)
    cosines = along.square() / (size * blocks.inner(moved, moved)).clamp_min(TINY)
    usable = blocks.scaled & (blocks.sizes >= LEAST) & (along > 0) & (size > 0)
    measured = along / (observed.learning_rate * observed.share * size).clamp_min(TINY)
    weights = torch.where(usable, blocks.sizes * cosines / (1 - cosines + NOISE), 0.0)
    return blocks.fitted(torch.where(usable, measured, 1.0).log(), weights)


def canonical_pair(observed: Observed, at: int = -2) -> Pair:
    """Two rounds in canonical form, the noise of their heads removed."""
    rounds = observed.rounds
    if len(rounds) < 2 or rounds[at] is rounds[-1] or rounds[at].rows is None:
        raise DoesNotApply("two broadcasts", "it needs a round that the attacker answered, and the one after it")
    now, later = rounds[at], rounds[len(rounds) + at + 1 if at < 0 else at + 1]
    if not isinstance(now.broadcast, Broadcast) or not isinstance(later.broadcast, Broadcast):
        raise DoesNotApply("two broadcasts", "these broadcasts are not veiled")
    plan = plan_of(observed)
    before, after = closest(plan, *(unmasked(observed, seen.broadcast) for seen in (now, later)))
    values = {name: value.to(plan.layout.dtype) for name, value in unflatten(before, plan.layout.entries).items()}
    model = with_values(observed.architecture, values)
    own = gradients_of(model, observed.loss, observed.inputs[now.rows], observed.targets[now.rows])
    entries, count = plan.layout.trainable, plan.layout.weights
    flat = before[:count], after[:count], flatten(own, entries).double()
    return Pair(model, *flat, blocks_of(plan), entries, kept(plan, now.broadcast.head).to(before))


def kept(plan: Plan, head: PublicHead | None) -> Tensor:
    """For each trainable element, whether its noise is known exactly: one of few candidates, or none at all."""
    names = () if head is None or head.decoys else (head.weight, head.bias if head.masked_bias else None)
    return torch.cat([torch.full((e.shape.numel(),), e.name not in names) for e in plan.layout.trainable])


def unmasked(observed: Observed, sent: Broadcast) -> list[nn.Module]:
    """A round's model without its head's noise: one for each candidate, or one fitted with own labels."""
    if sent.head is None or not sent.head.decoys:
        return [calibrate(observed, sent)]
    found = []
    for noise in sent.head.noise(sent.head.direction):
        found.append(base_of(observed.architecture, sent))
        move_head(found[-1], sent.head, -noise)
    return found


def closest(plan: Plan, now: Sequence[nn.Module], later: Sequence[nn.Module]) -> tuple[Tensor, Tensor]:
    """The two models, one of each round, that are closest in canonical form; units in the places of the first.

    Decoys are drawn anew in each round, and the model hardly changes.
    """
    first, second = ([canonical(plan, _parameters(plan, model)) for model in models] for models in (now, later))
    pairs = [(one, matched(plan, other, one)) for one, other in itertools.product(first, second)]
    return min(pairs, key=lambda pair: float((pair[0] - pair[1])[: plan.layout.parameters].norm()))


def _parameters(plan: Plan, model: nn.Module) -> Tensor:
    values = {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    return flatten(values, plan.layout.entries)
