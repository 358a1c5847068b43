"""Any torch Dataset as Data."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedveil.data.records import Data, Part
from fedveil.errors import BadArgument


def from_datasets(name: str, train: Dataset[Any], test: Dataset[Any], *, classes: Sequence[str] = ()) -> Data:
    """Read two torch Datasets of (input, target) into memory.

    Args:
        name: what to call the result.
        train: records for training; needs a length. Inputs are tensors, arrays or numbers, all of one shape.
        test: records for testing, of the same form.
        classes: names of the classes; by default "0", "1", ... if targets are whole numbers, and () (a regression)
            if they are not.

    Returns:
        The data set. Inputs become float32 and are not scaled.

    Raises:
        BadArgument: an item is not such a pair, or does not look like the others; says which.

    Example:
        >>> pairs = torch.utils.data.TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
        >>> from_datasets("mine", pairs, pairs)
        Data('mine', train=3, test=3, input (2,), 2 classes)
    """
    parts = [_read(f"{name}.train", train), _read(f"{name}.test", test)]
    first, second = parts
    forms = [(tuple(part.inputs.shape[1:]), part.targets.dtype, tuple(part.targets.shape[1:])) for part in parts]
    if forms[0] != forms[1]:
        what = f"items are {forms[1]}, those of train are {forms[0]} (input shape, target type, target shape)"
        raise BadArgument(f"{name}.test", what, "give both datasets the same transforms")
    whole = not first.targets.is_floating_point()
    if classes and not whole:
        raise BadArgument(f"{name}.train", "classes are named, but targets are not whole numbers", "classes=()")
    if whole and not classes:
        classes = [str(label) for label in range(1 + int(max(first.targets.max(), second.targets.max())))]
    return Data(name, first, second, classes=tuple(classes))


def _read(where: str, dataset: Dataset[Any]) -> Part:
    """All items of a dataset, checked and stacked."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        what = f"{type(dataset).__name__} has no length or no items by index"
        raise BadArgument(where, what, "torch.utils.data.TensorDataset of what it yields")
    if not len(dataset):
        raise BadArgument(where, "it is empty", "a dataset with at least one item")
    pairs = [_pair(f"{where}[{index}]", dataset[index]) for index in range(len(dataset))]
    for index, pair in enumerate(pairs):
        for kind, value, wanted in zip(("input", "target"), pair, pairs[0], strict=True):
            if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
                found = f"{kind} is {value.dtype} of shape {tuple(value.shape)}"
                first = f"that of item 0 is {wanted.dtype} of shape {tuple(wanted.shape)}"
                raise BadArgument(f"{where}[{index}]", f"{found}, {first}", "make all items alike")
    inputs, targets = (torch.stack(values) for values in zip(*pairs, strict=True))
    return Part(inputs.reshape(len(inputs), -1) if inputs.dim() < 2 else inputs, _target_column(where, targets))


def _target_column(where: str, targets: Tensor) -> Tensor:
    """Class indices as (n,), numbers as (n, outputs)."""
    if targets.is_floating_point():
        return targets.reshape(len(targets), -1)
    if targets.dim() > 1 and targets[0].numel() != 1:
        what = f"whole-number targets have shape {tuple(targets.shape[1:])}"
        raise BadArgument(where, what, "a class index for each record, or float targets for a regression")
    return targets.reshape(len(targets))


def _pair(where: str, item: Any) -> tuple[Tensor, Tensor]:
    """One item as (float32 input, int64 or float32 target)."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise BadArgument(where, f"it is {type(item).__name__}, not (input, target)", "a dataset of pairs")
    inputs, targets = (_tensor(where, kind, value) for kind, value in zip(("input", "target"), item, strict=True))
    exact = torch.float32 if targets.is_floating_point() else torch.int64
    inputs, targets = inputs.to(torch.float32), targets.to(exact)
    if not (inputs.isfinite().all() and targets.isfinite().all()):
        raise BadArgument(where, "it holds NaN or infinity", "mend or leave out this item")
    return inputs, targets


def _tensor(where: str, kind: str, value: Any) -> Tensor:
    """A number, array or tensor as a tensor."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, int | float | np.ndarray | np.generic):
        try:
            return torch.as_tensor(value)
        except TypeError as error:
            raise BadArgument(where, f"{kind} cannot become a tensor: {error}", "numeric arrays") from error
    raise BadArgument(where, f"{kind} is {type(value).__name__}", "a transform that gives tensors")
