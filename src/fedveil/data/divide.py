"""Seeded divisions of records into parts, and subsets that keep the shares of the classes."""

import numpy as np
from numpy.typing import NDArray

from fedveil.data.choices import whole
from fedveil.errors import BadArgument

Indices = NDArray[np.int64]
SEED = 20220
"""The fixed seed of every division that a data set comes with."""


def parts(records: int, shares: tuple[float, ...], seed: int = SEED) -> list[Indices]:
    """Record indices in random order, cut in shares that add up to 1."""
    order = np.random.default_rng(seed).permutation(records)
    cuts = np.rint(np.cumsum(shares)[:-1] * records).astype(np.int64)
    return list(np.split(order, cuts))


def group_parts(groups: NDArray[np.int64], share: float, seed: int = SEED) -> tuple[Indices, Indices]:
    """Two parts of about `share` and 1 - `share` of all records, no group in both; in random order."""
    rng = np.random.default_rng(seed)
    names, sizes = np.unique(groups, return_counts=True)
    order = rng.permutation(len(names))
    first = names[order][np.cumsum(sizes[order]) <= share * len(groups)]
    records = rng.permutation(len(groups))
    inside = np.isin(groups[records], first)
    return records[inside], records[~inside]


def stratified(where: str, option: str, targets: NDArray[np.int64], size: int | None) -> Indices:
    """A seeded subset in which each class keeps its share, in random order; all records if `size` is None.

    Larger subsets hold the smaller ones, up to one record a class.
    """
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(targets))
    if size is None:
        return order
    if whole(where, option, size, 1) > len(targets):
        raise BadArgument(where, f"{option} is {size}, there are {len(targets)} records", f"at most {len(targets)}")
    counts = np.bincount(targets)
    exact = counts * (size / len(targets))
    quota = np.floor(exact).astype(np.int64)
    largest = np.argsort(quota - exact, kind="stable")[: size - int(quota.sum())]
    quota[largest] += 1
    chosen = [order[targets[order] == label][:count] for label, count in enumerate(quota)]
    return rng.permutation(np.concatenate(chosen))
