"""A user's own records as Data: from torch Datasets, or from tensors."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from fedveil.data.records import Data, Inputs, Part, named, record_shape, tensors_of
from fedveil.errors import BadArgument


def from_datasets(name: str, train: Dataset[Any], test: Dataset[Any], *, classes: Sequence[str] = ()) -> Data:
    """Read two torch Datasets of (input, target) into memory.

    Args:
        name: what to call the result.
        train: records for training; needs a length. An input is a tensor, an array or a number, or a tuple or dict of
            them: the arguments or keyword arguments of a model's forward. All of one shape.
        test: records for testing, of the same form.
        classes: names of the classes; by default "0", "1", ... if targets are whole numbers, and () (a regression)
            if they are not.

    Returns:
        The data set. Whole numbers (token ids) stay whole, as int64; bytes (pixels) and other numbers become float32,
        not scaled. Targets may have a class at each pixel or token.

    Raises:
        BadArgument: an item is not such a pair, or does not look like the others; says which.

    Example:
        >>> pairs = torch.utils.data.TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
        >>> from_datasets("mine", pairs, pairs)
        Data('mine', train=3, test=3, input (2,), 2 classes)
    """
    return _data(name, _read(f"{name}.train", train), _read(f"{name}.test", test), classes)


def from_tensors(
    name: str, train: tuple[Inputs, Tensor], test: tuple[Inputs, Tensor], *, classes: Sequence[str] = ()
) -> Data:
    """Data of (inputs, targets) that are in memory already: tensors, or tuples or dicts of them for the inputs.

    Numbers become what `from_datasets` makes of them.

    Example:
        >>> ids, mask = torch.zeros(3, 8, dtype=torch.int64), torch.ones(3, 8)
        >>> pair = {"ids": ids, "mask": mask}, torch.tensor([0, 1, 1])
        >>> from_tensors("mine", pair, pair)
        Data('mine', train=3, test=3, inputs['ids'] (8,), inputs['mask'] (8,), 2 classes)
    """
    parts = [_tensors(f"{name}.{purpose}", part) for purpose, part in (("train", train), ("test", test))]
    return _data(name, parts[0], parts[1], classes)


def _tensors(where: str, pair: Any) -> Part:
    """A pair of inputs and targets, checked."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise BadArgument(where, f"it is {type(pair).__name__}, not (inputs, targets)", "a pair of tensors")
    inputs, targets = pair
    if not isinstance(targets, Tensor) or not targets.dim():
        raise BadArgument(where, f"targets are {type(targets).__name__}", "a tensor whose first dimension is records")
    for place, tensor in {**tensors_of(where, inputs), "targets": targets}.items():
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
            raise BadArgument(where, f"{place} are a sparse, nested or meta tensor", "an ordinary tensor: to_dense()")
        if tensor.is_floating_point() and not _plain(tensor).isfinite().all():
            raise BadArgument(where, f"{place} hold NaN or infinity in float32", "mend or leave out these records")
    return Part(cast(Inputs, pytree.tree_map_only(Tensor, _plain, inputs)), _target_column(_target(targets)))


def _data(name: str, train: Part, test: Part, classes: Sequence[str]) -> Data:
    """Two parts as a data set, if they have one form."""
    forms = [(record_shape(part.inputs), part.targets.dtype, tuple(part.targets.shape[1:])) for part in (train, test)]
    if forms[0] != forms[1]:
        what = f"items are {forms[1]}, those of train are {forms[0]} (input shape, target type, target shape)"
        raise BadArgument(f"{name}.test", what, "give both parts the same form")
    whole = not train.targets.is_floating_point()
    if classes and not whole:
        raise BadArgument(f"{name}.train", "classes are named, but targets are not whole numbers", "classes=()")
    if whole and not classes:
        classes = [str(label) for label in range(1 + int(max(train.targets.max(), test.targets.max())))]
    return Data(name, train, test, classes=tuple(classes))


def _read(where: str, dataset: Dataset[Any]) -> Part:
    """All items of a dataset, checked and stacked."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        what = f"{type(dataset).__name__} has no length or no items by index"
        raise BadArgument(where, what, "torch.utils.data.TensorDataset of what it yields")
    if not len(dataset):
        raise BadArgument(where, "it is empty", "a dataset with at least one item")
    items = [dataset[index] for index in range(len(dataset))]
    pairs = [_pair(f"{where}[{index}]", item) for index, item in enumerate(items)]
    for index, pair in enumerate(pairs):
        if pair.keys() != pairs[0].keys():
            odd = sorted(pair.keys() ^ pairs[0].keys())[0]
            what = f"it has {'no ' if odd in pairs[0] else ''}{odd}, unlike item 0"
            raise BadArgument(f"{where}[{index}]", what, "make all items alike")
        for kind, value in pair.items():
            wanted = pairs[0][kind]
            if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
                found = f"{kind} is {value.dtype} of shape {tuple(value.shape)}"
                first = f"that of item 0 is {wanted.dtype} of shape {tuple(wanted.shape)}"
                raise BadArgument(f"{where}[{index}]", f"{found}, {first}", "make all items alike")
    stacked = {kind: torch.stack([pair[kind] for pair in pairs]) for kind in pairs[0]}
    targets = _target_column(stacked.pop("target"))
    if "input" in stacked:
        inputs = stacked["input"]
        return Part(inputs.reshape(len(inputs), -1) if inputs.dim() < 2 else inputs, targets)
    form = pytree.tree_structure(items[0][0])
    return Part(cast(Inputs, pytree.tree_unflatten(list(stacked.values()), form)), targets)


def _target_column(targets: Tensor) -> Tensor:
    """Class indices as (n,) or (n, positions ...), numbers as (n, outputs)."""
    if targets.is_floating_point():
        return targets.reshape(len(targets), -1) if targets.dim() < 2 else targets
    return targets.reshape(len(targets)) if targets[0].numel() == 1 else targets


def _target(targets: Tensor) -> Tensor:
    return targets.to(torch.float32 if targets.is_floating_point() else torch.int64)


def _plain(inputs: Tensor) -> Tensor:
    """Yes or no as it is, whole numbers as int64, bytes and all others as float32."""
    if inputs.dtype in (torch.bool, torch.float32) or inputs.is_complex():
        return inputs
    return inputs.to(torch.float32 if inputs.is_floating_point() or inputs.dtype == torch.uint8 else torch.int64)


def _pair(where: str, item: Any) -> dict[str, Tensor]:
    """One item's input, or inputs by their place, and its target."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise BadArgument(where, f"it is {type(item).__name__}, not (input, target)", "a dataset of pairs")
    numbers = isinstance(item[0], list) and all(isinstance(value, int | float) for value in item[0])
    if numbers or (isinstance(item[0], Mapping) and not isinstance(item[0], dict)):
        fix = "torch.tensor(input)" if numbers else "dict(input)"
        raise BadArgument(where, f"input is {type(item[0]).__name__}", f"a transform that gives tensors: {fix}")
    places = {place.replace("inputs", "input", 1): leaf for place, leaf in named(item[0]).items()}
    if not places:
        raise BadArgument(where, f"input, a {type(item[0]).__name__}, is empty", "a tensor, or a tuple or dict of them")
    found = {place: _plain(_tensor(where, place, leaf)) for place, leaf in places.items()}
    found["target"] = _target(_tensor(where, "target", item[1]))
    if not all(tensor.isfinite().all() for tensor in found.values()):
        raise BadArgument(where, "it holds NaN or infinity", "mend or leave out this item")
    return found


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
