"""Predict new records with the model of a run, encoded as its training records were."""

import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedveil.checks import check_choice
from fedveil.data.archives import open_archive
from fedveil.data.catalogue import shorten
from fedveil.data.images import SUFFIXES, decode_images, encode_images
from fedveil.data.rows import Unknown, encode_new_rows, read_frame
from fedveil.data.tables import CsvTable, parse_table, read_delimiter
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import move_inputs, predict
from fedveil.federation.state import Folder
from fedveil.federation.targets import refuse_failure
from fedveil.files import convert_os_errors
from fedveil.graph.outputs import Output, choose_output, read_choice
from fedveil.records.arrays import as_tensor, is_frame, is_series
from fedveil.records.encoding import Encoding, ImageEncoding, NumbersEncoding, OutputForm, TableEncoding, read_encoding
from fedveil.records.inputs import Inputs, as_dicts, tensors_by_path
from fedveil.records.sources import check_finite
from fedveil.runs.folder import load_model

if TYPE_CHECKING:
    from pandas import DataFrame, Index

Array = NDArray[np.generic]
Decimal = Literal[".", ","]
ARRAYS, WHERE = (".npy", ".npz"), "new records"
INPUTS = "inputs"  # the array of records in an .npz file that has several
UNKNOWN = ("refuse", "ignore")


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions for records, in their order.

    Attributes:
        labels: the class of each record; None for quantities.
        probabilities: one column per class; None for quantities, and for losses whose outputs are not probabilities.
        values: predicted quantities, in the units of the target; None for classes.
        classes: the classes of the columns of `probabilities`.
        rows: the index of each record in what was passed. Records with missing cells are left out if training left
            them out.
        names: the file of each image; otherwise ().
        notes: messages about ignored columns, missing cells and unknown categories.
        index: the index of these records in the DataFrame that was passed; otherwise None.
    """

    labels: Array | None
    probabilities: NDArray[np.float64] | None
    values: NDArray[np.float64] | None
    classes: tuple[str | int, ...]
    rows: NDArray[np.int64]
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    index: "Index | None" = None

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self) -> dict[str, Array]:
        """Return the predictions by column: `prediction`, and `probability_CLASS` for each class."""
        main = self.labels if self.labels is not None else self.values
        assert main is not None
        found = _name_columns("prediction", main.reshape(len(self), -1), range(math.prod(main.shape[1:])))
        if self.probabilities is not None:
            if self.probabilities.ndim > 2:
                what, fix = "each record has several positions with a class", "use .labels and .probabilities"
                raise BadArgument("predictions", what, f"{fix}, or --out predictions.npz")
            parts = self.probabilities.shape[1]
            names = self.classes if len(self.classes) == parts else range(parts)
            found |= {f"probability_{name}": self.probabilities[:, index] for index, name in enumerate(names)}
        return found

    def to_frame(self) -> "DataFrame":
        """Return the predictions as a pandas DataFrame with the index of the DataFrame that was passed, or `rows`."""
        from pandas import DataFrame

        return DataFrame(self.columns(), index=self.rows if self.index is None else self.index)


def _name_columns(name: str, values: Array, numbers: Sequence[int]) -> dict[str, Array]:
    """Return the columns of an array by name; they are numbered if there are several."""
    if len(numbers) == 1:
        return {name: values[:, 0]}
    return {f"{name}_{number}": values[:, number] for number in numbers}


@dataclass(frozen=True, eq=False)
class EncodedRecords:
    """Records as inputs of a model; see `Predictions` for the other attributes."""

    inputs: Inputs
    rows: NDArray[np.int64]
    names: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Predictor:
    """The model of a run with the encoding of its records, from `load_predictor`.

    Call it with new records: a pandas DataFrame, whose columns are found by name and encoded; the path of a CSV file,
    of a folder or zip file of images, or of an .npy or .npz file; or a tensor or an array (or a tuple or dict of
    tensors) of what the model takes. Such numbers are not encoded, except that images of bytes are scaled.

    Attributes:
        model: the model, in evaluation mode.
        encoding: the encoding in the run's folder.
        unknown: whether categories that training did not have are refused, or ignored: all their inputs are then 0.
        delimiter: the delimiter of CSV files; None for the training file's if the header contains it, else detected.
        decimal: the decimal mark of CSV files; None for the training file's.
    """

    model: nn.Module
    encoding: Encoding
    unknown: Unknown = "refuse"
    delimiter: str | None = None
    decimal: Decimal | None = None

    def __post_init__(self) -> None:
        check_choice("load_predictor", "unknown", self.unknown, UNKNOWN)
        check_choice("load_predictor", "decimal", self.decimal or ".", (".", ","))

    def __call__(self, records: object) -> Predictions:
        """Return the predictions for records; refuse records that cannot be encoded."""
        encoded = self.encode(records)
        forms = ", ".join(f"{tuple(own.shape[1:])} {own.dtype}" for own in tensors_by_path(encoded.inputs).values())
        what = f"{type(self.model).__name__} does not accept them (each record: {forms.replace('torch.', '')})"
        with refuse_failure(WHERE, what, f"pass records of the form {self._expected()}"):
            outputs = predict(self.model, encoded.inputs)
        form = self.encoding.outputs or OutputForm("values", tuple(outputs.shape[1:]))
        labels, probabilities, values = convert_outputs(outputs.double().cpu(), form, self.encoding)
        index = records.index[encoded.rows] if is_frame(records) else None
        found = encoded.rows, encoded.names, tuple(encoded.notes), index
        return Predictions(labels, probabilities, values, self.encoding.classes, *found)

    def encode(self, records: object) -> EncodedRecords:
        """Return records as the model's inputs; refuse NaN and infinity."""
        if isinstance(records, str | Path):
            found = self._encode_file(Path(records))
        else:
            self._refuse_single(records)
            found = self._encode_frame(records) if is_frame(records) else self._encode_arrays(records)
        check_finite(WHERE, (found.inputs, torch.zeros(len(found.rows))), found.rows.tolist())
        first = next(self.model.parameters())
        return replace(found, inputs=move_inputs(found.inputs, first.device, first.dtype))

    def _refuse_single(self, records: object) -> None:
        """Refuse a Series or a dict, such as a single row, if the model was trained on columns."""
        own = self.encoding.inputs
        if not isinstance(own, ImageEncoding) and own.columns and (is_series(records) or isinstance(records, Mapping)):
            fix = "pass a DataFrame: frame.iloc[[0]] for one row, or pandas.DataFrame([record]) for a dict"
            raise BadArgument(WHERE, f"they are a {type(records).__name__}, not a table with columns", fix)

    def _encode_file(self, path: Path) -> EncodedRecords:
        own = self.encoding.inputs
        if not path.exists():
            raise BadArgument(str(path), "there is no such file", "pass an existing file or folder")
        with convert_os_errors(path, "read", "use readable files and folders"):
            if path.suffix in ARRAYS:
                return self._encode_arrays(read_array(path))
            if isinstance(own, ImageEncoding):
                return _encode_images(path, own)
            if path.is_dir():
                raise BadArgument(str(path), "it is a folder, but the model was not trained on images", "pass a file")
            return self._encode_table(self._read_table(path))

    def _read_table(self, path: Path) -> CsvTable:
        """Read a CSV file; by default, with the training file's delimiter, or another if the header lacks that one."""
        content, own = path.read_bytes(), self.encoding.inputs
        decimal = self.decimal or (own.decimal if isinstance(own, TableEncoding) else ".")
        delimiter = read_delimiter(str(path), self.delimiter, decimal)
        if isinstance(own, TableEncoding) and own.delimiter.encode() in content.split(b"\n", 1)[0]:
            delimiter = delimiter or own.delimiter
        return parse_table(str(path), content, delimiter, decimal)

    def _encode_frame(self, frame: "DataFrame") -> EncodedRecords:
        own = self.encoding.inputs
        if isinstance(own, TableEncoding):
            return self._encode_table(read_frame(frame, own))
        if isinstance(own, ImageEncoding):
            raise BadArgument(WHERE, "the model takes images, not a DataFrame", "pass a folder of images, or an array")
        named = frame.set_axis([str(name) for name in frame.columns], axis=1)
        columns = list(own.columns or named.columns)
        read_frame(named.head(1)).require_columns(columns)
        return self._cast(as_tensor(WHERE, "they", named[columns]).double())

    def _encode_table(self, table: CsvTable) -> EncodedRecords:
        own, notes = self.encoding.inputs, list[str]()
        if isinstance(own, TableEncoding):
            inputs, rows = encode_new_rows(table, own, self.unknown, notes)
            return EncodedRecords(inputs, rows, notes=notes)
        if not isinstance(own, NumbersEncoding) or not own.columns:
            what = "the names of the model's inputs are not known: it was not trained on a table with columns"
            raise BadArgument(table.path, what, "pass an .npy or .npz file with an array of its inputs")
        table.require_columns(own.columns)
        return self._cast(torch.from_numpy(np.stack([table.numbers(name) for name in own.columns], 1)))

    def _encode_arrays(self, records: object) -> EncodedRecords:
        """Return tensors or arrays, which are already encoded unless they are images of bytes."""
        inputs: Inputs
        if isinstance(records, tuple | Mapping):
            convert = lambda leaf: as_tensor(WHERE, "they", leaf) if isinstance(leaf, np.ndarray) else leaf  # noqa: E731
            inputs = cast(Inputs, pytree.tree_map(convert, as_dicts(records)))
        else:
            inputs = as_tensor(WHERE, "they", records)
        own = self.encoding.inputs
        if isinstance(own, ImageEncoding) and isinstance(inputs, Tensor) and inputs.dtype == torch.uint8:
            self._check_shape(inputs, (3, own.size, own.size))
            return _number_rows(encode_images(inputs.numpy(), own))
        return self._cast(inputs)

    def _cast(self, inputs: Inputs) -> EncodedRecords:
        """Convert integers to floats if the model takes floats."""
        expected = (self.encoding.tensors or {}).get("inputs")
        if isinstance(inputs, Tensor) and expected is not None:
            if not isinstance(self.encoding.inputs, NumbersEncoding):  # others may differ in length
                self._check_shape(inputs, expected.shape)
            real = inputs.is_floating_point() or not expected.dtype.startswith(("float", "bfloat"))
            inputs = inputs if real else inputs.double()
        return _number_rows(inputs)

    def _check_shape(self, inputs: Tensor, shape: Sequence[int]) -> None:
        if tuple(inputs.shape[1:]) != tuple(shape) or not inputs.dim():
            what = f"the shape is {tuple(inputs.shape)}, but the model takes (records, {', '.join(map(str, shape))})"
            table = isinstance(self.encoding.inputs, TableEncoding)
            fix = "pass a DataFrame or a CSV file, whose rows are encoded" if table else "pass an array of this shape"
            raise BadArgument(WHERE, what, fix)

    def _expected(self) -> str:
        forms = self.encoding.tensors or {}
        return ", ".join(f"{name}: {own.shape} {own.dtype}" for name, own in forms.items()) or "of the training records"


def load_predictor(
    folder: Folder,
    *,
    best: bool = False,
    model: nn.Module | None = None,
    output: Output | None = None,
    unknown: Unknown = "refuse",
    delimiter: str | None = None,
    decimal: Decimal | None = None,
    trust_code: bool = False,
) -> Predictor:
    """Return the model of a run with the encoding of its records, to predict new records.

    Args:
        folder: folder of the run.
        best: as for `load_model`.
        model: as for `load_model`.
        output: the function that was passed to the server as `output`; the name of an entry is known.
        unknown: "refuse" categories that training did not have, or "ignore" them: all their inputs are then 0.
        delimiter: the delimiter of CSV files; by default, that of the training file, or detected.
        decimal: the decimal mark in CSV files; by default, that of the training file.
        trust_code: as for `load_model`.

    Example:
        predictor = fedveil.load_predictor("runs/churn")
        found = predictor(pandas.read_csv("new.csv"))
        found.labels, found.probabilities  # or found.to_frame()
    """
    encoding = read_encoding(Path(folder))
    chosen = read_choice("load_predictor", encoding.outputs.entry if encoding.outputs else "", output)
    network = load_model(folder, best=best, model=model, trust_code=trust_code)
    return Predictor(choose_output(network, chosen), encoding, unknown, delimiter, decimal)


def convert_outputs(
    outputs: Tensor, form: OutputForm, encoding: Encoding
) -> tuple[Array | None, NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """Return the labels, probabilities and values that a model's outputs stand for; those that do not apply are None.

    Classes are on axis 1 of the probabilities, as in torch.
    """
    names = np.array(encoding.classes, dtype=None if all(isinstance(n, int) for n in encoding.classes) else object)
    if form.kind in ("values", "exponential"):
        mean, deviation = encoding.target_scale or (0.0, 1.0)
        values = (outputs.exp() if form.kind == "exponential" else outputs * deviation + mean).numpy()
        return None, None, values.reshape(-1) if count_outputs(form) == 1 else values
    if form.kind == "sigmoid":
        ones = outputs.sigmoid()
        if count_outputs(form) > 1:
            return (outputs > 0).long().numpy(), ones.numpy(), None
        both = torch.stack([(-outputs.flatten()).sigmoid(), ones.flatten()], 1)
        return names[(outputs.flatten() > 0).long().numpy()], both.numpy(), None
    scores = outputs.movedim(form.class_axis, 1)
    labels = names[scores.argmax(1).numpy()]
    return labels, scores.softmax(1).numpy() if form.kind == "softmax" else None, None


def count_outputs(form: OutputForm) -> int:
    """Return the number of outputs for one record."""
    return math.prod(form.shape)


def read_array(path: Path) -> Array:
    """Return the array in an .npy file, or the only one or the one named inputs in an .npz file."""
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found as file:
            name = INPUTS if INPUTS in file.files else file.files[0] if len(file.files) == 1 else None
            if name is None:
                what = f"it has the arrays {shorten(file.files, 8)}"
                raise BadArgument(str(path), what, f"name the array of records {INPUTS!r}")
            array: Array = file[name]
            return array
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, BadArgument):
            raise
        raise BadArgument(str(path), f"cannot be read: {error}", "save it with numpy.save or numpy.savez") from error


def _number_rows(inputs: Inputs) -> EncodedRecords:
    tensors = list(tensors_by_path(inputs).values())
    if not tensors or not tensors[0].dim() or not len(tensors[0]):
        raise BadArgument(WHERE, "there are no records", "pass at least one record")
    return EncodedRecords(inputs, np.arange(len(tensors[0])))


def _encode_images(path: Path, encoding: ImageEncoding) -> EncodedRecords:
    """Return all images of a folder or zip file, in the order of their names."""
    archive = open_archive(path)
    names = tuple(name for name in archive.names if Path(name).suffix.lower() in SUFFIXES)
    if not names:
        raise BadArgument(str(path), f"there are no images in it ({', '.join(SUFFIXES)})", "pass a folder of images")
    pixels = decode_images(archive, names, encoding.size)
    notes = [f"ignored {len(archive.names) - len(names):,} other files"] if len(names) < len(archive.names) else []
    return EncodedRecords(encode_images(pixels, encoding), np.arange(len(names)), names, notes)
