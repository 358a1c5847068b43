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
LABELS_FIX = "use class indices such as 0-4 or 1,3,5, or first-half, or second-half"
METHODS = ("iid", "dirichlet", "column")
MAX_DRAWS = 100  # maximum number of Dirichlet draws until each client has records
SEED = 20220  # seed for divisions that are part of a data set's definition


def split(
    data: Data, clients: int, *, how: str = "iid", seed: int = 0, alpha: float = 0.5, column: str | None = None
) -> list[Tensor]:
    """Divide the training records of a data set among clients.

    Args:
        data: the data set.
        clients: number of clients.
        how: "iid" (equal parts, chosen at random), "dirichlet" (each class is divided in proportions drawn from a
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
        >>> [len(rows) for rows in split(load("digits"), 4)]
        [360, 360, 359, 359]
    """
    check_choice("split", "split", how, METHODS)
    records = len(data.train.targets)
    check_count("split", "seed", seed, 0)
    if check_count("split", "clients", clients, 1) > records:
        message = f"{clients} clients cannot share {records} records"
        raise BadArgument("split", message, f"use at most {records} clients")
    if column is not None and how != "column":
        raise BadArgument("split", f'column={column!r} does not apply to how="{how}"', 'use how="column"')
    rng = np.random.default_rng(seed)
    if how == "iid":
        parts = np.array_split(rng.permutation(records), clients)
    elif how == "dirichlet":
        parts = _split_classes(data, clients, alpha, rng)
    else:
        parts = _split_values(data, clients, column)
    # shuffle each part, so that its batches are mixed
    return [torch.from_numpy(rng.permutation(part).astype(np.int64)) for part in parts]


def _split_classes(data: Data, clients: int, alpha: float, rng: Generator) -> list[Indices]:
    """Give clients different class frequencies; smaller values of alpha make them differ more."""
    if not data.classes or data.train.targets.dim() > 1:
        description = "has one at each position" if data.classes else "is for regression"
        message = f"a Dirichlet split needs one class per record, but {data.name!r} {description}"
        raise BadArgument("split", message, 'use how="iid" or how="column"')
    check_positive("split", "alpha", alpha, "use 0.5, a common choice; 100 is nearly iid")
    targets = data.train.targets.numpy()
    groups = [np.flatnonzero(targets == label) for label in range(len(data.classes))]
    for _ in range(MAX_DRAWS):
        parts = _draw_dirichlet(groups, clients, alpha, rng)
        if parts and all(len(part) for part in parts):
            return parts
    message = f"in each of {MAX_DRAWS} draws with alpha={alpha}, some of the {clients} clients got no records"
    raise BadArgument("split", message, "use a larger alpha or fewer clients")


def _draw_dirichlet(groups: list[Indices], clients: int, alpha: float, rng: Generator) -> list[Indices]:
    """Divide each class in random proportions; return [] if alpha is too extreme for NumPy."""
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for records in groups:
        proportions = rng.dirichlet(np.full(clients, alpha))
        if not math.isclose(proportions.sum(), 1.0, rel_tol=1e-6):
            return []
        split_points = np.rint(np.cumsum(proportions)[:-1] * len(records)).astype(np.int64)
        for part, rows in zip(parts, np.split(rng.permutation(records), split_points), strict=True):
            part.append(rows)
    return [np.concatenate(part) for part in parts]


def _split_values(data: Data, clients: int, column: str | None) -> list[Indices]:
    """Assign each group of records with the same value, largest first, to the client with the fewest records."""
    if column is None:
        names = ", ".join(repr(name) for name in sorted(data.columns))
        fix = f"set column= to one of {names}" if names else f"use 'iid' or 'dirichlet': {data.name!r} has no columns"
        raise BadArgument("split", 'how="column" needs a column', fix)
    check_choice(f"split of {data.name!r}", "column", column, data.columns)
    values, group_indices = np.unique(np.asarray(data.columns[column]), return_inverse=True)
    if clients > len(values):
        message = f"{clients} clients are too many: column {column!r} has only {len(values)} values"
        raise BadArgument("split", message, f"use --clients {len(values)} (in Python clients={len(values)}), or fewer")
    groups = sorted((np.flatnonzero(group_indices == g) for g in range(len(values))), key=len, reverse=True)
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for records in groups:
        min(parts, key=lambda part: sum(map(len, part))).append(records)
    return [np.concatenate(part) for part in parts]


def divide(records: int, fractions: tuple[float, ...], seed: int = SEED) -> list[Indices]:
    """Return record indices in random order, divided according to `fractions`, which must add up to 1."""
    order = np.random.default_rng(seed).permutation(records)
    split_points = np.rint(np.cumsum(fractions)[:-1] * records).astype(np.int64)
    return list(np.split(order, split_points))


def divide_classes(targets: Indices, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Divide each class into 1 - `fraction` and `fraction`; a class of two or more records is in both parts."""
    rng = np.random.default_rng(seed)
    train, test = [], []
    for label in np.unique(targets):
        records = rng.permutation(np.flatnonzero(targets == label))
        size = min(max(1, round(fraction * len(records))), len(records) - 1)
        test.append(records[:size])
        train.append(records[size:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def hold_out(data: Data, fraction: float) -> Data:
    """Move a fraction of the training records of a data set to its validation part, with a fixed seed.

    Class proportions are preserved. Statistics that the loader computed from the training records still include both
    parts.
    """
    if data.validation is not None:
        raise BadArgument("validation", f"{data.name!r} already has validation records", "use --validation own")
    targets = data.train.targets
    train, held_out = (
        divide_classes(targets.numpy(), fraction, SEED)
        if data.classes and targets.dim() == 1
        else divide(len(targets), (1 - fraction, fraction))
    )
    if not (len(train) and len(held_out)):
        raise BadArgument("validation", f"{len(targets)} records are too few to divide", "use another fraction")
    columns = {name: values[train] for name, values in data.columns.items()}
    return dataclasses.replace(
        data, train=data.train.take(train), validation=data.train.take(held_out), columns=columns
    )


def divide_groups(groups: Indices, fraction: float, seed: int = SEED) -> tuple[Indices, Indices]:
    """Divide records into parts of about `fraction` and 1 - `fraction`, in random order; no group is in both."""
    rng = np.random.default_rng(seed)
    group_ids, sizes = np.unique(groups, return_counts=True)
    order = rng.permutation(len(group_ids))
    first_groups = group_ids[order][np.cumsum(sizes[order]) <= fraction * len(groups)]
    records = rng.permutation(len(groups))
    is_first = np.isin(groups[records], first_groups)
    return records[is_first], records[~is_first]


def choose_subset(where: str, option: str, targets: Indices, size: int | None) -> Indices:
    """Choose a stratified subset with a fixed seed, in random order; all records if `size` is None.

    Each larger subset contains every smaller one, except for at most one record per class.
    """
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(targets))
    if size is None:
        return order
    if size > len(targets):
        message = f"{option} is {size}, but there are only {len(targets)} records"
        raise BadArgument(where, message, f"use at most {len(targets)}")
    counts = np.bincount(targets)
    exact_counts = counts * (size / len(targets))
    class_counts = np.floor(exact_counts).astype(np.int64)
    largest_remainders = np.argsort(class_counts - exact_counts, kind="stable")[: size - int(class_counts.sum())]
    class_counts[largest_remainders] += 1
    rows_by_class = [order[targets[order] == label][:count] for label, count in enumerate(class_counts)]
    return rng.permutation(np.concatenate(rows_by_class))


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
            raise BadArgument("labels", f"{part.strip()!r} in {text!r} is not a class index or a range", LABELS_FIX)
        low, high = int(first), int(last or first)
        if not low <= high < classes:
            message = f"{part.strip()!r} is not a class or a range of classes: classes range from 0 to {classes - 1}"
            raise BadArgument("labels", message, LABELS_FIX)
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
        raise BadArgument(
            "labels", f"{data.name!r} is a regression data set without classes", "use a data set with classes"
        )
    if data.train.targets.dim() > 1:
        message = f"records of {data.name!r} have a class at each position"
        raise BadArgument("labels", message, "use data with one class per record")
    mask = np.isin(data.train.targets.numpy(), labels)
    return dataclasses.replace(
        data,
        train=_with_labels(data, data.train, labels),
        test=_with_labels(data, data.test, labels),
        validation=None if data.validation is None else _with_labels(data, data.validation, labels),
        classes=tuple(data.classes[label] for label in labels),
        columns={name: values[mask] for name, values in data.columns.items()},
    )


def _with_labels(data: Data, part: DataPart, labels: Sequence[int]) -> DataPart:
    new_labels = part.targets.new_full((len(data.classes),), -1)
    new_labels[list(labels)] = torch.arange(len(labels))
    targets = new_labels[part.targets]
    if not (targets >= 0).any():
        names = ", ".join(data.classes[label] for label in labels)
        message = f"a part of {data.name!r} has no records of {names}"
        raise BadArgument("labels", message, "choose other classes, or use more records")
    return DataPart(part.inputs, targets).take(targets >= 0)
