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
CATEGORY = "missing"  # category that replaces missing words
LARGEST = 1e150  # the largest number that can be standardised; the squares of larger ones overflow
_TAB = {"\\t": "\t", "tab": "\t"}  # how users type a tab in a shell
_AS_UTF8 = "save it as UTF-8, or convert it: iconv -f latin1 -t utf-8 old.csv > new.csv"

Moments = Mapping[str, tuple[float, float]]
"""Mean and standard deviation by column."""
Masks = dict[str, NDArray[np.bool_]]
"""For each column, whether each cell is missing, or unknown."""
Fills = Mapping[str, float | str | None]
"""The value for missing cells by column; None for columns without one."""
IMPUTE = "use --missing drop to leave these records out, or --missing impute to fill in the cells"
IMPUTE += ' (in Python missing="drop" or missing="impute")'


class Column(NamedTuple):
    """A numeric or categorical column; `gaps` are the values that count as missing, and `words` are all other words."""

    name: str
    numeric: bool
    gaps: frozenset[str]
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

    def refuse(self, row: int, column: str, what: str, fix: str) -> NoReturn:
        """Raise an error about one cell."""
        raise BadArgument(f"{self.path}, {self.unit} {self.lines[row]}, column {column!r}", what, fix)

    def refuse_column(self, column: str, what: str, fix: str) -> NoReturn:
        """Raise an error about a column."""
        raise BadArgument(f"{self.path}, column {column!r}", what, fix)

    def require_columns(self, names: Sequence[str]) -> None:
        """Refuse a table that lacks a column."""
        missing = [column for column in names if column not in self.columns]
        if missing:
            what = f"there is no column {shorten(missing)}; the columns are {shorten(self.columns, 8)}"
            where, fix = f"{self.path}, line 1", "correct the header or the delimiter"
            if self.unit != "line":
                where, fix = self.path, "rename the columns, or add the missing ones"
            raise BadArgument(where, what, fix)

    def numbers(self, column: str) -> Floats:
        """Return a numeric column; refuse cells that are not numbers."""
        values = [number(cell, self.decimal) for cell in self.columns[column]]
        for row, value in enumerate(values):
            if value is None:
                self.refuse(row, column, f"{self.columns[column][row]!r} is not a number", "correct the cell")
        return np.array(values, dtype=np.float64)

    def take(self, rows: Indices) -> "CsvTable":
        """Return the given rows."""
        columns = {name: cells[rows] for name, cells in self.columns.items()}
        return replace(self, columns=columns, lines=self.lines[rows])

    def replace_cells(self, column: str, values: Mapping[str, str]) -> "CsvTable":
        """Return the table with some values of a column replaced."""
        cells = np.array([values.get(cell, cell) for cell in self.columns[column]], dtype=object)
        return replace(self, columns=self.columns | {column: cells})

    def moments(self, columns: Sequence[str], train: Indices) -> Moments:
        """Return the mean and standard deviation of numeric columns over the training rows."""
        _, *found = standardise(self._stack_numbers(columns), train)
        mean, deviation = (values.tolist() for values in found)
        return dict(zip(columns, zip(mean, deviation, strict=True), strict=True))

    def standardise(self, columns: Sequence[str], moments: Moments) -> Floats:
        """Standardise numeric columns with these moments; refuse cells whose result is too large for float32."""
        mean, deviation = np.array([moments[column] for column in columns], dtype=np.float64).T
        found: Floats = (self._stack_numbers(columns) - mean) / deviation
        self._refuse_first(np.abs(found) > np.finfo(np.float32).max, columns)
        return found

    def _stack_numbers(self, columns: Sequence[str]) -> Floats:
        values = np.stack([self.numbers(column) for column in columns], 1)
        self._refuse_first(np.abs(values) > LARGEST, columns)
        return values

    def _refuse_first(self, bad: NDArray[np.bool_], columns: Sequence[str]) -> None:
        for row, index in np.argwhere(bad)[:1].tolist():
            cell = self.columns[columns[index]][row]
            self.refuse(row, columns[index], f"{cell[:40]!r} is too large to be standardised", "correct the cell")

    def codes(self, column: str, categories: Sequence[str]) -> Indices:
        """Return the index of each cell's value in `categories`; refuse cells with other values."""
        self.refuse_unknown(self.find_unknown({column: categories}), {column: categories})
        return self._number_categories(column, categories)

    def find_unknown(self, known: Mapping[str, Sequence[str]]) -> Masks:
        """Return the cells whose values are not known, by column; columns without such cells are left out."""
        masks = {name: ~np.isin(self.columns[name], list(categories)) for name, categories in known.items()}
        return {name: mask for name, mask in masks.items() if mask.any()}

    def refuse_unknown(self, masks: Masks, known: Mapping[str, Sequence[str]], alternative: str = "") -> None:
        """Refuse cells with unknown values; the error contains the first one and counts all of them."""
        for name in sorted(masks, key=lambda column: int(masks[column].argmax()))[:1]:
            row, every = int(masks[name].argmax()), int(np.any(list(masks.values()), 0).sum())
            what = f"{str(self.columns[name][row])[:40]!r} is not a known value"
            what += f". {every:,} of {len(self):,} records have unknown values ({count_cells(masks)})" * (every > 1)
            self.refuse(row, name, what, f"use one of {shorten(known[name], 20)}{alternative}")

    def one_hot(self, column: str, categories: Sequence[str]) -> Floats:
        """Return the one-hot encoding of a column of categories; a cell with another value becomes zeros."""
        return np.eye(len(categories) + 1, len(categories))[self._number_categories(column, categories)]

    def _number_categories(self, column: str, categories: Sequence[str]) -> Indices:
        codes = {category: index for index, category in enumerate(categories)}
        return np.array([codes.get(cell, len(codes)) for cell in self.columns[column]], dtype=np.int64)

    def categories(self, column: str) -> tuple[str, ...]:
        """Return the distinct values of a column, sorted: numbers numerically, words alphabetically."""
        values = sorted(set(self.columns[column]))
        sizes = [number(value, self.decimal) for value in values]
        if all(size is not None for size in sizes):
            values = [value for _, value in sorted(zip(sizes, values, strict=True))]
        return tuple(values)

    def inspect(self, name: str, as_words: bool = False) -> Column:
        """Determine whether a column is numeric; with `as_words`, only empty cells count as missing."""
        values = set(self.columns[name])
        words = {value for value in values if as_words or number(value, self.decimal) is None}
        numeric = not as_words and find_gaps(words, MISSING_NUMBERS) == words
        gaps = find_gaps(words, ("",) if as_words else MISSING_NUMBERS if numeric else MISSING)
        if values == gaps:
            fix = f"use {flag('ignore', name)}, or another target if it is the target"
            self.refuse_column(name, "every cell is missing", fix)
        return Column(name, numeric, gaps, frozenset(words) - gaps)

    def drop_missing(
        self, inputs: Sequence[Column], target: Column | None, missing: str, notes: list[str], fix: str = IMPUTE
    ) -> "CsvTable":
        """Return the rows that have a target, if there is one, and, unless missing cells are imputed, all inputs."""
        columns = {column.name: column for column in (*inputs, *([target] if target else [])) if column.gaps}
        masks = {name: np.isin(self.columns[name], list(column.gaps)) for name, column in columns.items()}
        if masks and missing == "refuse":
            self._refuse_missing(masks, columns, fix)
        records = f"{len(self):,} records"
        lost = masks.pop(target.name if target else "", np.zeros(len(self), dtype=np.bool_))
        if lost.any():
            notes.append(f"left out {int(lost.sum()):,} of {records} because the target is missing")
        masks = {name: mask & ~lost for name, mask in masks.items() if (mask & ~lost).any()}
        if missing == "drop" and masks:
            incomplete = np.any(list(masks.values()), 0)
            left_out = f"left out {int(incomplete.sum()):,} of {records}"
            notes.append(f"{left_out} because of missing cells ({count_cells(masks)})")
            lost = lost | incomplete
            if lost.all():
                what = f"every record has missing cells ({count_cells(masks)})"
                other = f"use {flag('missing', 'impute')}, or ignore the columns with the most missing cells"
                raise BadArgument(self.path, what, other if target else fix)
        return self.take(np.flatnonzero(~lost))

    def _refuse_missing(self, masks: Masks, columns: Mapping[str, Column], fix: str) -> NoReturn:
        """Raise an error that names the first missing cell, counts all of them and lists the options."""
        name = min(masks, key=lambda column: int(masks[column].argmax()))
        row, stacked = int(masks[name].argmax()), np.stack(list(masks.values()))
        cell = self.columns[name][row]
        what = f"{cell!r} counts as missing" if cell.strip() else "the cell is empty"
        what += (
            f". {int(stacked.any(0).sum()):,} of {len(self):,} records have missing cells: {int(stacked.sum()):,} in "
        )
        what += f"{len(masks)} column{'s' * (len(masks) > 1)} ({count_cells(masks)})"
        if fix == IMPUTE and cell.strip() and not columns[name].numeric:
            fix += f"; use {flag('categorical', name)} if {cell!r} is an ordinary value"
        self.refuse(row, name, what, fix)

    def find_fills(self, inputs: Sequence[Column], train: Indices) -> Fills:
        """Return the median of the training rows for columns of numbers, and a category for columns of words."""
        fills: dict[str, float | str | None] = {}
        for column in inputs:
            fills[column.name] = CATEGORY
            if column.numeric:
                cells = self.columns[column.name][train]
                known = [size for cell in cells if (size := number(cell, self.decimal)) is not None]
                if not known:
                    fix = f"use {flag('ignore', column.name)}"
                    self.refuse_column(column.name, "every cell in the training part is missing", fix)
                fills[column.name] = float(np.median(known))
        return fills

    def fill(self, inputs: Sequence[Column], fills: Fills, notes: list[str]) -> "CsvTable":
        """Replace missing cells with the values for their columns; columns without a value stay as they are."""
        table, counts, changes = self, 0, []
        for column in inputs:
            count = int(np.isin(self.columns[column.name], list(column.gaps)).sum())
            value = fills[column.name]
            if count and value is not None:
                number = isinstance(value, float)
                text = repr(value).replace(".", self.decimal) if number else str(value)
                table = table.replace_cells(column.name, dict.fromkeys(column.gaps, text))
                shown = f"the median {value:.4g}" if number else f"the category {value!r}"
                changes.append(f"{column.name}: {count:,} with {shown}")
                counts += count
        if changes:
            notes.append(f"filled in {counts:,} missing cells ({shorten(changes)})")
        return table


def find_gaps(values: Iterable[str], missing: Collection[str]) -> frozenset[str]:
    """Return the values that count as missing."""
    return frozenset(value for value in values if value.strip().lower() in missing)


def count_cells(masks: Masks) -> str:
    """Format the number of cells in each column, largest first."""
    most = sorted(masks.items(), key=lambda item: -int(item[1].sum()))
    return shorten(f"{name}: {int(mask.sum()):,}" for name, mask in most)


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
        raise BadArgument(f"{path}, line {line}", "it is not UTF-8 text", _AS_UTF8) from error
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
    """Return the character that a user chose as the delimiter, or None; refuse several, and the decimal mark."""
    mark = _TAB.get(delimiter or "", delimiter)
    if mark is not None and (len(mark) != 1 or mark in '"\r\n'):
        what = f"delimiter must be one character, got {delimiter!r}"
        raise BadArgument(where, what, 'use ",", ";" or "tab", for example')
    if decimal == mark:
        what = f"{decimal!r} is both the decimal mark and the delimiter"
        raise BadArgument(where, what, f"use {flag('delimiter', ';')}")
    return mark


def find_delimiter(text: str) -> str:
    """Return the delimiter that yields the most columns, preferably the same number in each of the first rows."""
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


def _read_columns(path: str, rows: list[tuple[list[str], int]], delimiter: str) -> dict[str, NDArray[np.object_]]:
    """Convert rows, each with its line number, to columns; columns without a name are named as in pandas."""
    if not rows:
        raise BadArgument(path, "the file is empty", "use a CSV file with a header")
    header = [name.strip() or f"Unnamed: {index}" for index, name in enumerate(rows[0][0])]
    refuse_repeated(f"{path}, line {rows[0][1]}", header, "give each column its own name in the first line")
    if len(rows) == 1:
        raise BadArgument(path, "there is a header but no rows", "use a CSV file with records")
    for row, line in rows[1:]:
        if len(row) != len(header):
            what = f"the number of fields is {len(row)}, but the header has {len(header)}"
            fix = f"correct the line, or set the delimiter if it is not {delimiter!r}"
            raise BadArgument(f"{path}, line {line}", what, fix)
    return dict(zip(header, np.array([row for row, _ in rows[1:]], dtype=object).T, strict=True))


def refuse_repeated(where: str, names: Sequence[str], fix: str) -> None:
    """Refuse columns with the same name."""
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise BadArgument(where, f"several columns have the same name: {shorten(repeated)}", fix)


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
