"""Any CSV file as a data set."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedveil.data.choices import choose, whole
from fedveil.data.divide import parts
from fedveil.data.places import required
from fedveil.data.records import Data, tensor_part
from fedveil.data.registry import dataset
from fedveil.data.standard import standardised
from fedveil.data.tables import Table, codes, number, numbers, one_hot, read_table
from fedveil.errors import BadArgument

TASKS = ("classification", "regression")
MOST_CATEGORIES = 1000


@dataset("csv")
def csv_file(
    *,
    path: Path | None = None,
    target: str | None = None,
    task: str = "classification",
    delimiter: str = ",",
    test_share: float = 0.2,
    seed: int = 0,
    ignore: Sequence[str] = (),
    categorical: Sequence[str] = (),
) -> Data:
    """Any CSV file with a header: numeric columns standardised on the training part, others one-hot.

    Args:
        path: the file.
        target: the column to predict.
        task: "classification" (classes are the sorted values of the target) or "regression" (a numeric target,
            standardised on the training part).
        delimiter: between fields.
        test_share: of the records, between 0 and 1.
        seed: of the division into training and test records.
        ignore: columns to leave out.
        categorical: columns to take as categories although they hold numbers.
    """
    where = "load('csv')"
    choose(where, "task", task, TASKS)
    if not 0 < test_share < 1:
        raise BadArgument(where, f"test_share is {test_share}", "a number between 0 and 1")
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise BadArgument(where, f"delimiter is {delimiter!r}", 'one character, such as "," or ";"')
    table = read_table(required("csv", path, "records.csv"), delimiter)
    if target is None:
        raise BadArgument(where, "it needs the column to predict", f"target= one of {', '.join(table.columns)}")
    for column in (target, *ignore, *categorical):
        choose(table.path, "column", column, table.columns)
    train, test = parts(len(table), (1 - test_share, test_share), whole(where, "seed", seed, 0))
    if not (len(train) and len(test)):
        raise BadArgument(table.path, f"{len(table)} records leave a part empty", "more records, or another test_share")
    names = [column for column in table.columns if column != target and column not in ignore]
    if not names:
        raise BadArgument(table.path, "no column is left for the inputs", "ignore fewer columns")
    blocks = [_encoded(table, column, train, column in categorical) for column in names]
    inputs, classes = np.concatenate(blocks, 1), _classes(table, target) if task == "classification" else ()
    targets = codes(table, target, classes) if classes else standardised(numbers(table, target)[:, None], train)
    return Data(
        Path(table.path).stem,
        tensor_part(inputs[train], targets[train]),
        tensor_part(inputs[test], targets[test]),
        classes=classes,
        columns={column: np.array(table.columns[column])[train] for column in names},
    )


def _encoded(table: Table, column: str, train: NDArray[np.int64], categorical: bool) -> NDArray[np.float64]:
    """One column as numbers: standardised if it is numeric, else one-hot."""
    cells = table.columns[column]
    odd = [row for row, cell in enumerate(cells) if number(cell) is None]
    if not odd and not categorical:
        return standardised(numbers(table, column)[:, None], train)
    if not categorical and len(odd) < len(cells) / 2:
        what = f"{cells[odd[0]]!r} is not a number, and most of this column is"
        table.refuse(odd[0], column, what, f'mend the cell, or categorical=["{column}"]')
    return one_hot(table, column, _categories(table, column))


def _categories(table: Table, column: str) -> tuple[str, ...]:
    """The sorted values of a column that is not an identifier."""
    values = tuple(sorted(set(table.columns[column])))
    if len(values) > MOST_CATEGORIES:
        what = f"{len(values)} different values are too many for one-hot inputs (at most {MOST_CATEGORIES})"
        raise BadArgument(f"{table.path}, column {column!r}", what, f'ignore=["{column}"]')
    return values


def _classes(table: Table, target: str) -> tuple[str, ...]:
    """The classes of a target column, at least two."""
    classes = _categories(table, target)
    if len(classes) < 2:
        what = f"every record has the value {classes[0]!r}"
        raise BadArgument(f"{table.path}, column {target!r}", what, "a target with two classes or more")
    return classes
