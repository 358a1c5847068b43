"""CSV files as tables of cells, read with line numbers so that an error can say where."""

import csv
import io
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from fedveil.data.catalogue import few, regular
from fedveil.errors import BadArgument

TASKS = ("classification", "regression")
DELIMITERS = (",", ";", "\t", "|")  # that are looked for
_AS_UTF8 = "save it as UTF-8, or convert it: iconv -f latin1 -t utf-8 old.csv > new.csv"
LARGEST = 1e150  # of a number that is scaled: squares of larger ones overflow


@dataclass(frozen=True)
class CsvTable:
    """Cells of a CSV file by column, and the line each row ends on."""

    path: str
    columns: dict[str, tuple[str, ...]]
    lines: tuple[int, ...]
    delimiter: str = ","
    decimal: str = "."

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
        values = [number(cell, self.decimal) for cell in self.columns[column]]
        for row, value in enumerate(values):
            if value is None:
                self.refuse(row, column, f"{self.columns[column][row]!r} is not a number", "mend the cell")
        return np.array(values, dtype=np.float64)

    def take(self, rows: NDArray[np.int64]) -> "CsvTable":
        """Some of the rows."""
        columns = {name: tuple(cells[row] for row in rows) for name, cells in self.columns.items()}
        return replace(self, columns=columns, lines=tuple(self.lines[row] for row in rows))

    def filled(self, column: str, gaps: Collection[str], value: str) -> "CsvTable":
        """The table with another cell in place of some."""
        cells = tuple(value if cell in gaps else cell for cell in self.columns[column])
        return replace(self, columns=self.columns | {column: cells})

    def scaled(self, columns: Sequence[str], train: NDArray[np.int64]) -> NDArray[np.float64]:
        """Numeric columns, standardised on the training rows; a cell that is too large for float32 is an error."""
        values = np.stack([self.numbers(column) for column in columns], 1)
        self._refuse_first(np.abs(values) > LARGEST, columns)
        found = standardised(values, train)
        self._refuse_first(np.abs(found) > np.finfo(np.float32).max, columns)
        return found

    def scale(self, column: str, train: NDArray[np.int64]) -> tuple[float, float]:
        """Mean and deviation that `scaled` takes out of a column."""
        mean, deviation = moments(self.numbers(column)[:, None], train)
        return float(mean[0]), float(deviation[0])

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
        """The values of a column, sorted: numbers by size, words by letter."""
        values = sorted(set(self.columns[column]))
        sizes = [number(value, self.decimal) for value in values]
        if all(size is not None for size in sizes):
            values = [value for _, value in sorted(zip(sizes, values, strict=True))]
        return tuple(values)


def read_table(path: Path, delimiter: str | None = ",", decimal: str = ".") -> CsvTable:
    """A CSV file with a header."""
    return parse_table(str(path), regular(path).read_bytes(), delimiter, decimal)


def parse_table(path: str, content: bytes, delimiter: str | None = ",", decimal: str = ".") -> CsvTable:
    """The table that the bytes of a CSV file hold; without a delimiter it is found."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadArgument(f"{path}, line {line}", "it is not UTF-8 text", _AS_UTF8) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise BadArgument(f"{path}, line {line}", "it holds a NUL character: the file is damaged", "fetch it again")
    delimiter = find_delimiter(text) if delimiter is None else delimiter
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        rows = [(row, reader.line_num) for row in reader if row]
    except csv.Error as error:
        fix = f"look for an unclosed quote or a delimiter that is not {delimiter!r}, or fetch the file again"
        raise BadArgument(f"{path}, line {reader.line_num}", f"not CSV: {error}", fix) from error
    columns, lines = _checked(path, [row for row, _ in rows], [line for _, line in rows], delimiter)
    return CsvTable(path, columns, lines, delimiter, decimal)


def find_delimiter(text: str) -> str:
    """The delimiter that gives the most columns, and as many in each of the first rows if one does."""
    sample = text[:100_000]
    if len(sample) < len(text):
        sample = sample[: sample.rfind("\n") + 1]

    def columns(delimiter: str) -> tuple[bool, int]:
        try:
            rows = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter)
            widths = [len(row) for row in islice(rows, 20) if row]
        except csv.Error:
            return False, 0
        return len(set(widths)) == 1 < widths[0], sum(widths[:1])

    return max(DELIMITERS, key=columns)


def _checked(
    path: str, rows: list[list[str]], lines: list[int], delimiter: str
) -> tuple[dict[str, tuple[str, ...]], tuple[int, ...]]:
    """Columns and lines from a header and rows of equal width; columns without a name get that which pandas gives."""
    if not rows:
        raise BadArgument(path, "the file is empty", "a CSV file with a header")
    header = [name.strip() or f"Unnamed: {place}" for place, name in enumerate(rows[0])]
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        what = f"columns are named twice: {few(repeated)}"
        raise BadArgument(f"{path}, line {lines[0]}", what, "a first line with a name for each column")
    if len(rows) == 1:
        raise BadArgument(path, "there is a header and no row", "a CSV file with records")
    for row, line in zip(rows[1:], lines[1:], strict=True):
        if len(row) != len(header):
            what = f"{len(row)} fields, the header has {len(header)}"
            fix = f"the line is damaged or cut off, or fields are not separated by {delimiter!r}"
            raise BadArgument(f"{path}, line {line}", what, fix)
    return dict(zip(header, zip(*rows[1:], strict=True), strict=True)), tuple(lines[1:])


def number(cell: str, decimal: str = ".") -> float | None:
    """The finite number in a cell; None if it holds anything else.

    >>> number("1.5"), number("1,5"), number("1,5", decimal=","), number("nan")
    (1.5, None, 1.5, None)
    """
    if decimal != ".":
        cell = cell.replace(".", "_").replace(decimal, ".")
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in cell else None


def moments(values: NDArray[np.float64], train: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and deviation of columns over the training rows; a deviation of 0 is given as 1."""
    mean, deviation = values[train].mean(0), values[train].std(0)
    flat = deviation <= 1e-12 * np.maximum(1.0, np.abs(mean))
    return mean, np.where(flat, 1.0, deviation)


def standardised(values: NDArray[Any], train: NDArray[np.int64]) -> NDArray[np.float64]:
    """Columns with mean 0 and deviation 1 over the training rows; a column that is constant there becomes 0 there."""
    table = np.asarray(values, dtype=np.float64)
    mean, deviation = moments(table, train)
    scaled: NDArray[np.float64] = (table - mean) / deviation
    return scaled
