"""Tables of text with their line numbers, so that an error can say where."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from fedveil.data.places import few
from fedveil.errors import BadArgument


@dataclass(frozen=True)
class Table:
    """Cells of a CSV file by column, and the line each row ends on."""

    path: str
    columns: dict[str, tuple[str, ...]]
    lines: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.lines)

    def refuse(self, row: int, column: str, what: str, fix: str) -> NoReturn:
        """Raise an error about one cell."""
        raise BadArgument(f"{self.path}, line {self.lines[row]}, column {column!r}", what, fix)


def read_table(path: Path, delimiter: str = ",") -> Table:
    """A CSV file with a header."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadArgument(str(path), f"cannot be read: {error.strerror}", "path= a readable CSV file") from error
    return parse_table(str(path), content, delimiter)


def parse_table(path: str, content: bytes, delimiter: str = ",") -> Table:
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
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        for row in reader:
            if row:
                rows.append(row)
                lines.append(reader.line_num)
    except csv.Error as error:
        fix = f"look for an unclosed quote or a delimiter that is not {delimiter!r}, or fetch the file again"
        raise BadArgument(f"{path}, line {reader.line_num}", f"not CSV: {error}", fix) from error
    return _checked(path, rows, lines)


def _checked(path: str, rows: list[list[str]], lines: list[int]) -> Table:
    """A table from a header and rows of equal width."""
    if not rows:
        raise BadArgument(path, "the file is empty", "a CSV file with a header")
    header = [name.strip() for name in rows[0]]
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise BadArgument(f"{path}, line {lines[0]}", f"columns are named twice: {few(repeated)}", "one name a column")
    if len(rows) == 1:
        raise BadArgument(path, "there is a header and no row", "a CSV file with records")
    for row, line in zip(rows[1:], lines[1:], strict=True):
        if len(row) != len(header):
            what = f"{len(row)} fields, the header has {len(header)}"
            raise BadArgument(f"{path}, line {line}", what, "the line is damaged or cut off, or the delimiter is wrong")
    columns = dict(zip(header, zip(*rows[1:], strict=True), strict=True))
    return Table(path, columns, tuple(lines[1:]))


def need_columns(table: Table, wanted: Sequence[str]) -> None:
    """Refuse a table that lacks a column."""
    missing = [column for column in wanted if column not in table.columns]
    if missing:
        found = few(table.columns, 8)
        raise BadArgument(f"{table.path}, line 1", f"no column {few(missing)}; found {found}", "check the delimiter")


def number(cell: str) -> float | None:
    """The finite number in a cell; None if it holds anything else."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def numbers(table: Table, column: str) -> NDArray[np.float64]:
    """A numeric column; any other cell is an error."""
    values = [number(cell) for cell in table.columns[column]]
    for row, value in enumerate(values):
        if value is None:
            table.refuse(row, column, f"{table.columns[column][row]!r} is not a number", "mend the cell")
    return np.array(values, dtype=np.float64)


def codes(table: Table, column: str, categories: Sequence[str]) -> NDArray[np.int64]:
    """Positions in `categories` of the cells of a column; any other cell is an error."""
    position = {category: index for index, category in enumerate(categories)}
    cells = table.columns[column]
    for row, cell in enumerate(cells):
        if cell not in position:
            table.refuse(row, column, f"{cell!r} is not a known value", f"one of {few(categories, 20)}")
    return np.array([position[cell] for cell in cells], dtype=np.int64)


def one_hot(table: Table, column: str, categories: Sequence[str]) -> NDArray[np.float64]:
    """A column of categories as one column of 0 and 1 for each of them."""
    return np.eye(len(categories))[codes(table, column, categories)]
