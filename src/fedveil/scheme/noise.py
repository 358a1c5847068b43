"""The one-time noise of a round (paper, Sec. 4.1, "Random noises selection")."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import BadArgument
from fedveil.graph.plan import Plan
from fedveil.graph.solve import Integers
from fedveil.scheme.decoys import MOST_DECOYS
from fedveil.scheme.entropy import Entropy
from fedveil.scheme.losses import Loss, SquaredError
from fedveil.scheme.messages import MOST_GROUPS

SMALLEST_SIZE, LARGEST_SIZE = 1e-30, 1e30  # of the offset
DEFAULT_DECOYS = 2  # as many passes as squared error with one group
LARGEST_FACTOR = 1e6  # beyond it, products of a few factors overflow float32

Reals = NDArray[np.float64]


@dataclass(frozen=True)
class NoiseSettings:
    """How much noise a veil draws.

    Attributes:
        groups: the paper's m, from 1 to the number of outputs and at most 64. Clients compute groups + 2 gradients.
        additive: size of the additive noise. The gradient is recovered with the same precision for any size.
        multiplicative: bound x of the factors, which are log-uniform in [1/x, x].
        permute: also permute units secretly.
        decoys: number of false offsets of the head that are sent with the true one, at most 64; clients compute one
            gradient for each. Default 2, and none for squared error if nothing follows the head: its m + 2 terms
            need none.
        keep_noise: draw factors, permutation, direction and partition once and keep them for all rounds, in memory
            only (docs/defences/veil.md says what that reveals).

    Raises:
        BadArgument: a value out of range.
    """

    groups: int = 1
    additive: float = 1.0
    multiplicative: float = 4.0
    permute: bool = True
    decoys: int | None = None
    keep_noise: bool = False

    def __post_init__(self) -> None:
        if type(self.groups) is not int or not 1 <= self.groups <= MOST_GROUPS:
            what = f"groups must be an integer from 1 to {MOST_GROUPS}, got {self.groups!r}"
            raise BadArgument("Veil", what, "use groups=1: it hides as much on average and costs least")
        _check_size("additive", self.additive, SMALLEST_SIZE, LARGEST_SIZE)
        _check_size("multiplicative", self.multiplicative, 1.0, LARGEST_FACTOR)
        if self.decoys is not None and (type(self.decoys) is not int or not 1 <= self.decoys <= MOST_DECOYS):
            what = f"decoys must be an integer from 1 to {MOST_DECOYS}, got {self.decoys!r}"
            fix = f"use decoys={DEFAULT_DECOYS}: clients compute a gradient for each decoy and one more"
            raise BadArgument("Veil", what, fix)

    def check_groups(self, plan: Plan) -> None:
        """Refuse more groups than the model has outputs."""
        outputs = plan.head.outputs if plan.head else 1
        if self.groups > outputs:
            fix = f"use groups=1, which hides as much on average and costs least; the maximum is groups={outputs}"
            raise BadArgument("Veil", f"groups must be at most {outputs}, the model's outputs, got {self.groups}", fix)

    def count_decoys(self, plan: Plan, loss: Loss) -> int:
        """Return the number of decoys for a model and a loss."""
        if self.decoys is not None:
            return self.decoys
        has_own_terms = isinstance(loss, SquaredError) and not (plan.head and plan.head.within)
        return 0 if has_own_terms else DEFAULT_DECOYS


def _check_size(name: str, value: float, least: float, most: float) -> None:
    if not (isinstance(value, int | float) and least <= value <= most):
        raise BadArgument("Veil", f"{name} must be a number from {least:g} to {most:g}, got {value!r}")


@dataclass(frozen=True, repr=False, eq=False)
class UnitNoise:
    """Factors and permutation of hidden units.

    Attributes:
        scale: r, one number per scale class.
        members: the new number of each order class within its kind.
        factors: the factor of each scale slot of the plan.
        shifts: the shift of each order slot of the plan.
        others: log-uniform numbers for the head.
    """

    scale: Reals
    members: Integers
    factors: Reals
    shifts: Integers
    others: Reals


@dataclass(frozen=True, repr=False, eq=False)
class HeadNoise:
    """The public part of the additive noise: its size, its direction (r_a) and the partition.

    The paper's gamma is the offset plus the anchor's d, which `perturb_model` computes and which is secret.
    """

    offset: Reals
    direction: Tensor
    partition: Tensor

    def renew(self, additive: float, entropy: Entropy) -> "HeadNoise":
        """Return the same direction and partition with a new offset."""
        groups = len(self.offset)
        numbers = entropy.log_uniform(1, np.full(groups, math.log(2)), np.ones(groups, np.uint64))[0]
        return HeadNoise(numbers * additive, self.direction, self.partition)


class NoiseShape(NamedTuple):
    """The parameters of `draw_units`."""

    bound: float  # of the factors
    others: int  # numbers for the head
    permute: bool


def draw_units(plan: Plan, shape: NoiseShape, count: int, entropy: Entropy) -> list[UnitNoise]:
    """Draw factors and permutations for `count` rounds.

    r is log-uniform in [1/bound, bound], the other numbers in [1/2, 2]; both have a random sign, r as far as its
    symmetry allows.
    """
    width, signed = plan.freedoms
    widths = np.concatenate([width * math.log(shape.bound), np.full(shape.others, math.log(2))])
    numbers = entropy.log_uniform(count, widths, np.concatenate([signed, np.ones(shape.others, np.uint64)]))
    r, others = numbers[:, : len(width)], numbers[:, len(width) :]
    members = _draw_members(plan, count, entropy if shape.permute else None)
    rows = r, members, plan.slots.factors(r), plan.slots.shifts(members), others
    return [UnitNoise(*row) for row in zip(*rows, strict=True)]


def _draw_members(plan: Plan, count: int, entropy: Entropy | None) -> Integers:
    """Draw new numbers of the order classes within their kinds, one row per round; without entropy nothing moves."""
    moves = plan.moves
    members = np.zeros((count, len(plan.cells)), dtype=np.int64)
    inside = _shuffle(moves.cells, moves.starts, count, entropy)
    blocks = np.zeros((count, 1 + len(moves.families)), dtype=np.int64)
    blocks[:, 1:] = _shuffle(moves.families, moves.first, count, entropy)
    members[:, moves.classes] = blocks[:, moves.blocks] * moves.sizes + inside
    return members


def _shuffle(groups: Integers, starts: Integers, count: int, entropy: Entropy | None) -> Integers:
    """Draw a new number within its group for each member; `starts` has the start of its group in sorted order."""
    keys = groups.astype(np.uint64) << np.uint64(40)
    random = entropy.words(count * len(groups)) if entropy else np.zeros(count * len(groups), np.uint64)
    order = np.argsort(keys + (random.reshape(count, -1) >> np.uint64(24)), axis=1, kind="stable")
    numbers = np.empty((count, len(groups)), np.int64)
    np.put_along_axis(numbers, order, np.arange(len(groups)) - np.sort(starts), 1)
    return numbers


def draw_head(plan: Plan, units: UnitNoise, settings: NoiseSettings, entropy: Entropy) -> HeadNoise | None:
    """Draw the head's noise; None if two components of the direction are equal in the model's dtype."""
    assert plan.head is not None
    groups, outputs = settings.groups, plan.head.outputs
    partition = _draw_partition(outputs, groups, entropy)
    numbers = units.others[groups:]
    if groups < outputs:
        numbers = _balance(np.abs(numbers), partition, groups, entropy)
    direction = torch.from_numpy(numbers).to(plan.layout.dtype)
    if len(set(direction.tolist())) < outputs:
        return None
    return HeadNoise(units.others[:groups] * settings.additive, direction, torch.from_numpy(partition))


def _draw_partition(outputs: int, groups: int, entropy: Entropy) -> Integers:
    """Draw the group of each output: a random partition into `groups` non-empty parts."""
    if groups == 1:
        return np.zeros(outputs, dtype=np.int64)
    extra = entropy.words(outputs - groups) % np.uint64(groups)  # uniform up to 2^-64 x groups
    partition = np.concatenate([np.arange(groups), extra.astype(np.int64)])
    return partition[np.argsort(entropy.words(outputs))]


def _balance(sizes: Reals, partition: Integers, groups: int, entropy: Entropy) -> Reals:
    """Give sizes random signs so that they sum to 0 in every group of two or more.

    The noise then does not change the head's column sums. Training often makes these small, so a client could estimate
    the noise from them.
    """
    keys = (partition.astype(np.uint64) << np.uint64(40)) + (entropy.words(len(sizes)) >> np.uint64(24))
    up = np.empty(len(sizes), np.int64)
    up[np.argsort(keys)] = np.arange(len(sizes)) % 2  # every other one, group by group, in random order
    sums = np.bincount(2 * partition + up, sizes, 2 * groups).reshape(groups, 2)
    sums[(sums == 0).any(1)] = 1.0  # a group of one
    ratio = np.sqrt(sums[:, 0] / sums[:, 1])[partition]
    return np.where(up, sizes * ratio, -sizes / ratio)
