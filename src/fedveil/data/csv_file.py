"""Any CSV file as a data set: columns of numbers and of words, and a task that is guessed from the target."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from fedveil.checks import one_of, whole
from fedveil.data import gaps
from fedveil.data.catalogue import About, dataset, few, required
from fedveil.data.gaps import Column, flag
from fedveil.data.records import Data, tensor_part
from fedveil.data.splits import parts
from fedveil.data.tables import DELIMITERS, TASKS, CsvTable, number, read_table
from fedveil.errors import BadArgument

WHERE = "load('csv')"
MOST_CATEGORIES = 1000
FEW = 20  # whole numbers that may be classes
MANY = 0.2  # categories per record that help no model
_TAB = {"\\t": "\t", "tab": "\t"}  # as typed in a shell
_UNNAMED = re.compile(r"Unnamed: \d+")
_PANDAS = "in Python: pandas.{reader}(path).to_csv('records.csv', index=False)"
_UTF16 = "save it as UTF-8, or convert it: iconv -f utf-16 -t utf-8 old.csv > new.csv"
_OTHER_FILES = {
    b"PK\x03\x04": ("an Excel workbook or a zip file", "save the sheet as CSV UTF-8, or unpack the zip file"),
    b"\xd0\xcf\x11\xe0": ("an Excel workbook", "save the sheet as CSV UTF-8"),
    b"PAR1": ("a Parquet file", _PANDAS.format(reader="read_parquet")),
    b"ARROW1": ("a Feather file", _PANDAS.format(reader="read_feather")),
    b"\x1f\x8b": ("compressed with gzip", "unpack it with gunzip"),
    b"BZh": ("compressed with bzip2", "unpack it with bunzip2"),
    b"\xfd7zXZ": ("compressed with xz", "unpack it with unxz"),
    b'{"': ("JSON", _PANDAS.format(reader="read_json")),
    b"[{": ("JSON", _PANDAS.format(reader="read_json")),
    b"<!DOCTYPE": ("a web page", "download the file itself"),
    b"<!doctype": ("a web page", "download the file itself"),
    b"\xff\xfe": ("UTF-16 text", _UTF16),
    b"\xfe\xff": ("UTF-16 text", _UTF16),
}


class _Wanted(NamedTuple):
    inputs: tuple[str, ...]
    target: str
    categorical: tuple[str, ...]


@dataset("csv", About("any CSV file with a header; needs --path and --target", "yours", "yours"))
def csv_file(
    *,
    path: Path | None = None,
    target: str | None = None,
    task: str | None = None,
    delimiter: str | None = None,
    decimal: str = ".",
    missing: str = "refuse",
    test_share: float = 0.2,
    seed: int = 0,
    ignore: str | Sequence[str] = (),
    categorical: str | Sequence[str] = (),
) -> Data:
    """Any CSV file with a header: numeric columns standardised on the training part, others one-hot.

    A cell is missing if it is empty or NA, N/A, #N/A, <NA>, NaN, null or ?, in upper or lower case; among numbers also
    None. Any other word, such as "unknown", is a category. In columns named in `categorical` only the empty cell is
    missing. What was guessed, left out or filled in is said in the `notes` of the result.

    Args:
        path: the file.
        target: the column to predict.
        task: "classification" (classes are the sorted values of the target) or "regression" (a numeric target,
            standardised on the training part). By default a numeric target is a regression, unless it holds only two
            different integers, such as 0 and 1: these are classes, as words are.
        delimiter: between fields; by default found among comma, semicolon, tab and |.
        decimal: the decimal mark of numbers, "." or ",".
        missing: what becomes of missing cells: "refuse" (an error that counts them), "drop" (their records are left
            out) or "impute" (among numbers the median of the training part, which extreme values do not move; among
            words a category of its own, "missing", so that no value is made up). A target is never filled in: its
            record is left out.
        test_share: of the records, between 0 and 1.
        seed: of the division into training and test records.
        ignore: columns that are not inputs; `split(..., how="column")` may still go by them. A column without a name,
            which is mostly a row number, is never an input.
        categorical: columns to take as categories although they hold numbers.
    """
    notes: list[str] = []
    if not 0 < test_share < 1:
        raise BadArgument(WHERE, f"test_share is {test_share}", "a number between 0 and 1")
    one_of(WHERE, "way with missing cells,", missing, gaps.WAYS)
    table = _opened(required("csv", path, "records.csv"), delimiter, decimal, notes)
    wanted = _wanted(table, target, _names("ignore", ignore), _names("categorical", categorical), notes)
    inputs = [_input(table, name, name in wanted.categorical) for name in wanted.inputs]
    answer = gaps.look_at(table, wanted.target, wanted.target in wanted.categorical)
    task = _task(table, answer, task, answer.name in wanted.categorical, notes)
    table, counts = gaps.complete(table, inputs, answer, missing, notes)
    train, test = parts(len(table), (1 - test_share, test_share), whole(WHERE, "seed", seed, 0))
    if not (len(train) and len(test)):
        raise BadArgument(table.path, f"{len(table)} records leave a part empty", "more records, or another test_share")
    notes.append(f"divided at random: {len(train):,} records for training, {len(test):,} for testing")
    table = gaps.impute(table, inputs, counts, train, notes)
    numbers = np.concatenate([_encoded(table, column, train) for column in inputs], 1)
    table = _unify_spelling(table, answer) if answer.numeric and task == "classification" else table
    classes = _classes(table, answer.name) if task == "classification" else ()
    _describe(table, inputs, notes)
    records = tensor_part(numbers, table.codes(answer.name, classes) if classes else _scaled(table, answer.name, train))
    scale = None if classes else table.scale(answer.name, train)
    return Data(
        Path(table.path).stem,
        records.take(train),
        records.take(test),
        classes=classes,
        columns={
            name: np.array(cells, dtype=object)[train] for name, cells in table.columns.items() if name != answer.name
        },
        target_scale=scale,
        notes=(*notes, scale_note(f"the target {answer.name!r}", scale)) if scale else tuple(notes),
    )


def scale_note(target: str, scale: tuple[float, float]) -> str:
    """What it means for errors that a target is standardised."""
    mean, deviation = scale
    return (
        f"{target} is standardised (mean {mean:.4g} and deviation {deviation:.4g} become 0 and 1): "
        f"an mse of 1 is a squared error of {deviation**2:.4g} in its own units"
    )


def _names(option: str, names: str | Sequence[str]) -> tuple[str, ...]:
    listed = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) for name in listed):
        raise BadArgument(WHERE, f"{option} is {names!r}", "names of columns")
    return listed


def _opened(path: Path, delimiter: str | None, decimal: str, notes: list[str]) -> CsvTable:
    """The table in a file; what is no CSV file is told by its first bytes."""
    if path.is_dir():
        inside = few(sorted(child.name for child in path.glob("*.csv")))
        fix = (
            f"--path of one of its files: {inside}" if inside else "a CSV file; --data images takes a folder of images"
        )
        raise BadArgument(str(path), "it is a folder, not a CSV file", fix)
    mark = _TAB.get(delimiter or "", delimiter)
    if mark is not None and (len(mark) != 1 or mark in '"\r\n'):
        raise BadArgument(WHERE, f"delimiter is {delimiter!r}", 'one character, such as "," or ";", or "tab"')
    if decimal not in (".", ",") or decimal == mark:
        what = f"the decimal mark is {decimal!r}" + (", and so is the delimiter" if decimal == mark else "")
        raise BadArgument(WHERE, what, 'decimal "." or ",", and another delimiter')
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(16)
        for magic, (what, fix) in _OTHER_FILES.items():
            if start.startswith(magic):
                raise BadArgument(str(path), f"it is {what}, not a CSV file", fix)
    table = read_table(path, mark, decimal)
    if len(table.columns) == 1:
        _refuse_one_column(table)
    if mark is None and table.delimiter != ",":
        notes.append(f"fields are separated by {'tabs' if table.delimiter == chr(9) else repr(table.delimiter)}")
    return table


def _refuse_one_column(table: CsvTable) -> NoReturn:
    (header,) = table.columns
    likely = max((*DELIMITERS, " "), key=header.count)
    fix = "a file with the column to predict and at least one other"
    if likely in header:
        fix = flag("delimiter", "tab" if likely == "\t" else likely)
    what = f"with {table.delimiter!r} between fields there is only one column, {header[:80]!r}"
    raise BadArgument(f"{table.path}, line 1", what, fix)


def _wanted(
    table: CsvTable, target: str | None, ignore: Sequence[str], categorical: Sequence[str], notes: list[str]
) -> _Wanted:
    """Inputs and target, if there are such columns and they go together."""
    values = [name for name in table.columns if number(name, table.decimal) is not None]
    if values and target not in table.columns:
        what = f"the header should hold the names of the columns, and has numbers ({few(values)})"
        raise BadArgument(f"{table.path}, line 1", what, "a first line with a name for each column")
    if target is None:
        every = ", ".join(table.columns)
        raise BadArgument(WHERE, "it needs the column to predict", f"--target (in Python target=) one of {every}")
    for column in (target, *ignore, *categorical):
        one_of(table.path, "column", column, table.columns)
    if target in ignore:
        raise BadArgument(table.path, f"{target!r} is both the target and in ignore", "take it out of one of them")
    names = [column for column in table.columns if column != target and column not in ignore]
    unnamed = [column for column in names if _UNNAMED.fullmatch(column) and column not in categorical]
    if unnamed:
        notes.append(f"left out columns without a name, which are mostly row numbers: {few(map(repr, unnamed))}")
    inputs = tuple(column for column in names if column not in unnamed)
    if not inputs:
        raise BadArgument(table.path, "no column is left for the inputs", "ignore fewer columns")
    return _Wanted(inputs, target, tuple(categorical))


def _input(table: CsvTable, name: str, categorical: bool) -> Column:
    found = gaps.look_at(table, name, categorical)
    if not found.numeric and not categorical:
        _refuse_spoilt_numbers(table, found, flag("categorical", name))
    return found


def _not_numbers(table: CsvTable, column: Column) -> list[int]:
    """Rows whose cell is neither a number nor missing."""
    values = set(table.columns[column.name]) - column.gaps
    words = {value for value in values if number(value, table.decimal) is None}
    return [row for row, cell in enumerate(table.columns[column.name]) if cell in words]


def _refuse_spoilt_numbers(table: CsvTable, column: Column, otherwise: str) -> None:
    """Refuse words in a column that looks as if it were meant to be numeric."""
    cells, odd = table.columns[column.name], _not_numbers(table, column)
    first, other = cells[odd[0]][:40], "," if table.decimal == "." else "."
    if all(number(cell, other) is not None for cell in set(cells) - column.gaps):
        what = f"{first!r} is no number with {table.decimal!r} as the decimal mark, but would be one with {other!r}"
        fix = f"{flag('decimal', other)}; if it separates thousands, take it out of the file; else {otherwise}"
        table.refuse(odd[0], column.name, what, fix)
    if len(odd) < sum(cell not in column.gaps for cell in cells) / 2:
        what = f"{first!r} is not a number, and most of this column is"
        table.refuse(odd[0], column.name, what, f"mend the cell, empty it if the value is missing, or {otherwise}")


def _task(table: CsvTable, target: Column, task: str | None, categorical: bool, notes: list[str]) -> str:
    """The task that is asked for, or that the target suggests."""
    if task is not None:
        one_of(WHERE, "task", task, TASKS)
    if task == "regression" and categorical:
        what = f"a regression needs numbers, and the target {target.name!r} is in categorical"
        raise BadArgument(table.path, what, "take it out, or " + flag("task", "classification"))
    if task == "regression" and not target.numeric:
        row = _not_numbers(table, target)[0]
        what = f"{table.columns[target.name][row][:40]!r} is not a number, and a regression needs numbers"
        table.refuse(row, target.name, what, f"mend the cell, or {flag('task', 'classification')}")
    if task is not None or categorical:
        return task or "classification"
    values = set(table.columns[target.name]) - target.gaps
    if not target.numeric:
        _refuse_spoilt_numbers(table, target, flag("task", "classification"))
        held = f"{len(values):,} different words such as {min(values)[:40]!r}"
        notes.append(f"a classification, as the target {target.name!r} holds {held}")
        return "classification"
    sizes = {size for value in values if (size := number(value, table.decimal)) is not None}
    integers, name = all(size.is_integer() for size in sizes), repr(target.name)
    if integers and len(sizes) == 2:
        held, otherwise = " and ".join(f"{size:.0f}" for size in sorted(sizes)), flag("task", "regression")
        notes.append(f"two classes, as the target {name} holds only {held}; {otherwise} if they are quantities")
        return "classification"
    held = f"numbers, which are only {len(sizes)} different integers" if integers and len(sizes) <= FEW else "numbers"
    notes.append(f"a regression, as the target {name} holds {held}; --task classification if they are classes")
    return "regression"


def _unify_spelling(table: CsvTable, target: Column) -> CsvTable:
    """The table with one spelling of each number in the target: 1 and 1.0 are one class."""
    spelling: dict[float | None, str] = {}
    for cell in sorted(set(table.columns[target.name]), key=lambda cell: (len(cell), cell)):
        spelling.setdefault(number(cell, table.decimal), cell)
    cells = tuple(spelling[number(cell, table.decimal)] for cell in table.columns[target.name])
    return replace(table, columns=table.columns | {target.name: cells})


def _encoded(table: CsvTable, column: Column, train: NDArray[np.int64]) -> NDArray[np.float64]:
    """One column as numbers: standardised if it is numeric, else one-hot."""
    if column.numeric:
        return table.scaled([column.name], train)
    categories = table.categories(column.name)
    if len(categories) > MOST_CATEGORIES:
        what = f"{len(categories):,} different values are too many for one-hot inputs (at most {MOST_CATEGORIES:,})"
        fix = _disguised(categories) or flag("ignore", column.name)
        raise BadArgument(f"{table.path}, column {column.name!r}", what, fix)
    return table.one_hot(column.name, categories)


def _disguised(values: Sequence[str]) -> str | None:
    """What to do about values that are mostly numbers with a sign or separators around them, or dates."""
    if all(re.fullmatch(r"[-+]?[€$£¥]?\s*[-+]?\d[\d.,' ]*\s*[€$£¥%]?", value) for value in values):
        return f"numbers alone, without currency signs and separators of thousands: {values[0][:20]!r} is none"
    if all(re.match(r"\d{1,4}[-./]\d{1,2}[-./]\d{1,4}", value) for value in values):
        return "dates as numbers, such as days since the first; or leave the column out: --ignore"
    return None


def _describe(table: CsvTable, inputs: Sequence[Column], notes: list[str]) -> None:
    """Say which columns are categories: numbers that could not be read as such would be among them."""
    sizes = {column.name: len(set(table.columns[column.name])) for column in inputs if not column.numeric}
    if sizes:
        notes.append(f"taken as categories: {few(f'{name} ({size:,} values)' for name, size in sizes.items())}")
    rising = [column.name for column in inputs if column.numeric and _counts_rows(table, column)]
    if rising:
        what = f"{few(map(repr, rising))} counts the rows, which says nothing about new ones"
        notes.append(f"{what}: {flag('ignore', rising[0])} if it is an identifier")
    many = [name for name, size in sizes.items() if size > max(FEW, MANY * len(table))]
    if many:
        what = f"nearly a category per record in {few(map(repr, many))}, which a model learns by heart"
        notes.append(f"{what}: --ignore dates and identifiers, and take signs and separators out of numbers")


def _counts_rows(table: CsvTable, column: Column) -> bool:
    """Whether a column holds consecutive integers, one for each row in their order."""
    numbers = table.numbers(column.name)
    return len(numbers) > FEW and bool((np.diff(numbers) == 1).all())


def _classes(table: CsvTable, target: str) -> tuple[str, ...]:
    """The classes of a target column, at least two."""
    classes = table.categories(target)
    if len(classes) > MOST_CATEGORIES:
        what = f"{len(classes):,} different values are too many for classes (at most {MOST_CATEGORIES:,})"
        fix = _disguised(classes) or f"{flag('task', 'regression')}, or another target"
        raise BadArgument(f"{table.path}, column {target!r}", what, fix)
    _refuse_constant(table, target)
    return classes


def _scaled(table: CsvTable, target: str, train: NDArray[np.int64]) -> NDArray[np.float64]:
    _refuse_constant(table, target)
    return table.scaled([target], train)


def _refuse_constant(table: CsvTable, target: str) -> None:
    values = set(table.columns[target])
    if len(values) == 1:
        what = f"every record has the value {values.pop()!r}"
        raise BadArgument(f"{table.path}, column {target!r}", what, "a target with two different values or more")
