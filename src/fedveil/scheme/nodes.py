"""Nodes: polynomial interpolation of a loss's gradient, and its error (docs/losses.md).

Interpolation is at Chebyshev points u_k = cos((2k + 1) pi / 2K) of the public interval [-reach, reach], in which the
head's secret offset d lies at u = d / reach.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
FEWEST, MOST = 3, 128
SPREAD = 2.0  # half width of the interval, in standard errors of the anchor
CAUTION = 2.0  # safety factor on the extrapolation; found on the grid of tests/scheme/test_nodes.py
MARGIN = 0.1  # of the tolerance; found there too
LIKELY, EXTRA = 3.0, 1.2  # standard deviations added to the last rounds' counts; the factor used in the first rounds
SLOWEST = 0.95  # largest decay rate per coefficient
REMEMBERED = 8  # rounds
STRIP = math.pi  # distance of the nearest pole of cross-entropy's gradient from the real axis, in logits


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
    """The weight of each node's value in the interpolating polynomial at a place."""
    found: list[float] = (polynomials(count, place) @ transform(count)).tolist()
    return found


@dataclass(frozen=True)
class Spectrum:
    """Sizes of the Chebyshev coefficients of a round's gradient; for the server only.

    Attributes:
        sizes: |a_0| ... |a_(K-1)|, over the size of the recovered gradient.
        floor: a coefficient's rounding error, in the same unit.
        shift: half the interval's length times the span of r_a: logits per unit of alpha.
        ending: the sum of the last four terms at the secret's place, in the same unit.
    """

    sizes: tuple[float, ...]
    floor: float
    shift: float
    ending: float = math.inf

    def decay(self) -> tuple[float, float]:
        """(size, rate) of the last coefficients: a line through the logarithms of six.

        The first two are left out: they are far above all others if the gradient is almost linear in the place.
        """
        last = self.sizes[min(2, len(self.sizes) - 2) :][-6:]
        if last[-1] <= 4 * self.floor:
            return last[-1], 0.5
        logs = np.log(np.maximum(last, 1e-300))
        steps = np.arange(len(logs)) - (len(logs) - 1) / 2
        slope = float(steps @ logs / (steps @ steps))
        size = math.exp(float(logs.mean()) + slope * float(steps[-1]))
        return max(size, last[-1]), min(SLOWEST, math.exp(slope))

    def truncation(self) -> float:
        """The extrapolated sum of the coefficients beyond the last: its root mean square over unknown phases."""
        size, rate = self.decay()
        return CAUTION * size * rate * math.sqrt((1 + 3 * rate**2) / (1 - rate**2))

    def error(self, place: float) -> float:
        """Estimated relative error at a place: that of interpolation, T_K times a smooth function, plus rounding.

        If the last terms nearly cancel at the place, that function is small there; this reduces the estimate by the
        square root, at most by a factor of 3.
        """
        wave = abs(math.cos(len(self.sizes) * math.acos(min(1.0, max(-1.0, place)))))
        _, rate = self.decay()
        size = self.truncation()
        here = CAUTION * self.ending * rate**4 / size if size > 0 else 1.0
        return size * wave * math.sqrt(min(1.0, max(0.1, here))) + self.floor


class NodeCount:
    """The fewest nodes that keep the error below a tolerance, estimated from the last rounds' coefficients.

    A gradient of cross-entropy has its nearest poles where logits are pi off the real axis, so coefficients fall by rho
    per node with (rho - 1/rho) / 2 = pi / shift (an ellipse through the poles). Each round shows its rho, hence its
    shift per unit of the public interval, and how many nodes it needed; the next count follows from the next interval.
    The secret's place in the interval is not used, because the count is public.
    """

    def __init__(self, tolerance: float, start: int = 12) -> None:
        self.tolerance = tolerance
        self._start = start
        self._seen: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)

    def __call__(self, shift: float) -> int:
        """The count for an interval of that shift: enough for every remembered round, and likely for the next."""
        if not self._seen:
            return self._start
        needed = [digits / -math.log(_rate(per_shift * shift)) for per_shift, digits in self._seen]
        most = max(needed)
        likely = statistics.fmean(needed) + LIKELY * statistics.pstdev(needed) if len(needed) > 2 else EXTRA * most
        return min(MOST, max(FEWEST + 1, math.ceil(max(likely, most))))  # three nodes would show no decay

    def observe(self, spectrum: Spectrum) -> None:
        """Learn from a round."""
        sizes, floor = np.array(spectrum.sizes), max(4 * spectrum.floor, 1e-300)
        tail = np.maximum.accumulate(sizes[::-1])[::-1]  # the largest coefficient from each one on
        last = max(1, int((tail > floor).sum()) - 1)
        first = max(0, last - 6)
        rate = min(SLOWEST, max(1e-3, float((tail[last] + 1e-300) / (tail[first] + 1e-300)) ** (1 / (last - first))))
        wanted = max(MARGIN * self.tolerance * math.sqrt((1 - rate**2) / (1 + 3 * rate**2)), spectrum.floor / 4)
        enough = np.flatnonzero(tail <= wanted)
        beyond = last + max(0.0, math.log(wanted / max(float(tail[last]), 1e-300)) / math.log(rate))
        needed = min(float(enough[0]), beyond) if len(enough) else beyond
        minor = (1 / rate - rate) / 2
        self._seen.append((STRIP / minor / max(spectrum.shift, 1e-300), needed * -math.log(rate)))


def _rate(shift: float) -> float:
    """The ratio of consecutive coefficients at that shift of the logits."""
    minor = STRIP / max(shift, 1e-12)
    return min(SLOWEST, max(1e-3, math.hypot(minor, 1) - minor))
