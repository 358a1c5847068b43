"""Any CSV file as a data set, read with line numbers so that an error can say where."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from fedveil.checks import one_of, whole
from fedveil.data.catalogue import About, dataset, few, regular, required
from fedveil.data.records import Data, tensor_part
from fedveil.data.splits import parts
from fedveil.errors import BadArgument

TASKS = ("classification", "regression")
MOST_CATEGORIES = 1000
LARGEST = 1e150  # of a number that is scaled: squares of larger ones overflow


@dataclass(frozen=True)
class CsvTable:
    """Cells of a CSV file by column, and the line each row ends on."""

    path: str
    columns: dict[str, tuple[str, ...]]
    lines: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.lines)

    def refuse(self, row: int, column: str, what: str, fix: str) -> NoReturn:
        """Raise an error about one cell."""
        raise BadArgument(f"{self.path}, line {self.lines[row]}, column {column!r}", what, fix)

    def need(self, wanted: Sequence[str]) -> None:
        """Refuse a table that lacks a column."""
        missing = [column for column in wanted if column not in self.columns]
        if missing:
            what = f"no column {few(missing)}; found {few(self.columns, 8)}"
            raise BadArgument(f"{self.path}, line 1", what, "check the delimiter")

    def numbers(self, column: str) -> NDArray[np.float64]:
        """A numeric column; any other cell is an error."""
        values = [_number(cell) for cell in self.columns[column]]
        for row, value in enumerate(values):
            if value is None:
                self.refuse(row, column, f"{self.columns[column][row]!r} is not a number", "mend the cell")
        return np.array(values, dtype=np.float64)

    def scaled(self, columns: Sequence[str], train: NDArray[np.int64]) -> NDArray[np.float64]:
        """Numeric columns, standardised on the training rows; a cell that is too large for float32 is an error."""
        values = np.stack([self.numbers(column) for column in columns], 1)
        self._refuse_first(np.abs(values) > LARGEST, columns)
        found = standardised(values, train)
        self._refuse_first(np.abs(found) > np.finfo(np.float32).max, columns)
        return found

    def _refuse_first(self, bad: NDArray[np.bool_], columns: Sequence[str]) -> None:
        for row, place in np.argwhere(bad)[:1].tolist():
            cell = self.columns[columns[place]][row]
            self.refuse(row, columns[place], f"{cell[:40]!r} is too large to be scaled", "mend the cell")

    def codes(self, column: str, categories: Sequence[str]) -> NDArray[np.int64]:
        """Positions in `categories` of the cells of a column; any other cell is an error."""
        position = {category: index for index, category in enumerate(categories)}
        for row, cell in enumerate(self.columns[column]):
            if cell not in position:
                self.refuse(row, column, f"{cell!r} is not a known value", f"one of {few(categories, 20)}")
        return np.array([position[cell] for cell in self.columns[column]], dtype=np.int64)

    def one_hot(self, column: str, categories: Sequence[str]) -> NDArray[np.float64]:
        """A column of categories as one column of 0 and 1 for each of them."""
        return np.eye(len(categories))[self.codes(column, categories)]

    def categories(self, column: str) -> tuple[str, ...]:
        """The sorted values of a column that is not an identifier."""
        values = tuple(sorted(set(self.columns[column])))
        if len(values) > MOST_CATEGORIES:
            what = f"{len(values)} different values are too many for one-hot inputs (at most {MOST_CATEGORIES})"
            raise BadArgument(f"{self.path}, column {column!r}", what, f'ignore=["{column}"]')
        return values


def read_table(path: Path, delimiter: str = ",") -> CsvTable:
    """A CSV file with a header."""
    return parse_table(str(path), regular(path).read_bytes(), delimiter)


def parse_table(path: str, content: bytes, delimiter: str = ",") -> CsvTable:
    """The table that the bytes of a CSV file hold."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadArgument(f"{path}, line {line}", "it is not UTF-8 text", "save the file as UTF-8") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise BadArgument(f"{path}, line {line}", "it holds a NUL character: the file is damaged", "fetch it again")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        rows = [(row, reader.line_num) for row in reader if row]
    except csv.Error as error:
        fix = f"look for an unclosed quote or a delimiter that is not {delimiter!r}, or fetch the file again"
        raise BadArgument(f"{path}, line {reader.line_num}", f"not CSV: {error}", fix) from error
    return _checked(path, [row for row, _ in rows], [line for _, line in rows])


def _checked(path: str, rows: list[list[str]], lines: list[int]) -> CsvTable:
    """A table from a header and rows of equal width."""
    if not rows:
        raise BadArgument(path, "the file is empty", "a CSV file with a header")
    header = [name.strip() for name in rows[0]]
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        what = f"columns are named twice: {few(repeated)}"
        raise BadArgument(f"{path}, line {lines[0]}", what, "one name per column")
    if len(rows) == 1:
        raise BadArgument(path, "there is a header and no row", "a CSV file with records")
    for row, line in zip(rows[1:], lines[1:], strict=True):
        if len(row) != len(header):
            what = f"{len(row)} fields, the header has {len(header)}"
            raise BadArgument(f"{path}, line {line}", what, "the line is damaged or cut off, or the delimiter is wrong")
    columns = dict(zip(header, zip(*rows[1:], strict=True), strict=True))
    return CsvTable(path, columns, tuple(lines[1:]))


def _number(cell: str) -> float | None:
    """The finite number in a cell; None if it holds anything else."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def standardised(values: NDArray[Any], train: NDArray[np.int64]) -> NDArray[np.float64]:
    """Columns with mean 0 and deviation 1 over the training rows; a column that is constant there becomes 0 there."""
    table = np.asarray(values, dtype=np.float64)
    mean, deviation = table[train].mean(0), table[train].std(0)
    flat = deviation <= 1e-12 * np.maximum(1.0, np.abs(mean))
    scaled: NDArray[np.float64] = (table - mean) / np.where(flat, 1.0, deviation)
    return scaled


@dataset("csv", About("any CSV file with a header; needs path= and target=", "yours", "yours"))
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
    one_of(where, "task", task, TASKS)
    if not 0 < test_share < 1:
        raise BadArgument(where, f"test_share is {test_share}", "a number between 0 and 1")
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise BadArgument(where, f"delimiter is {delimiter!r}", 'one character, such as "," or ";"')
    table = read_table(required("csv", path, "records.csv"), delimiter)
    if target is None:
        raise BadArgument(where, "it needs the column to predict", f"target= one of {', '.join(table.columns)}")
    for column in (target, *ignore, *categorical):
        one_of(table.path, "column", column, table.columns)
    train, test = parts(len(table), (1 - test_share, test_share), whole(where, "seed", seed, 0))
    if not (len(train) and len(test)):
        raise BadArgument(table.path, f"{len(table)} records leave a part empty", "more records, or another test_share")
    names = [column for column in table.columns if column != target and column not in ignore]
    if not names:
        raise BadArgument(table.path, "no column is left for the inputs", "ignore fewer columns")
    blocks = [_encoded(table, column, train, column in categorical) for column in names]
    classes = _classes(table, target) if task == "classification" else ()
    targets = table.codes(target, classes) if classes else table.scaled([target], train)
    records = tensor_part(np.concatenate(blocks, 1), targets)
    columns = {column: np.array(table.columns[column])[train] for column in names}
    return Data(Path(table.path).stem, records.take(train), records.take(test), classes=classes, columns=columns)


def _encoded(table: CsvTable, column: str, train: NDArray[np.int64], categorical: bool) -> NDArray[np.float64]:
    """One column as numbers: standardised if it is numeric, else one-hot."""
    cells = table.columns[column]
    odd = [row for row, cell in enumerate(cells) if _number(cell) is None]
    if not odd and not categorical:
        return table.scaled([column], train)
    if not categorical and len(odd) < len(cells) / 2:
        what = f"{cells[odd[0]]!r} is not a number, and most of this column is"
        table.refuse(odd[0], column, what, f'mend the cell, or categorical=["{column}"]')
    return table.one_hot(column, table.categories(column))


def _classes(table: CsvTable, target: str) -> tuple[str, ...]:
    """The classes of a target column, at least two."""
    classes = table.categories(target)
    if len(classes) < 2:
        what = f"every record has the value {classes[0]!r}"
        raise BadArgument(f"{table.path}, column {target!r}", what, "a target with two classes or more")
    return classes
