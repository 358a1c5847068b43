"""Missing values of a table: recognise them, leave out their records, or fill them in."""

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from fedveil.data.catalogue import shorten
from fedveil.data.tables import CsvTable, number
from fedveil.errors import BadArgument

WAYS = ("refuse", "drop", "impute")
WORDS = ("", "na", "n/a", "#n/a", "<na>", "nan", "null", "?")  # a cell that is one of these is missing, in any case
AMONG_NUMBERS = (*WORDS, "none")  # among words, "None" may be an answer like any other
CATEGORY = "missing"  # that replaces missing words

Masks = dict[str, NDArray[np.bool_]]
"""For each column, which of its cells are missing."""


class Column(NamedTuple):
    """A column of numbers or of words, and those of its cells that count as missing."""

    name: str
    numeric: bool
    gaps: frozenset[str]


def flag(option: str, value: str) -> str:
    """Return an option with a value, for users of the command line and of Python."""
    python = f'["{value}"]' if option in ("ignore", "categorical") else f'"{value}"'
    return f"--{option} {shlex.quote(value)} (in Python {option}={python})"


def inspect_column(table: CsvTable, name: str, as_words: bool = False) -> Column:
    """Find out whether a column holds numbers; in one that is taken as words, only the empty cell is missing."""
    values = set(table.columns[name])
    if as_words:
        column = Column(name, False, frozenset(value for value in values if not value.strip()))
    else:
        words = {value for value in values if number(value, table.decimal) is None}
        numeric = all(word.strip().lower() in AMONG_NUMBERS for word in words)
        gaps = frozenset(word for word in words if numeric or word.strip().lower() in WORDS)
        column = Column(name, numeric, gaps)
    if values == column.gaps:
        fix = f"use {flag('ignore', name)}, or another target if it is the target"
        raise BadArgument(f"{table.path}, column {name!r}", "every cell is missing", fix)
    return column


def drop_records(
    table: CsvTable, inputs: Sequence[Column], target: Column, missing: str, notes: list[str]
) -> tuple[CsvTable, dict[str, int]]:
    """Return the rows that stay, and how many cells of each input are missing in them."""
    columns = {column.name: column for column in (*inputs, target) if column.gaps}
    masks = {name: np.array([cell in columns[name].gaps for cell in table.columns[name]]) for name in columns}
    if masks and missing == "refuse":
        _refuse(table, masks, columns)
    lost, records = np.zeros(len(table), dtype=np.bool_), len(table)
    if target.gaps:
        lost = masks.pop(target.name)
        notes.append(f"left out without a target: {int(lost.sum()):,} of {records:,} records")
        masks = {name: mask & ~lost for name, mask in masks.items() if (mask & ~lost).any()}
    if missing == "drop" and masks:
        incomplete = np.any(list(masks.values()), 0)
        notes.append(f"left out for missing cells ({_counts(masks)}): {int(incomplete.sum()):,} of {records:,} records")
        lost = lost | incomplete
        if lost.all():
            fix = f"use {flag('missing', 'impute')}, or ignore the columns with most of them"
            raise BadArgument(table.path, f"every record has missing cells ({_counts(masks)})", fix)
        masks = {}
    counts = {name: int(mask.sum()) for name, mask in masks.items()}
    return table.take(np.flatnonzero(~lost)) if lost.any() else table, counts


def _counts(masks: Masks) -> str:
    """Return columns with the number of their missing cells, largest first."""
    most = sorted(masks.items(), key=lambda item: -int(item[1].sum()))
    return shorten(f"{name}: {int(mask.sum()):,}" for name, mask in most)


def _refuse(table: CsvTable, masks: Masks, columns: Mapping[str, Column]) -> NoReturn:
    """Name the first missing cell, count them all, and list the options."""
    name = min(masks, key=lambda column: int(masks[column].argmax()))
    row = int(masks[name].argmax())
    cell, cells = table.columns[name][row], sum(int(mask.sum()) for mask in masks.values())
    rows = int(np.any(list(masks.values()), 0).sum())
    what = f"{cell!r} means missing" if cell.strip() else "the cell is empty"
    what += f". {rows:,} of {len(table):,} records have missing cells: {cells:,} in {len(masks)} "
    what += f"column{'s' * (len(masks) > 1)} ({_counts(masks)})"
    fix = "use --missing drop to leave these records out, or --missing impute to fill the cells in"
    fix += ' (in Python missing="drop" or missing="impute")'
    if cell.strip() and not columns[name].numeric:
        fix += f"; use {flag('categorical', name)} if {cell!r} is a value like any other"
    table.refuse(row, name, what, fix)


def impute(
    table: CsvTable, inputs: Sequence[Column], counts: Mapping[str, int], train: NDArray[np.int64], notes: list[str]
) -> CsvTable:
    """Return the table with missing cells filled in: the median of the training rows, or a category for them."""
    changes = []
    for column in (column for column in inputs if column.name in counts):
        value, shown = CATEGORY, f"the category {CATEGORY!r}"
        if column.numeric:
            cells = (table.columns[column.name][row] for row in train)
            known = [size for cell in cells if (size := number(cell, table.decimal)) is not None]
            if not known:
                where, fix = f"{table.path}, column {column.name!r}", f"use {flag('ignore', column.name)}"
                raise BadArgument(where, "every cell of the training part is missing", fix)
            median = float(np.median(known))
            value, shown = repr(median).replace(".", table.decimal), f"the median {median:.4g}"
        table = table.replace_cells(column.name, dict.fromkeys(column.gaps, value))
        changes.append(f"{column.name}: {counts[column.name]:,} with {shown}")
    if changes:
        notes.append(f"filled in {sum(counts.values()):,} missing cells ({shorten(changes)})")
    return table
