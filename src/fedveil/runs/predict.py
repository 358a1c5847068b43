"""Make predictions for new records with the model of a run, encoding them like its training records."""

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
ARRAY_SUFFIXES, WHERE = (".npy", ".npz"), "new records"
INPUTS = "inputs"  # name of the array of records in an .npz file with several arrays
UNKNOWN_OPTIONS = ("refuse", "ignore")


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions for records, in the order of the records.

    Attributes:
        labels: the class of each record; None for quantities.
        probabilities: one column per class; None for quantities, and for losses whose outputs are not probabilities.
        values: predicted quantities, in the units of the target; None for classes.
        classes: the classes of the columns of `probabilities`.
        rows: the index of each record among those passed. Records with missing cells are left out if training left
            such records out.
        names: the file of each image; () for other records.
        notes: messages about ignored columns, missing cells and unknown categories.
        index: the index of these records in the DataFrame that was passed; None for other inputs.
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
        predictions = self.labels if self.labels is not None else self.values
        assert predictions is not None
        result = _name_columns(
            "prediction", predictions.reshape(len(self), -1), range(math.prod(predictions.shape[1:]))
        )
        if self.probabilities is not None:
            if self.probabilities.ndim > 2:
                message, fix = (
                    "each record has several predicted classes, one for each position",
                    "use .labels and .probabilities",
                )
                raise BadArgument("predictions", message, f"{fix}, or --out predictions.npz")
            num_classes = self.probabilities.shape[1]
            names = self.classes if len(self.classes) == num_classes else range(num_classes)
            result |= {f"probability_{name}": self.probabilities[:, index] for index, name in enumerate(names)}
        return result

    def to_frame(self) -> "DataFrame":
        """Return the predictions as a pandas DataFrame with the index of the DataFrame that was passed, or `rows`."""
        from pandas import DataFrame

        return DataFrame(self.columns(), index=self.rows if self.index is None else self.index)


def _name_columns(name: str, values: Array, indices: Sequence[int]) -> dict[str, Array]:
    """Return the columns of an array by name, with their indices if there are several."""
    if len(indices) == 1:
        return {name: values[:, 0]}
    return {f"{name}_{index}": values[:, index] for index in indices}


@dataclass(frozen=True, eq=False)
class EncodedRecords:
    """Records encoded as inputs of a model; see `Predictions` for the other attributes."""

    inputs: Inputs
    rows: NDArray[np.int64]
    names: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Predictor:
    """The model of a run with the encoding of its records, from `load_predictor`.

    Call it with new records: a pandas DataFrame, whose columns are found by name and encoded; the path of a CSV file,
    of a folder or zip file of images, or of an .npy or .npz file; or the model's inputs: a tensor, an array, or a
    tuple or dict of tensors. These inputs are not encoded, except that images of bytes are scaled.

    Attributes:
        model: the model, in evaluation mode.
        encoding: the encoding in the run's folder.
        unknown: "refuse" categories that did not occur in training, or "ignore" them, which sets their inputs to 0.
        delimiter: the delimiter of CSV files; by default the training file's if the header contains it, else detected.
        decimal: the decimal mark of CSV files; by default the training file's.
    """

    model: nn.Module
    encoding: Encoding
    unknown: Unknown = "refuse"
    delimiter: str | None = None
    decimal: Decimal | None = None

    def __post_init__(self) -> None:
        check_choice("load_predictor", "unknown", self.unknown, UNKNOWN_OPTIONS)
        check_choice("load_predictor", "decimal", self.decimal or ".", (".", ","))

    def __call__(self, records: object) -> Predictions:
        """Return the predictions for records; refuse records that cannot be encoded."""
        encoded = self.encode(records)
        forms = ", ".join(
            f"{tuple(tensor.shape[1:])} {tensor.dtype}" for tensor in tensors_by_path(encoded.inputs).values()
        )
        message = f"{type(self.model).__name__} does not accept them (each record: {forms.replace('torch.', '')})"
        with refuse_failure(WHERE, message, f"pass records of the form {self._expected()}"):
            outputs = predict(self.model, encoded.inputs)
        form = self.encoding.outputs or OutputForm("values", tuple(outputs.shape[1:]))
        labels, probabilities, values = convert_outputs(outputs.double().cpu(), form, self.encoding)
        index = records.index[encoded.rows] if is_frame(records) else None
        details = encoded.rows, encoded.names, tuple(encoded.notes), index
        return Predictions(labels, probabilities, values, self.encoding.classes, *details)

    def encode(self, records: object) -> EncodedRecords:
        """Encode records as the model's inputs; refuse NaN and infinity."""
        if isinstance(records, str | Path):
            encoded = self._encode_file(Path(records))
        else:
            self._refuse_single(records)
            encoded = self._encode_frame(records) if is_frame(records) else self._encode_arrays(records)
        check_finite(WHERE, (encoded.inputs, torch.zeros(len(encoded.rows))), encoded.rows.tolist())
        parameter = next(self.model.parameters())
        return replace(encoded, inputs=move_inputs(encoded.inputs, parameter.device, parameter.dtype))

    def _refuse_single(self, records: object) -> None:
        """Refuse a Series or a dict, such as a single row, if the model was trained on columns."""
        encoding = self.encoding.inputs
        if (
            not isinstance(encoding, ImageEncoding)
            and encoding.columns
            and (is_series(records) or isinstance(records, Mapping))
        ):
            fix = "pass a DataFrame: frame.iloc[[0]] for one row, or pandas.DataFrame([record]) for a dict"
            raise BadArgument(WHERE, f"they are a {type(records).__name__}, not a table with columns", fix)

    def _encode_file(self, path: Path) -> EncodedRecords:
        encoding = self.encoding.inputs
        if not path.exists():
            raise BadArgument(str(path), "there is no such file", "pass an existing file or folder")
        with convert_os_errors(path, "read", "use readable files and folders"):
            if path.suffix in ARRAY_SUFFIXES:
                return self._encode_arrays(read_array(path))
            if isinstance(encoding, ImageEncoding):
                return _encode_images(path, encoding)
            if path.is_dir():
                raise BadArgument(str(path), "it is a folder, but the model was not trained on images", "pass a file")
            return self._encode_table(self._read_table(path))

    def _read_table(self, path: Path) -> CsvTable:
        """Read a CSV file, by default with the training file's delimiter if the header contains it."""
        content, encoding = path.read_bytes(), self.encoding.inputs
        decimal = self.decimal or (encoding.decimal if isinstance(encoding, TableEncoding) else ".")
        delimiter = read_delimiter(str(path), self.delimiter, decimal)
        if isinstance(encoding, TableEncoding) and encoding.delimiter.encode() in content.split(b"\n", 1)[0]:
            delimiter = delimiter or encoding.delimiter
        return parse_table(str(path), content, delimiter, decimal)

    def _encode_frame(self, frame: "DataFrame") -> EncodedRecords:
        encoding = self.encoding.inputs
        if isinstance(encoding, TableEncoding):
            return self._encode_table(read_frame(frame, encoding))
        if isinstance(encoding, ImageEncoding):
            raise BadArgument(WHERE, "the model takes images, not a DataFrame", "pass a folder of images, or an array")
        renamed_frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
        columns = list(encoding.columns or renamed_frame.columns)
        read_frame(renamed_frame.head(1)).require_columns(columns)
        return self._cast(as_tensor(WHERE, "they", renamed_frame[columns]).double())

    def _encode_table(self, table: CsvTable) -> EncodedRecords:
        encoding, notes = self.encoding.inputs, list[str]()
        if isinstance(encoding, TableEncoding):
            inputs, rows = encode_new_rows(table, encoding, self.unknown, notes)
            return EncodedRecords(inputs, rows, notes=notes)
        if not isinstance(encoding, NumbersEncoding) or not encoding.columns:
            message = "the model's inputs have no names, because it was not trained on a table with columns"
            raise BadArgument(table.path, message, "pass an .npy or .npz file with an array of its inputs")
        table.require_columns(encoding.columns)
        return self._cast(torch.from_numpy(np.stack([table.numbers(name) for name in encoding.columns], 1)))

    def _encode_arrays(self, records: object) -> EncodedRecords:
        """Convert arrays to tensors; they are already encoded unless they are images of bytes."""
        inputs: Inputs
        if isinstance(records, tuple | Mapping):
            convert = lambda leaf: as_tensor(WHERE, "they", leaf) if isinstance(leaf, np.ndarray) else leaf  # noqa: E731
            inputs = cast(Inputs, pytree.tree_map(convert, as_dicts(records)))
        else:
            inputs = as_tensor(WHERE, "they", records)
        encoding = self.encoding.inputs
        if isinstance(encoding, ImageEncoding) and isinstance(inputs, Tensor) and inputs.dtype == torch.uint8:
            self._check_shape(inputs, (3, encoding.size, encoding.size))
            return _number_rows(encode_images(inputs.numpy(), encoding))
        return self._cast(inputs)

    def _cast(self, inputs: Inputs) -> EncodedRecords:
        """Convert integers to floats if the model takes floats."""
        expected = (self.encoding.tensors or {}).get("inputs")
        if isinstance(inputs, Tensor) and expected is not None:
            if not isinstance(self.encoding.inputs, NumbersEncoding):  # records of numbers may differ in length
                self._check_shape(inputs, expected.shape)
            keep_dtype = inputs.is_floating_point() or not expected.dtype.startswith(("float", "bfloat"))
            inputs = inputs if keep_dtype else inputs.double()
        return _number_rows(inputs)

    def _check_shape(self, inputs: Tensor, shape: Sequence[int]) -> None:
        if tuple(inputs.shape[1:]) != tuple(shape) or not inputs.dim():
            message = f"expected shape (records, {', '.join(map(str, shape))}), got {tuple(inputs.shape)}"
            is_table = isinstance(self.encoding.inputs, TableEncoding)
            fix = (
                "pass a DataFrame or a CSV file, whose rows are encoded" if is_table else "pass an array of this shape"
            )
            raise BadArgument(WHERE, message, fix)

    def _expected(self) -> str:
        forms = self.encoding.tensors or {}
        return (
            ", ".join(f"{name}: {form.shape} {form.dtype}" for name, form in forms.items()) or "of the training records"
        )


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
    """Load the model of a run with the encoding of its records, to make predictions for new records.

    Args:
        folder: folder of the run.
        best: see `load_model`.
        model: see `load_model`.
        output: the function that was passed to the server as `output`; None if it was the name of an entry.
        unknown: "refuse" categories that did not occur in training, or "ignore" them, which sets their inputs to 0.
        delimiter: the delimiter of CSV files; by default the training file's if the header contains it, else detected.
        decimal: the decimal mark of CSV files; by default the training file's.
        trust_code: see `load_model`.

    Example:
        predictor = fedveil.load_predictor("runs/churn")
        predictions = predictor(pandas.read_csv("new.csv"))
        predictions.labels, predictions.probabilities  # or predictions.to_frame()
    """
    encoding = read_encoding(Path(folder))
    choice = read_choice("load_predictor", encoding.outputs.entry if encoding.outputs else "", output)
    network = load_model(folder, best=best, model=model, trust_code=trust_code)
    return Predictor(choose_output(network, choice), encoding, unknown, delimiter, decimal)


def convert_outputs(
    outputs: Tensor, form: OutputForm, encoding: Encoding
) -> tuple[Array | None, NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """Convert a model's outputs to labels, probabilities and values; those that do not apply are None.

    Classes are on axis 1 of the probabilities, as in torch.
    """
    names = np.array(encoding.classes, dtype=None if all(isinstance(n, int) for n in encoding.classes) else object)
    if form.kind in ("values", "exponential"):
        mean, deviation = encoding.target_scale or (0.0, 1.0)
        values = (outputs.exp() if form.kind == "exponential" else outputs * deviation + mean).numpy()
        return None, None, values.reshape(-1) if count_outputs(form) == 1 else values
    if form.kind == "sigmoid":
        probabilities = outputs.sigmoid()
        if count_outputs(form) > 1:
            return (outputs > 0).long().numpy(), probabilities.numpy(), None
        class_probabilities = torch.stack([(-outputs.flatten()).sigmoid(), probabilities.flatten()], 1)
        return names[(outputs.flatten() > 0).long().numpy()], class_probabilities.numpy(), None
    scores = outputs.movedim(form.class_axis, 1)
    labels = names[scores.argmax(1).numpy()]
    return labels, scores.softmax(1).numpy() if form.kind == "softmax" else None, None


def count_outputs(form: OutputForm) -> int:
    """Return the number of outputs for one record."""
    return math.prod(form.shape)


def read_array(path: Path) -> Array:
    """Read the array in an .npy file, or in an .npz file the only array or the one named "inputs"."""
    try:
        loaded_file = np.load(path, allow_pickle=False)
        if isinstance(loaded_file, np.ndarray):
            return loaded_file
        with loaded_file as file:
            name = INPUTS if INPUTS in file.files else file.files[0] if len(file.files) == 1 else None
            if name is None:
                message = f"it contains several arrays: {shorten(file.files, 8)}"
                raise BadArgument(str(path), message, f"name the array of records {INPUTS!r}")
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
    """Encode all images of a folder or zip file, in the order of their names."""
    archive = open_archive(path)
    names = tuple(name for name in archive.names if Path(name).suffix.lower() in SUFFIXES)
    if not names:
        raise BadArgument(str(path), f"there are no images in it ({', '.join(SUFFIXES)})", "pass a folder of images")
    pixels = decode_images(archive, names, encoding.size)
    notes = (
        [f"ignored {len(archive.names) - len(names):,} files that are not images"]
        if len(names) < len(archive.names)
        else []
    )
    return EncodedRecords(encode_images(pixels, encoding), np.arange(len(names)), names, notes)
