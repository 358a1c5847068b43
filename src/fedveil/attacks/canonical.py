"""Undo factors and permutations without knowing them: all veiled versions of a network share one canonical form.

Factors and places of hidden units do not change what a network computes: a veil only picks another member of the same
orbit. Picking a member by a rule that does not depend on the starting point undoes that.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedveil.graph.plan import Plan
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.tables import Pool, build_pool

Reals = NDArray[np.float64]
MOST_STEPS = 5000
SETTLED = 1e-13  # of a logarithm of a factor


def _sides(plan: Plan) -> Pool:
    """The slots of each element of the flat vector of all tensors."""
    return build_pool(plan.layout.entries, dict(plan.pieces), plan.layout.device)


def least_factors(plan: Plan, flat: Reals) -> Reals:
    """One factor per scale class that gives the parameters the least sum of squares on their orbit.

    The sum is convex in t = log r, so the minimum does not depend on the starting point (Stock et al. 2019,
    "Equi-normalization of neural networks"). Each step moves every class half the way to its own optimum: every element
    belongs to at most two classes, so by convexity the sum never grows.
    """
    p, slots = plan.layout.parameters, plan.slots
    free = (plan.symmetries & Symmetry.POSITIVE) > 0
    sides = [side[:p].cpu().numpy() for side in _sides(plan).scale]
    units, powers = [slots.unit[side] for side in sides], [slots.power[side] for side in sides]
    t = np.zeros(slots.classes)
    for _ in range(MOST_STEPS):
        squares = (flat[:p] * np.exp(sum(w * t[u] for u, w in zip(units, powers, strict=True)))) ** 2
        into, out = np.zeros(slots.classes), np.zeros(slots.classes)
        for u, w in zip(units, powers, strict=True):
            into += np.bincount(u[w > 0], squares[w > 0], slots.classes)
            out += np.bincount(u[w < 0], squares[w < 0], slots.classes)
        open_ = free & (into > 0) & (out > 0)
        step = np.zeros_like(t)
        step[open_] = np.log(out[open_] / into[open_]) / 8  # the optimum is at a quarter; half the way is an eighth
        t += step
        if np.abs(step).max(initial=0.0) < SETTLED:
            break
    return np.exp(t)


def signs(plan: Plan, flat: Reals) -> Reals:
    """+1 or -1 per scale class that takes signs, so that the weights into a unit have a positive sum of cubes."""
    p, slots = plan.layout.parameters, plan.slots
    free = (plan.symmetries & Symmetry.SIGN) > 0
    rows = _sides(plan).scale[0][:p].cpu().numpy()
    into = slots.power[rows] > 0
    cubes = np.bincount(slots.unit[rows][into], flat[:p][into] ** 3, slots.classes)
    return np.where(free & (cubes < 0), -1.0, 1.0)


def scaled(plan: Plan, flat: Tensor, factors: Reals) -> Tensor:
    """The member of the orbit that these factors lead to."""
    return flat * _sides(plan).factors(torch.from_numpy(plan.slots.factors(factors)).to(flat))


def canonical(plan: Plan, flat: Tensor) -> Tensor:
    """The member of the orbit of least norm, in float64; units keep their places."""
    double = flat.double()
    double = scaled(plan, double, least_factors(plan, double.cpu().numpy()))
    return scaled(plan, double, signs(plan, double.cpu().numpy()))


def fingerprints(plan: Plan, flat: Reals) -> dict[int, Reals]:
    """What identifies each order class: all parameters that lead into it and out of it, sorted per tensor."""
    found: dict[int, list[Reals]] = {}
    for side in _sides(plan).order:
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


def matched(plan: Plan, flat: Tensor, reference: Tensor) -> Tensor:
    """The same model with each unit in the place of the most similar unit of `reference`; both in canonical form.

    The Hungarian method pairs units that may trade places: the distances of their fingerprints have the least sum.
    """
    own, wanted = (fingerprints(plan, vector.double().cpu().numpy()) for vector in (flat, reference))
    members = plan.orders.members.copy()
    for cell in np.unique(plan.cells[plan.cells > 0]):
        classes = np.flatnonzero(plan.cells == cell)
        here, there = (np.stack([prints[int(c)] for c in classes]) for prints in (own, wanted))
        apart = (there**2).sum(1)[:, None] + (here**2).sum(1) - 2 * there @ here.T
        members[classes] = plan.orders.members[classes].min() + linear_sum_assignment(apart)[1]
    shifts = torch.from_numpy(plan.slots.shifts(members)).to(flat.device)
    return flat[_sides(plan).sources(shifts)]
