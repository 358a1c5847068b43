"""Load any CSV file as a data set of numeric and categorical columns; infer the task from the target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedveil.checks import check_choice
from fedveil.data.catalogue import OpenUnitInterval, Scaling, Seed, Task, shorten
from fedveil.data.dataset import MAX_LIKELY_CLASSES, Data, part_from_arrays
from fedveil.data.rows import describe_table, encode_rows, numeric_columns
from fedveil.data.splits import divide
from fedveil.data.tables import (
    MISSING_CATEGORY,
    Column,
    CsvTable,
    Fills,
    Indices,
    flag,
    number,
    read_delimiter,
    read_table,
)
from fedveil.errors import BadArgument
from fedveil.records.encoding import CategoryColumn, NumberColumn

WHERE = "load('csv')"
MAX_CATEGORIES = 1000
MAX_CATEGORIES_PER_RECORD = 0.2  # with more categories per record, a column does not help a model
_PANDAS_EXAMPLE = "pandas.read_parquet (or read_excel, read_json)(path).to_csv('records.csv')"
_BINARY_SIGNATURES = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"PAR1", b"ARROW1")
_OTHER_SIGNATURES = (*_BINARY_SIGNATURES, b'{"', b"[{", b"<!DOCTYPE", b"<!doctype", b"\xff\xfe", b"\xfe\xff")


def csv(
    *,
    path: Path,
    target: str | None = None,
    task: Task | None = None,
    delimiter: str | None = None,
    decimal: Literal[".", ","] = ".",
    missing: Literal["refuse", "drop", "impute"] = "refuse",
    test_share: OpenUnitInterval = 0.2,
    seed: Seed = 0,
    ignore: str | Sequence[str] = (),
    categorical: str | Sequence[str] = (),
    scaling: Scaling = "records",
) -> Data:
    """Load a CSV file with a header; standardise numeric columns and one-hot encode the others.

    A cell is missing if it is empty or contains NA, N/A, #N/A, <NA>, NaN, null or ?, in upper or lower case; in
    numeric columns, None also counts as missing. Any other word, such as "unknown", is a category. In columns listed in
    `categorical`, only empty cells are missing. The `notes` of the result report what was inferred, left out
    or filled in.

    Args:
        path: the file.
        target: the column to predict.
        task: "classification" (classes are the sorted values of the target) or "regression" (a numeric target,
            standardised). By default, a target of words or of only two distinct integers, such as 0 and 1,
            means classification; any other numeric target means regression.
        delimiter: field delimiter; by default, a comma, semicolon, tab or | is detected.
        decimal: the decimal mark in numbers, "." or ",".
        missing: "refuse" missing cells (the error counts them), "drop" their records, or "impute" them: numbers with
            the median of the training part, which is robust to outliers, and words with the category "missing". Records
            with a missing target are always left out.
        test_share: fraction of the records to test on, between 0 and 1.
        seed: seed for the split into training and test records.
        ignore: columns that are not inputs; `split(..., how="column")` can still use them. A column without a name,
            usually a row number, is never an input.
        categorical: columns to treat as categories even though they contain numbers.
        scaling: only "records", because there are no public constants for a user's file.
    """
    if scaling == "public":
        fix = "scale the columns with public constants, and pass the records to fedveil.data.from_records"
        raise BadArgument(WHERE, "there are no public constants for a CSV file", fix)
    notes: list[str] = []
    categorical_columns, ignored_columns = _list_names(categorical), _list_names(ignore)
    table = _open_table(path, delimiter, decimal, notes)
    target = _check_target(table, target, ignored_columns, categorical_columns)
    inputs = _inspect_inputs(table, target, ignored_columns, categorical_columns, notes)
    target_column = table.inspect(target, target in categorical_columns)
    task = _choose_task(table, target_column, task, target in categorical_columns, notes)
    table = table.drop_missing(inputs, target_column, missing, notes)
    train, test = divide(len(table), (1 - test_share, test_share), seed)
    if not (len(train) and len(test)):
        fix = "use more records, or another test_share"
        raise BadArgument(table.path, f"{len(table)} records are too few to divide", fix)
    notes.append(f"divided at random: {len(train):,} records for training, {len(test):,} for testing")
    fills = table.choose_fills(inputs, train) if missing == "impute" else {}
    table = table.fill(inputs, fills, notes) if missing == "impute" else table
    columns = [_describe_column(table, column, train, fills, column.name in categorical_columns) for column in inputs]
    encoding = describe_table(table, columns, missing)
    features = encode_rows(table, encoding)
    if task == "classification" and target_column.numeric:
        table = _unify_spelling(table, target)
    if len(set(table.columns[target])) == 1:
        message = f"every record has the value {table.columns[target][0]!r}"
        table.reject_column(target, message, "use a target with at least two different values")
    _note_columns(table, inputs, notes)
    scale, classes = None, tuple[str, ...]()
    if task == "classification":
        classes = _list_categories(table, target, "classes", f"{flag('task', 'regression')}, or another target")
        records = part_from_arrays(features, table.codes(target, classes))
    else:
        moments = table.moments([target], train)
        records, scale = part_from_arrays(features, table.standardise([target], moments)), moments[target]
        notes.append(
            f"the target {target!r} is standardised (mean {scale[0]:.4g}, standard deviation {scale[1]:.4g}): "
            f"an mse of 1 corresponds to a squared error of {scale[1] ** 2:.4g} in the original units"
        )
    train_cells = {name: cells[train] for name, cells in table.columns.items() if name != target}
    parts = records.take(train), records.take(test)
    name = Path(table.path).stem
    return Data(name, *parts, None, classes, train_cells, None, scale, tuple(notes), encoding, target)


def _list_names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _open_table(path: Path, delimiter: str | None, decimal: str, notes: list[str]) -> CsvTable:
    """Read a CSV file; refuse other file types, which are recognised by their first bytes."""
    if path.is_dir():
        fix = "pass one of its files as --path, or use --data images for a folder of images"
        raise BadArgument(str(path), "it is a folder, not a CSV file", fix)
    character = read_delimiter(WHERE, delimiter, decimal)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(16).startswith(_OTHER_SIGNATURES):
                message = "it is not CSV, but Excel, Parquet, JSON, HTML, UTF-16 text or a compressed file"
                raise BadArgument(
                    str(path), message, f"save it as CSV in UTF-8, or convert it in Python: {_PANDAS_EXAMPLE}"
                )
    table = read_table(path, character, decimal)
    if len(table.columns) == 1:
        (header,) = table.columns
        message = f"with the delimiter {table.delimiter!r} there is only one column, {header[:80]!r}"
        fix = "use --delimiter (in Python delimiter=), or a file with at least one column besides the target"
        raise BadArgument(f"{path}, line 1", message, fix)
    if character is None and table.delimiter != ",":
        notes.append(f"fields are separated by {'tabs' if table.delimiter == chr(9) else repr(table.delimiter)}")
    return table


def _check_target(table: CsvTable, target: str | None, ignore: Sequence[str], categorical: Sequence[str]) -> str:
    """Return the target; refuse columns that are not in the table, and a header that contains numbers."""
    values = [name for name in table.columns if number(name, table.decimal) is not None]
    if values and target not in table.columns:
        message = f"the header should contain the names of the columns, but contains numbers ({shorten(values)})"
        raise BadArgument(f"{table.path}, line 1", message, "add a first line with the name of each column")
    if target is None:
        fix = f"use --target (in Python target=) with one of {', '.join(table.columns)}"
        raise BadArgument(WHERE, "the column to predict is not specified", fix)
    for column in (target, *ignore, *categorical):
        check_choice(table.path, "column", column, table.columns)
    if target in ignore:
        raise BadArgument(table.path, f"{target!r} is both the target and an ignored column", "choose one")
    return target


def _inspect_inputs(
    table: CsvTable, target: str, ignore: Sequence[str], categorical: Sequence[str], notes: list[str]
) -> list[Column]:
    """Choose and inspect the input columns; refuse columns of numbers that contain a few words."""
    names = [column for column in table.columns if column != target and column not in ignore]
    unnamed = [column for column in names if column.startswith("Unnamed: ") and column not in categorical]
    if unnamed:
        notes.append(f"left out unnamed columns, usually row numbers: {shorten(map(repr, unnamed))}")
    inputs = [table.inspect(name, name in categorical) for name in names if name not in unnamed]
    if not inputs:
        raise BadArgument(table.path, "no columns are left as inputs", "ignore fewer columns")
    for column in inputs:
        if not column.numeric and column.name not in categorical:
            _refuse_stray_words(table, column, flag("categorical", column.name))
    return inputs


def _refuse_stray_words(table: CsvTable, column: Column, alternative: str) -> None:
    """Refuse a column that looks numeric but contains a few words."""
    cells = table.columns[column.name]
    row, *others = np.flatnonzero(np.isin(cells, list(column.words))).tolist()
    word, other_mark = cells[row][:40], "," if table.decimal == "." else "."
    if all(number(cell, other_mark) is not None for cell in set(cells) - column.missing_values):
        message = (
            f"{word!r} is not a number with {table.decimal!r} as the decimal mark, but would be one with {other_mark!r}"
        )
        fix = (
            f"use {flag('decimal', other_mark)}, remove {other_mark!r} if it separates thousands, or use {alternative}"
        )
        table.refuse(row, column.name, message, fix)
    if 1 + len(others) < sum(cell not in column.missing_values for cell in cells) / 2:
        message = f"{word!r} is not a number, but most cells in this column are"
        fix = f"correct the cell, empty it if the value is missing, or use {alternative}"
        table.refuse(row, column.name, message, fix)


def _choose_task(table: CsvTable, target: Column, task: Task | None, categorical: bool, notes: list[str]) -> Task:
    """Return the task that the user chose, or infer it from the target."""
    classes = flag("task", "classification")
    if task == "regression" and categorical:
        message = f"regression needs numbers, but the target {target.name!r} is listed in categorical"
        raise BadArgument(table.path, message, f"remove it from categorical, or use {classes}")
    if task == "regression" and not target.numeric:
        column = table.columns[target.name]
        row = int(np.isin(column, list(target.words)).argmax())
        message = f"{column[row][:40]!r} is not a number, but regression needs numbers"
        table.refuse(row, target.name, message, f"correct the cell, or use {classes}")
    if task is not None or categorical:
        return task or "classification"
    cells = set(table.columns[target.name]) - target.missing_values
    if not target.numeric:
        _refuse_stray_words(table, target, classes)
        description = f"{len(cells):,} distinct words, such as {min(cells)[:40]!r}"
        notes.append(f"classification, because the target {target.name!r} has {description}")
        return "classification"
    numbers = {value for cell in cells if (value := number(cell, table.decimal)) is not None}
    all_integers, name = all(value.is_integer() for value in numbers), repr(target.name)
    if all_integers and len(numbers) == 2:
        description, alternative = " and ".join(f"{value:.0f}" for value in sorted(numbers)), flag("task", "regression")
        notes.append(
            f"two classes, because the target {name} has only {description}; use {alternative} if they are quantities"
        )
        return "classification"
    description = (
        f"numbers, but only {len(numbers)} distinct integers"
        if all_integers and len(numbers) <= MAX_LIKELY_CLASSES
        else "numbers"
    )
    notes.append(
        f"regression, because the target {name} has {description}; use --task classification if they are classes"
    )
    return "regression"


def _unify_spelling(table: CsvTable, target: str) -> CsvTable:
    """Return the table with one spelling of each number in the target: 1 and 1.0 are the same class."""
    spelling: dict[float | None, str] = {}
    cells = sorted(set(table.columns[target]), key=lambda cell: (len(cell), cell))
    values = {cell: spelling.setdefault(number(cell, table.decimal), cell) for cell in cells}
    return table.replace_cells(target, values)


def _describe_column(
    table: CsvTable, column: Column, train: Indices, fills: Fills, is_text: bool
) -> NumberColumn | CategoryColumn:
    """Return the encoding of one column; `is_text` means that the user listed it in `categorical`."""
    if column.numeric:
        return numeric_columns(table.moments([column.name], train), fills)[0]
    categories = _list_categories(table, column.name, "one-hot inputs", flag("ignore", column.name))
    fill = MISSING_CATEGORY if fills and MISSING_CATEGORY in categories else None
    return CategoryColumn(column.name, categories, fill, "text" if is_text else "words")


def _list_categories(table: CsvTable, column: str, purpose: str, alternative: str) -> tuple[str, ...]:
    """Return the distinct values of a column; refuse too many, such as dates or amounts with currency signs."""
    values = table.categories(column)
    if len(values) > MAX_CATEGORIES:
        message = f"{len(values):,} distinct values are too many for {purpose} (at most {MAX_CATEGORIES:,})"
        fix = f"use {alternative}; write amounts without currency signs and separators, and dates as numbers of days"
        table.reject_column(column, message, fix)
    return values


def _note_columns(table: CsvTable, inputs: Sequence[Column], notes: list[str]) -> None:
    """Append notes about columns that are treated as categories, contain row numbers or have too many categories."""
    sizes = {column.name: len(set(table.columns[column.name])) for column in inputs if not column.numeric}
    if sizes:
        notes.append(f"treated as categories: {shorten(f'{name} ({size:,} values)' for name, size in sizes.items())}")
    numeric_names = [column.name for column in inputs if column.numeric and len(table) > MAX_LIKELY_CLASSES]
    row_numbers = [name for name in numeric_names if (np.diff(table.numbers(name)) == 1).all()]  # consecutive integers
    if row_numbers:
        message = f"{shorten(map(repr, row_numbers))} contains row numbers, which do not help to predict new records"
        notes.append(f"{message}; use {flag('ignore', row_numbers[0])} if it is an identifier")
    large_columns = [
        name for name, size in sizes.items() if size > max(MAX_LIKELY_CLASSES, MAX_CATEGORIES_PER_RECORD * len(table))
    ]
    if large_columns:
        message = f"{shorten(map(repr, large_columns))}: too many categories, so a model would memorise the records"
        notes.append(f"{message}; use --ignore for dates and identifiers, and remove currency signs from numbers")
