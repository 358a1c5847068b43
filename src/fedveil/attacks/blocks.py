"""Blocks of a network's parameters: elements that share all their unknown factors.

A veil multiplies every element by the factors of at most two units, r_i / r_j. Elements of one block have the same
factors: a row of the first layer with its bias, the k x k kernel between two channels, the columns of the head for one
channel. Within a block the factor is one unknown number; over all blocks its logarithm is linear in one number per
unit.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedveil.attacks.canonical import element_slots
from fedveil.graph.plan import Plan
from fedveil.graph.symmetry import Symmetry

TINY = 1e-30


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
    """Return the blocks of a plan's trainable parameters; signs and permutations do not divide them."""
    slots, device = plan.slots, plan.layout.device
    positive = (plan.symmetries & Symmetry.POSITIVE) > 0
    sides = element_slots(plan).scale[:, : plan.layout.weights].cpu().numpy()
    units, powers = slots.unit[sides], slots.power[sides]
    keys = np.sort(np.where(positive[units], 2 * units + (powers < 0), 0), 0)
    rows, number = np.unique(keys, axis=1, return_inverse=True)
    exponents = np.zeros((rows.shape[1], slots.classes))
    for key in rows:
        np.add.at(exponents, (np.arange(len(key)), key // 2), np.where(key % 2, -1.0, 1.0) * (key > 0))
    return Blocks(torch.from_numpy(number.ravel()).to(device), torch.from_numpy(exponents).to(device))
