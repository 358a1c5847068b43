"""Canonical form: remove the unknown factors and permutations by which veiled versions of a network differ.

Scaling and permuting hidden units does not change the function that a network computes. All networks that can be
transformed into one another in this way form an orbit, and a veil moves a network within its orbit. The canonical form
is a member of the orbit, chosen by a rule that does not depend on the starting point.

A veil multiplies every element by the factors of at most two units, r_i / r_j. All elements of a *block* share the same
factors. Examples of blocks are a row of the first layer with its bias, the k x k kernel between two channels, and the
columns of the head for one channel. Each block has one unknown factor, and the logarithms of all factors are linear
functions of one number per unit.
"""

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import NoConvergence, anderson, linear_sum_assignment
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from fedveil.graph.plan import Plan, Pool, flatten
from fedveil.graph.solve import Integers
from fedveil.graph.units import Symmetry

Reals = NDArray[np.float64]
MAX_STEPS = 5000
TOLERANCE = 1e-12  # the iteration stops when no logarithm of a factor changes by more than this
HISTORY = 12  # number of previous steps used by Anderson acceleration
TINY = 1e-30


def element_slots(plan: Plan) -> Pool:
    """Return the slots of each element in the flat vector of all tensors."""
    return Pool.build(plan.layout.entries, dict(plan.pieces), plan.layout.device)


def flat_values(plan: Plan, model: nn.Module) -> Tensor:
    """Return all tensors of a model as one flat vector."""
    values = {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    return flatten(values, plan.layout.entries)


class CanonicalForm(NamedTuple):
    """A model in canonical form."""

    flat: Tensor  # the values of all tensors, in float64
    factors: Tensor  # the factor by which each value was multiplied


def _zero_tensors(plan: Plan, flat: Tensor, exclude: Collection[str]) -> Reals:
    """Return a copy of a flat vector with the excluded tensors set to 0."""
    values: Reals = flat.double().cpu().numpy().copy()
    for entry in plan.layout.entries:
        if entry.name in exclude:
            values[entry.start : entry.stop] = 0.0
    return values


def block_powers(plan: Plan, elements: int) -> tuple[Integers, csr_matrix]:
    """Return the block of each of the first `elements` elements, and the exponents of all scale classes by block."""
    slots, sides = plan.slots, element_slots(plan).scale[:, :elements].cpu().numpy()
    units, is_inverse = slots.unit[sides], slots.power[sides] < 0
    is_scaled = (plan.symmetries[units] & Symmetry.POSITIVE) > 0
    keys, block_index = np.unique(
        np.sort(np.where(is_scaled, 2 * units + is_inverse, 0), 0), axis=1, return_inverse=True
    )
    exponents = np.where(keys % 2, -1.0, 1.0) * (keys > 0)
    blocks = np.broadcast_to(np.arange(keys.shape[1]), keys.shape)
    positions = blocks.ravel(), keys.ravel() // 2
    return block_index.ravel(), csr_matrix((exponents.ravel(), positions), (keys.shape[1], slots.classes))


def least_norm_factors(plan: Plan, flat: Reals) -> Reals:
    """Return the factors, one per scale class, that minimise the parameters' sum of squares over the orbit.

    The sum is convex in t = log r, so the minimum does not depend on the starting point (Stock et al. 2019,
    "Equi-normalization of neural networks"). Each step moves every class halfway to its optimum. Every element belongs
    to at most two classes, so by convexity the sum never increases. Anderson acceleration saves nine out of ten steps.
    If a class has no outgoing weights, its incoming weights are scaled to norm 1.
    """
    block_index, powers = block_powers(plan, plan.layout.parameters)
    energy = np.bincount(block_index, flat[: len(block_index)] ** 2, powers.shape[0])
    incoming, outgoing, start = powers.maximum(0).T, (-powers).maximum(0).T, np.zeros(plan.slots.classes)

    def flows(t: Reals) -> tuple[Reals, Reals]:
        """Return the sums of squares of the weights into and out of each class."""
        squares = energy * np.exp(2 * (powers @ t))
        return incoming @ squares, outgoing @ squares

    inflow, outflow = flows(start)
    is_two_sided, is_unread = (inflow > 0) & (outflow > 0), (inflow > 0) & (outflow == 0)

    def step(t: Reals) -> Reals:
        inflow, outflow = flows(t)
        result = np.zeros_like(t)
        result[is_two_sided] = (
            np.log(outflow[is_two_sided] / inflow[is_two_sided]) / 8
        )  # half of the step to the optimum, log(outflow / inflow) / 4
        result[is_unread] = -np.log(inflow[is_unread]) / 4
        return result

    with warnings.catch_warnings(action="ignore"):  # SciPy warns if the last steps are parallel
        try:
            solution: Reals = anderson(step, start, alpha=1.0, M=HISTORY, f_tol=TOLERANCE, maxiter=MAX_STEPS)
        except NoConvergence as error:
            solution = error.args[0]  # the last iterate
    return np.exp(solution)


def signs(plan: Plan, flat: Reals) -> Reals:
    """Return the signs, one per scale class, for which the sum of cubes of the incoming weights is positive.

    Classes without a sign symmetry get +1.
    """
    num_parameters, slots = plan.layout.parameters, plan.slots
    has_sign_symmetry = (plan.symmetries & Symmetry.SIGN) > 0
    rows = element_slots(plan).scale[0][:num_parameters].cpu().numpy()
    is_incoming = slots.power[rows] > 0
    cubes = np.bincount(slots.unit[rows][is_incoming], flat[:num_parameters][is_incoming] ** 3, slots.classes)
    return np.where(has_sign_symmetry & (cubes < 0), -1.0, 1.0)


def element_factors(plan: Plan, factors: Reals) -> Tensor:
    """Return each element's factor, given one factor per scale class."""
    return element_slots(plan).factors(torch.from_numpy(plan.slots.factors(factors)).to(plan.layout.device))


def canonical_form(plan: Plan, flat: Tensor, exclude: Collection[str] = ()) -> CanonicalForm:
    """Return the member of the orbit with the smallest norm; units are not permuted.

    The tensors named in `exclude` are scaled like the others, but do not influence the factors.
    """
    factors = element_factors(plan, least_norm_factors(plan, _zero_tensors(plan, flat, exclude)))
    factors = factors * element_factors(plan, signs(plan, _zero_tensors(plan, flat * factors, exclude)))
    return CanonicalForm(flat.double() * factors, factors)


def fingerprints(plan: Plan, flat: Reals) -> dict[int, Reals]:
    """Return a fingerprint of each order class: the parameters into and out of it, sorted within each tensor."""
    result: dict[int, list[Reals]] = {}
    for side in element_slots(plan).order:
        for entry in plan.layout.trainable + plan.layout.frozen:
            element_range = slice(entry.start, entry.stop)
            order = plan.slots.order[side[element_range].cpu().numpy()]
            is_movable = plan.cells[order] > 0
            order, values = order[is_movable], flat[element_range][is_movable]
            class_order = np.lexsort((values, order))
            order_classes, starts = np.unique(order[class_order], return_index=True)
            for order_class, part in zip(
                order_classes.tolist(), np.split(values[class_order], starts[1:]), strict=False
            ):
                result.setdefault(order_class, []).append(part)
    return {order_class: np.concatenate(parts) for order_class, parts in result.items()}


def _list_cells(plan: Plan, block: int) -> list[Integers]:
    """Return the cells of a block, sorted by kind, as arrays of classes; block 0 contains all other cells."""
    orders, result = plan.orders, []
    is_member = (orders.blocks == block) & (orders.cells > 0)
    for _, cell in sorted({(int(orders.kinds[c]), int(orders.cells[c])) for c in np.flatnonzero(is_member)}):
        classes = np.flatnonzero(is_member & (orders.cells == cell))
        result.append(classes[np.argsort(orders.members[classes])])
    return result


def sources(plan: Plan, flat: Tensor, reference: Tensor, exclude: Collection[str] = ()) -> Tensor:
    """Return the source index of each element when units are permuted to match the units of `reference`.

    Both vectors are in canonical form. Units that may be permuted are paired by their fingerprints. Blocks that are
    permuted as a whole, such as attention heads, are paired by the total distance between their units.
    """
    fingerprint, expected = (fingerprints(plan, _zero_tensors(plan, vector, exclude)) for vector in (flat, reference))

    def pair(unit: Integers, reference_unit: Integers) -> tuple[Integers, float]:
        """Match the units of two cells (Hungarian method); return the permutation and the squared distance."""
        empty = np.zeros(0)  # classes without parameters cannot be distinguished
        rows, columns = (
            np.stack([prints.get(int(c), empty) for c in cell])
            for prints, cell in ((expected, reference_unit), (fingerprint, unit))
        )
        costs = (rows**2).sum(1)[:, None] + (columns**2).sum(1) - 2 * rows @ columns.T
        pairs = linear_sum_assignment(costs)
        return pairs[1], float(costs[pairs].sum())

    orders, members = plan.orders, plan.orders.members.copy()
    for classes in _list_cells(plan, 0):
        members[classes] = orders.members[classes][pair(classes, classes)[0]]
    for family in np.unique(orders.families[1:]):
        blocks = [_list_cells(plan, int(b)) for b in np.flatnonzero(orders.families == family) if b]
        matches = [
            [[pair(*cells) for cells in zip(candidate, target, strict=True)] for candidate in blocks]
            for target in blocks
        ]
        costs = [[sum(cost for _, cost in pairings) for pairings in row] for row in matches]
        for target_index, source in zip(*linear_sum_assignment(np.array(costs)), strict=True):
            for target_cells, source_cells, (order, _) in zip(
                blocks[target_index], blocks[source], matches[target_index][source], strict=True
            ):
                members[target_cells] = orders.members[source_cells][order]
    shifts = torch.from_numpy(plan.slots.shifts(members)).to(flat.device)
    return element_slots(plan).sources(shifts)


def match_units(plan: Plan, flat: Tensor, reference: Tensor) -> Tensor:
    """Permute the units of a model to match the units of `reference`; both are in canonical form."""
    return flat[sources(plan, flat, reference)]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a flat vector of trainable parameters.

    Attributes:
        index: index of each element's block.
        powers: exponents of the units' factors in each block, with shape (blocks, scale classes).
    """

    index: Tensor
    powers: Tensor

    @property
    def is_scaled(self) -> Tensor:
        """Whether each block is multiplied by an unknown factor."""
        return (self.powers != 0).any(1)

    @property
    def sizes(self) -> Tensor:
        """The number of elements in each block."""
        return torch.bincount(self.index, minlength=len(self.powers)).to(self.powers)

    def inner_product(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the inner product of two vectors within each block."""
        return first.new_zeros(len(self.powers)).index_add(0, self.index, first * second)

    def directions(self, vector: Tensor) -> Tensor:
        """Scale every block of a vector to norm 1; set blocks without an unknown factor to 0."""
        norms = self.inner_product(vector, vector).sqrt()
        return vector * (self.is_scaled / norms.clamp_min(TINY))[self.index]

    def project_out(self, vector: Tensor, directions: Tensor) -> Tensor:
        """Remove a vector's component along the given direction in each block."""
        return vector - directions * self.inner_product(vector, directions)[self.index]

    def fit_factors(self, logarithms: Tensor, weights: Tensor) -> Tensor:
        """Fit the factors of all blocks to noisy logarithms by least squares, with one unknown per unit."""
        roots = weights.sqrt()
        weighted_powers, weighted_logarithms = roots.unsqueeze(1) * self.powers, (roots * logarithms).unsqueeze(1)
        units = torch.linalg.lstsq(weighted_powers.cpu(), weighted_logarithms.cpu(), driver="gelsd").solution.to(
            weighted_powers
        )
        factors: Tensor = (self.powers @ units)[:, 0].exp()
        return factors


def find_blocks(plan: Plan) -> Blocks:
    """Return the blocks of a plan's trainable parameters; signs and permutations do not affect them."""
    block_index, powers = block_powers(plan, plan.layout.weights)
    return Blocks(*(torch.from_numpy(part).to(plan.layout.device) for part in (block_index, powers.toarray())))
