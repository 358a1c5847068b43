"""What every data set is once loaded: tensors for training and testing, and the names of the classes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import BadArgument

Progress = Callable[[int, int], None]
"""Called with (done, total) while a long job goes on."""


class Part(NamedTuple):
    """Records of one purpose: training, validation or test.

    Attributes:
        inputs: float32, the first dimension counts records; images are (n, channels, height, width).
        targets: int64 (n,), an index into the classes; or float32 (n, outputs) for regression.
    """

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, eq=False)
class Data:
    """A data set in memory.

    Attributes:
        name: what it was loaded as.
        train: the records that clients share out among themselves.
        test: the records that nobody trains on.
        validation: records for choosing settings, if the data set has such a part.
        classes: names by class index; () for regression.
        columns: for each training record, values that `split(..., how="column")` may go by.
        scale: for images, mean and deviation of each channel that were taken out of pixels in [0, 1].
    """

    name: str
    train: Part
    test: Part
    validation: Part | None = None
    classes: tuple[str, ...] = ()
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    scale: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def __post_init__(self) -> None:
        for purpose, part in (("train", self.train), ("test", self.test), ("validation", self.validation)):
            if part is not None:
                _check_part(f"{self.name}.{purpose}", part, self.classes)
        records = len(self.train.inputs)
        for column, values in self.columns.items():
            if len(values) != records:
                what = f"{len(values)} values for {records} training records"
                raise BadArgument(f"{self.name}.columns[{column!r}]", what, "one value a training record")

    @property
    def outputs(self) -> int:
        """How many outputs a model for this data needs: one a class, or the width of the targets."""
        return len(self.classes) or int(self.train.targets.shape[1])

    def pixels(self, inputs: Tensor) -> Tensor:
        """Images as pixels in [0, 1]: the scaling undone, what lies outside cut off."""
        mean, deviation = self._scale_like(inputs)
        return (inputs * deviation + mean).clamp(0, 1)

    def scaled(self, pixels: Tensor) -> Tensor:
        """Pixels in [0, 1] as the images that a model of this data takes: the inverse of `pixels`, differentiable."""
        mean, deviation = self._scale_like(pixels)
        return (pixels - mean) / deviation

    def _scale_like(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the channels, to be combined with these images."""
        if self.scale is None or images.dim() != 4:
            what = f"records of shape {tuple(images.shape[1:])} are no images"
            raise BadArgument(self.name, what, "a data set of images, and a model that takes them as images")
        mean, deviation = (torch.tensor(part, dtype=images.dtype, device=images.device) for part in self.scale)
        return mean.view(-1, 1, 1), deviation.view(-1, 1, 1)

    def __repr__(self) -> str:
        sizes = {"train": self.train, "validation": self.validation, "test": self.test}
        parts = ", ".join(f"{purpose}={len(part.inputs)}" for purpose, part in sizes.items() if part is not None)
        task = f"{len(self.classes)} classes" if self.classes else f"{self.outputs} regression targets"
        return f"Data({self.name!r}, {parts}, input {tuple(self.train.inputs.shape[1:])}, {task})"


def _check_part(where: str, part: Part, classes: tuple[str, ...]) -> None:
    """Refuse a part whose tensors do not belong together."""
    inputs, targets = part
    if inputs.dtype != torch.float32 or inputs.dim() < 2 or not len(inputs):
        what = f"inputs are {inputs.dtype} of shape {tuple(inputs.shape)}"
        raise BadArgument(where, what, "float32 inputs of shape (records, ...), at least one record")
    wanted = (torch.int64, 1) if classes else (torch.float32, 2)
    if (targets.dtype, targets.dim()) != wanted or len(targets) != len(inputs):
        what = f"targets are {targets.dtype} of shape {tuple(targets.shape)} for {len(inputs)} inputs"
        form = "int64 targets of shape (records,)" if classes else "float32 targets of shape (records, outputs)"
        raise BadArgument(where, what, form)
    if classes and not 0 <= int(targets.min()) <= int(targets.max()) < len(classes):
        what = f"a target is {int(targets.min())} or {int(targets.max())}, there are {len(classes)} classes"
        raise BadArgument(where, what, f"targets from 0 to {len(classes) - 1}")


def tensor_part(inputs: NDArray[Any], targets: NDArray[Any]) -> Part:
    """A part from arrays: int64 targets if they are integers, else float32."""
    kind = np.int64 if targets.dtype.kind in "iu" else np.float32
    return Part(
        torch.from_numpy(np.ascontiguousarray(inputs, dtype=np.float32)),
        torch.from_numpy(np.ascontiguousarray(targets, dtype=kind)),
    )
