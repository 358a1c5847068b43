"""The encoding of a run's records: how rows and images become a model's inputs, and outputs become predictions.

It is written as JSON to the folder of every run, so that the model can be used on new records.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from fedveil.errors import BadArgument
from fedveil.files import write_atomically
from fedveil.plain_json import SCHEMA, check_schema, read_json, to_json

FILE = "encoding.json"
WIDTH = 120  # characters per line
STRICT = ConfigDict(extra="forbid")
OutputKind = Literal["softmax", "sigmoid", "scores", "exponential", "values"]


@with_config(STRICT)
@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers: a cell x becomes (x - mean) / deviation; a missing cell becomes `fill`, if it is set."""

    name: str
    mean: float
    deviation: float
    fill: float | None = None
    kind: Literal["number"] = "number"


@with_config(STRICT)
@dataclass(frozen=True)
class CategoryColumn:
    """A column of categories: one input per category, which is 1 for the cell's category and 0 for the others.

    A missing cell becomes the category `fill`, if it is set. In a column of kind "text", only empty cells are missing;
    in a column of kind "words", the words in `TableEncoding.missing_words` count as missing too.
    """

    name: str
    categories: tuple[str, ...]
    fill: str | None = None
    kind: Literal["words", "text"] = "words"


@with_config(STRICT)
@dataclass(frozen=True)
class TableEncoding:
    """The encoding of the rows of a table.

    Attributes:
        columns: the columns that become inputs, in the order of the inputs.
        missing: how training handled missing cells: "refuse" them, "drop" their rows, or "impute" them.
        missing_numbers: cells that count as missing in columns of numbers, in lower case.
        missing_words: cells that count as missing in columns of words, in lower case.
        delimiter: the delimiter of the training file.
        decimal: the decimal mark of the training file.
    """

    columns: tuple[Annotated[NumberColumn | CategoryColumn, Field(discriminator="kind")], ...]
    missing: Literal["refuse", "drop", "impute"] = "refuse"
    missing_numbers: tuple[str, ...] = ("",)
    missing_words: tuple[str, ...] = ("",)
    delimiter: str = ","
    decimal: Literal[".", ","] = "."
    kind: Literal["table"] = "table"


@with_config(STRICT)
@dataclass(frozen=True)
class ImageEncoding:
    """The encoding of images: RGB pixels in [0, 1], resized to `size` x `size` and standardised by channel.

    The means of `pool` x `pool` neighbouring values are then taken, if `pool` is not 1.
    """

    size: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    pool: int = 1
    kind: Literal["images"] = "images"


@with_config(STRICT)
@dataclass(frozen=True)
class NumbersEncoding:
    """Records that are passed to the model unchanged; `columns` are the names of the training inputs, if any."""

    columns: tuple[str, ...] = ()
    kind: Literal["numbers"] = "numbers"


InputEncoding = TableEncoding | ImageEncoding | NumbersEncoding


@with_config(STRICT)
@dataclass(frozen=True)
class TensorForm:
    """The shape of one record of a tensor, and its dtype, such as "float32"."""

    shape: tuple[int, ...]
    dtype: str


@with_config(STRICT)
@dataclass(frozen=True)
class OutputForm:
    """The form of a model's outputs.

    Attributes:
        kind: "softmax" and "sigmoid" turn the outputs into probabilities of classes; "scores" are one number per class,
            the largest of which is the prediction; "exponential" turns the outputs into expected counts; "values" are
            predicted numbers.
        shape: shape of the output for one record.
        class_axis: the axis of the classes, where 0 is the axis of records.
        entry: the chosen entry of the model's output; "" if none was chosen.
    """

    kind: OutputKind
    shape: tuple[int, ...]
    class_axis: int = -1
    entry: str = ""


@with_config(STRICT)
@dataclass(frozen=True)
class Encoding:
    """The encoding of a run's records.

    Attributes:
        inputs: how records become the model's inputs.
        target: name of the predicted column, if it is known.
        classes: names or numbers of the classes, by index; () for regression.
        target_scale: mean and standard deviation of a standardised target: value = output x deviation + mean.
        tensors: the form of each input tensor, set by the server.
        outputs: the form of the model's outputs, set by the server.
    """

    inputs: Annotated[InputEncoding, Field(discriminator="kind")] = NumbersEncoding()
    target: str = ""
    classes: tuple[str | int, ...] = ()
    target_scale: tuple[float, float] | None = None
    tensors: Mapping[str, TensorForm] | None = None
    outputs: OutputForm | None = None


def write_encoding(folder: Path, encoding: Encoding) -> None:
    """Write an encoding to a folder, unless the file is up to date."""
    path, text = folder / FILE, format_encoding(encoding)
    if not path.is_file() or path.read_text() != text:
        write_atomically(path, text)


def format_encoding(encoding: Encoding) -> str:
    """Return an encoding as JSON."""
    return _format({"schema": SCHEMA, **asdict(encoding)}) + "\n"


def _format(value: Any, indent: str = "", prefix: str = "") -> str:
    """Format a value as JSON after `prefix`, on one line if it fits."""
    line = prefix + to_json(value)
    if len(indent) + len(line) < WIDTH or not isinstance(value, dict | list | tuple):
        return line
    inner_indent = indent + "  "
    if isinstance(value, dict):
        items = [_format(item, inner_indent, f"{json.dumps(name)}: ") for name, item in value.items()]
    else:
        items = [_format(item, inner_indent) for item in value]
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{prefix}{start}\n{inner_indent}" + f",\n{inner_indent}".join(items) + f"\n{indent}{end}"


def read_encoding(folder: Path) -> Encoding:
    """Read the encoding in the folder of a run; refuse an unknown schema and invalid values."""
    path = folder / FILE
    if not path.is_file():
        message = f"{FILE} is missing in this folder" if folder.is_dir() else "this folder does not exist"
        raise BadArgument(str(folder), message, "use the folder of a run, or train again")
    values = check_schema(read_json(path), str(path))
    try:
        return TypeAdapter(Encoding).validate_python(values)
    except ValidationError as error:
        first_error = error.errors()[0]
        message = f"{'.'.join(map(str, first_error['loc']))} is not valid: {first_error['msg']}"
        raise BadArgument(str(path), message, "restore the file, or train again") from error
