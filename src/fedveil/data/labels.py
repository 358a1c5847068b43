"""Subsets of a data set by class, for example where some labels are private and the others public."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from fedveil.data.dataset import Data, Part
from fedveil.errors import BadArgument

HALVES = ("first-half", "second-half")
FORM = "use class indices such as 0-4 or 1,3,5, or first-half, or second-half"


def parse_labels(text: str, classes: int) -> tuple[int, ...]:
    """Return the class indices that a text names, in increasing order.

    Of an odd number of classes the first half is the smaller one.

    >>> parse_labels("0-2,7", 10), parse_labels("first-half", 7)
    ((0, 1, 2, 7), (0, 1, 2))
    """
    middle = classes // 2
    if text in HALVES:
        return tuple(range(middle) if text == HALVES[0] else range(middle, classes))
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise BadArgument("labels", f"{part.strip()!r} of {text!r} names no classes", FORM)
        low, high = int(first), int(last or first)
        if not low <= high < classes:
            what = f"{part.strip()!r} is not a class or a range of classes: there are {classes}, from 0"
            raise BadArgument("labels", what, FORM)
        found |= set(range(low, high + 1))
    return tuple(sorted(found))


def other_labels(labels: Sequence[int], classes: int) -> tuple[int, ...]:
    """Return the classes that are not among `labels`."""
    return tuple(label for label in range(classes) if label not in labels)


def keep_labels(data: Data, labels: Sequence[int]) -> Data:
    """Return the records of some classes, in their order; the class `labels[k]` becomes class k.

    Guarantees: a record keeps its input, the name of its class and its columns
      (test_kept_records_keep_their_input_their_name_and_their_columns).

    Raises:
        BadArgument: the data set has no classes, or a part has no record of these.
    """
    if not data.classes:
        raise BadArgument("labels", f"{data.name!r} is a regression and has no classes", "use a data set with classes")
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


def _with_labels(data: Data, part: Part, labels: Sequence[int]) -> Part:
    numbers = part.targets.new_full((len(data.classes),), -1)
    numbers[list(labels)] = torch.arange(len(labels))
    renumbered = numbers[part.targets]
    if not (renumbered >= 0).any():
        names = ", ".join(data.classes[label] for label in labels)
        what = f"a part of {data.name!r} has no record of {names}"
        raise BadArgument("labels", what, "choose other classes, or use more records")
    return Part(part.inputs, renumbered).take(renumbered >= 0)
