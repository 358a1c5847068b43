"""A user's own records as Data: from arrays, frames and tensors, from torch Datasets and DataLoaders."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from fedveil.arrays import as_tensor, check_loader, is_frame, is_series
from fedveil.data.records import Data, Inputs, Part, named, record_shape, tensors_of
from fedveil.errors import BadArgument

Given: TypeAlias = tuple[Any, Any] | Dataset[Any] | DataLoader[Any]
"""Records as users have them: (inputs, targets), a Dataset of (input, target), or a DataLoader over one."""
FEW = 20  # whole numbers that may be classes
PAIRS = "(inputs, targets) of tensors, NumPy arrays or pandas frames"
FORMS = f"{PAIRS}, a Dataset of (input, target), or a DataLoader"


def from_parts(name: str, train: Given, test: Given, *, classes: Sequence[str] = ()) -> Data:
    """Read training and test records, each in any form: what `from_tensors` or what `from_datasets` takes.

    Example:
        >>> train = np.zeros((3, 2)), np.array([0, 1, 1])
        >>> test = torch.utils.data.TensorDataset(torch.zeros(2, 2), torch.tensor([0, 1]))
        >>> from_parts("mine", train, test)
        Data('mine', train=3, test=2, input (2,), 2 classes)
    """
    return _data(name, _part(f"{name}.train", train), _part(f"{name}.test", test), classes)


def from_datasets(
    name: str,
    train: Dataset[Any] | DataLoader[Any],
    test: Dataset[Any] | DataLoader[Any],
    *,
    classes: Sequence[str] = (),
) -> Data:
    """Read two torch Datasets of (input, target) into memory.

    `Federation` takes Datasets as clients too and reads them batch by batch: use that where they do not fit.

    Args:
        name: what to call the result.
        train: records for training, (input, target) or (input, input, ..., target); needs a length. An input is a
            tensor, an array or a number, or a tuple or dict of them: the arguments or keyword arguments of a model's
            forward. All of one shape. Of a DataLoader, the dataset is read and put together by its collate_fn, all
            records as one batch.
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
    return _data(name, _items(f"{name}.train", train), _items(f"{name}.test", test), classes)


def from_tensors(name: str, train: tuple[Any, Any], test: tuple[Any, Any], *, classes: Sequence[str] = ()) -> Data:
    """Data of (inputs, targets) that are in memory already.

    Args:
        name: what to call the result.
        train: inputs and targets, each a tensor, a NumPy array or a pandas DataFrame or Series; inputs may also be a
            tuple or dict of these, and targets a list of numbers. The columns of a DataFrame of inputs are features
            and become float32, whole numbers too; for token ids give ``frame.to_numpy()``.
        test: of the same form.
        classes: as for `from_datasets`, as is what becomes of numbers.

    Example:
        >>> ids, mask = torch.zeros(3, 8, dtype=torch.int64), torch.ones(3, 8)
        >>> pair = {"ids": ids, "mask": mask}, torch.tensor([0, 1, 1])
        >>> from_tensors("mine", pair, pair)
        Data('mine', train=3, test=3, inputs['ids'] (8,), inputs['mask'] (8,), 2 classes)
    """
    return _data(name, _tensors(f"{name}.train", train), _tensors(f"{name}.test", test), classes)


def _part(where: str, given: Any) -> Part:
    """Records in any form."""
    if isinstance(given, tuple | list):
        return _tensors(where, given)
    alone = isinstance(given, Mapping | Tensor | np.ndarray | str) or is_frame(given) or is_series(given)
    if alone or not (isinstance(given, Dataset | DataLoader) or hasattr(given, "__getitem__")):
        raise BadArgument(where, f"it is {type(given).__name__}, not (inputs, targets) and no Dataset", FORMS)
    return _items(where, given)


def _items(where: str, given: Any) -> Part:
    """The records of a dataset or of a loader over one."""
    return _loaded(where, given) if isinstance(given, DataLoader) else _read(where, given)


def _loaded(where: str, loader: DataLoader[Any]) -> Part:
    """All records of a loader's dataset, as one batch of it."""
    check_loader(where, loader)
    dataset = cast(Any, loader.dataset)
    if loader.collate_fn is default_collate or not len(dataset):
        return _read(where, dataset)
    batch = loader.collate_fn([dataset[index] for index in range(len(dataset))])
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        what = f"collate_fn gave {type(batch).__name__}, not (inputs, targets)"
        raise BadArgument(where, what, "a collate_fn that returns (inputs, targets)")
    return _tensors(where, _input_and_target(batch))


def _input_and_target(item: Sequence[Any]) -> tuple[Any, Any]:
    """The last of several is the target, those before it are the arguments of forward."""
    return item[0] if len(item) == 2 else tuple(item[:-1]), item[-1]


def _tensors(where: str, pair: Any) -> Part:
    """A pair of inputs and targets, checked."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        length = f" of {len(pair)}" if isinstance(pair, tuple | list) else ""
        raise BadArgument(where, f"it is {type(pair).__name__}{length}, not (inputs, targets)", PAIRS)
    targets = as_tensor(where, "targets", pair[1]).detach()
    if not targets.dim():
        raise BadArgument(where, "targets are one number", "a target per record")
    if is_frame(pair[1]) and targets.shape[1] > 1:
        targets = targets.to(torch.float32)  # numbers of several columns, not classes at several positions
    inputs = pytree.tree_map_with_path(
        lambda path, leaf: _in_memory(where, "inputs" + pytree.keystr(path), leaf), pair[0]
    )
    for place, tensor in {**tensors_of(where, inputs), "targets": targets}.items():
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
            raise BadArgument(where, f"{place} are a sparse, nested or meta tensor", "an ordinary tensor: to_dense()")
        if tensor.is_floating_point() and not (finite := _plain(tensor).isfinite()).all():
            what = f"{place} hold NaN or infinity in float32, the first at {(~finite).nonzero()[0].tolist()}"
            raise BadArgument(where, what, "mend or leave out these records")
    inputs = pytree.tree_map_only(Tensor, _plain, inputs)
    if isinstance(inputs, Tensor) and inputs.dim() == 1:
        inputs = inputs[:, None]
    return Part(cast(Inputs, inputs), _target_column(_target(targets)))


def _in_memory(where: str, place: str, leaf: Any) -> Any:
    """An array or a frame as a tensor, features as float32; what is no records, such as None, as it is."""
    if is_frame(leaf):
        return as_tensor(where, place, leaf).to(torch.float32)
    records = isinstance(leaf, Tensor | np.ndarray) or is_series(leaf)
    return as_tensor(where, place, leaf).detach() if records else leaf


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
    return Data(name, train, test, classes=tuple(classes), notes=_guessed(train.targets))


def _guessed(targets: Tensor) -> tuple[str, ...]:
    """A note if floating targets look like classes."""
    if not targets.is_floating_point() or targets[0].numel() > 1:
        return ()
    values = np.unique(targets.cpu().numpy())
    if len(values) > FEW or (values != np.rint(values)).any():
        return ()
    held = f"targets are floating numbers, of {len(values)} different whole values"
    return (f"{held}: taken as a regression; give them as int64 if they are classes",)


def _read(where: str, dataset: Any) -> Part:
    """All items of a dataset, checked and stacked."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        what = f"{type(dataset).__name__} has no length or no items by index"
        raise BadArgument(where, what, "torch.utils.data.TensorDataset of what it yields")
    if not len(dataset):
        raise BadArgument(where, "it is empty", "a dataset with at least one item")
    items = [dataset[index] for index in range(len(dataset))]
    for index, item in enumerate(items):
        if not isinstance(item, tuple | list) or len(item) < 2:
            what = f"it is {type(item).__name__}, not (input, target)"
            raise BadArgument(f"{where}[{index}]", what, "a dataset of (input, target) or (input, input, ..., target)")
    pairs = [_pair(f"{where}[{index}]", *_input_and_target(item)) for index, item in enumerate(items)]
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
    form = pytree.tree_structure(_input_and_target(items[0])[0])
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


def _pair(where: str, given: Any, target: Any) -> dict[str, Tensor]:
    """One item's input, or inputs by their place, and its target."""
    numbers = isinstance(given, list) and all(isinstance(value, int | float) for value in given)
    if numbers or (isinstance(given, Mapping) and not isinstance(given, dict)):
        fix = "torch.tensor(input)" if numbers else "dict(input)"
        raise BadArgument(where, f"input is {type(given).__name__}", f"a transform that gives tensors: {fix}")
    places = {place.replace("inputs", "input", 1): leaf for place, leaf in named(given).items()}
    if not places:
        raise BadArgument(where, f"input, a {type(given).__name__}, is empty", "a tensor, or a tuple or dict of them")
    found = {place: _plain(as_tensor(where, place, leaf).detach().cpu()) for place, leaf in places.items()}
    found["target"] = _target(as_tensor(where, "target", target).detach().cpu())
    if not all(tensor.isfinite().all() for tensor in found.values()):
        raise BadArgument(where, "it holds NaN or infinity", "mend or leave out this item")
    return found
