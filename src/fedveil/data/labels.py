"""Some classes of a data set as a data set of its own, as where one part of the labels is private and one public."""

from collections.abc import Sequence

import numpy as np

from fedveil.data.records import Data, Part
from fedveil.errors import BadArgument

HALVES = ("first-half", "second-half")
FORM = "class indices such as 0-4 or 1,3,5, or first-half, or second-half"


def parse_labels(text: str, classes: int) -> tuple[int, ...]:
    """The class indices that a text names, in rising order.

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
            what = f"{part.strip()!r} is no class or range of classes: there are {classes}, from 0"
            raise BadArgument("labels", what, FORM)
        found |= set(range(low, high + 1))
    return tuple(sorted(found))


def other_labels(labels: Sequence[int], classes: int) -> tuple[int, ...]:
    """The classes that are not among `labels`."""
    return tuple(label for label in range(classes) if label not in labels)


def keep_labels(data: Data, labels: Sequence[int]) -> Data:
    """The records of some classes, in their order; the class `labels[k]` becomes class k.

    Guarantees: a record keeps its input, its name of the class and its columns
      (test_kept_records_keep_their_input_their_name_and_their_columns).

    Raises:
        BadArgument: the data set has no classes, or a part has no record of these.
    """
    if not data.classes:
        raise BadArgument("labels", f"{data.name!r} is a regression and has no classes", "a data set with classes")
    if data.train.targets.dim() > 1:
        raise BadArgument("labels", f"records of {data.name!r} have a class at each position", "a class per record")
    kept = np.isin(data.train.targets.numpy(), labels)
    return Data(
        data.name,
        _kept(data, data.train, labels),
        _kept(data, data.test, labels),
        None if data.validation is None else _kept(data, data.validation, labels),
        tuple(data.classes[label] for label in labels),
        {name: values[kept] for name, values in data.columns.items()},
        data.scale,
    )


def _kept(data: Data, part: Part, labels: Sequence[int]) -> Part:
    """The records of one part, renumbered."""
    targets = part.targets.numpy()
    place = np.full(len(data.classes), -1, dtype=np.int64)
    place[list(labels)] = np.arange(len(labels))
    rows = np.flatnonzero(place[targets] >= 0)
    if not len(rows):
        names = ", ".join(data.classes[label] for label in labels)
        raise BadArgument("labels", f"a part of {data.name!r} has no record of {names}", "other classes, more records")
    new = part.targets.new_tensor(place[targets[rows]])
    return Part(part.take(rows).inputs, new)
