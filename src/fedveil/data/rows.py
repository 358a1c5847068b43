"""Encode rows of a table as a model's inputs, in the same way for training and for prediction."""

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
    find_missing_values,
    number,
    refuse_repeated,
)
from fedveil.errors import BadArgument
from fedveil.records.encoding import CategoryColumn, NumberColumn, TableEncoding

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Unknown = Literal["refuse", "ignore"]
INCOMPLETE_FIX = "fill in the cells, leave these records out, or train with --missing impute (which fills a column of "
INCOMPLETE_FIX += "words only if some of its cells were missing in training)"
NO_FILL_FIX = "fill in the cells, or use --unknown ignore; no cell of this column was missing in training"
UNKNOWN_FIX = (
    ', or use --unknown ignore (in Python unknown="ignore"), which sets all inputs of an unknown category to 0'
)


def numeric_columns(moments: Moments, fills: Fills | None = None) -> tuple[NumberColumn, ...]:
    """Return the encoding of columns of numbers."""
    columns = []
    for name, (mean, deviation) in moments.items():
        fill = (fills or {}).get(name)
        columns.append(NumberColumn(name, mean, deviation, fill if isinstance(fill, float) else None))
    return tuple(columns)


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
    """Encode new rows; return the inputs and the indices of the rows that were encoded.

    Columns are matched by name; other columns are ignored. Missing cells are treated as in training.

    Args:
        table: the rows.
        encoding: the encoding of the training rows.
        unknown: "refuse" categories that did not occur in training, or "ignore" them, which sets their inputs to 0.
        notes: list that receives messages about ignored columns, missing cells and unknown categories.
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
        if unknown == "refuse":  # a column without missing cells in training has no fill value
            table.drop_missing(
                [column for column in columns if fills[column.name] is None], None, "refuse", notes, NO_FILL_FIX
            )
        table = table.fill(columns, fills, notes)
    else:
        table = table.drop_missing(columns, None, encoding.missing, notes, INCOMPLETE_FIX)
    categories = {column.name: column.categories for column in encoding.columns if isinstance(column, CategoryColumn)}
    if masks := table.find_unknown(categories):
        if unknown == "refuse":
            table.refuse_unknown(masks, categories, UNKNOWN_FIX)
        missing_cells = {
            column.name: np.isin(table.columns[column.name], list(column.missing_values))
            for column in columns
            if column.name in masks
        }
        unknown_cells = {name: mask & ~missing_cells[name] for name, mask in masks.items()}
        for cells, description in (
            (unknown_cells, "unknown categories"),
            (missing_cells, "missing cells in columns without a fill value"),
        ):
            if affected_cells := {name: mask for name, mask in cells.items() if mask.any()}:
                notes.append(f"set all inputs to 0 for {description} ({count_cells(affected_cells)})")
    row_indices = np.flatnonzero(np.isin(lines, table.lines))
    return torch.from_numpy(encode_rows(table, encoding).astype(np.float32)), row_indices


def _find_missing(table: CsvTable, encoding: TableEncoding, column: NumberColumn | CategoryColumn) -> Column:
    """Return a column with the values that count as missing."""
    missing = {"number": encoding.missing_numbers, "words": encoding.missing_words, "text": ("",)}[column.kind]
    cells = set(table.columns[column.name])
    return Column(column.name, column.kind == "number", find_missing_values(cells, missing), frozenset())


def read_frame(frame: "DataFrame", encoding: TableEncoding | None = None) -> CsvTable:
    """Return the cells of a pandas DataFrame as text, as they would be in a CSV file with decimal points."""
    names = [str(name) for name in frame.columns]
    refuse_repeated("the DataFrame", names, "give each column a unique name: frame.columns = [...]")
    columns = {str(name): _cells_as_text(series) for name, series in frame.items()}
    for column in encoding.columns if encoding else ():
        if isinstance(column, CategoryColumn) and column.name in columns:
            columns[column.name] = _match_spelling(columns[column.name], column.categories)
    return CsvTable("the DataFrame", columns, np.arange(len(frame)), unit="row")


def _cells_as_text(series: "Series") -> NDArray[np.object_]:
    """Return the values of a column as text; missing values become empty cells."""
    cells = ["" if is_missing else str(value) for value, is_missing in zip(series.tolist(), series.isna(), strict=True)]
    return np.array(cells, dtype=object)


def _match_spelling(cells: NDArray[np.object_], categories: Sequence[str]) -> NDArray[np.object_]:
    """Spell numbers like the categories with the same value, because pandas may read 1 from a CSV file as 1.0."""
    spelling = {number(category): category for category in reversed(categories) if number(category) is not None}
    matched_cells = {cell: cell if cell in categories else spelling.get(number(cell), cell) for cell in set(cells)}
    return np.array([matched_cells[cell] for cell in cells], dtype=object)
