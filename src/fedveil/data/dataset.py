"""A data set in memory: tensors for training and testing, and the names of the classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import BadArgument
from fedveil.records.encoding import Encoding, InputEncoding, NumbersEncoding
from fedveil.records.inputs import Inputs, check_same_form, describe_forms, map_tensors, tensors_by_path
from fedveil.records.sources import (
    Stream,
    UserRecords,
    as_source,
    check_finite,
    check_form,
    check_range,
    check_same_columns,
    list_columns,
)

MAX_LIKELY_CLASSES = 20  # targets with at most this many distinct integers may be classes


class DataPart(NamedTuple):
    """Records for one purpose: training, validation or test.

    Attributes:
        inputs: a tensor whose first dimension indexes records, float32 or integers (token ids), or a tuple or dict of
            such tensors; images have shape (n, channels, height, width).
        targets: int64 class indices of shape (n,), or (n, ...) with a class for each pixel or token; for regression,
            float32 of shape (n, outputs) or (n, ...).
    """

    inputs: Inputs
    targets: Tensor

    @property
    def tensor(self) -> Tensor:
        """The inputs, which must be a single tensor."""
        return one_tensor("inputs", self.inputs)

    def take(self, rows: Tensor | NDArray[np.generic] | Sequence[int]) -> "DataPart":
        """Return the records with the given indices."""
        return DataPart(map_tensors(lambda tensor: tensor[rows], self.inputs), self.targets[rows])


def one_tensor(where: str, inputs: Inputs) -> Tensor:
    """Return the inputs if they are a single tensor; refuse anything else."""
    if not isinstance(inputs, Tensor):
        message = f"expected each record to be a single tensor, got a {type(inputs).__name__} of tensors"
        raise BadArgument(where, message, "use data whose inputs are a single tensor")
    return inputs


@dataclass(frozen=True, eq=False)
class Data:
    """A data set in memory.

    Attributes:
        name: name of the data set.
        train: the records to divide among clients.
        test: the records that are never used for training.
        validation: records for choosing settings, if the data set has any.
        classes: class names by index; () for regression.
        columns: values of each training record, by column, for `split(..., how="column")`.
        scale: for images, the mean and standard deviation of each channel, used to standardise pixels in [0, 1].
        target_scale: for a standardised regression target, its mean and standard deviation in the training part.
        notes: messages about records that the loader divided or left out, and values that it inferred or filled in.
        input_encoding: how the loader encoded the records.
        target: name of the target column, if it is known.
    """

    name: str
    train: DataPart
    test: DataPart
    validation: DataPart | None = None
    classes: tuple[str, ...] = ()
    columns: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    scale: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    target_scale: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
    input_encoding: InputEncoding = NumbersEncoding()  # noqa: RUF009  (it is frozen)
    target: str = ""

    def __post_init__(self) -> None:
        for purpose, part in self._parts().items():
            _check_part(f"{self.name}.{purpose}", part, self.classes)
        num_records = len(self.train.targets)
        for column, values in self.columns.items():
            if len(values) != num_records:
                message = f"expected {num_records} values, one per training record, got {len(values)}"
                raise BadArgument(f"{self.name}.columns[{column!r}]", message, "pass one value per training record")

    def _parts(self) -> dict[str, DataPart]:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {purpose: part for purpose, part in parts.items() if part is not None}

    @property
    def outputs(self) -> int:
        """The number of outputs that a model needs: one per class, or one per value in a regression target."""
        return len(self.classes) or self.train.targets[0].numel()

    @property
    def encoding(self) -> Encoding:
        """The encoding of new records, for `RunDetails(encoding=...)`."""
        return Encoding(self.input_encoding, self.target, self.classes, self.target_scale)

    def pixels(self, inputs: Tensor) -> Tensor:
        """Convert images to pixels, clipped to [0, 1]: the inverse of `standardise`."""
        mean, deviation = self._channel_scale(inputs)
        return (inputs * deviation + mean).clamp(0, 1)

    def standardise(self, pixels: Tensor) -> Tensor:
        """Convert pixels in [0, 1] to inputs for a model; differentiable."""
        mean, deviation = self._channel_scale(pixels)
        return (pixels - mean) / deviation

    def original_units(self, targets: Tensor) -> Tensor:
        """Return regression targets, or predictions of them, in their original units."""
        mean, deviation = self.target_scale or (0.0, 1.0)
        return targets * deviation + mean

    def _channel_scale(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation of each channel, in a shape that broadcasts over these images."""
        if self.scale is None or images.dim() != 4:
            message = f"records of shape {tuple(images.shape[1:])} are not images"
            raise BadArgument(self.name, message, "use a data set of images, and a model that takes them as images")
        mean, deviation = (torch.tensor(part, dtype=images.dtype, device=images.device) for part in self.scale)
        return mean.view(-1, 1, 1), deviation.view(-1, 1, 1)

    def __repr__(self) -> str:
        parts = ", ".join(f"{purpose}={len(part.targets)}" for purpose, part in self._parts().items())
        task = f"{len(self.classes)} classes" if self.classes else f"{self.outputs} regression targets"
        shapes = {path: tuple(tensor.shape[1:]) for path, tensor in tensors_by_path(self.train.inputs).items()}
        inputs = ", ".join(f"{'input' if path == 'inputs' else path} {shape}" for path, shape in shapes.items())
        return f"Data({self.name!r}, {parts}, {inputs}, {task})"


def _check_part(where: str, part: DataPart, classes: tuple[str, ...]) -> None:
    """Refuse a part whose tensors do not match each other or the classes."""
    check_form(where, part)
    inputs, targets = part
    for path, tensor in tensors_by_path(inputs).items():
        is_valid = tensor.dtype == torch.float32 or not (tensor.is_floating_point() or tensor.is_complex())
        if not is_valid or tensor.dim() < (2 if tensor is inputs else 1):
            message = f"{path} has dtype {tensor.dtype} and shape {tuple(tensor.shape)}"
            raise BadArgument(where, message, "use float32 or integers of shape (records, ...)")
    dtype, min_dim = (torch.int64, 1) if classes else (torch.float32, 2)
    if targets.dtype != dtype or targets.dim() < min_dim:
        form = "(records,), or (records, ...) with a class at each position" if classes else "(records, outputs)"
        message = f"targets have dtype {targets.dtype} and shape {tuple(targets.shape)}"
        raise BadArgument(where, message, f"use {dtype} targets of shape {form}")
    if classes and not 0 <= int(targets.min()) <= int(targets.max()) < len(classes):
        message = (
            f"targets range from {int(targets.min())} to {int(targets.max())}, but there are {len(classes)} classes"
        )
        raise BadArgument(where, message, f"use targets from 0 to {len(classes) - 1}")


def part_from_arrays(inputs: NDArray[np.generic], targets: NDArray[np.generic]) -> DataPart:
    """Convert arrays to a `DataPart`; targets become int64 if they are integers, otherwise float32."""
    dtype = np.int64 if targets.dtype.kind in "iu" else np.float32
    return DataPart(
        torch.from_numpy(np.ascontiguousarray(inputs, dtype=np.float32)),
        torch.from_numpy(np.ascontiguousarray(targets, dtype=dtype)),
    )


def from_records(
    name: str,
    train: UserRecords,
    test: UserRecords,
    *,
    validation: UserRecords | None = None,
    classes: Sequence[str] = (),
) -> Data:
    """Read a user's training, test and validation records into memory.

    If the records do not fit into memory, pass Datasets to `Federation` instead, which reads them in batches.

    Args:
        name: name of the data set.
        train: (inputs, targets), each a tensor, a NumPy array, or a pandas DataFrame or Series (targets may also be a
            list of numbers); or a Dataset of (input, target) or (input, input, ..., target); or a DataLoader, whose
            collate_fn combines all records into one batch. Inputs may be a tuple or dict: the arguments or keyword
            arguments of a model's forward. The columns of a DataFrame of inputs are features and become float32, even
            if they are integers; for token ids, pass ``frame.to_numpy()``.
        test: test records, in any of these forms.
        validation: optional validation records, in any of these forms.
        classes: class names; by default "0", "1", ... if targets are integers, or () for regression.

    Returns:
        The data set. Integers (token ids) become int64; bytes (pixels) and other numbers become float32, unscaled.
        Targets may have a class for each pixel or token.

    Raises:
        BadArgument: a record does not have one of these forms, or differs from the others; the message says which one.

    Example:
        >>> train = np.zeros((3, 2)), np.array([0, 1, 1])
        >>> test = torch.utils.data.TensorDataset(torch.zeros(2, 2), torch.tensor([0, 1]))
        >>> from_records("mine", train, test)
        Data('mine', train=3, test=2, input (2,), 2 classes)
    """
    train_part, test_part = read_part(f"{name}.train", train), read_part(f"{name}.test", test)
    validation_part = None if validation is None else read_part(f"{name}.validation", validation)
    encoding = NumbersEncoding(list_columns(train))
    for purpose, records in {"test": test, "validation": validation}.items():
        check_same_columns(f"{name}.{purpose}", records, f"{name}.train", encoding.columns)
    held_out = {"test": test_part} if validation_part is None else {"test": test_part, "validation": validation_part}
    for purpose, part in held_out.items():
        check_same_form(f"{name}.{purpose}", describe_forms(part), f"{name}.train", describe_forms(train_part))
    if train_part.targets.is_floating_point():
        if classes:
            raise BadArgument(f"{name}.train", "classes are given, but targets are not integers", "leave out classes=")
        return Data(
            name,
            train_part,
            test_part,
            validation_part,
            notes=_note_classes(train_part.targets),
            input_encoding=encoding,
        )
    num_classes = 1 + max(0, *(int(part.targets.max()) for part in (train_part, *held_out.values())))
    return Data(
        name,
        train_part,
        test_part,
        validation_part,
        tuple(classes or map(str, range(num_classes))),
        input_encoding=encoding,
    )


def read_part(where: str, records: UserRecords) -> DataPart:
    """Read records in any of the accepted forms into a `DataPart`."""
    source = as_source(where, records)
    if not len(source):
        raise BadArgument(where, "there are no records", "pass at least one record")
    batch = (
        source.take(range(len(source)), check=True) if isinstance(source, Stream) else (source.inputs, source.targets)
    )
    check_form(where, batch)
    check_finite(where, batch, range(len(source)))
    check_range(where, batch, range(len(source)), torch.float32)
    inputs, targets = map_tensors(_as_feature, batch[0]), batch[1].detach()
    if isinstance(inputs, Tensor) and inputs.dim() == 1:
        inputs = inputs[:, None]
    if targets.is_floating_point():
        return DataPart(inputs, targets.float() if targets.dim() > 1 else targets.float()[:, None])
    return DataPart(inputs, targets.long().reshape(len(targets)) if targets[0].numel() == 1 else targets.long())


def _as_feature(inputs: Tensor) -> Tensor:
    """Convert bytes and floating-point numbers to float32, other integers to int64; keep bool and complex unchanged."""
    if inputs.dtype == torch.bool or inputs.is_complex():
        return inputs
    is_feature = inputs.is_floating_point() or inputs.dtype == torch.uint8
    return inputs.detach().to(torch.float32 if is_feature else torch.int64)


def _note_classes(targets: Tensor) -> tuple[str, ...]:
    """Return a note if floating-point targets look like classes."""
    if targets[0].numel() > 1:
        return ()
    values = np.unique(targets.cpu().numpy())
    if len(values) > MAX_LIKELY_CLASSES or (values != np.rint(values)).any():
        return ()
    description = f"targets are floating-point numbers with {len(values)} distinct integer values"
    return (f"{description} and are treated as regression targets; pass them as int64 if they are classes",)
