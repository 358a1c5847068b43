"""What every data set is once loaded: tensors for training and testing, and the names of the classes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from fedveil.errors import BadArgument

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
"""What a model's forward takes: a tensor, a tuple of arguments or a dict of keyword arguments, of tensors or nested."""
Progress = Callable[[int, int], None]
"""Called with (done, total) while a long job goes on."""


class Part(NamedTuple):
    """Records of one purpose: training, validation or test.

    Attributes:
        inputs: tensors whose first dimension counts records; float32 or whole numbers (token ids). Mostly one tensor,
            but a tuple or a dict of them is as good; images are (n, channels, height, width).
        targets: int64 (n,), an index into the classes, or (n, ...) with one at each pixel or token; float32
            (n, outputs) or (n, ...) for regression.
    """

    inputs: Inputs
    targets: Tensor

    @property
    def tensor(self) -> Tensor:
        """The inputs, where one tensor is all there is; refuses others."""
        return one_tensor("inputs", self.inputs)

    def take(self, rows: Any) -> "Part":
        """Some of the records."""
        inputs = pytree.tree_map_only(Tensor, lambda tensor: tensor[rows], self.inputs)
        return Part(cast(Inputs, inputs), self.targets[rows])


def one_tensor(where: str, inputs: Inputs) -> Tensor:
    """The inputs, if they are a single tensor."""
    if not isinstance(inputs, Tensor):
        what = f"records are a {type(inputs).__name__} of tensors, and this takes records of one tensor only"
        raise BadArgument(where, what, "data whose inputs are one tensor")
    return inputs


def named(inputs: Inputs) -> dict[str, Any]:
    """Everything in the inputs by its place there, such as "inputs", "inputs[0]" or "inputs['ids']"."""
    leaves, _ = pytree.tree_flatten_with_path(inputs)
    return {"inputs" + pytree.keystr(path): leaf for path, leaf in leaves}


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
        target_scale: for a standardised regression target, its mean and deviation in the training part.
        notes: what the loader guessed, left out, filled in or divided, a sentence each, for the user to read.
    """

    name: str
    train: Part
    test: Part
    validation: Part | None = None
    classes: tuple[str, ...] = ()
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    scale: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    target_scale: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for purpose, part in (("train", self.train), ("test", self.test), ("validation", self.validation)):
            if part is not None:
                _check_part(f"{self.name}.{purpose}", part, self.classes)
        records = len(self.train.targets)
        for column, values in self.columns.items():
            if len(values) != records:
                what = f"{len(values)} values for {records} training records"
                raise BadArgument(f"{self.name}.columns[{column!r}]", what, "one value per training record")

    @property
    def outputs(self) -> int:
        """How many outputs a model for this data needs: one for each class, or for each number of a target."""
        return len(self.classes) or self.train.targets[0].numel()

    def pixels(self, inputs: Tensor) -> Tensor:
        """Images as pixels in [0, 1]: the scaling undone, what lies outside cut off."""
        mean, deviation = self._scale_like(inputs)
        return (inputs * deviation + mean).clamp(0, 1)

    def scaled(self, pixels: Tensor) -> Tensor:
        """Pixels in [0, 1] as the images that a model of this data takes: the inverse of `pixels`, differentiable."""
        mean, deviation = self._scale_like(pixels)
        return (pixels - mean) / deviation

    def in_units(self, targets: Tensor) -> Tensor:
        """Regression targets, or a model's predictions of them, in the units of the source: standardising undone."""
        mean, deviation = self.target_scale or (0.0, 1.0)
        return targets * deviation + mean

    def _scale_like(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the channels, to be combined with these images."""
        if self.scale is None or images.dim() != 4:
            what = f"records of shape {tuple(images.shape[1:])} are no images"
            raise BadArgument(self.name, what, "a data set of images, and a model that takes them as images")
        mean, deviation = (torch.tensor(part, dtype=images.dtype, device=images.device) for part in self.scale)
        return mean.view(-1, 1, 1), deviation.view(-1, 1, 1)

    def __repr__(self) -> str:
        sizes = {"train": self.train, "validation": self.validation, "test": self.test}
        parts = ", ".join(f"{purpose}={len(part.targets)}" for purpose, part in sizes.items() if part is not None)
        task = f"{len(self.classes)} classes" if self.classes else f"{self.outputs} regression targets"
        shape = record_shape(self.train.inputs)
        places = {"input": shape} if isinstance(shape, tuple) else shape
        inputs = ", ".join(f"{place} {shape}" for place, shape in places.items())
        return f"Data({self.name!r}, {parts}, {inputs}, {task})"


def record_shape(inputs: Inputs) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
    """The shape of one record's input, or those of its inputs by their place."""
    if isinstance(inputs, Tensor):
        return tuple(inputs.shape[1:])
    return {place: tuple(leaf.shape[1:]) for place, leaf in named(inputs).items() if isinstance(leaf, Tensor)}


def tensors_of(where: str, inputs: Inputs) -> dict[str, Tensor]:
    """The tensors in the inputs by their place; at least one."""
    found = {place: leaf for place, leaf in named(inputs).items() if isinstance(leaf, Tensor)}
    if not found:
        fix = "a tensor (of a list of numbers: torch.tensor(inputs)), or a tuple or dict of arguments of forward"
        raise BadArgument(where, f"inputs, a {type(inputs).__name__}, hold no tensor", fix)
    return found


def _check_part(where: str, part: Part, classes: tuple[str, ...]) -> None:
    """Refuse a part whose tensors do not belong together."""
    inputs, targets = part
    tensors = tensors_of(where, inputs)
    for place, tensor in tensors.items():
        real = tensor.dtype == torch.float32 or not (tensor.is_floating_point() or tensor.is_complex())
        if not real or tensor.dim() < (2 if tensor is inputs else 1) or not len(tensor):
            what = f"{place} are {tensor.dtype} of shape {tuple(tensor.shape)}"
            raise BadArgument(where, what, "float32 or whole numbers of shape (records, ...), at least one record")
    dtype, least = (torch.int64, 1) if classes else (torch.float32, 2)
    other = next((place for place, tensor in tensors.items() if len(tensor) != len(targets)), None)
    if targets.dtype != dtype or targets.dim() < least or other:
        place = other or next(iter(tensors))
        what = f"targets are {targets.dtype} of shape {tuple(targets.shape)} for {len(tensors[place])} {place}"
        form = "int64 targets of shape (records,), or (records, ...) for a class at each position"
        raise BadArgument(where, what, form if classes else "float32 targets of shape (records, outputs)")
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
