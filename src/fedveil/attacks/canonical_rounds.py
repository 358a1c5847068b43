"""Two consecutive veiled rounds in canonical form, units in the same places, the noise of their heads removed."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.attacks.canonical import canonical, matched
from fedveil.attacks.leaks import Gradients, gradients_of
from fedveil.attacks.observed import DoesNotApply, Observed
from fedveil.attacks.veil import calibrate, candidate_models, plan_of, with_values
from fedveil.graph.layout import Entry, flatten, unflatten
from fedveil.graph.plan import Plan
from fedveil.scheme.messages import Broadcast, PublicHead


@dataclass(frozen=True, eq=False)
class Pair:
    """Two consecutive rounds in canonical form.

    Attributes:
        plan: which layers can be masked.
        before, after: all tensors of both as flat vectors in float64, units in the same places.
        kept: 1 for each trainable element whose noise is known; 0 in a head whose noise is only estimated.
    """

    plan: Plan
    before: Tensor
    after: Tensor
    kept: Tensor

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The names and places of the trainable parameters."""
        return self.plan.layout.trainable

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """The trainable parameters of both rounds."""
        return self.before[: self.plan.layout.weights], self.after[: self.plan.layout.weights]

    @property
    def distance(self) -> float:
        """How far apart the parameters are."""
        return float((self.before - self.after)[: self.plan.layout.parameters].norm())

    def model(self, architecture: nn.Module) -> nn.Module:
        """The first round's model."""
        layout = self.plan.layout
        values = {name: value.to(layout.dtype) for name, value in unflatten(self.before, layout.entries).items()}
        return with_values(architecture, values)

    def flat(self, gradients: Gradients) -> Tensor:
        """Gradients as a flat vector."""
        return flatten(gradients, self.entries)

    def named(self, flat: Tensor) -> Gradients:
        """A flat vector by the names of parameters, in their dtype."""
        return {name: value.to(self.plan.layout.dtype) for name, value in unflatten(flat, self.entries).items()}


def canonical_pairs(observed: Observed, at: int = -2) -> list[Pair]:
    """The round `at` and the one after it; one pair for each two candidates for the noise of their heads."""
    rounds = observed.rounds
    if len(rounds) < 2 or rounds[at] is rounds[-1] or rounds[at].rows is None:
        raise DoesNotApply("two broadcasts", "it needs a round that the attacker answered, and the one after it")
    sent = rounds[at].broadcast, rounds[range(len(rounds))[at] + 1].broadcast
    if not all(isinstance(each, Broadcast) for each in sent):
        raise DoesNotApply("two broadcasts", "these broadcasts are not veiled")
    plan = plan_of(observed)
    first, second = ([canonical(plan, values_of(plan, m)) for m in unmasked(observed, each)] for each in sent)
    trusted = kept(plan, sent[0].head).to(first[0])
    pairs = itertools.product(first, second)
    return [Pair(plan, one, matched(plan, other, one), trusted) for one, other in pairs]


def own_part(observed: Observed, model: nn.Module, pair: Pair, at: int) -> Tensor:
    """The attacker's own gradient at a model, as a flat vector in float64."""
    rows = observed.rounds[at].rows
    return pair.flat(gradients_of(model, observed.loss, observed.inputs[rows], observed.targets[rows])).double()


def kept(plan: Plan, head: PublicHead | None) -> Tensor:
    """For each trainable element, whether its noise is known exactly: one of few candidates, or none at all."""
    names = () if head is None or head.decoys else (head.weight, head.bias if head.masked_bias else None)
    return torch.cat([torch.full((e.shape.numel(),), e.name not in names) for e in plan.layout.trainable])


def unmasked(observed: Observed, sent: Broadcast) -> list[nn.Module]:
    """A round's model without its head's noise: one for each candidate, or one fitted with own labels."""
    return candidate_models(observed, sent) or [calibrate(observed, sent)]


def values_of(plan: Plan, model: nn.Module) -> Tensor:
    """All tensors of a model as one flat vector."""
    values = {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    return flatten(values, plan.layout.entries)
