"""The attacker of PPDL: one record from what its owner selected in several rounds, noise and all.

For one record x the gradient of row i of the first Linear layer is delta_i (x, 1). Each round shows some numbers of
such a matrix of rank one, each with noise of its own; the record is the same in all of them. The attacker stacks the
rows of all rounds and fits rank one to the numbers that were sent, so that noise averages out, and a number that was
not selected in one row, or in one round, comes from another.
"""

import torch
from torch import Tensor

from fedveil.attacks.first_layer import TINY, first_linear, joined
from fedveil.attacks.leaks import ULPS, from_difference
from fedveil.attacks.observed import DoesNotApply, Observed

SWEEPS = 50  # of alternating least squares


def sent_rows(observed: Observed, at: int, path: str) -> tuple[Tensor, Tensor]:
    """The rows (gradient of weights, of bias) of one round's difference, and which numbers the victim sent.

    A number that it did not send is 0 up to rounding of the two weights, which the division by learning rate and
    share has magnified.
    """
    leak = from_difference(observed, at)
    rows = joined({name: value.detach() for name, value in leak.gradients.items()}, path)
    weights = joined({name: value.detach() for name, value in leak.model.named_parameters()}, path)
    unit = torch.finfo(leak.model.get_parameter(f"{path}.weight").dtype).eps
    rounding = ULPS * unit * weights.abs() / (observed.learning_rate * (1 - observed.share))
    return rows, (rows.abs() > rounding).to(rows)


def rank_one(rows: Tensor, sent: Tensor) -> Tensor:
    """The vector v for which rows = factors v^T fits best where `sent` is 1, by alternating least squares."""
    rows = rows * sent
    v: Tensor = torch.linalg.svd(rows, full_matrices=False)[2][0]
    for _ in range(SWEEPS):
        factors = (rows @ v) / (sent @ v.square()).clamp_min(TINY)
        v = (rows.T @ factors) / (sent.T @ factors.square()).clamp_min(TINY)
        v = v / v.norm().clamp_min(TINY)
    return v


def stacked(observed: Observed) -> Tensor:
    """The record that fits all rounds: rank one, whose last coordinate, the bias's, is 1."""
    if len(observed.rounds) < 2:
        raise DoesNotApply("ppdl", "it needs two broadcasts or more")
    path = first_linear(observed.architecture)
    found = [sent_rows(observed, at, path) for at in range(len(observed.rounds) - 1)]
    v = rank_one(torch.cat([rows for rows, _ in found]), torch.cat([sent for _, sent in found]))
    return v[:-1] / (v[-1] if v[-1].abs() > TINY else TINY)
