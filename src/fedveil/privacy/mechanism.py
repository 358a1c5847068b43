"""The Gaussian mechanism on a grid: sums of clipped gradients are rounded to it, and noise is drawn on it.

A client sends its sum S as integers rint(S / unit). The server, or each client, adds discrete Gaussian integers of
standard deviation 2^20. So the noisy sum is an exact integer: none of its bits comes from the rounding of floats, which
depends on the sum. One record changes the integers by at most

    sensitivity / unit,    sensitivity = clip sqrt(k) + unit sqrt(k d) + 2 sqrt(k) summation_error

if the adversary sees k sums of d numbers: both neighbouring sums are rounded, by at most half a unit each, and
computed with rounding errors. The noise is noise x sensitivity, which makes the multiplier exact.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import BadArgument
from fedveil.privacy.gradients import summation_error
from fedveil.privacy.samplers import SCALE, discrete_gaussian
from fedveil.scheme.noise import Entropy

LARGEST = 2.0**53  # integers below it are exact in float64
MOST_RECORDS = 2**17  # maximum size of a client's sample; the bound on rounding errors assumes it


@dataclass(frozen=True)
class Grid:
    """The grid of a round's sums, from public numbers alone.

    Attributes:
        unit: the distance between its points; the noise of one party has a standard deviation of 2^20 units.
        sensitivity: the largest change of the sum that one record can cause.
    """

    unit: float
    sensitivity: float


def make_grid(noise: float, clip: float, numbers: int, *, candidates: int = 1, shares: int = 1) -> Grid:
    """Choose the grid for a noise multiplier.

    Args:
        noise: the multiplier; 0 gives the grid of a multiplier of 1, and nobody adds noise.
        clip: maximum norm of a record's gradient.
        numbers: the number of values in one gradient.
        candidates: the number of sums that the adversary sees.
        shares: the number of noise shares that are certain to be in the sum and unknown to the adversary.
    """
    multiplier = noise or 1.0
    rounding = math.sqrt(candidates * numbers) * multiplier / math.sqrt(shares) / SCALE  # of the sensitivity
    if rounding > 0.5:
        what = f"noise {noise:g} on {candidates * numbers:,} numbers needs a finer grid than 2^-20"
        raise BadArgument("privacy", what, "use a smaller noise")
    exact = math.sqrt(candidates) * (clip + 2 * summation_error(MOST_RECORDS, clip))
    sensitivity = exact / (1 - rounding) * (1 + 2**-40)
    return Grid(multiplier * sensitivity / math.sqrt(shares) / SCALE, sensitivity)


def quantise(sums: Tensor, grid: Grid) -> Tensor:
    """Return sums in units of the grid: integers, as float64."""
    return torch.round(sums.double() / grid.unit)


def add_noise(sums: Tensor, entropy: Entropy) -> Tensor:
    """Add discrete Gaussian noise to integers."""
    drawn = discrete_gaussian(entropy, sums.numel()).astype(np.float64)
    return sums + torch.from_numpy(drawn).view(sums.shape).to(sums.device)


def count_shares(members: int, colluding: int, vanishing: int) -> int:
    """Return the number of noise shares that the adversary does not know and that are in the sum in any case."""
    shares = members - colluding - vanishing
    if shares < 1:
        what = f"of {members} clients, {colluding} may collude and {vanishing} may vanish: no noise is left"
        raise BadArgument("privacy", what, "use more clients, or smaller colluding= and vanishing=")
    return shares
