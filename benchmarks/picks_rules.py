"""What clients see of a broadcast, and rules by which they may pick the true offset from among the decoys.

A rule gives every candidate a value; the smallest, or the largest, is picked. `benchmarks/picks.py` measures them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedveil.scheme.broadcast import Broadcast, PublicHead
from fedveil.scheme.noise import column_weights

GAMMA = (0.5, 2.0)  # between which the size of the public offset is drawn, by default
FINER = 8.0  # how much smaller than V the base must be to have finer digits

Reals = NDArray[np.float64]
Places = NDArray[np.int64]
Values = dict[str, Reals]  # by name of a heuristic, a number for every secret and candidate


# What clients see


@dataclass(frozen=True, eq=False)
class Seen:
    """The public part of many broadcasts, the first axis of each array counting them.

    Attributes:
        base: the head without its public offset, the bias as its last column.
        noisy: 1 for columns that carry the noise, 0 for a bias that does not.
        rows: r_a in the places of each group, else 0.
        candidates: q of m numbers.
        offset: gamma minus the true candidate.
        scale: for each column about the size of the hidden unit's factor: the norm of what comes in.
    """

    base: Reals
    noisy: Reals
    rows: Reals
    candidates: Reals
    offset: Reals
    scale: Reals

    @cached_property
    def implied(self) -> Reals:
        """The head that each candidate implies: secrets x candidates x outputs x columns."""
        noise = self.candidates @ self.rows
        found: Reals = self.base[:, None] - noise[..., None] * self.noisy[:, None, None]
        return found

    @cached_property
    def canonical(self) -> Reals:
        """The same with the factors taken out as far as a client can."""
        found: Reals = self.implied * self.scale[:, None, None]
        return found


def canonical_scale(parameters: Mapping[str, Tensor], head: PublicHead) -> Reals:
    """The norms of what comes into each hidden unit, itself in canonical scale; for the bias their geometric mean."""
    scale = torch.ones((), dtype=torch.float64)
    for name, weight in parameters.items():
        if name.endswith("weight") and name != head.weight:
            bias = parameters[name.replace("weight", "bias")]
            scale = torch.cat([weight * scale, bias[:, None]], 1).norm(dim=1)
    return torch.cat([scale, scale.log().mean().exp()[None]]).numpy()


def look(broadcast: Broadcast) -> tuple[Reals, ...]:
    """One broadcast's part of `Seen`."""
    head = broadcast.head
    assert head is not None
    assert head.bias is not None
    base = torch.cat([broadcast.parameters[head.weight], broadcast.parameters[head.bias][:, None]], 1)
    noisy = np.append(np.ones(base.shape[1] - 1), float(head.noisy_bias))
    rows = F.one_hot(head.partition, head.groups).double().T * head.direction.double()
    scale = canonical_scale(broadcast.parameters, head)
    return base.double().numpy(), noisy, rows.numpy(), head.candidates.numpy(), head.offset.numpy(), scale


def pick(values: Reals, random: np.random.Generator) -> Places:
    """Which candidate has the smallest value, for each secret; one of them at random if several do."""
    smallest = values == values.min(1, keepdims=True)
    places: Places = (smallest * (1 + random.random(values.shape))).argmax(1)
    return places


# Heuristics: a value for each candidate, of which the smallest or the largest is picked


def distances(seen: Seen) -> Values:
    """From estimates of the offset: weighted means of the columns' votes, in their standard errors."""
    energy = (seen.rows**2).sum(2)
    votes = seen.rows @ seen.base / energy[..., None]
    misfit = seen.base - seen.rows.transpose(0, 2, 1) @ votes
    squares = (energy[..., None] * votes**2).sum(1) + (misfit**2).sum(1)
    robust = column_weights(np.where(seen.noisy > 0, squares, np.inf))[0]
    inputs = np.ones_like(robust)
    inputs[:, -1] = 0
    slope = inputs * (seen.scale - seen.scale[:, :-1].mean(1, keepdims=True))
    weights = {
        "robust mean": robust,
        "least squares": seen.scale**2,
        "scaled mean": seen.scale,
        "mean": np.ones_like(robust),
        "slope": slope * seen.scale,
    }
    found: Values = {}
    for name, weight in weights.items():
        share = weight * seen.noisy
        share = (share / share.sum(1, keepdims=True))[:, None]
        centre = (share * votes).sum(2, keepdims=True)
        error = np.sqrt((share**2 * (votes - centre) ** 2).sum(2))[:, None]
        found["distance from " + name] = (((seen.candidates - centre[:, None, :, 0]) / error) ** 2).sum(2)
        if name == "robust mean":
            found["distance from zero"] = ((seen.candidates / error) ** 2).sum(2)
    middle = np.median(votes[..., :-1], axis=2)
    found["distance from median"] = (energy[:, None] * (seen.candidates - middle[:, None]) ** 2).sum(2)
    others = seen.candidates - seen.candidates.mean(1, keepdims=True)
    found["distance from the others"] = (energy[:, None] * others**2).sum(2)
    found["size"] = (energy[:, None] * seen.candidates**2).sum(2)
    return found


def gammas(seen: Seen) -> Values:
    """Of the secret numbers that a candidate and the public offset imply."""
    implied = np.abs(seen.offset[:, None] + seen.candidates)
    outside = np.maximum(GAMMA[0] - implied, 0) + np.maximum(implied - GAMMA[1], 0)
    return {"gamma": np.log(implied).sum(2), "gamma out of range": outside.sum(2)}


def moments(heads: Reals) -> Values:
    """Of the sums, sizes and shapes of the implied heads in one scale."""
    weights, bias = heads[..., :-1], heads[..., -1]
    squares = heads**2
    power = squares.mean((2, 3))
    by_column, by_row = squares[..., :-1].sum(2), squares.sum(3)
    return {
        "norm": power,
        "absolute sum": np.abs(heads).sum((2, 3)),
        "column sums": (weights.sum(2) ** 2).sum(2),
        "row means": (weights.sum(3) ** 2).sum(2),
        "total": weights.sum((2, 3)),
        "size of total": np.abs(weights.sum((2, 3))),
        "median": np.median(weights, axis=(2, 3)),
        "size of median": np.abs(np.median(weights, axis=(2, 3))),
        "bias": (bias**2).sum(2),
        "bias sum": bias.sum(2),
        "largest entry": np.abs(weights).max((2, 3)),
        "largest entry by norm": np.abs(heads).max((2, 3)) / np.sqrt(power),
        "smallest entry": np.abs(weights).min((2, 3)),
        "kurtosis": (squares**2).mean((2, 3)) / power**2,
        "skewness": (squares * heads).mean((2, 3)) / power**1.5,
        "spread of columns": np.log(by_column).std(2),
        "spread of rows": np.log(by_row).std(2),
        "smallest column": by_column.min(2),
        "largest row": by_row.max(2),
    }


def spectra(seen: Seen) -> Values:
    """Of the singular values, and of how columns grow with their scale."""
    sizes = np.linalg.svd(seen.canonical[..., :-1], compute_uv=False)
    logs = np.log((seen.canonical[..., :-1] ** 2).sum(2))
    scale = np.log(seen.scale[:, None, :-1])
    scale = scale - scale.mean(2, keepdims=True)
    lean = (logs * scale).sum(2)
    return {
        "largest singular value": sizes[..., 0],
        "smallest singular value": sizes[..., -1],
        "nuclear norm": sizes.sum(2),
        "determinant": np.log(sizes).sum(2),
        "lean to large factors": lean,
        "size of that lean": np.abs(lean),
    }


def heuristics(seen: Seen) -> Values:
    """All of them."""
    found = distances(seen) | gammas(seen) | spectra(seen)
    for scale, heads in (("sent", seen.implied), ("canonical", seen.canonical)):
        found |= {f"{name}, {scale}": values for name, values in moments(heads).items()}
    return found


def grid(seen: Seen) -> Reals:
    """How far the implied head is from float32's numbers, where the base has finer digits than these."""
    heads = np.abs(seen.implied)
    finer = (np.abs(seen.base)[:, None] < heads / FINER) & (seen.noisy[:, None, None] > 0)
    digits = heads / np.spacing(heads.astype(np.float32))
    away = np.where(finer, np.abs(digits - np.round(digits)), 0.0).sum((2, 3))
    count = finer.sum((2, 3))
    found: Reals = np.where(count > 0, away / np.maximum(count, 1), 0.25)
    return found


def trailing_zeros(seen: Seen) -> Reals:
    """Of a candidate's binary digits: small sums of large numbers end in more of them, and decoys are sums.

    Size alone tells a part of it: compare the heuristic "distance from zero".
    """
    bits = np.ascontiguousarray(seen.candidates).view(np.int64) | np.int64(1 << 52)
    found: Reals = np.log2((bits & -bits).astype(np.float64)).sum(2)
    return found


def off_the_line(seen: Seen) -> Reals:
    """The largest distance, in last digits, of the others from the best line through a candidate.

    Candidates lie on a line. The true one does exactly, the others as well as rounding lets them.
    """
    points = seen.candidates.astype(np.longdouble)
    digits = np.spacing(np.abs(seen.candidates)).astype(np.longdouble)
    found = np.zeros(points.shape[:2])
    count = points.shape[1]
    if count == 2 or points.shape[2] == 1:
        return found
    for place in range(count):
        others = [number for number in range(count) if number != place]
        away, weights = points[:, others] - points[:, [place]], digits[:, others] ** -2
        line = away[:, :1]
        for _ in range(6):  # least squares for the places along the line and for its direction, in turn
            along = (weights * away * line).sum(2, keepdims=True) / (weights * line**2).sum(2, keepdims=True)
            line = (weights * away * along).sum(1, keepdims=True) / (weights * along**2).sum(1, keepdims=True)
        found[:, place] = (np.abs(away - along * line) / digits[:, others]).max((1, 2))
    return found
