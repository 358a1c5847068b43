"""Aggregation rules for federations in which some clients may be hostile.

Each rule takes a matrix with one row per client and `num_hostile`, the number of rows that may be arbitrary, and
returns a single vector. All clients have the same weight, because a hostile client could claim any weight.

- Coordinate-wise median and trimmed mean: Yin, Chen, Kannan, Bartlett, "Byzantine-Robust Distributed Learning:
  Towards Optimal Statistical Rates", ICML 2018.
- Geometric median: Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", IEEE Transactions on
  Signal Processing 70, 2022 (the smoothed Weiszfeld algorithm).
- Centred clipping: Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021.
- Clipped mean: Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?", 2019 (arXiv 1911.07963).
  Here, the clipping norm is the median norm.
- Krum and multi-Krum: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant
  Gradient Descent", NeurIPS 2017.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

WEISZFELD_ITERATIONS, CLIPPING_ITERATIONS = 32, 5  # maximum numbers of iterations
SMOOTHING = 1e-6  # minimum distance, relative to the median distance; smaller distances are rounded up


def distances(rows: Tensor, centre: Tensor) -> Tensor:
    """Return the distance of each row from the centre, in float64."""
    result: Tensor = torch.linalg.vector_norm(rows - centre, dim=1, dtype=torch.float64)
    return result


def median(rows: Tensor, num_hostile: int) -> Tensor:
    """Return the coordinate-wise median; for an even number of rows, the mean of the two middle values."""
    sorted_rows, middle = rows.sort(0).values, len(rows) // 2
    return sorted_rows[middle] if len(rows) % 2 else sorted_rows[middle - 1 : middle + 1].mean(0)


def trimmed_mean(rows: Tensor, num_hostile: int) -> Tensor:
    """Return the coordinate-wise mean without the `num_hostile` smallest and the `num_hostile` largest values."""
    return rows.sort(0).values[num_hostile : len(rows) - num_hostile].mean(0)


def geometric_median(rows: Tensor, num_hostile: int) -> Tensor:
    """Return the point that minimises the sum of its distances to the rows."""
    centre = median(rows, num_hostile)
    for _ in range(WEISZFELD_ITERATIONS):
        distance = distances(rows, centre)
        weights = 1 / distance.clamp_min(max(SMOOTHING * float(distance.median()), torch.finfo(distance.dtype).tiny))
        mean = (weights / weights.sum()).to(rows) @ rows
        step, centre = float(torch.linalg.vector_norm(mean - centre, dtype=torch.float64)), mean
        if step <= SMOOTHING * float(distance.median()):
            break
    return centre


def centred_clipping(rows: Tensor, num_hostile: int) -> Tensor:
    """Move a centre repeatedly by the mean of the rows' differences from it, each clipped to the median norm.

    Unlike in the paper, the centre starts at the round's median rather than the last round's result, so that a resumed
    run needs no additional state. The radius is the median distance rather than a setting.
    """
    centre = median(rows, num_hostile)
    for _ in range(CLIPPING_ITERATIONS):
        distance = distances(rows, centre)
        radius = distance.median()
        scale = torch.where(distance > radius, radius / distance, torch.ones_like(distance)).to(rows)
        centre = centre + (scale[:, None] * (rows - centre)).mean(0)
    return centre


def clipped_mean(rows: Tensor, num_hostile: int) -> Tensor:
    """Return the mean of the rows after clipping each of them to the median norm."""
    norms = distances(rows, torch.zeros_like(rows[0]))
    bound = norms.sort().values[(len(rows) - 1) // 2]
    return (torch.where(norms > bound, bound / norms, torch.ones_like(norms)).to(rows)[:, None] * rows).mean(0)


def _scores(rows: Tensor, num_hostile: int) -> Tensor:
    """Return each row's sum of squared distances to its n - num_hostile - 2 nearest neighbours."""
    squares = torch.stack([distances(rows, row) for row in rows]).square()
    num_neighbours = max(1, len(rows) - num_hostile - 2)
    return squares.sort(1).values[:, 1 : 1 + num_neighbours].sum(1)  # the first distance is from the row to itself


def krum(rows: Tensor, num_hostile: int) -> Tensor:
    """Return the row that is closest to its neighbours."""
    return rows[int(_scores(rows, num_hostile).argmin())]


def multi_krum(rows: Tensor, num_hostile: int) -> Tensor:
    """Return the mean of the n - num_hostile rows that are closest to their neighbours."""
    return rows[_scores(rows, num_hostile).argsort()[: len(rows) - num_hostile]].mean(0)


@dataclass(frozen=True)
class AggregationRule:
    """An aggregation rule and the number of rows that it requires."""

    combine: Callable[[Tensor, int], Tensor]
    extra_rows: int  # number of rows required in addition to 2 * num_hostile

    def min_rows(self, num_hostile: int) -> int:
        """Return the minimum number of rows if `num_hostile` of them may be hostile."""
        return 2 * num_hostile + self.extra_rows

    def max_hostile(self, num_rows: int) -> int:
        """Return how many of `num_rows` rows may be hostile."""
        return max(0, (num_rows - self.extra_rows) // 2)


RULES: Mapping[str, AggregationRule] = {
    "median": AggregationRule(median, 1),
    "trimmed-mean": AggregationRule(trimmed_mean, 1),
    "geometric-median": AggregationRule(geometric_median, 1),
    "centred-clipping": AggregationRule(centred_clipping, 1),
    "clipped-mean": AggregationRule(clipped_mean, 1),
    "krum": AggregationRule(krum, 3),
    "multi-krum": AggregationRule(multi_krum, 3),
}
