"""How clients' vectors become one when some clients may be hostile.

Each rule takes the clients' vectors as rows, and `hostile`, how many of them may be anything at all; it returns one
vector. Every client has one vote: a weight would be a claim that a hostile client can make as it likes.

- Median and trimmed mean of each coordinate: Yin, Chen, Kannan, Bartlett, "Byzantine-Robust Distributed Learning:
  Towards Optimal Statistical Rates", ICML 2018.
- Geometric median: Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", IEEE Transactions on
  Signal Processing 70, 2022 (the smoothed Weiszfeld algorithm).
- Centred clipping: Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021.
- Clipped mean: Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?", 2019 (arXiv 1911.07963).
  The bound here is the median length.
- Krum and multi-Krum: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant
  Gradient Descent", NeurIPS 2017.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

WEISZFELD, CLIPPINGS = 32, 5  # steps at most
SMOOTHING = 1e-6  # of a median distance: nearer than this, a row pulls no more


def distances(rows: Tensor, centre: Tensor) -> Tensor:
    """Return the distance of each row from the centre, in float64."""
    away: Tensor = torch.linalg.vector_norm(rows - centre, dim=1, dtype=torch.float64)
    return away


def median(rows: Tensor, hostile: int) -> Tensor:
    """Return the median of each coordinate; the mean of the middle two of an even number."""
    ordered, middle = rows.sort(0).values, len(rows) // 2
    return ordered[middle] if len(rows) % 2 else ordered[middle - 1 : middle + 1].mean(0)


def trimmed_mean(rows: Tensor, hostile: int) -> Tensor:
    """The mean of each coordinate without its `hostile` smallest and largest values."""
    return rows.sort(0).values[hostile : len(rows) - hostile].mean(0)


def geometric_median(rows: Tensor, hostile: int) -> Tensor:
    """The point whose distances from the rows have the smallest sum."""
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
    """A centre moved by the rows' mean difference from it, each difference clipped to the median of their lengths.

    Differs from the paper: it begins at the round's own median, not at the last round's result, so that a run that is
    resumed goes on the same without further state; and its radius is the median distance, not a setting.
    """
    centre = median(rows, hostile)
    for _ in range(CLIPPINGS):
        away = distances(rows, centre)
        radius = away.median()
        shorten = torch.where(away > radius, radius / away, torch.ones_like(away)).to(rows)
        centre = centre + (shorten[:, None] * (rows - centre)).mean(0)
    return centre


def clipped_mean(rows: Tensor, hostile: int) -> Tensor:
    """The mean, of rows no longer than the median of their lengths."""
    lengths = distances(rows, torch.zeros_like(rows[0]))
    middle = lengths.sort().values[(len(rows) - 1) // 2]
    return (torch.where(lengths > middle, middle / lengths, torch.ones_like(lengths)).to(rows)[:, None] * rows).mean(0)


def _scores(rows: Tensor, hostile: int) -> Tensor:
    """For each row the sum of squares of the distances from its n - hostile - 2 nearest rows."""
    squares = torch.stack([distances(rows, row) for row in rows]).square()
    near = max(1, len(rows) - hostile - 2)
    return squares.sort(1).values[:, 1 : 1 + near].sum(1)  # the first is the row itself


def krum(rows: Tensor, hostile: int) -> Tensor:
    """The row that is nearest to its neighbours."""
    return rows[int(_scores(rows, hostile).argmin())]


def multi_krum(rows: Tensor, hostile: int) -> Tensor:
    """The mean of the n - hostile rows that are nearest to their neighbours."""
    return rows[_scores(rows, hostile).argsort()[: len(rows) - hostile]].mean(0)


@dataclass(frozen=True)
class Rule:
    """A rule, and how many rows it needs."""

    combine: Callable[[Tensor, int], Tensor]
    beyond: int  # twice `hostile` plus this many rows

    def needed(self, hostile: int) -> int:
        """The fewest rows among which so many may be hostile."""
        return 2 * hostile + self.beyond

    def most(self, rows: int) -> int:
        """How many of the rows may be hostile."""
        return max(0, (rows - self.beyond) // 2)


RULES: Mapping[str, Rule] = {
    "median": Rule(median, 1),
    "trimmed-mean": Rule(trimmed_mean, 1),
    "geometric-median": Rule(geometric_median, 1),
    "centred-clipping": Rule(centred_clipping, 1),
    "clipped-mean": Rule(clipped_mean, 1),
    "krum": Rule(krum, 3),
    "multi-krum": Rule(multi_krum, 3),
}
