"""Rules that combine clients' vectors when some clients may be hostile.

Each rule takes a matrix whose rows are the clients' vectors, and `hostile`, the number of rows that may be arbitrary.
It returns one vector. All clients have the same weight: a hostile client could claim any weight.

- Median and trimmed mean of each coordinate: Yin, Chen, Kannan, Bartlett, "Byzantine-Robust Distributed Learning:
  Towards Optimal Statistical Rates", ICML 2018.
- Geometric median: Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", IEEE Transactions on
  Signal Processing 70, 2022 (the smoothed Weiszfeld algorithm).
- Centred clipping: Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021.
- Clipped mean: Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?", 2019 (arXiv 1911.07963).
  The bound here is the median norm.
- Krum and multi-Krum: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant
  Gradient Descent", NeurIPS 2017.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

WEISZFELD, CLIPPINGS = 32, 5  # maximum number of steps
SMOOTHING = 1e-6  # relative to the median distance; rows nearer than this get no additional weight


def distances(rows: Tensor, centre: Tensor) -> Tensor:
    """Return the distance of each row from the centre, in float64."""
    away: Tensor = torch.linalg.vector_norm(rows - centre, dim=1, dtype=torch.float64)
    return away


def median(rows: Tensor, hostile: int) -> Tensor:
    """Return the median of each coordinate; for an even number of rows, the mean of the middle two."""
    ordered, middle = rows.sort(0).values, len(rows) // 2
    return ordered[middle] if len(rows) % 2 else ordered[middle - 1 : middle + 1].mean(0)


def trimmed_mean(rows: Tensor, hostile: int) -> Tensor:
    """Return the mean of each coordinate without its `hostile` smallest and largest values."""
    return rows.sort(0).values[hostile : len(rows) - hostile].mean(0)


def geometric_median(rows: Tensor, hostile: int) -> Tensor:
    """Return the point with the smallest sum of distances from the rows."""
    centre = median(rows, hostile)
    for _ in range(WEISZFELD):
        away = distances(rows, centre)
        pull = 1 / away.clamp_min(max(SMOOTHING * float(away.median()), torch.finfo(away.dtype).tiny))
        moved = (pull / pull.sum()).to(rows) @ rows
        step, centre = float(torch.linalg.vector_norm(moved - centre, dtype=torch.float64)), moved
        if step <= SMOOTHING * float(away.median()):
            break
    return centre


def centred_clipping(rows: Tensor, hostile: int) -> Tensor:
    """Repeatedly move a centre by the mean of the rows' differences from it, each clipped to their median norm.

    Unlike in the paper, the centre starts at the round's median, not at the last round's result, so that a resumed run
    needs no further state, and the radius is the median distance, not a setting.
    """
    centre = median(rows, hostile)
    for _ in range(CLIPPINGS):
        away = distances(rows, centre)
        radius = away.median()
        shorten = torch.where(away > radius, radius / away, torch.ones_like(away)).to(rows)
        centre = centre + (shorten[:, None] * (rows - centre)).mean(0)
    return centre


def clipped_mean(rows: Tensor, hostile: int) -> Tensor:
    """Return the mean of the rows, each clipped to their median norm."""
    lengths = distances(rows, torch.zeros_like(rows[0]))
    middle = lengths.sort().values[(len(rows) - 1) // 2]
    return (torch.where(lengths > middle, middle / lengths, torch.ones_like(lengths)).to(rows)[:, None] * rows).mean(0)


def _scores(rows: Tensor, hostile: int) -> Tensor:
    """Return for each row the sum of squared distances to its n - hostile - 2 nearest rows."""
    squares = torch.stack([distances(rows, row) for row in rows]).square()
    near = max(1, len(rows) - hostile - 2)
    return squares.sort(1).values[:, 1 : 1 + near].sum(1)  # the first is the row itself


def krum(rows: Tensor, hostile: int) -> Tensor:
    """Return the row that is nearest to its neighbours."""
    return rows[int(_scores(rows, hostile).argmin())]


def multi_krum(rows: Tensor, hostile: int) -> Tensor:
    """Return the mean of the n - hostile rows that are nearest to their neighbours."""
    return rows[_scores(rows, hostile).argsort()[: len(rows) - hostile]].mean(0)


@dataclass(frozen=True)
class AggregationRule:
    """A rule, and the number of rows that it needs."""

    combine: Callable[[Tensor, int], Tensor]
    beyond: int  # rows in addition to twice `hostile`

    def needed(self, hostile: int) -> int:
        """Return the minimum number of rows if `hostile` of them may be arbitrary."""
        return 2 * hostile + self.beyond

    def most(self, rows: int) -> int:
        """Return the maximum number of rows that may be hostile."""
        return max(0, (rows - self.beyond) // 2)


RULES: Mapping[str, AggregationRule] = {
    "median": AggregationRule(median, 1),
    "trimmed-mean": AggregationRule(trimmed_mean, 1),
    "geometric-median": AggregationRule(geometric_median, 1),
    "centred-clipping": AggregationRule(centred_clipping, 1),
    "clipped-mean": AggregationRule(clipped_mean, 1),
    "krum": AggregationRule(krum, 3),
    "multi-krum": AggregationRule(multi_krum, 3),
}
