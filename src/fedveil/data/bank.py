"""UCI Bank Marketing (Moro, Cortez, Rita 2014): will a client of a Portuguese bank subscribe to a term deposit?"""

from pathlib import Path

import numpy as np

from fedveil.data.catalogue import NAMES, Task
from fedveil.data.dataset import Data, part_from_arrays
from fedveil.data.splits import divide
from fedveil.data.tables import read_table

NUMBERS = tuple(NAMES["bank"]["numbers"])
CATEGORIES = NAMES["bank_categories"]
ANSWERS = ("no", "yes")


def bank(*, path: Path, task: Task = "regression", duration: bool = True) -> Data:
    """Load Bank Marketing: 41,188 calls, 20 inputs (63 values), divided 8:1:1 for training, validation and test.

    Differs from the paper, which states 17 inputs, as in the older file bank-full.csv. The number of records in the
    paper, 41,188, is that of bank-additional-full.csv, which has 20 inputs.

    Args:
        path: path of bank-additional-full.csv.
        task: "regression" (one target, 0 or 1, for the squared error) or "classification" (classes "no" and "yes").
        duration: whether the duration of the call is an input. It is known only after the call, and nearly reveals
            the answer.
    """
    table = read_table(path, ";")
    table.require_columns([*NUMBERS, *CATEGORIES, "y"])
    train, validation, test = divide(len(table), (0.8, 0.1, 0.1))
    numbers, _, _ = table.standardise([name for name in NUMBERS if duration or name != "duration"], train)
    hot = [table.one_hot(column, known) for column, known in CATEGORIES.items()]
    answers = table.codes("y", ANSWERS)
    targets = answers if task == "classification" else answers[:, None].astype(np.float32)
    records = part_from_arrays(np.concatenate([numbers, *hot], 1), targets)
    parts = records.take(train), records.take(test), records.take(validation)
    columns = {column: table.columns[column][train] for column in CATEGORIES}
    return Data("bank", *parts, ANSWERS if task == "classification" else (), columns)
