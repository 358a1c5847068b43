"""Encode the rows of a table as a model's inputs: the same code for training and for new rows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.data.catalogue import shorten
from fedveil.data.tables import (
    MISSING,
    MISSING_NUMBERS,
    Column,
    CsvTable,
    Fills,
    Floats,
    Indices,
    Moments,
    count_cells,
    find_gaps,
    number,
    refuse_repeated,
)
from fedveil.errors import BadArgument
from fedveil.records.encoding import CategoryColumn, NumberColumn, TableEncoding

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Unknown = Literal["refuse", "ignore"]
COMPLETE = "fill in the cells or leave these records out; a model trained with --missing impute would accept them, in "
COMPLETE += "columns of words only if cells were missing in training too"
NO_FILL = "fill in the cells: training had none missing in this column; or use --unknown ignore, as for new categories"
IGNORE = '; or use --unknown ignore (in Python unknown="ignore"), with which all inputs of an unknown category are 0'


def number_columns(moments: Moments, fills: Fills | None = None) -> tuple[NumberColumn, ...]:
    """Return the encoding of columns of numbers."""
    found = []
    for name, (mean, deviation) in moments.items():
        fill = (fills or {}).get(name)
        found.append(NumberColumn(name, mean, deviation, fill if isinstance(fill, float) else None))
    return tuple(found)


def describe_table(
    table: CsvTable, columns: Sequence[NumberColumn | CategoryColumn], missing: Literal["refuse", "drop", "impute"]
) -> TableEncoding:
    """Return the encoding of a table with these columns."""
    decimal: Literal[".", ","] = "," if table.decimal == "," else "."
    return TableEncoding(tuple(columns), missing, MISSING_NUMBERS, MISSING, table.delimiter, decimal)


def encode_rows(table: CsvTable, encoding: TableEncoding) -> Floats:
    """Return the inputs of rows without missing cells; all inputs of an unknown category are 0."""
    parts = []
    for column in encoding.columns:
        if isinstance(column, NumberColumn):
            parts.append(table.standardise([column.name], {column.name: (column.mean, column.deviation)}))
        else:
            parts.append(table.one_hot(column.name, column.categories))
    return np.concatenate(parts, 1)


def encode_new_rows(
    table: CsvTable, encoding: TableEncoding, unknown: Unknown, notes: list[str]
) -> tuple[Tensor, Indices]:
    """Encode new rows; return the inputs and the indices of the rows that were not left out.

    Columns are found by name, and others are ignored. Missing cells are treated as in training.

    Args:
        table: the rows.
        encoding: the encoding of the training rows.
        unknown: whether to "refuse" categories that training did not have, or to "ignore" them: all inputs are then 0.
        notes: messages about ignored columns, missing cells and unknown categories are appended to it.
    """
    names = [column.name for column in encoding.columns]
    table.require_columns(names)
    if not len(table):
        raise BadArgument(table.path, "there are no records", "pass at least one record")
    if others := [name for name in table.columns if name not in names]:
        notes.append(f"ignored columns that are not inputs: {shorten(others, 8)}")
    lines, fills = table.lines, {column.name: column.fill for column in encoding.columns}
    columns = [_find_missing(table, encoding, column) for column in encoding.columns]
    if encoding.missing == "impute":
        if unknown == "refuse":  # a column that had no missing cells has no value for them
            table.drop_missing([own for own in columns if fills[own.name] is None], None, "refuse", notes, NO_FILL)
        table = table.fill(columns, fills, notes)
    else:
        table = table.drop_missing(columns, None, encoding.missing, notes, COMPLETE)
    known = {column.name: column.categories for column in encoding.columns if isinstance(column, CategoryColumn)}
    if masks := table.find_unknown(known):
        if unknown == "refuse":
            table.refuse_unknown(masks, known, IGNORE)
        gaps = {own.name: np.isin(table.columns[own.name], list(own.gaps)) for own in columns if own.name in masks}
        new = {name: mask & ~gaps[name] for name, mask in masks.items()}
        for cells, what in ((new, "with unknown categories"), (gaps, "missing where training had none missing")):
            if found := {name: mask for name, mask in cells.items() if mask.any()}:
                notes.append(f"all inputs are 0 for cells {what} ({count_cells(found)})")
    kept = np.flatnonzero(np.isin(lines, table.lines))
    return torch.from_numpy(encode_rows(table, encoding).astype(np.float32)), kept


def _find_missing(table: CsvTable, encoding: TableEncoding, column: NumberColumn | CategoryColumn) -> Column:
    """Return a column with the values that count as missing."""
    missing = {"number": encoding.missing_numbers, "words": encoding.missing_words, "text": ("",)}[column.kind]
    cells = set(table.columns[column.name])
    return Column(column.name, column.kind == "number", find_gaps(cells, missing), frozenset())


def read_frame(frame: "DataFrame", encoding: TableEncoding | None = None) -> CsvTable:
    """Return the cells of a pandas DataFrame as text, as they would be in a CSV file with decimal points."""
    names = [str(name) for name in frame.columns]
    refuse_repeated("the DataFrame", names, "give each column its own name: frame.columns = [...]")
    columns = {str(name): _cells(series) for name, series in frame.items()}
    for column in encoding.columns if encoding else ():
        if isinstance(column, CategoryColumn) and column.name in columns:
            columns[column.name] = _match_spelling(columns[column.name], column.categories)
    return CsvTable("the DataFrame", columns, np.arange(len(frame)), unit="row")


def _cells(series: "Series") -> NDArray[np.object_]:
    """Return the values of a column as text; missing values become empty cells."""
    cells = ["" if gap else str(value) for value, gap in zip(series.tolist(), series.isna(), strict=True)]
    return np.array(cells, dtype=object)


def _match_spelling(cells: NDArray[np.object_], categories: Sequence[str]) -> NDArray[np.object_]:
    """Return numbers with the spelling of the category of the same value: pandas reads 1 in a CSV file as 1.0."""
    spelling = {number(category): category for category in reversed(categories) if number(category) is not None}
    known = {cell: cell if cell in categories else spelling.get(number(cell), cell) for cell in set(cells)}
    return np.array([known[cell] for cell in cells], dtype=object)
