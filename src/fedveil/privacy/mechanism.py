"""The discrete Gaussian mechanism: sums of clipped gradients are rounded to a grid, and noise on this grid is added.

A client sends its sum S as integers rint(S / unit). The server, or each client, adds discrete Gaussian integers with
standard deviation 2^20. The noisy sum is an exact integer, so it is free of floating-point rounding errors, which would
depend on the sum. One record changes the integers by at most

    sensitivity / unit,    sensitivity = clip sqrt(k) + unit sqrt(k d) + 2 sqrt(k) summation_error

if the adversary sees k sums of d numbers each. The last two terms account for rounding to the grid, by at most half a
unit for each of two neighbouring sums, and for rounding errors in the sums. The standard deviation of the noise is
noise x sensitivity, so the noise multiplier is exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.errors import BadArgument, NonFiniteUpdate
from fedveil.privacy.gradients import summation_error
from fedveil.privacy.samplers import SCALE, discrete_gaussian
from fedveil.scheme.noise import Entropy

EXACT_LIMIT = 2.0**53  # integers below this are exact in float64
MAX_RECORDS = 2**17  # maximum size of a client's sample; the bound on rounding errors assumes it


@dataclass(frozen=True)
class Grid:
    """The grid for the sums of a round, which depends only on public numbers.

    Attributes:
        unit: the distance between grid points; the noise of one party has a standard deviation of 2^20 units.
        sensitivity: the largest change that one record can cause in the sum.
    """

    unit: float
    sensitivity: float


def make_grid(noise: float, clip: float, num_values: int, *, candidates: int = 1, shares: int = 1) -> Grid:
    """Choose the grid for a noise multiplier.

    Args:
        noise: noise multiplier. For 0, which means no noise, the grid is the same as for 1.
        clip: maximum norm of a record's gradient.
        num_values: the number of values in one gradient.
        candidates: the number of sums that the adversary sees.
        shares: the number of noise shares that are always in the sum and unknown to the adversary.
    """
    multiplier = noise or 1.0
    # relative to the sensitivity
    rounding = math.sqrt(candidates * num_values) * multiplier / math.sqrt(shares) / SCALE
    if rounding > 0.5:
        message = f"noise {noise:g} on {candidates * num_values:,} values needs a grid finer than 2^-20 of it"
        raise BadArgument("privacy", message, "use a smaller noise multiplier")
    unrounded = math.sqrt(candidates) * (clip + 2 * summation_error(MAX_RECORDS, clip))
    sensitivity = unrounded / (1 - rounding) * (1 + 2**-40)
    return Grid(multiplier * sensitivity / math.sqrt(shares) / SCALE, sensitivity)


def quantise(sums: Tensor, grid: Grid) -> Tensor:
    """Return the sums in units of the grid, rounded to integers in float64."""
    return torch.round(sums.double() / grid.unit)


def add_noise(sums: Tensor, entropy: Entropy) -> Tensor:
    """Add discrete Gaussian noise to integers, which are float64 below 2^53, or int64 modulo 2^64."""
    noise = torch.from_numpy(discrete_gaussian(entropy, sums.numel())).view(sums.shape)
    return sums + noise.to(sums.device, sums.dtype)


def sum_integers(parts: Sequence[Tensor]) -> Tensor:
    """Sum integers that are stored as float64; return the sum as int64."""
    return torch.stack([part.round().to(torch.int64) for part in parts]).sum(0)


def count_shares(members: int, colluding: int, vanishing: int) -> int:
    """Return the number of noise shares that are always in the sum and unknown to the adversary."""
    shares = members - colluding - vanishing
    if shares < 1:
        message = f"of {members} clients, {colluding} may collude and {vanishing} may drop out, which leaves no noise"
        raise BadArgument("privacy", message, "use more clients, or smaller colluding= and vanishing=")
    return shares


def clip_vector(flat: Tensor, clip: float, where: str = "gradient") -> tuple[Tensor, float, bool]:
    """Clip a float64 vector to norm `clip`; return the result, its norm, and whether it was clipped.

    The bound holds in exact arithmetic: `slack` is an upper bound on the relative rounding error of the norm and of the
    scaled vector. The vector is first divided by its largest magnitude, so that squares do not overflow.
    """
    largest = float(flat.abs().max()) if len(flat) else 0.0
    if not math.isfinite(largest):
        raise NonFiniteUpdate(where, "its gradient contains NaN or infinity")
    if not largest:
        return flat, 0.0, False
    direction = flat / largest
    norm = float(torch.linalg.vector_norm(direction))
    slack = (len(flat) + 8) * torch.finfo(torch.float64).eps
    if largest * norm * (1 + slack) <= clip:
        return flat, largest * norm, False
    return direction * (clip / norm * (1 - slack)), clip, True
