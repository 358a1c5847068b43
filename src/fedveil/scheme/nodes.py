"""Where a loss is probed, how the probes are put together, and how far off the result is (docs/losses.md).

All of it is polynomial interpolation at Chebyshev points u_k = cos((2k + 1) pi / 2K) of the public interval
[-reach, reach], in which the head's secret offset d lies at u = d / reach.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
FEWEST, MOST = 4, 64
SPREAD = 2.0  # standard errors of the anchor that the interval reaches to either side
SLOWEST = 0.95  # decay a coefficient at which an extrapolation ends
REMEMBERED = 8  # rounds
STRIP = math.pi  # how far from the real axis the logits of a cross-entropy may go before its gradient has a pole


def chebyshev(count: int) -> Reals:
    """The nodes in [-1, 1]."""
    places: Reals = np.cos((2 * np.arange(count) + 1) * (math.pi / (2 * count)))
    return places


def transform(count: int) -> Reals:
    """Rows that turn values at the nodes into Chebyshev coefficients a_0 ... a_(K-1)."""
    angles = (2 * np.arange(count) + 1) * (math.pi / (2 * count))
    rows: Reals = np.cos(np.arange(count)[:, None] * angles) * (2 / count)
    rows[0] /= 2
    return rows


def polynomials(count: int, place: float) -> Reals:
    """T_0 ... T_(count-1) at a place of [-1, 1]."""
    values: Reals = np.cos(np.arange(count) * math.acos(min(1.0, max(-1.0, place))))
    return values


def lagrange(count: int, place: float) -> list[float]:
    """What each node's value counts at a place: the polynomial through all of them, there."""
    found: list[float] = (polynomials(count, place) @ transform(count)).tolist()
    return found


@dataclass(frozen=True)
class Spectrum:
    """Sizes of the Chebyshev coefficients of a round's gradient, for the server's eyes.

    Attributes:
        sizes: |a_0| ... |a_(K-1)|, over the recovered gradient's.
        floor: what rounding alone makes of a coefficient, in the same measure.
        shift: half the interval's length times the largest of r_a: logits per unit of alpha.
    """

    sizes: tuple[float, ...]
    floor: float
    shift: float

    def decay(self) -> tuple[float, float]:
        """(size, rate) of the last coefficients, in pairs because every other one of an even function is 0."""
        last, before = max(self.sizes[-2:]), max(self.sizes[-4:-2])
        if last <= 4 * self.floor or before <= 0:
            return last, 0.5
        return last, min(SLOWEST, math.sqrt(last / before))

    def truncation(self) -> float:
        """The most that coefficients beyond the last can add up to: |a_K| + 2 |a_(K+1)| + 2 |a_(K+2)| + ..."""
        size, rate = self.decay()
        return size * rate * (1 + rate) / (1 - rate)

    def error(self, place: float) -> float:
        """Estimated relative error at a place: the interpolation's, which follows T_K, and rounding."""
        count = len(self.sizes)
        wave = abs(math.cos(count * math.acos(min(1.0, max(-1.0, place)))))
        return self.truncation() * max(wave, 0.1) + self.floor


class NodeCount:
    """The fewest nodes that keep the error below a tolerance, from what the last rounds' coefficients were.

    A gradient of cross-entropy has its nearest poles where logits are pi off the real axis, so that coefficients fall
    by rho a node with (rho - 1/rho) / 2 = pi / shift (an ellipse through the poles). Each round shows its rho and hence
    its shift per unit of the public interval; the next count follows from the next interval. Where the secret lies in
    the interval plays no part: the count is public.
    """

    def __init__(self, tolerance: float, start: int = 12) -> None:
        self.tolerance = tolerance
        self._start = start
        self._seen: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)

    def __call__(self, shift: float) -> int:
        """The count for an interval of that shift."""
        if not self._seen:
            return self._start
        return max(self._count(per_shift * shift, size) for per_shift, size in self._seen)

    def _count(self, shift: float, size: float) -> int:
        """The fewest K with size rate^K (1 + rate) / (1 - rate) below the tolerance."""
        minor = STRIP / max(shift, 1e-12)
        rate = min(SLOWEST, math.hypot(minor, 1) - minor)
        wanted = self.tolerance * (1 - rate) / (1 + rate) / max(size, 1e-300)
        count = math.ceil(math.log(wanted) / math.log(rate)) if wanted < 1 else FEWEST
        return min(MOST, max(FEWEST, count))

    def observe(self, spectrum: Spectrum) -> None:
        """Learn from a round."""
        sizes, floor = spectrum.sizes, 4 * spectrum.floor
        above = [j for j, size in enumerate(sizes) if size > floor]
        last = above[-1] if above else 0
        first = max(0, last - 5)
        rate = 0.05
        if last - first >= 2:
            tail = np.maximum.accumulate(np.array(sizes[first : last + 1])[::-1])[::-1]
            rate = min(SLOWEST, max(0.01, float(tail[-1] / tail[0]) ** (1 / (last - first))))
        minor = (1 / rate - rate) / 2
        self._seen.append((STRIP / minor / max(spectrum.shift, 1e-300), sizes[last] / rate**last))
