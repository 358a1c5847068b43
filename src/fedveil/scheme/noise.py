"""Draw the noise for a round (paper, Sec. 4.1, "Random noises selection").

Anchoring splits the head's noise into a large public offset and a small secret one, d (docs/maths.md, "Anchoring").
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.checks import check_range
from fedveil.errors import BadArgument
from fedveil.graph.plan import Plan
from fedveil.graph.solve import Integers
from fedveil.scheme.broadcast import MAX_DECOYS, MAX_GROUPS

MIN_ADDITIVE, MAX_ADDITIVE = 1e-30, 1e30  # minimum and maximum size of the offset
GROUPS_FIX = "use groups=1, which costs the least and, on average, hides as much as a larger number of groups"
MAX_MULTIPLICATIVE = 1e6  # with larger factors, products of a few of them overflow float32
MAX_STEPS = 16  # maximum number of iterations for the anchor
QUANTILE = 0.1  # quantile of the columns' squared norms that determines their weights
TOLERANCE = 0.01  # converged if a step's squared norm is at most this fraction of the squared norm of a small column
TINY = np.finfo(np.float64).tiny

Reals = NDArray[np.float64]


class Entropy:
    """A source of random numbers: the operating system or, for tests only, a seeded generator."""

    def __init__(self) -> None:
        self._bytes: Callable[[int], bytes] = os.urandom
        self.for_tests_only = False

    @classmethod
    def for_tests(cls, seed: int) -> "Entropy":
        """Return a reproducible source. Its numbers are not secret, so servers and clients on a network refuse it."""
        source = cls()
        source._bytes = np.random.Generator(np.random.PCG64(seed)).bytes
        source.for_tests_only = True
        return source

    def words(self, count: int) -> NDArray[np.uint64]:
        """Draw uniform 64-bit integers."""
        return np.frombuffer(self._bytes(8 * count), dtype=np.uint64)

    def token(self) -> str:
        """Draw a random name for a round."""
        return self._bytes(16).hex()

    def log_uniform(self, count: int, width: Reals, signed: NDArray[np.uint64]) -> Reals:
        """Draw `count` rows of exp(u) with u uniform in [-width, width), and with random signs where `signed` is 1."""
        words = self.words(count * len(width)).reshape(count, -1)
        size: Reals = np.exp((words >> np.uint64(11)) * (width * 2**-52) - width)
        return size * (1.0 - 2.0 * (words & signed))

    def keys(self, count: int) -> NDArray[np.uint32]:
        """Draw uniform 32-bit integers, to be used as sort keys."""
        return np.frombuffer(self._bytes(4 * count), dtype=np.uint32)

    def fractions(self, count: int) -> Reals:
        """Draw uniform numbers in [-1/2, 1/2), with 16 random bits each."""
        words = np.frombuffer(self._bytes(2 * count), dtype=np.uint16).astype(np.float64)
        return words * 2.0**-16 - 0.5

    def normal(self, count: int) -> Reals:
        """Draw standard normal numbers, each from 52 random bits.

        A torch.Generator would derive all of them from one 32-bit seed.
        """
        uniform = ((self.words(count) >> np.uint64(12)) + 0.5) * 2.0**-52  # never 0 or 1
        result: Reals = torch.special.ndtri(torch.from_numpy(uniform)).numpy()
        return result


@dataclass(frozen=True)
class NoiseSettings:
    """The amount of noise that a veil draws.

    Attributes:
        groups: m in the paper, from 1 to the number of outputs, at most 64. Clients compute groups + 2 gradients.
        additive: the size of the additive noise, which does not affect the precision of the recovered gradient.
        multiplicative: the bound x on the factors, which are log-uniform in [1/x, x].
        permute: whether to permute units as well.
        decoys: the number of false head offsets that are sent with the true one, at most 64. Clients compute a gradient
            for each. The default is 2, or 0 for squared error if nothing follows the head.
        keep_noise: whether to draw factors, permutation, direction and partition only once and keep them in memory for
            all rounds (docs/defences/veil.md explains what this reveals).

    Raises:
        BadArgument: a value is out of range.
    """

    groups: int = 1
    additive: float = 1.0
    multiplicative: float = 4.0
    permute: bool = True
    decoys: int | None = None
    keep_noise: bool = False

    def __post_init__(self) -> None:
        _check_count("groups", self.groups, MAX_GROUPS, GROUPS_FIX)
        check_range("Veil", "additive", self.additive, MIN_ADDITIVE, MAX_ADDITIVE)
        check_range("Veil", "multiplicative", self.multiplicative, 1.0, MAX_MULTIPLICATIVE)
        if self.decoys is not None:
            fix = "omit decoys, or use a smaller number: each decoy adds a gradient that clients compute"
            _check_count("decoys", self.decoys, MAX_DECOYS, fix)

    def check_groups(self, plan: Plan) -> None:
        """Refuse more groups than the model has outputs."""
        outputs = plan.head.outputs if plan.head else 1
        if self.groups > outputs:
            message = f"groups must be at most {outputs}, the number of the model's outputs, got {self.groups}"
            raise BadArgument("Veil", message, GROUPS_FIX)

    def draw_units(self, plan: Plan, count: int, entropy: Entropy) -> "list[UnitNoise]":
        """Draw factors and permutations for `count` rounds.

        r is log-uniform in [1/x, x] with x = multiplicative; the head's numbers are log-uniform in [1/2, 2]. All have
        random signs, except r where its symmetry does not allow them.
        """
        width, signed = plan.freedoms
        numbers_for_head = self.groups + plan.head.outputs if plan.head else 0
        widths = np.concatenate([width * math.log(self.multiplicative), np.full(numbers_for_head, math.log(2))])
        numbers = entropy.log_uniform(count, widths, np.concatenate([signed, np.ones(numbers_for_head, np.uint64)]))
        r, head_numbers = numbers[:, : len(width)], numbers[:, len(width) :]
        members = _draw_members(plan, count, entropy if self.permute else None)
        rows = r, members, plan.slots.factors(r), plan.slots.shifts(members), head_numbers
        return [UnitNoise(*row) for row in zip(*rows, strict=True)]

    def draw_head(self, plan: Plan, units: "UnitNoise", entropy: Entropy) -> "HeadNoise | None":
        """Draw the head's noise; return None if two components of the direction are equal in the model's dtype."""
        assert plan.head is not None
        groups, outputs = self.groups, plan.head.outputs
        partition = _draw_partition(outputs, groups, entropy)
        numbers = units.head_numbers[groups:]
        if groups < outputs:
            numbers = _balance(np.abs(numbers), partition, groups, entropy)
        direction = torch.from_numpy(numbers).to(plan.layout.dtype)
        if len(set(direction.tolist())) < outputs:
            return None
        return HeadNoise(units.head_numbers[:groups] * self.additive, direction, torch.from_numpy(partition))


def _check_count(name: str, value: int, maximum: int, fix: str) -> None:
    if type(value) is not int or not 1 <= value <= maximum:
        raise BadArgument("Veil", f"{name} must be an integer from 1 to {maximum}, got {value!r}", fix)


@dataclass(frozen=True, repr=False, eq=False)
class UnitNoise:
    """The factors and the permutation of the hidden units.

    Attributes:
        scale: r, one number per scale class.
        members: the new index of each order class within its kind.
        factors: the factor of each scale slot of the plan.
        shifts: the shift of each order slot of the plan.
        head_numbers: log-uniform numbers from which the head's noise is computed.
    """

    scale: Reals
    members: Integers
    factors: Reals
    shifts: Integers
    head_numbers: Reals


@dataclass(frozen=True, repr=False, eq=False)
class HeadNoise:
    """The public part of the additive noise: its size, its direction (r_a) and the partition.

    The paper's gamma is the offset plus the anchor's secret d, which depends on the model.
    """

    offset: Reals
    direction: Tensor
    partition: Tensor

    def renew(self, additive: float, entropy: Entropy) -> "HeadNoise":
        """Return noise with the same direction and partition, but a new offset."""
        groups = len(self.offset)
        numbers = entropy.log_uniform(1, np.full(groups, math.log(2)), np.ones(groups, np.uint64))[0]
        return HeadNoise(numbers * additive, self.direction, self.partition)


def _draw_members(plan: Plan, count: int, entropy: Entropy | None) -> Integers:
    """Draw the new index of each order class within its kind, one row per round; the identity without entropy."""
    orders, is_moving = plan.orders, plan.moving
    cells, sizes = orders.cells[is_moving], np.bincount(orders.cells[is_moving])
    members = np.zeros((count, len(orders.cells)), dtype=np.int64)
    blocks = np.zeros((count, len(orders.families)), dtype=np.int64)
    index_in_cell = _shuffle(cells, count, entropy)
    blocks[:, 1:] = _shuffle(orders.families[1:], count, entropy)
    members[:, is_moving] = blocks[:, orders.blocks[is_moving]] * sizes[cells] + index_in_cell
    return members


def _shuffle(groups: Integers, count: int, entropy: Entropy | None) -> Integers:
    """Draw a new index for each member within its group, one row per round."""
    keys, ordered = groups.astype(np.uint64) << np.uint64(40), np.sort(groups)
    random = entropy.words(count * len(groups)) if entropy else np.zeros(count * len(groups), np.uint64)
    order = np.argsort(keys + (random.reshape(count, -1) >> np.uint64(24)), axis=1, kind="stable")
    new_indices = np.empty((count, len(groups)), np.int64)
    np.put_along_axis(new_indices, order, np.arange(len(groups)) - np.searchsorted(ordered, ordered), 1)
    return new_indices


def _draw_partition(outputs: int, groups: int, entropy: Entropy) -> Integers:
    """Draw the group of each output: a random partition into `groups` non-empty parts."""
    if groups == 1:
        return np.zeros(outputs, dtype=np.int64)
    remaining_groups = entropy.words(outputs - groups) % np.uint64(
        groups
    )  # the bias of the remainder is below groups x 2^-64
    partition = np.concatenate([np.arange(groups), remaining_groups.astype(np.int64)])
    return partition[np.argsort(entropy.words(outputs))]


def _balance(sizes: Reals, partition: Integers, groups: int, entropy: Entropy) -> Reals:
    """Give sizes random signs and rescale them so that they sum to 0 in every group of two or more.

    The noise then does not change the head's column sums. Training often makes these small, so a client could
    otherwise estimate the noise from them.
    """
    keys = (partition.astype(np.uint64) << np.uint64(40)) + (entropy.words(len(sizes)) >> np.uint64(24))
    is_positive = np.empty(len(sizes), np.int64)
    is_positive[np.argsort(keys)] = np.arange(len(sizes)) % 2  # alternate within each group, in random order
    sums = np.bincount(2 * partition + is_positive, sizes, 2 * groups).reshape(groups, 2)
    sums[(sums == 0).any(1)] = 1.0  # a group with a single output
    ratio = np.sqrt(sums[:, 0] / sums[:, 1])[partition]
    return np.where(is_positive, sizes * ratio, -sizes / ratio)


def anchor(head: Reals, direction: Reals, partition: NDArray[np.int64], groups: int) -> Reals:
    """Return A(head): m numbers that shift with any offset added to the head along r_a.

    A(head + (g o r_a) 1^T) = A(head) + g, for any g with one number per group. Each column votes for g: its vote is the
    multiple of r_a, within each group, that fits the column best. A starts as the median vote, and is then repeatedly
    replaced by the weighted mean of the votes until it converges. The weight of a column is 1 / (its squared norm + the
    10th percentile of the squared norms), after A is subtracted. Columns that are small because of a large factor
    dominate, because they make alpha large.

    This differs from the paper, which sends the sum of head and noise. benchmarks/anchor.py measures how much noise
    remains.
    """
    rows = direction[None] if groups == 1 else (partition == np.arange(groups)[:, None]) * direction
    energy = rows @ direction
    votes = (rows @ head) / np.reshape(energy, (-1, 1))
    residual = head - rows.T @ votes
    residual_squares, columns = (residual * residual).sum(0) + TINY, head.shape[1]
    result = np.partition(votes, columns // 2, axis=1)[:, columns // 2]
    for _ in range(MAX_STEPS):
        deviations = votes - result[:, None]
        weights, small_square = column_weights(energy @ (deviations * deviations) + residual_squares)
        step = deviations @ weights / weights.sum()
        result = result + step
        if energy @ (step * step) <= TOLERANCE * small_square[0]:
            break
    return result


def column_weights(squares: Reals) -> tuple[Reals, Reals]:
    """Return column weights, given squared norms along the last axis, and the squared norm of a small column."""
    columns = squares.shape[-1]
    index = min(max(1, int(QUANTILE * columns)), columns - 1)
    small_square: Reals = np.partition(squares, index, axis=-1)[..., index : index + 1]
    return 1 / (squares + small_square), small_square
