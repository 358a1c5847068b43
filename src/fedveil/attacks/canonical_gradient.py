"""Derive a victim's gradient from two veiled broadcasts, for any network that has a canonical form.

In canonical form, with units in the same order, the models of the two rounds are C = f W and C' = f' W'. The factors f
and f' are unknown and constant within each block. If the server uses plain SGD, then W' = W - lr g, where g is the mean
gradient of all clients. The gradient at the canonical model, which the attacker can compute for candidate records, is
g_C = g / f. The following equations therefore hold exactly in every block, for a step of any size:

    C' = a (C - lr f^2 g_C),                           a = f' / f,
    Q C' = -k (1 - share) Q h,    k = a lr f^2,        g_C = share own + (1 - share) h.

Here `own` is the attacker's gradient, h is the mean gradient of the other clients, and Q projects out two directions in
each block: C and `own`. All other components of h remain. The factor k > 0 of a block is unknown, but log(k / lr) is a
sum of one number per unit. The component of C' along `own`, about -k share |own|, measures k with an error of order
(1 - share) / share, and the attacker fits the numbers to all blocks. The fit only affects the weights of the blocks:
within each block, the direction of Q h is exact. Blocks without an unknown factor, such as the head's bias, do not
need Q. The head's bias reveals the labels.

Adam's first step is lr g / (|g| + eps), which is the learning rate with the sign of g. In every block,

    C' = a (C - lr f s),        s = sign(g) in {-1, 0, 1},

with two unknowns, a and lr f a, which are the same for all elements of the block. The attacker alternates between
solving for them by least squares and updating s. Their logarithms are linear in one number per unit. The step thus
reveals every sign, and also the factors f. Since g = share own + (1 - share) h, the signs bound h on one side:
s (share own + (1 - share) h) >= 0. The bounds are tight where the attacker's contribution is small. A search minimises
their squared violation, which is 0 for the true records.

The broadcasts reveal which of the two optimizers was used.
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
from fedveil.scheme.broadcast import Broadcast, PublicHead

MIN_BLOCK_SGD = 3  # minimum number of elements in a block for measuring k, since Q removes two dimensions
MIN_BLOCK_ADAM = 4  # minimum number of elements in a block for fitting two unknowns, a and f, and checking the fit
ROUNDING = 1e-6  # rounding error of a squared cosine that should be 1
MAX_SIGN_MISFIT = 0.05  # misfit below which all steps count as signs; normally distributed steps have a misfit of 0.2
SIGN_ITERATIONS = 30  # alternations between signs and factors
VIOLATION_WEIGHT = 10.0  # weight of violated bounds; the weight of the total variation is chosen for cosine distances
MAX_DEVIATIONS = 8.0  # limit on a truncation point, in standard deviations


@dataclass(frozen=True, eq=False)
class RoundPair:
    """Two consecutive rounds in canonical form, without the noise of their heads.

    Attributes:
        plan: the plan of the architecture.
        before, after: all tensors of each round as a flat vector in float64, with units in the same order.
        known_mask: 1 for each trainable element with known noise; 0 in a head with estimated noise.
    """

    plan: Plan
    before: Tensor
    after: Tensor
    known_mask: Tensor

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """The trainable parameters of both rounds."""
        return self.before[: self.plan.layout.weights], self.after[: self.plan.layout.weights]

    @property
    def distance(self) -> float:
        """The norm of the difference between the parameters of the two rounds."""
        return float((self.before - self.after)[: self.plan.layout.parameters].norm())

    def to_tensors(self, flat: Tensor, entries: tuple[Entry, ...]) -> Gradients:
        """Split a flat vector into tensors with the model's dtype."""
        return {name: value.to(self.plan.layout.dtype) for name, value in unflatten(flat, entries).items()}


@dataclass(frozen=True, eq=False)
class PartialDistance:
    """1 - cosine similarity between a gradient and the leaked one, over the part that two broadcasts reveal."""

    blocks: Blocks
    hidden_directions: tuple[
        Tensor, ...
    ]  # mutually orthogonal vectors; each contains one unobserved direction per block
    known_mask: Tensor  # 1 for each trainable element with known noise
    leaked_gradient: Tensor  # the leaked gradient
    entries: tuple[Entry, ...]

    def __call__(self, gradients: Gradients) -> Tensor:
        """Return the distance between the given gradient and the leaked one."""
        flat = flatten(gradients, self.entries)
        for directions in self.hidden_directions:
            flat = self.blocks.project_out(flat, directions.to(flat))
        return 1 - torch.nn.functional.cosine_similarity(
            flat * self.known_mask.to(flat), self.leaked_gradient.to(flat), dim=0
        )


@dataclass(frozen=True, eq=False)
class SignViolation:
    """The squared violation of the bounds given by the signs, relative to the squared norms of both contributions."""

    signs: Tensor
    own_gradient: Tensor
    share: float
    entries: tuple[Entry, ...]

    def __call__(self, gradients: Gradients) -> Tensor:
        """Return the violation for a mean gradient of the other clients."""
        others = (1 - self.share) * flatten(gradients, self.entries)
        own_part = self.share * self.own_gradient.to(others)
        violation = torch.relu(-self.signs.to(others) * (own_part + others)).square().sum()
        return VIOLATION_WEIGHT * violation / (own_part.square().sum() + others.square().sum())


def from_canonical_difference(observation: Observation) -> Leak:
    """Derive the mean gradient of all other clients at the canonical model, as far as two veiled broadcasts reveal it.

    The attack needs the last round that the attacker answered and the round after it. The server must use plain SGD, or
    Adam in its first round. If there are several candidates for the noise of the heads, the attack uses the pair of
    candidates whose difference is a step of Adam. If there is no such pair, the attack uses the closest pair,
    since decoys are redrawn in each round while the model hardly changes.
    """
    batch = observation.own_batch(observation.consecutive_rounds()[0])
    pairs = canonical_pairs(observation)
    blocks, lr = find_blocks(pairs[0].plan), observation.learning_rate
    sign_fits = [fit_signs(blocks, *pair.weights, lr) for pair in pairs]
    (residual, signs), signed_pair = min(zip(sign_fits, pairs, strict=True), key=lambda candidate: candidate[0][0])
    pair = signed_pair if residual < MAX_SIGN_MISFIT else min(pairs, key=lambda pair: pair.distance)
    model = copy_with_values(observation.architecture, pair.to_tensors(pair.before, pair.plan.layout.entries))
    own_gradient = flatten(mean_gradients(model, observation.loss, *batch), pair.plan.layout.trainable).double()
    if residual < MAX_SIGN_MISFIT:
        return leak_from_signs(observation, model, pair, own_gradient, signs)
    return leak_from_directions(observation, model, pair, own_gradient, blocks)


def canonical_pairs(observation: Observation) -> list[RoundPair]:
    """Return the last two rounds in canonical form, with one pair for each combination of candidates."""
    first, second = (observed_round.broadcast for observed_round in observation.consecutive_rounds())
    if not isinstance(first, Broadcast) or not isinstance(second, Broadcast):
        raise DoesNotApply("two broadcasts", "these broadcasts are not veiled")
    plan = analyse_architecture(observation)
    forms = []
    for broadcast in (first, second):  # remove each candidate for the head's noise, or noise fitted to labels
        models = candidate_models(observation, broadcast) or [calibrate(observation, broadcast)]
        forms.append([canonical_form(plan, flat_values(plan, model)).flat for model in models])
    known_mask = known_elements(plan, first.head).to(forms[0][0])
    return [
        RoundPair(plan, first_form, match_units(plan, second_form, first_form), known_mask)
        for first_form, second_form in itertools.product(*forms)
    ]


def known_elements(plan: Plan, head: PublicHead | None) -> Tensor:
    """Return whether each trainable element's noise is known, that is, absent or one of a few public candidates."""
    names = () if head is None or head.has_candidates else (head.weight, head.bias if head.noisy_bias else None)
    return torch.cat([torch.full((entry.shape.numel(),), entry.name not in names) for entry in plan.layout.trainable])


def leak_from_directions(
    observation: Observation, model: nn.Module, pair: RoundPair, own_gradient: Tensor, blocks: Blocks
) -> Leak:
    """Derive the gradient from a step of plain SGD, except for two directions in each block."""
    (before, after), share, entries = pair.weights, observation.share, pair.plan.layout.trainable
    scale_directions = blocks.directions(before)
    change, own_rest = (
        blocks.project_out(after - before, scale_directions),
        blocks.project_out(own_gradient, scale_directions),
    )
    rates = observation.learning_rate * step_sizes(blocks, change, own_rest, observation)
    hidden_directions = scale_directions, blocks.directions(own_rest)
    observed_gradient = -blocks.project_out(change, hidden_directions[1]) / rates[blocks.index]
    exact_gradient = (before - after) / observation.learning_rate - share * own_gradient
    others = torch.where(blocks.is_scaled[blocks.index], observed_gradient, exact_gradient) / (1 - share)
    compare = PartialDistance(blocks, hidden_directions, pair.known_mask, others * pair.known_mask, entries)
    return Leak(model, pair.to_tensors(others, entries), observation.loss, compare=compare)


def step_sizes(blocks: Blocks, change: Tensor, own_gradient: Tensor, observation: Observation) -> Tensor:
    """Return k / lr for each block: the step for a gradient of norm 1, divided by the learning rate.

    These ratios are measured along the attacker's own gradient and fitted with one number per unit. The closer a
    block's step is to the direction of that gradient, the larger its weight in the fit.
    """
    projections, own_squares = (
        -blocks.inner_product(change, own_gradient),
        blocks.inner_product(own_gradient, own_gradient),
    )
    cosines = projections.square() / (own_squares * blocks.inner_product(change, change)).clamp_min(TINY)
    is_usable = blocks.is_scaled & (blocks.sizes >= MIN_BLOCK_SGD) & (projections > 0) & (own_squares > 0)
    ratios = projections / (observation.learning_rate * observation.share * own_squares).clamp_min(TINY)
    weights = torch.where(is_usable, blocks.sizes * cosines / (1 - cosines + ROUNDING), 0.0)
    return blocks.fit_factors(torch.where(is_usable, ratios, 1.0).log(), weights)


def fit_signs(blocks: Blocks, before: Tensor, after: Tensor, lr: float) -> tuple[float, Tensor]:
    """Fit the steps between two rounds, assuming that each was +lr, 0 or -lr before the factors were applied.

    Return the misfit and the signs. The misfit is the relative squared error of rounding all steps to -1,
    0 or 1; it is about 0 if the assumption holds. The signs are -1, 0 or 1 for each trainable element.
    """
    is_usable = blocks.is_scaled & (blocks.sizes >= MIN_BLOCK_ADAM)
    gauge = torch.ones_like(blocks.sizes)
    for _ in range(SIGN_ITERATIONS):
        difference = gauge[blocks.index] * before - after
        mean = blocks.inner_product(difference, difference.sign()) / blocks.sizes
        signs = difference.sign() * (difference.abs() > mean[blocks.index] / 2)
        cc, cs, ss = (
            blocks.inner_product(before, before),
            blocks.inner_product(before, signs),
            blocks.inner_product(signs, signs),
        )
        cy, sy = blocks.inner_product(before, after), blocks.inner_product(signs, after)
        determinant = cc * ss - cs.square()
        is_solved = is_usable & (determinant > TINY)
        gauge = torch.where(is_solved, (cy * ss - cs * sy) / determinant.clamp_min(TINY), 1.0)
        step = torch.where(is_solved, (cs * cy - cc * sy) / determinant.clamp_min(TINY), lr)
    is_solved &= (gauge > 0) & (step > 0)
    difference = (gauge[blocks.index] * before - after) / step[blocks.index]
    weights = torch.where(
        is_solved, 1 / (blocks.inner_product(difference - signs, difference - signs) / blocks.sizes + TINY), 0.0
    )
    weights = weights / weights.max().clamp_min(TINY)
    ones = torch.ones_like(gauge)
    gauges = blocks.fit_factors(torch.where(is_solved, gauge, ones).log(), weights)
    factors = blocks.fit_factors(torch.where(is_solved, step / gauge / lr, ones).log(), weights)
    steps = (before - after / gauges[blocks.index]) / (lr * factors[blocks.index])
    rounded_steps = steps.round().clamp(-1, 1)
    return float((steps - rounded_steps).square().sum() / steps.square().sum().clamp_min(TINY)), rounded_steps


def leak_from_signs(
    observation: Observation, model: nn.Module, pair: RoundPair, own_gradient: Tensor, signs: Tensor
) -> Leak:
    """Derive bounds on the gradient from a step of Adam, and use its mean within these bounds to reveal labels.

    The gradient is assumed to have a normal distribution with mean 0, truncated at the bound; its standard deviation is
    estimated from the attacker's own records. Biases are omitted: the bound on a single number per class is too loose,
    whereas a row of weights has many bounds.
    """
    share, entries = observation.share, pair.plan.layout.trainable
    known_signs, squares = signs * pair.known_mask, torch.zeros_like(own_gradient)
    for batch in zip(torch.split(observation.inputs, 1), torch.split(observation.targets, 1), strict=True):
        squares += flatten(mean_gradients(model, observation.loss, *batch), entries).double().square()
    deviations = (squares / len(observation.inputs)).sqrt()
    estimate = truncated_mean(known_signs, share / (1 - share) * own_gradient, deviations)
    result = {name: value for name, value in pair.to_tensors(estimate, entries).items() if value.dim() > 1}
    return Leak(model, result, observation.loss, compare=SignViolation(known_signs, own_gradient, share, entries))


def truncated_mean(signs: Tensor, bound: Tensor, deviation: Tensor) -> Tensor:
    """Return the mean of h ~ N(0, deviation^2) given signs * (bound + h) > 0; it is 0 where the sign is 0."""
    truncation = (-signs * bound / deviation.clamp_min(TINY)).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)
    density = torch.exp(-truncation.square() / 2) / (2 * torch.pi) ** 0.5
    result: Tensor = signs * deviation * density / torch.special.ndtr(-truncation)
    return result
