"""Canonical form: remove the unknown factors and permutations by which veiled versions of a network differ.

Scaling and permuting hidden units does not change what a network computes: a veil moves it to another member of the
same orbit. A rule that does not depend on the starting point chooses the same member for all of them.

A veil multiplies every element by the factors of at most two units, r_i / r_j. Elements of one *block* have the same
factors: a row of the first layer with its bias, the k x k kernel between two channels, the columns of the head for one
channel. Within a block the factor is one unknown number; over all blocks its logarithm is linear in one number per
unit.
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
MOST_STEPS = 5000
SETTLED = 1e-12  # change in the logarithm of a factor
DEPTH = 12  # earlier steps used by Anderson acceleration
TINY = 1e-30


def element_slots(plan: Plan) -> Pool:
    """Flatten all tensors into one vector, and return the slots of each of its elements."""
    return Pool.build(plan.layout.entries, dict(plan.pieces), plan.layout.device)


def flat_values(plan: Plan, model: nn.Module) -> Tensor:
    """Return all tensors of a model as one flat vector."""
    values = {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    return flatten(values, plan.layout.entries)


class CanonicalForm(NamedTuple):
    """A model in canonical form."""

    flat: Tensor  # the values of all tensors, in float64
    factors: Tensor  # the factor by which each value was multiplied


def _zero_tensors(plan: Plan, flat: Tensor, without: Collection[str]) -> Reals:
    """Return the values that determine the form, with some tensors set to 0."""
    values: Reals = flat.double().cpu().numpy().copy()
    for entry in plan.layout.entries:
        if entry.name in without:
            values[entry.start : entry.stop] = 0.0
    return values


def block_powers(plan: Plan, elements: int) -> tuple[Integers, csr_matrix]:
    """Return the block of each of the first elements, and for each block the exponent of each scale class."""
    slots, sides = plan.slots, element_slots(plan).scale[:, :elements].cpu().numpy()
    units, inverse = slots.unit[sides], slots.power[sides] < 0
    scaled = (plan.symmetries[units] & Symmetry.POSITIVE) > 0
    keys, number = np.unique(np.sort(np.where(scaled, 2 * units + inverse, 0), 0), axis=1, return_inverse=True)
    exponents = np.where(keys % 2, -1.0, 1.0) * (keys > 0)
    blocks = np.broadcast_to(np.arange(keys.shape[1]), keys.shape)
    where = blocks.ravel(), keys.ravel() // 2
    return number.ravel(), csr_matrix((exponents.ravel(), where), (keys.shape[1], slots.classes))


def least_factors(plan: Plan, flat: Reals) -> Reals:
    """Return one factor per scale class that minimises the parameters' sum of squares on their orbit.

    The sum is convex in t = log r, so the minimum does not depend on the starting point (Stock et al. 2019,
    "Equi-normalization of neural networks"). Each step moves every class halfway to its own optimum: every element
    belongs to at most two classes, so by convexity the sum never grows; Anderson acceleration saves nine steps in ten.
    If nothing reads a class, the weights into it are scaled to norm 1.
    """
    number, powers = block_powers(plan, plan.layout.parameters)
    energy = np.bincount(number, flat[: len(number)] ** 2, powers.shape[0])
    incoming, outgoing, start = powers.maximum(0).T, (-powers).maximum(0).T, np.zeros(plan.slots.classes)

    def flows(t: Reals) -> tuple[Reals, Reals]:
        """Return the sums of squares into each class and out of it."""
        squares = energy * np.exp(2 * (powers @ t))
        return incoming @ squares, outgoing @ squares

    into, out = flows(start)
    both, unread = (into > 0) & (out > 0), (into > 0) & (out == 0)

    def step(t: Reals) -> Reals:
        into, out = flows(t)
        found = np.zeros_like(t)
        found[both] = np.log(out[both] / into[both]) / 8  # the optimum is at a quarter; halfway is an eighth
        found[unread] = -np.log(into[unread]) / 4
        return found

    with warnings.catch_warnings(action="ignore"):  # scipy warns if the last steps are parallel
        try:
            found: Reals = anderson(step, start, alpha=1.0, M=DEPTH, f_tol=SETTLED, maxiter=MOST_STEPS)
        except NoConvergence as error:
            found = error.args[0]  # the last point
    return np.exp(found)


def signs(plan: Plan, flat: Reals) -> Reals:
    """Return +1 or -1 per scale class with a sign symmetry: the weights into a unit get a positive sum of cubes."""
    p, slots = plan.layout.parameters, plan.slots
    free = (plan.symmetries & Symmetry.SIGN) > 0
    rows = element_slots(plan).scale[0][:p].cpu().numpy()
    into = slots.power[rows] > 0
    cubes = np.bincount(slots.unit[rows][into], flat[:p][into] ** 3, slots.classes)
    return np.where(free & (cubes < 0), -1.0, 1.0)


def element_factors(plan: Plan, factors: Reals) -> Tensor:
    """Return each element's factor, given one factor per scale class."""
    return element_slots(plan).factors(torch.from_numpy(plan.slots.factors(factors)).to(plan.layout.device))


def canonical_form(plan: Plan, flat: Tensor, without: Collection[str] = ()) -> CanonicalForm:
    """Return the member of the orbit with the least norm; units are not permuted.

    Tensors in `without` are scaled along with the others, but do not influence the factors.
    """
    factors = element_factors(plan, least_factors(plan, _zero_tensors(plan, flat, without)))
    factors = factors * element_factors(plan, signs(plan, _zero_tensors(plan, flat * factors, without)))
    return CanonicalForm(flat.double() * factors, factors)


def fingerprints(plan: Plan, flat: Reals) -> dict[int, Reals]:
    """Identify each order class by all parameters that lead into it and out of it, sorted per tensor."""
    found: dict[int, list[Reals]] = {}
    for side in element_slots(plan).order:
        for entry in plan.layout.trainable + plan.layout.frozen:
            inside = slice(entry.start, entry.stop)
            order = plan.slots.order[side[inside].cpu().numpy()]
            movable = plan.cells[order] > 0
            order, values = order[movable], flat[inside][movable]
            by_class = np.lexsort((values, order))
            numbers, starts = np.unique(order[by_class], return_index=True)
            for number, part in zip(numbers.tolist(), np.split(values[by_class], starts[1:]), strict=False):
                found.setdefault(number, []).append(part)
    return {number: np.concatenate(parts) for number, parts in found.items()}


def _list_cells(plan: Plan, block: int) -> list[Integers]:
    """Return the cells of a block, sorted by kind, each as an array of classes; block 0 has the cells of no block."""
    orders, found = plan.orders, []
    inside = (orders.blocks == block) & (orders.cells > 0)
    for _, cell in sorted({(int(orders.kinds[c]), int(orders.cells[c])) for c in np.flatnonzero(inside)}):
        classes = np.flatnonzero(inside & (orders.cells == cell))
        found.append(classes[np.argsort(orders.members[classes])])
    return found


def sources(plan: Plan, flat: Tensor, reference: Tensor, without: Collection[str] = ()) -> Tensor:
    """Return the index that each element comes from if every unit is moved to the most similar unit of `reference`.

    Both are in canonical form. Units that may be permuted are paired by their fingerprints; blocks that are permuted as
    a whole, such as attention heads, by the sums over their units.
    """
    own, wanted = (fingerprints(plan, _zero_tensors(plan, vector, without)) for vector in (flat, reference))

    def pair(here: Integers, there: Integers) -> tuple[Integers, float]:
        """Return the units of one cell in the order of another's (Hungarian method), and their squared distance."""
        nothing = np.zeros(0)  # all classes without parameters are alike
        rows, columns = (
            np.stack([known.get(int(c), nothing) for c in cell]) for known, cell in ((wanted, there), (own, here))
        )
        costs = (rows**2).sum(1)[:, None] + (columns**2).sum(1) - 2 * rows @ columns.T
        pairs = linear_sum_assignment(costs)
        return pairs[1], float(costs[pairs].sum())

    orders, members = plan.orders, plan.orders.members.copy()
    for classes in _list_cells(plan, 0):
        members[classes] = orders.members[classes][pair(classes, classes)[0]]
    for family in np.unique(orders.families[1:]):
        blocks = [_list_cells(plan, int(b)) for b in np.flatnonzero(orders.families == family) if b]
        every = [[[pair(*cells) for cells in zip(here, there, strict=True)] for here in blocks] for there in blocks]
        costs = [[sum(cost for _, cost in pairings) for pairings in row] for row in every]
        for to, source in zip(*linear_sum_assignment(np.array(costs)), strict=True):
            for there, here, (order, _) in zip(blocks[to], blocks[source], every[to][source], strict=True):
                members[there] = orders.members[here][order]
    shifts = torch.from_numpy(plan.slots.shifts(members)).to(flat.device)
    return element_slots(plan).sources(shifts)


def match_units(plan: Plan, flat: Tensor, reference: Tensor) -> Tensor:
    """Permute a model's units into the order of the most similar units of `reference`; both in canonical form."""
    return flat[sources(plan, flat, reference)]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a flat vector of trainable parameters.

    Attributes:
        number: the block of each element.
        powers: for each block, the exponent of each unit's factor, (blocks, scale classes).
    """

    number: Tensor
    powers: Tensor

    @property
    def scaled(self) -> Tensor:
        """For each block, whether any unknown factor acts on it."""
        return (self.powers != 0).any(1)

    @property
    def sizes(self) -> Tensor:
        """The number of elements in each block."""
        return torch.bincount(self.number, minlength=len(self.powers)).to(self.powers)

    def inner(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the inner product of two vectors within each block."""
        return one.new_zeros(len(self.powers)).index_add(0, self.number, one * other)

    def directions(self, vector: Tensor) -> Tensor:
        """Scale every block of a vector to norm 1; blocks without an unknown factor become 0."""
        lengths = self.inner(vector, vector).sqrt()
        return vector * (self.scaled / lengths.clamp_min(TINY))[self.number]

    def project_out(self, vector: Tensor, directions: Tensor) -> Tensor:
        """Remove the part of a vector along one direction in each block."""
        return vector - directions * self.inner(vector, directions)[self.number]

    def fit_factors(self, logarithms: Tensor, weights: Tensor) -> Tensor:
        """Fit each block's factor to noisy logarithms, by least squares in one number per unit."""
        roots = weights.sqrt()
        left, right = roots.unsqueeze(1) * self.powers, (roots * logarithms).unsqueeze(1)
        units = torch.linalg.lstsq(left.cpu(), right.cpu(), driver="gelsd").solution.to(left)
        factors: Tensor = (self.powers @ units)[:, 0].exp()
        return factors


def find_blocks(plan: Plan) -> Blocks:
    """Return the blocks of a plan's trainable parameters; signs and permutations do not affect them."""
    number, powers = block_powers(plan, plan.layout.weights)
    return Blocks(*(torch.from_numpy(part).to(plan.layout.device) for part in (number, powers.toarray())))
