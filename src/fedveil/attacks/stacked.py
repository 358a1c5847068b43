"""Rebuild one record from several filtered updates: incomplete, truncated, delayed or with independent noise.

The gradient of the first Linear layer for one record is a rank-one matrix, delta (x, 1)^T, and the record is the same
in all rounds. A filter reveals an interval for every element of that matrix: a value, a bound on what was truncated, or
a bound on what was left out. The attacker fits a rank-one matrix to the intervals of all rounds, with its own records
as a prior for x.
"""

import math

import torch
from torch import Tensor

from fedveil.attacks.first_layer import SMOOTH, TINY, first_linear, fit_rank_one, layer_rows
from fedveil.attacks.leaked_gradients import from_masked_difference
from fedveil.attacks.observation import DoesNotApply, Observation

STEPS, STILL = 1000, 1e-9  # maximum number of steps of the fit, and the relative change at which it ends
NEAR = 0.01  # elements within this fraction of the largest magnitude may be truncated


def stack_rows(observed: Observation) -> tuple[Tensor, Tensor]:
    """Return the gradients of the first layer in all rounds, and masks of the elements that were sent.

    Both have the shape (rounds, units, inputs + 1).
    """
    if len(observed.rounds) < 2:
        raise DoesNotApply("dense record", "the attack needs at least two broadcasts")
    path = first_linear(observed.architecture)
    leaks = [from_masked_difference(observed, at) for at in range(len(observed.rounds) - 1)]
    rows, sent = ([layer_rows(getattr(leak, kind), path) for leak in leaks] for kind in ("gradients", "mask"))
    return torch.stack(rows), torch.stack(sent) > 0


def find_cutoffs(rows: Tensor, sent: Tensor) -> Tensor:
    """Return the smallest magnitude that was sent in each round, with the shape (rounds, 1, 1)."""
    magnitudes = torch.where(sent, rows.abs(), math.inf).flatten(1).amin(1)
    return torch.where(magnitudes.isfinite(), magnitudes, 0.0)[:, None, None]


def rebuild_filtered_record(observed: Observation) -> Tensor:
    """Rebuild a record from updates whose smallest elements are missing, whose largest are truncated, or with noise."""
    rows, sent = stack_rows(observed)
    cutoff, limit = find_cutoffs(rows, sent), (1 - NEAR) * rows.abs().max()
    low = torch.where(sent, torch.where(rows <= -limit, -math.inf, rows), -cutoff)
    high = torch.where(sent, torch.where(rows >= limit, math.inf, rows), cutoff)
    return fit_record(low.flatten(0, 1), high.flatten(0, 1), observed.inputs.flatten(1).double())


def rebuild_delayed_record(observed: Observation) -> Tensor:
    """Rebuild a record from updates whose missing elements are added to the next update (top-k with memory).

    The sum over all rounds misses only what is unsent at the end, which is below the last round's smallest element.
    """
    rows, sent = stack_rows(observed)
    cutoff = torch.where(sent[-1], 0.0, find_cutoffs(rows, sent)[-1])
    total = (rows * sent).sum(0)
    low, high = ((total + side * cutoff) / len(rows) for side in (-1, 1))
    return fit_record(low, high, observed.inputs.flatten(1).double())


def fit_record(low: Tensor, high: Tensor, sample: Tensor) -> Tensor:
    """Return the most likely record x, given that rows b_i (x, 1) + noise are between `low` and `high`.

    The prior of x is the normal distribution of the attacker's records, `sample`. The search starts from the best
    matrix of rank one. In turn, it estimates the factors b_i, the variance of the noise and x, and moves each element
    to the value in its interval that is closest to b_i (x, 1). The best matrix of rank one fits noise alone with a norm
    of about sqrt(variance) (sqrt(rows) + sqrt(columns)), so the data count only as far as they exceed this.
    """
    mean, spread = sample.mean(0), torch.cov(sample.T) if len(sample) > 1 else torch.zeros_like(sample[0]).diag()
    ridge = SMOOTH * float(sample.square().mean()) + TINY
    prior = torch.linalg.inv(spread + ridge * torch.eye(len(mean)).to(spread))
    rows = torch.zeros_like(low).clamp(low, high)
    full = fit_rank_one(rows, torch.ones_like(rows))
    full = full / torch.where(full[-1].abs() > TINY, full[-1], TINY)
    free, edge = rows.numel() - sum(rows.shape), sum(math.sqrt(size) for size in rows.shape) ** 2
    for _ in range(STEPS):
        factors = (rows @ full) / full.square().sum().clamp_min(TINY)
        guess = factors[:, None] * full
        rows = guess.clamp(low, high)
        noise = (rows - guess).square().sum() / max(free, 1) + TINY
        trust = (1 - edge * noise / guess.square().sum().clamp_min(TINY)).clamp_min(0) / noise
        weight, pull = trust * factors.square().sum(), trust * (factors @ rows)[:-1]
        record = torch.linalg.solve(prior + weight * torch.eye(len(mean)).to(prior), prior @ mean + pull)
        change = (record - full[:-1]).abs().max()
        full = torch.cat([record, record.new_ones(1)])
        if change <= STILL * record.abs().max():
            break
    return full[:-1]
