"""Divide records among clients, or into training and test records; choose stratified subsets and classes."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from fedveil.checks import check_choice, check_count, check_positive
from fedveil.data.dataset import Data, DataPart
from fedveil.errors import BadArgument

Indices = NDArray[np.int64]
HALVES = ("first-half", "second-half")
LABELS = "use class indices such as 0-4 or 1,3,5, or first-half, or second-half"
WAYS = ("iid", "dirichlet", "column")
DRAWS = 100  # number of Dirichlet draws, after which a client without records is an error
SEED = 20220  # seed for divisions that are part of a data set's definition


def split(
    data: Data, clients: int, *, how: str = "iid", seed: int = 0, alpha: float = 0.5, column: str | None = None
) -> list[Tensor]:
    """Divide the training records of a data set among clients.

    Args:
        data: the data set.
        clients: number of clients.
        how: "iid" (equal shares, chosen at random), "dirichlet" (each class is divided in proportions drawn from a
            symmetric Dirichlet distribution) or "column" (records with the same value stay together).
        seed: seed for the division.
        alpha: parameter of the Dirichlet distribution; smaller values make clients differ more.
        column: one of `data.columns`, for how="column".

    Returns:
        For each client, an int64 tensor of indices into `data.train`, in random order.

    Raises:
        BadArgument: the records cannot be divided in this way.

    Guarantees: every record belongs to one client, and no client is empty
      (test_every_record_belongs_to_one_client_and_no_client_is_empty).

    Example:
        >>> from fedveil.data import load
        >>> [len(share) for share in split(load("digits"), 4)]
        [360, 360, 359, 359]
    """
    check_choice("split", "split", how, WAYS)
    records = len(data.train.targets)
    check_count("split", "seed", seed, 0)
    if check_count("split", "clients", clients, 1) > records:
        what = f"{clients} clients cannot share {records} records"
        raise BadArgument("split", what, f"use at most {records} clients")
    if column is not None and how != "column":
        raise BadArgument("split", f'column={column!r} does not apply to how="{how}"', 'use how="column"')
    rng = np.random.default_rng(seed)
    if how == "iid":
        shares = np.array_split(rng.permutation(records), clients)
    elif how == "dirichlet":
        shares = _split_classes(data, clients, alpha, rng)
    else:
        shares = _split_values(data, clients, column)
    # shuffle each share, so that its batches are mixed
    return [torch.from_numpy(rng.permutation(share).astype(np.int64)) for share in shares]


def _split_classes(data: Data, clients: int, alpha: float, rng: Generator) -> list[Indices]:
    """Give clients different class frequencies; smaller values of alpha make them differ more."""
    if not data.classes or data.train.targets.dim() > 1:
        has = "has one at each position" if data.classes else "is for regression"
        what = f"a Dirichlet split needs one class per record, but {data.name!r} {has}"
        raise BadArgument("split", what, 'use how="iid" or how="column"')
    check_positive("split", "alpha", alpha, "use 0.5, a common choice; 100 is nearly iid")
    targets = data.train.targets.numpy()
    groups = [np.flatnonzero(targets == label) for label in range(len(data.classes))]
    for _ in range(DRAWS):
        shares = _draw_dirichlet(groups, clients, alpha, rng)
        if shares and all(len(share) for share in shares):
            return shares
    what = f"in each of {DRAWS} draws with alpha={alpha}, some of {clients} clients got no records"
    raise BadArgument("split", what, "use a larger alpha or fewer clients")


def _draw_dirichlet(groups: list[Indices], clients: int, alpha: float, rng: Generator) -> list[Indices]:
    """Divide each class in random proportions; return [] if alpha is too extreme for NumPy."""
    shares: list[list[Indices]] = [[] for _ in range(clients)]
    for records in groups:
        proportions = rng.dirichlet(np.full(clients, alpha))
        if not math.isclose(proportions.sum(), 1.0, rel_tol=1e-6):
            return []
        cuts = np.rint(np.cumsum(proportions)[:-1] * len(records)).astype(np.int64)
        for share, piece in zip(shares, np.split(rng.permutation(records), cuts), strict=True):
            share.append(piece)
    return [np.concatenate(share) for share in shares]


def _split_values(data: Data, clients: int, column: str | None) -> list[Indices]:
    """Assign each group of records with the same value, largest first, to the client with the fewest records."""
    if column is None:
        named = ", ".join(repr(name) for name in sorted(data.columns))
        fix = f"set column= to one of {named}" if named else f"use 'iid' or 'dirichlet': {data.name!r} has no columns"
        raise BadArgument("split", 'how="column" needs a column', fix)
    check_choice(f"split of {data.name!r}", "column", column, data.columns)
    values, group_of = np.unique(np.asarray(data.columns[column]), return_inverse=True)
    if clients > len(values):
        what = f"{clients} clients, but column {column!r} has only {len(values)} values"
        raise BadArgument("split", what, f"use --clients {len(values)} (in Python clients={len(values)}), or fewer")
    groups = sorted((np.flatnonzero(group_of == g) for g in range(len(values))), key=len, reverse=True)
    shares: list[list[Indices]] = [[] for _ in range(clients)]
    for records in groups:
        min(shares, key=lambda share: sum(map(len, share))).append(records)
    return [np.concatenate(share) for share in shares]


def divide(records: int, shares: tuple[float, ...], seed: int = SEED) -> list[Indices]:
    """Return record indices in random order, divided according to `shares`, which must add up to 1."""
    order = np.random.default_rng(seed).permutation(records)
    cuts = np.rint(np.cumsum(shares)[:-1] * records).astype(np.int64)
    return list(np.split(order, cuts))


def divide_classes(targets: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
    """Divide each class into parts of about 1 - `share` and `share`; a class with two or more records is in both."""
    rng = np.random.default_rng(seed)
    train, test = [], []
    for label in np.unique(targets):
        records = rng.permutation(np.flatnonzero(targets == label))
        size = min(max(1, round(share * len(records))), len(records) - 1)
        test.append(records[:size])
        train.append(records[size:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def hold_out(data: Data, share: float) -> Data:
    """Move a fraction of the training records of a data set to its validation part, with a fixed seed.

    The proportions of the classes stay the same. Statistics that the loader computed from the training records include
    both parts.
    """
    if data.validation is not None:
        raise BadArgument("validation", f"{data.name!r} already has validation records", "use --validation own")
    targets = data.train.targets
    train, held = (
        divide_classes(targets.numpy(), share, SEED)
        if data.classes and targets.dim() == 1
        else divide(len(targets), (1 - share, share))
    )
    if not (len(train) and len(held)):
        raise BadArgument("validation", f"{len(targets)} records are too few to divide", "use another fraction")
    columns = {name: values[train] for name, values in data.columns.items()}
    return dataclasses.replace(data, train=data.train.take(train), validation=data.train.take(held), columns=columns)


def divide_groups(groups: Indices, share: float, seed: int = SEED) -> tuple[Indices, Indices]:
    """Divide records into parts of about `share` and 1 - `share`, in random order; no group is in both."""
    rng = np.random.default_rng(seed)
    names, sizes = np.unique(groups, return_counts=True)
    order = rng.permutation(len(names))
    first = names[order][np.cumsum(sizes[order]) <= share * len(groups)]
    records = rng.permutation(len(groups))
    inside = np.isin(groups[records], first)
    return records[inside], records[~inside]


def choose_subset(where: str, option: str, targets: Indices, size: int | None) -> Indices:
    """Choose a stratified subset with a fixed seed, in random order; all records if `size` is None.

    Each larger subset contains every smaller one, except for at most one record per class.
    """
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(targets))
    if size is None:
        return order
    if size > len(targets):
        what = f"{option} is {size}, but there are only {len(targets)} records"
        raise BadArgument(where, what, f"use at most {len(targets)}")
    counts = np.bincount(targets)
    exact = counts * (size / len(targets))
    quota = np.floor(exact).astype(np.int64)
    quota[np.argsort(quota - exact, kind="stable")[: size - int(quota.sum())]] += 1  # round up the largest remainders
    chosen = [order[targets[order] == label][:count] for label, count in enumerate(quota)]
    return rng.permutation(np.concatenate(chosen))


def parse_labels(text: str, classes: int) -> tuple[int, ...]:
    """Parse class indices and return them in increasing order.

    If the number of classes is odd, the first half is the smaller one.

    >>> parse_labels("0-2,7", 10), parse_labels("first-half", 7)
    ((0, 1, 2, 7), (0, 1, 2))
    """
    middle = classes // 2
    if text in HALVES:
        return tuple(range(middle) if text == HALVES[0] else range(middle, classes))
    result: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise BadArgument("labels", f"{part.strip()!r} in {text!r} is not a class index or a range", LABELS)
        low, high = int(first), int(last or first)
        if not low <= high < classes:
            what = f"{part.strip()!r} is not a class or a range of classes: classes range from 0 to {classes - 1}"
            raise BadArgument("labels", what, LABELS)
        result |= set(range(low, high + 1))
    return tuple(sorted(result))


def other_labels(labels: Sequence[int], classes: int) -> tuple[int, ...]:
    """Return the classes that are not in `labels`."""
    return tuple(label for label in range(classes) if label not in labels)


def keep_labels(data: Data, labels: Sequence[int]) -> Data:
    """Return the records of the given classes, in their original order; the class `labels[k]` becomes class k.

    Guarantees: a record keeps its input, the name of its class and its columns
      (test_kept_records_keep_their_input_their_name_and_their_columns).

    Raises:
        BadArgument: the data set has no classes, or a part has no records of these classes.
    """
    if not data.classes:
        raise BadArgument("labels", f"{data.name!r} is for regression, without classes", "use a data set with classes")
    if data.train.targets.dim() > 1:
        what = f"records of {data.name!r} have a class at each position"
        raise BadArgument("labels", what, "use data with one class per record")
    rows = np.isin(data.train.targets.numpy(), labels)
    return dataclasses.replace(
        data,
        train=_with_labels(data, data.train, labels),
        test=_with_labels(data, data.test, labels),
        validation=None if data.validation is None else _with_labels(data, data.validation, labels),
        classes=tuple(data.classes[label] for label in labels),
        columns={name: values[rows] for name, values in data.columns.items()},
    )


def _with_labels(data: Data, part: DataPart, labels: Sequence[int]) -> DataPart:
    numbers = part.targets.new_full((len(data.classes),), -1)
    numbers[list(labels)] = torch.arange(len(labels))
    renumbered = numbers[part.targets]
    if not (renumbered >= 0).any():
        names = ", ".join(data.classes[label] for label in labels)
        what = f"a part of {data.name!r} has no records of {names}"
        raise BadArgument("labels", what, "choose other classes, or use more records")
    return DataPart(part.inputs, renumbered).take(renumbered >= 0)
