"""Read CSV files as tables of cells, with line numbers for error messages, and handle missing cells."""

import csv
import io
import math
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from fedveil.data.catalogue import require_regular, shorten
from fedveil.errors import BadArgument

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
DELIMITERS = (",", ";", "\t", "|")  # detected automatically
MISSING = ("", "na", "n/a", "#n/a", "<na>", "nan", "null", "?")  # values of missing cells, in upper or lower case
MISSING_NUMBERS = (*MISSING, "none")  # in a column of words, "None" may be an ordinary value
MISSING_CATEGORY = "missing"  # category that replaces missing words
MAX_NUMBER = 1e150  # the largest number that can be standardised; the squares of larger ones overflow
_TAB_NAMES = {"\\t": "\t", "tab": "\t"}  # how users type a tab in a shell
_UTF8_FIX = "save it as UTF-8, or convert it: iconv -f latin1 -t utf-8 old.csv > new.csv"

Moments = Mapping[str, tuple[float, float]]
"""Mean and standard deviation by column."""
Masks = dict[str, NDArray[np.bool_]]
"""Boolean masks of the missing or unknown cells, by column."""
Fills = Mapping[str, float | str | None]
"""The value that replaces missing cells, by column; None if they are not replaced."""
MISSING_FIX = "use --missing drop to leave these records out, or --missing impute to fill in the cells"
MISSING_FIX += ' (in Python missing="drop" or missing="impute")'


class Column(NamedTuple):
    """A numeric or categorical column, with the values that count as missing and all other words."""

    name: str
    numeric: bool
    missing_values: frozenset[str]
    words: frozenset[str]


@dataclass(frozen=True)
class CsvTable:
    """The cells of a CSV file by column, and the line on which each row ends."""

    path: str
    columns: dict[str, NDArray[np.object_]]
    lines: Indices
    delimiter: str = ","
    decimal: str = "."
    unit: str = "line"  # the unit of `lines`, for messages

    def __len__(self) -> int:
        return len(self.lines)

    def refuse(self, row: int, column: str, message: str, fix: str) -> NoReturn:
        """Raise an error about one cell."""
        raise BadArgument(f"{self.path}, {self.unit} {self.lines[row]}, column {column!r}", message, fix)

    def reject_column(self, column: str, message: str, fix: str) -> NoReturn:
        """Raise an error about a column."""
        raise BadArgument(f"{self.path}, column {column!r}", message, fix)

    def require_columns(self, names: Sequence[str]) -> None:
        """Refuse a table that lacks a column."""
        missing = [column for column in names if column not in self.columns]
        if missing:
            message = f"columns are missing: {shorten(missing)}; the columns are {shorten(self.columns, 8)}"
            where, fix = f"{self.path}, line 1", "correct the header or the delimiter"
            if self.unit != "line":
                where, fix = self.path, "rename the columns, or add the missing ones"
            raise BadArgument(where, message, fix)

    def numbers(self, column: str) -> Floats:
        """Return a numeric column; refuse cells that are not numbers."""
        values = [number(cell, self.decimal) for cell in self.columns[column]]
        for row, value in enumerate(values):
            if value is None:
                self.refuse(row, column, f"{self.columns[column][row]!r} is not a number", "correct the cell")
        return np.array(values, dtype=np.float64)

    def take(self, rows: Indices) -> "CsvTable":
        """Return the rows with the given indices."""
        columns = {name: cells[rows] for name, cells in self.columns.items()}
        return replace(self, columns=columns, lines=self.lines[rows])

    def replace_cells(self, column: str, values: Mapping[str, str]) -> "CsvTable":
        """Return the table with some values of a column replaced."""
        cells = np.array([values.get(cell, cell) for cell in self.columns[column]], dtype=object)
        return replace(self, columns=self.columns | {column: cells})

    def moments(self, columns: Sequence[str], train: Indices) -> Moments:
        """Return the mean and standard deviation of numeric columns over the training rows."""
        _, mean, deviation = standardise(self._stack_numbers(columns), train)
        return dict(zip(columns, zip(mean.tolist(), deviation.tolist(), strict=True), strict=True))

    def standardise(self, columns: Sequence[str], moments: Moments) -> Floats:
        """Standardise numeric columns with these moments; refuse cells whose result is too large for float32."""
        mean, deviation = np.array([moments[column] for column in columns], dtype=np.float64).T
        result: Floats = (self._stack_numbers(columns) - mean) / deviation
        self._refuse_first(np.abs(result) > np.finfo(np.float32).max, columns)
        return result

    def _stack_numbers(self, columns: Sequence[str]) -> Floats:
        values = np.stack([self.numbers(column) for column in columns], 1)
        self._refuse_first(np.abs(values) > MAX_NUMBER, columns)
        return values

    def _refuse_first(self, mask: NDArray[np.bool_], columns: Sequence[str]) -> None:
        for row, index in np.argwhere(mask)[:1].tolist():
            cell = self.columns[columns[index]][row]
            self.refuse(row, columns[index], f"{cell[:40]!r} is too large to be standardised", "correct the cell")

    def codes(self, column: str, categories: Sequence[str]) -> Indices:
        """Return the index of each cell's value in `categories`; refuse cells with other values."""
        self.refuse_unknown(self.find_unknown({column: categories}), {column: categories})
        return self._category_indices(column, categories)

    def find_unknown(self, known_values: Mapping[str, Sequence[str]]) -> Masks:
        """Return a mask of the cells with unknown values, for each column that has any."""
        masks = {name: ~np.isin(self.columns[name], list(categories)) for name, categories in known_values.items()}
        return {name: mask for name, mask in masks.items() if mask.any()}

    def refuse_unknown(self, masks: Masks, known_values: Mapping[str, Sequence[str]], alternative: str = "") -> None:
        """Refuse cells with unknown values; the error shows the first and counts all of them."""
        for name in sorted(masks, key=lambda column: int(masks[column].argmax()))[:1]:
            row, num_rows = int(masks[name].argmax()), int(np.any(list(masks.values()), 0).sum())
            message = f"{str(self.columns[name][row])[:40]!r} is not a known value"
            message += f". {num_rows:,} of {len(self):,} records have unknown values ({count_cells(masks)})" * (
                num_rows > 1
            )
            self.refuse(row, name, message, f"use one of {shorten(known_values[name], 20)}{alternative}")

    def one_hot(self, column: str, categories: Sequence[str]) -> Floats:
        """Return the one-hot encoding of a column of categories; cells with other values become zeros."""
        return np.eye(len(categories) + 1, len(categories))[self._category_indices(column, categories)]

    def _category_indices(self, column: str, categories: Sequence[str]) -> Indices:
        codes = {category: index for index, category in enumerate(categories)}
        return np.array([codes.get(cell, len(codes)) for cell in self.columns[column]], dtype=np.int64)

    def categories(self, column: str) -> tuple[str, ...]:
        """Return the distinct values of a column, sorted: numbers numerically, words alphabetically."""
        values = sorted(set(self.columns[column]))
        numbers = [number(value, self.decimal) for value in values]
        if all(parsed_number is not None for parsed_number in numbers):
            values = [value for _, value in sorted(zip(numbers, values, strict=True))]
        return tuple(values)

    def inspect(self, name: str, as_words: bool = False) -> Column:
        """Determine whether a column is numeric; with `as_words`, only empty cells count as missing."""
        values = set(self.columns[name])
        words = {value for value in values if as_words or number(value, self.decimal) is None}
        is_numeric = not as_words and find_missing_values(words, MISSING_NUMBERS) == words
        missing_values = find_missing_values(words, ("",) if as_words else MISSING_NUMBERS if is_numeric else MISSING)
        if values == missing_values:
            fix = f"use {flag('ignore', name)}, or another target if it is the target"
            self.reject_column(name, "every cell is missing", fix)
        return Column(name, is_numeric, missing_values, frozenset(words) - missing_values)

    def drop_missing(
        self, inputs: Sequence[Column], target: Column | None, missing: str, notes: list[str], fix: str = MISSING_FIX
    ) -> "CsvTable":
        """Drop rows without a target and, unless missing cells are imputed, rows with missing inputs."""
        columns = {column.name: column for column in (*inputs, *([target] if target else [])) if column.missing_values}
        masks = {name: np.isin(self.columns[name], list(column.missing_values)) for name, column in columns.items()}
        if masks and missing == "refuse":
            self._refuse_missing(masks, columns, fix)
        records = f"{len(self):,} records"
        dropped_rows = masks.pop(target.name if target else "", np.zeros(len(self), dtype=np.bool_))
        if dropped_rows.any():
            notes.append(f"left out {int(dropped_rows.sum()):,} of {records} because the target is missing")
        masks = {name: mask & ~dropped_rows for name, mask in masks.items() if (mask & ~dropped_rows).any()}
        if missing == "drop" and masks:
            incomplete = np.any(list(masks.values()), 0)
            left_out = f"left out {int(incomplete.sum()):,} of {records}"
            notes.append(f"{left_out} because of missing cells ({count_cells(masks)})")
            dropped_rows = dropped_rows | incomplete
            if dropped_rows.all():
                message = f"every record has missing cells ({count_cells(masks)})"
                alternative = f"use {flag('missing', 'impute')}, or ignore the columns with the most missing cells"
                raise BadArgument(self.path, message, alternative if target else fix)
        return self.take(np.flatnonzero(~dropped_rows))

    def _refuse_missing(self, masks: Masks, columns: Mapping[str, Column], fix: str) -> NoReturn:
        """Raise an error that shows the first missing cell, counts all of them and lists the options."""
        name = min(masks, key=lambda column: int(masks[column].argmax()))
        row, all_masks = int(masks[name].argmax()), np.stack(list(masks.values()))
        cell = self.columns[name][row]
        message = f"{cell!r} counts as missing" if cell.strip() else "the cell is empty"
        message += f". {int(all_masks.any(0).sum()):,} of {len(self):,} records have missing cells: "
        message += f"{int(all_masks.sum()):,} in "
        message += f"{len(masks)} column{'s' * (len(masks) > 1)} ({count_cells(masks)})"
        if fix == MISSING_FIX and cell.strip() and not columns[name].numeric:
            fix += f"; use {flag('categorical', name)} if {cell!r} is an ordinary value"
        self.refuse(row, name, message, fix)

    def choose_fills(self, inputs: Sequence[Column], train: Indices) -> Fills:
        """Choose the fill value of each column: the median of the training rows, or a category for columns of words."""
        fills: dict[str, float | str | None] = {}
        for column in inputs:
            fills[column.name] = MISSING_CATEGORY
            if column.numeric:
                cells = self.columns[column.name][train]
                numbers = [value for cell in cells if (value := number(cell, self.decimal)) is not None]
                if not numbers:
                    fix = f"use {flag('ignore', column.name)}"
                    self.reject_column(column.name, "every cell in the training part is missing", fix)
                fills[column.name] = float(np.median(numbers))
        return fills

    def fill(self, inputs: Sequence[Column], fills: Fills, notes: list[str]) -> "CsvTable":
        """Replace missing cells with the fill values of their columns; columns without a fill value stay unchanged."""
        table, total, changes = self, 0, []
        for column in inputs:
            count = int(np.isin(self.columns[column.name], list(column.missing_values)).sum())
            value = fills[column.name]
            if count and value is not None:
                is_number = isinstance(value, float)
                text = repr(value).replace(".", self.decimal) if is_number else str(value)
                table = table.replace_cells(column.name, dict.fromkeys(column.missing_values, text))
                description = f"the median {value:.4g}" if is_number else f"the category {value!r}"
                changes.append(f"{column.name}: {count:,} with {description}")
                total += count
        if changes:
            notes.append(f"filled in {total:,} missing cells ({shorten(changes)})")
        return table


def find_missing_values(values: Iterable[str], missing: Collection[str]) -> frozenset[str]:
    """Return the values that count as missing."""
    return frozenset(value for value in values if value.strip().lower() in missing)


def count_cells(masks: Masks) -> str:
    """Format the number of cells in each column, largest first."""
    items = sorted(masks.items(), key=lambda item: -int(item[1].sum()))
    return shorten(f"{name}: {int(mask.sum()):,}" for name, mask in items)


def flag(option: str, value: str) -> str:
    """Format an option and its value for users of both the command line and Python."""
    python = f'["{value}"]' if option in ("ignore", "categorical") else f'"{value}"'
    return f"--{option} {shlex.quote(value)} (in Python {option}={python})"


def read_table(path: Path, delimiter: str | None = ",", decimal: str = ".") -> CsvTable:
    """Read a CSV file with a header."""
    return parse_table(str(path), require_regular(path).read_bytes(), delimiter, decimal)


def parse_table(path: str, content: bytes, delimiter: str | None = ",", decimal: str = ".") -> CsvTable:
    """Parse the bytes of a CSV file; if the delimiter is None, detect it."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadArgument(f"{path}, line {line}", "it is not UTF-8 text", _UTF8_FIX) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise BadArgument(f"{path}, line {line}", "it contains a NUL byte: the file is damaged", "download it again")
    delimiter = find_delimiter(text) if delimiter is None else delimiter
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        rows = [(row, reader.line_num) for row in reader if row]
    except csv.Error as error:
        fix = f"look for an unclosed quote or a delimiter that is not {delimiter!r}, or download the file again"
        raise BadArgument(f"{path}, line {reader.line_num}", f"it is not valid CSV: {error}", fix) from error
    columns = _read_columns(path, rows, delimiter)
    return CsvTable(path, columns, np.array([line for _, line in rows[1:]]), delimiter, decimal)


def read_delimiter(where: str, delimiter: str | None, decimal: str) -> str | None:
    """Return the delimiter that the user chose, or None; refuse several characters and the decimal mark."""
    character = _TAB_NAMES.get(delimiter or "", delimiter)
    if character is not None and (len(character) != 1 or character in '"\r\n'):
        message = f"delimiter must be one character, got {delimiter!r}"
        raise BadArgument(where, message, 'use ",", ";" or "tab", for example')
    if decimal == character:
        message = f"{decimal!r} is both the decimal mark and the delimiter"
        raise BadArgument(where, message, f"use {flag('delimiter', ';')}")
    return character


def find_delimiter(text: str) -> str:
    """Return the delimiter that yields the most columns, preferably the same number in each of the first rows."""
    sample = text[:100_000]
    if len(sample) < len(text):
        sample = sample[: sample.rfind("\n") + 1]

    def score(delimiter: str) -> tuple[bool, int]:
        try:
            rows = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter)
            widths = [len(row) for row in islice(rows, 20) if row]
        except csv.Error:
            return False, 0
        return len(set(widths)) == 1 < widths[0], sum(widths[:1])

    return max(DELIMITERS, key=score)


def _read_columns(path: str, rows: list[tuple[list[str], int]], delimiter: str) -> dict[str, NDArray[np.object_]]:
    """Convert rows, each with its line number, to columns; columns without a name are named as in pandas."""
    if not rows:
        raise BadArgument(path, "the file is empty", "use a CSV file with a header")
    header = [name.strip() or f"Unnamed: {index}" for index, name in enumerate(rows[0][0])]
    refuse_repeated(f"{path}, line {rows[0][1]}", header, "give each column a unique name in the first line")
    if len(rows) == 1:
        raise BadArgument(path, "there is a header but no rows", "use a CSV file with records")
    for row, line in rows[1:]:
        if len(row) != len(header):
            message = f"expected {len(header)} fields, as in the header, got {len(row)}"
            fix = f"correct the line, or set the delimiter if it is not {delimiter!r}"
            raise BadArgument(f"{path}, line {line}", message, fix)
    return dict(zip(header, np.array([row for row, _ in rows[1:]], dtype=object).T, strict=True))


def refuse_repeated(where: str, names: Sequence[str], fix: str) -> None:
    """Refuse columns with the same name."""
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise BadArgument(where, f"several columns have the same name: {shorten(duplicates)}", fix)


def number(cell: str, decimal: str = ".") -> float | None:
    """Return the finite number in a cell; None if the cell contains anything else.

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


def standardise(values: Floats, train: Indices) -> tuple[Floats, Floats, Floats]:
    """Scale columns to mean 0 and standard deviation 1 over the training rows; also return their means and deviations.

    A column that is constant in the training rows is only shifted, and its deviation is returned as 1.
    """
    mean, deviation = values[train].mean(0), values[train].std(0)
    deviation = np.where(deviation <= 1e-12 * np.maximum(1.0, np.abs(mean)), 1.0, deviation)
    return (values - mean) / deviation, mean, deviation
