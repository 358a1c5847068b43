"""CSV files as tables of cells, read with line numbers so that errors can name the line."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from fedveil.data.catalogue import require_regular, shorten
from fedveil.errors import BadArgument

TASKS = ("classification", "regression")
DELIMITERS = (",", ";", "\t", "|")  # that are recognised
_AS_UTF8 = "save it as UTF-8, or convert it: iconv -f latin1 -t utf-8 old.csv > new.csv"
LARGEST = 1e150  # number that can be standardised: squares of larger ones overflow


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
            what = f"no column {shorten(missing)}; found {shorten(self.columns, 8)}"
            raise BadArgument(f"{self.path}, line 1", what, "correct the header or the delimiter")

    def numbers(self, column: str) -> NDArray[np.float64]:
        """Return a numeric column; refuse any other cell."""
        values = [number(cell, self.decimal) for cell in self.columns[column]]
        for row, value in enumerate(values):
            if value is None:
                self.refuse(row, column, f"{self.columns[column][row]!r} is not a number", "correct the cell")
        return np.array(values, dtype=np.float64)

    def take(self, rows: NDArray[np.int64]) -> "CsvTable":
        """Return some of the rows."""
        columns = {name: tuple(cells[row] for row in rows) for name, cells in self.columns.items()}
        return replace(self, columns=columns, lines=tuple(self.lines[row] for row in rows))

    def replace_cells(self, column: str, values: Mapping[str, str]) -> "CsvTable":
        """Return the table with other values for some cells of a column."""
        cells = tuple(values.get(cell, cell) for cell in self.columns[column])
        return replace(self, columns=self.columns | {column: cells})

    def standardise(self, columns: Sequence[str], train: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return numeric columns, standardised on the training rows; refuse a cell that is too large for float32."""
        values = np.stack([self.numbers(column) for column in columns], 1)
        self._refuse_first(np.abs(values) > LARGEST, columns)
        found = standardise(values, train)
        self._refuse_first(np.abs(found) > np.finfo(np.float32).max, columns)
        return found

    def _refuse_first(self, bad: NDArray[np.bool_], columns: Sequence[str]) -> None:
        for row, index in np.argwhere(bad)[:1].tolist():
            cell = self.columns[columns[index]][row]
            self.refuse(row, columns[index], f"{cell[:40]!r} is too large to be standardised", "correct the cell")

    def codes(self, column: str, categories: Sequence[str]) -> NDArray[np.int64]:
        """Return the indices in `categories` of the cells of a column; refuse any other cell."""
        codes = {category: index for index, category in enumerate(categories)}
        for row, cell in enumerate(self.columns[column]):
            if cell not in codes:
                self.refuse(row, column, f"{cell!r} is not a known value", f"use one of {shorten(categories, 20)}")
        return np.array([codes[cell] for cell in self.columns[column]], dtype=np.int64)

    def one_hot(self, column: str, categories: Sequence[str]) -> NDArray[np.float64]:
        """Return a column of categories as one column of 0 and 1 for each of them."""
        return np.eye(len(categories))[self.codes(column, categories)]

    def categories(self, column: str) -> tuple[str, ...]:
        """Return the values of a column, sorted: numbers by size, words by letter."""
        values = sorted(set(self.columns[column]))
        sizes = [number(value, self.decimal) for value in values]
        if all(size is not None for size in sizes):
            values = [value for _, value in sorted(zip(sizes, values, strict=True))]
        return tuple(values)


def read_table(path: Path, delimiter: str | None = ",", decimal: str = ".") -> CsvTable:
    """Read a CSV file with a header."""
    return parse_table(str(path), require_regular(path).read_bytes(), delimiter, decimal)


def parse_table(path: str, content: bytes, delimiter: str | None = ",", decimal: str = ".") -> CsvTable:
    """Parse the bytes of a CSV file; without a delimiter it is recognised."""
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
    columns = _read_columns(path, rows, delimiter)
    return CsvTable(path, columns, tuple(line for _, line in rows[1:]), delimiter, decimal)


def find_delimiter(text: str) -> str:
    """Return the delimiter that gives the most columns, preferably as many in each of the first rows."""
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


def _read_columns(path: str, rows: list[tuple[list[str], int]], delimiter: str) -> dict[str, tuple[str, ...]]:
    """Return columns from rows, each with its line; columns without a name are named as pandas names them."""
    if not rows:
        raise BadArgument(path, "the file is empty", "use a CSV file with a header")
    header = [name.strip() or f"Unnamed: {index}" for index, name in enumerate(rows[0][0])]
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        what = f"columns are named twice: {shorten(repeated)}"
        raise BadArgument(f"{path}, line {rows[0][1]}", what, "give each column a name in the first line")
    if len(rows) == 1:
        raise BadArgument(path, "there is a header and no row", "use a CSV file with records")
    for row, line in rows[1:]:
        if len(row) != len(header):
            what = f"{len(row)} fields, the header has {len(header)}"
            fix = f"correct the line, or name the delimiter if it is not {delimiter!r}"
            raise BadArgument(f"{path}, line {line}", what, fix)
    return dict(zip(header, zip(*(row for row, _ in rows[1:]), strict=True), strict=True))


def number(cell: str, decimal: str = ".") -> float | None:
    """Return the finite number in a cell; None if it holds anything else.

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
    """Return mean and deviation of columns over the training rows; a deviation of 0 becomes 1."""
    mean, deviation = values[train].mean(0), values[train].std(0)
    flat = deviation <= 1e-12 * np.maximum(1.0, np.abs(mean))
    return mean, np.where(flat, 1.0, deviation)


def standardise(values: NDArray[np.float64], train: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return columns with mean 0 and deviation 1 over the training rows; one that is constant there becomes 0 there."""
    mean, deviation = moments(values, train)
    found: NDArray[np.float64] = (values - mean) / deviation
    return found
