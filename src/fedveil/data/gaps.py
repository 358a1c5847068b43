"""Missing cells of a table: which they are, and their records left out or the cells filled in."""

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from fedveil.data.catalogue import few
from fedveil.data.tables import CsvTable, number
from fedveil.errors import BadArgument

WAYS = ("refuse", "drop", "impute")
WORDS = ("", "na", "n/a", "#n/a", "<na>", "nan", "null", "?")  # a cell that is one of these is missing, in any case
AMONG_NUMBERS = (*WORDS, "none")  # among words, "None" may be an answer like any other
CATEGORY = "missing"  # of words that are

Rows = NDArray[np.bool_]


class Column(NamedTuple):
    """What a column holds: numbers or words, and the cells of it that count as missing."""

    name: str
    numeric: bool
    gaps: frozenset[str]


def flag(option: str, value: str) -> str:
    """An option with a value, for users of the command line and for those of Python."""
    python = f'["{value}"]' if option in ("ignore", "categorical") else f'"{value}"'
    return f"--{option} {shlex.quote(value)} (in Python {option}={python})"


def look_at(table: CsvTable, name: str, as_words: bool = False) -> Column:
    """What a column holds; in one that is taken as words, only the empty cell is missing."""
    values = set(table.columns[name])
    if as_words:
        found = Column(name, False, frozenset(value for value in values if not value.strip()))
    else:
        words = {value for value in values if number(value, table.decimal) is None}
        numeric = all(_means_missing(word, AMONG_NUMBERS) for word in words)
        found = Column(name, numeric, frozenset(word for word in words if numeric or _means_missing(word, WORDS)))
    if values == found.gaps:
        fix = f"{flag('ignore', name)}, or another target if it is the target"
        raise BadArgument(f"{table.path}, column {name!r}", "every cell is missing", fix)
    return found


def _means_missing(cell: str, words: Sequence[str]) -> bool:
    return cell.strip().lower() in words


def complete(
    table: CsvTable, inputs: Sequence[Column], target: Column, missing: str, notes: list[str]
) -> tuple[CsvTable, dict[str, int]]:
    """The rows that stay, and how many cells of each input are missing in them."""
    masks = {
        column.name: np.array([cell in column.gaps for cell in table.columns[column.name]])
        for column in (*inputs, target)
        if column.gaps
    }
    if masks and missing == "refuse":
        _refuse(table, masks, {column.name: column.numeric for column in (*inputs, target)})
    lost, records = np.zeros(len(table), dtype=np.bool_), len(table)
    if target.gaps:
        lost = masks.pop(target.name)
        notes.append(f"left out for lack of a target: {int(lost.sum()):,} of {records:,} records")
        masks = {name: mask & ~lost for name, mask in masks.items() if (mask & ~lost).any()}
    if missing == "drop" and masks:
        gone = np.any(list(masks.values()), 0)
        notes.append(f"left out for missing cells ({_counts(masks)}): {int(gone.sum()):,} of {records:,} records")
        lost = lost | gone
        if lost.all():
            what = f"every record has missing cells, so that none is left ({_counts(masks)})"
            raise BadArgument(table.path, what, f"{flag('missing', 'impute')}, or ignore the columns with most of them")
        masks = {}
    return table.take(np.flatnonzero(~lost)) if lost.any() else table, {
        name: int(mask.sum()) for name, mask in masks.items()
    }


def _counts(masks: Mapping[str, Rows]) -> str:
    """Columns with how many cells each lacks, most first."""
    most = sorted(masks.items(), key=lambda item: -int(item[1].sum()))
    return few(f"{name}: {int(mask.sum()):,}" for name, mask in most)


def _refuse(table: CsvTable, masks: Mapping[str, Rows], numeric: Mapping[str, bool]) -> NoReturn:
    """Name the first missing cell, count them all, and say what can be done."""
    name = min(masks, key=lambda column: int(masks[column].argmax()))
    row = int(masks[name].argmax())
    cell, cells = table.columns[name][row], sum(int(mask.sum()) for mask in masks.values())
    rows = int(np.any(list(masks.values()), 0).sum())
    what = (
        f"{repr(cell) + ' means missing' if cell.strip() else 'the cell is empty'}. {rows:,} of {len(table):,} records "
        f"have missing cells: {cells:,} in {len(masks)} column{'s' * (len(masks) > 1)} ({_counts(masks)})"
    )
    fix = "--missing drop leaves these records out, --missing impute fills the cells in"
    fix += ' (in Python missing="drop" or missing="impute")'
    if cell.strip() and not numeric[name]:
        fix += f"; {flag('categorical', name)} takes {cell!r} as a value like any other"
    table.refuse(row, name, what, fix)


def impute(
    table: CsvTable, inputs: Sequence[Column], counts: Mapping[str, int], train: NDArray[np.int64], notes: list[str]
) -> CsvTable:
    """The table with missing cells filled in: by the median of the training rows, or by a category of their own."""
    said = []
    for column in (column for column in inputs if column.name in counts):
        value, called = CATEGORY, f"the category {CATEGORY!r}"
        if column.numeric:
            cells = (table.columns[column.name][row] for row in train)
            known = [size for cell in cells if (size := number(cell, table.decimal)) is not None]
            if not known:
                where = f"{table.path}, column {column.name!r}"
                raise BadArgument(where, "every cell of the training part is missing", flag("ignore", column.name))
            median = float(np.median(known))
            value, called = repr(median).replace(".", table.decimal), f"the median {median:.4g}"
        table = table.filled(column.name, column.gaps, value)
        said.append(f"{column.name}: {counts[column.name]:,} with {called}")
    if said:
        notes.append(f"filled in {sum(counts.values()):,} missing cells ({few(said)})")
    return table
