"""Seeded divisions of records: among clients, into training and test, and subsets with all classes in proportion."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from fedveil.checks import number, one_of, positive, whole
from fedveil.data.dataset import Data
from fedveil.errors import BadArgument

Indices = NDArray[np.int64]
DRAWS = 100  # of a Dirichlet division before a client without records is an error
SEED = 20220  # of every division that belongs to a data set


class _Request(NamedTuple):
    data: Data
    clients: int
    alpha: float
    column: str | None


def _iid(request: _Request, rng: Generator) -> list[Indices]:
    """Divide records at random into shares that differ by one record at most."""
    return list(np.array_split(rng.permutation(len(request.data.train.targets)), request.clients))


def _draw_dirichlet(groups: list[Indices], request: _Request, rng: Generator) -> list[Indices]:
    """Cut each class in proportions drawn for it; return [] if numpy cannot draw for so extreme an alpha."""
    shares: list[list[Indices]] = [[] for _ in range(request.clients)]
    for records in groups:
        proportions = rng.dirichlet(np.full(request.clients, request.alpha))
        if not math.isclose(proportions.sum(), 1.0, rel_tol=1e-6):
            return []
        cuts = np.rint(np.cumsum(proportions)[:-1] * len(records)).astype(np.int64)
        for share, piece in zip(shares, np.split(rng.permutation(records), cuts), strict=True):
            share.append(piece)
    return [np.concatenate(share) for share in shares]


def _dirichlet(request: _Request, rng: Generator) -> list[Indices]:
    """Give clients different frequencies of classes: the smaller alpha, the more different."""
    data, alpha, clients = request.data, request.alpha, request.clients
    if not data.classes or data.train.targets.dim() > 1:
        has = "has one at each position" if data.classes else "is a regression"
        what = f"a Dirichlet split needs one class per record, and {data.name!r} {has}"
        raise BadArgument("split", what, 'use how="iid" or how="column"')
    positive("split", "alpha", alpha, "use 0.5, which is usual; 100 is nearly iid")
    targets = data.train.targets.numpy()
    groups = [np.flatnonzero(targets == label) for label in range(len(data.classes))]
    for _ in range(DRAWS):
        shares = _draw_dirichlet(groups, request, rng)
        if shares and all(len(share) for share in shares):
            return shares
    what = f"in {DRAWS} draws with alpha={alpha} some of {clients} clients always got no record"
    raise BadArgument("split", what, "use a larger alpha or fewer clients")


def _column(request: _Request, rng: Generator) -> list[Indices]:
    """Keep records with one value at one client; the largest group goes to the smallest client so far."""
    data, clients = request.data, request.clients
    if request.column is None:
        named = ", ".join(repr(name) for name in sorted(data.columns))
        fix = f"set column= to one of {named}" if named else f"use 'iid' or 'dirichlet': {data.name!r} has no columns"
        raise BadArgument("split", 'how="column" needs a column', fix)
    column = one_of(f"split of {data.name!r}", "column", request.column, data.columns)
    values, group_of = np.unique(np.asarray(data.columns[column]), return_inverse=True)
    if clients > len(values):
        what = f"{clients} clients, but column {column!r} has {len(values)} values and none is divided"
        raise BadArgument("split", what, f"use --clients {len(values)} (in Python clients={len(values)}), or fewer")
    groups = sorted((np.flatnonzero(group_of == g) for g in range(len(values))), key=len, reverse=True)
    shares: list[list[Indices]] = [[] for _ in range(clients)]
    for records in groups:
        min(shares, key=lambda share: sum(map(len, share))).append(records)
    return [np.concatenate(share) for share in shares]


_WAYS: dict[str, Callable[[_Request, Generator], list[Indices]]]
_WAYS = {"iid": _iid, "dirichlet": _dirichlet, "column": _column}


def split(
    data: Data, clients: int, *, how: str = "iid", seed: int = 0, alpha: float = 0.5, column: str | None = None
) -> list[Tensor]:
    """Divide the training records of a data set among clients.

    Args:
        data: the data set.
        clients: number of clients.
        how: "iid" (equal shares at random), "dirichlet" (each class is cut in proportions drawn from a symmetric
            Dirichlet distribution) or "column" (records with the same value stay together).
        seed: the same seed gives the same division.
        alpha: of the Dirichlet distribution; the smaller, the less alike the clients.
        column: one of `data.columns`, for how="column".

    Returns:
        For each client an int64 tensor of indices into `data.train`, in random order.

    Raises:
        BadArgument: the division asked for does not exist.

    Guarantees: every record belongs to one client, and no client is empty
      (test_every_record_belongs_to_one_client_and_no_client_is_empty).

    Example:
        >>> from fedveil.data import load
        >>> [len(share) for share in split(load("digits"), 4)]
        [360, 360, 359, 359]
    """
    way = _WAYS[one_of("split", "way to split, how =", how, _WAYS)]
    records = len(data.train.targets)
    whole("split", "seed", seed, 0)
    if whole("split", "clients", clients, 1) > records:
        raise BadArgument("split", f"{clients} clients for {records} records", f"use at most {records} clients")
    if column is not None and how != "column":
        raise BadArgument("split", f'column={column!r} means nothing to how="{how}"', 'use how="column"')
    rng = np.random.default_rng(seed)
    shares = way(_Request(data, clients, alpha, column), rng)
    # in random order, so that batches cut from a share are mixed
    return [torch.from_numpy(rng.permutation(share).astype(np.int64)) for share in shares]


def check_test_share(where: str, share: object) -> None:
    """Refuse a share of test records that is not between 0 and 1."""
    if not number(share) or not 0 < share < 1:
        raise BadArgument(where, f"test_share is {share}", "use a number between 0 and 1")


def divide(records: int, shares: tuple[float, ...], seed: int = SEED) -> list[Indices]:
    """Return record indices in random order, cut in shares that add up to 1."""
    order = np.random.default_rng(seed).permutation(records)
    cuts = np.rint(np.cumsum(shares)[:-1] * records).astype(np.int64)
    return list(np.split(order, cuts))


def divide_classes(targets: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
    """Return two parts of about 1 - `share` and `share` of each class; a class with two records or more is in both."""
    rng = np.random.default_rng(seed)
    train, test = [], []
    for label in np.unique(targets):
        records = rng.permutation(np.flatnonzero(targets == label))
        size = min(max(1, round(share * len(records))), len(records) - 1)
        test.append(records[:size])
        train.append(records[size:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def divide_groups(groups: Indices, share: float, seed: int = SEED) -> tuple[Indices, Indices]:
    """Return two parts of about `share` and 1 - `share` of all records, no group in both; in random order."""
    rng = np.random.default_rng(seed)
    names, sizes = np.unique(groups, return_counts=True)
    order = rng.permutation(len(names))
    first = names[order][np.cumsum(sizes[order]) <= share * len(groups)]
    records = rng.permutation(len(groups))
    inside = np.isin(groups[records], first)
    return records[inside], records[~inside]


def choose_subset(where: str, option: str, targets: Indices, size: int | None) -> Indices:
    """Choose a seeded subset in which each class keeps its share, in random order; all records if `size` is None.

    Larger subsets contain the smaller ones, up to one record per class.
    """
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(targets))
    if size is None:
        return order
    if whole(where, option, size, 1) > len(targets):
        raise BadArgument(where, f"{option} is {size}, there are {len(targets)} records", f"use at most {len(targets)}")
    counts = np.bincount(targets)
    exact = counts * (size / len(targets))
    quota = np.floor(exact).astype(np.int64)
    quota[np.argsort(quota - exact, kind="stable")[: size - int(quota.sum())]] += 1  # the largest remainders
    chosen = [order[targets[order] == label][:count] for label, count in enumerate(quota)]
    return rng.permutation(np.concatenate(chosen))
