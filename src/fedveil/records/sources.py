"""Sources of records, and their checks: arrays and frames in memory, or a Dataset that is read batch by batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data.dataloader import default_collate

from fedveil.errors import BadArgument
from fedveil.records.arrays import as_tensor, is_frame, is_series
from fedveil.records.inputs import (
    Batch,
    Inputs,
    check_alike,
    describe,
    describe_forms,
    map_tensors,
    name_leaves,
    name_tensors,
)

Given: TypeAlias = tuple[object, object] | Dataset[object] | DataLoader[object]
"""Records of a client or for testing, in any form that users may pass."""
FORMS = "(inputs, targets) of tensors, NumPy arrays or pandas frames, a Dataset of (input, target), or a DataLoader"
PLAIN = bool | int | float | str | None  # constants among the inputs
ITEMS = "(input, target) or (input, input, ..., target)"


class IndexedDataset(Protocol):
    """A Dataset with a length and records by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


@dataclass(frozen=True, eq=False)
class Rows:
    """Records in memory."""

    who: str  # the owner's name in messages, such as "client 0"
    inputs: Inputs
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Sequence[int]) -> Batch:
        """Return these records as one batch."""
        chosen = torch.tensor(rows, dtype=torch.int64, device=self.targets.device)
        return map_tensors(lambda tensor: tensor[chosen.to(tensor.device)], self.inputs), self.targets[chosen]


@dataclass(frozen=True, eq=False)
class Stream:
    """Records of a Dataset, read on demand: they need not fit into memory."""

    who: str
    dataset: IndexedDataset
    collate: Callable[[list[Any]], Any] = default_collate

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, rows: Sequence[int], *, check: bool = False) -> Batch:
        """Read these records as one batch; with `check`, refuse any that differs from the first in shape or dtype."""
        items = self._read_items(rows)
        if check and self.collate is default_collate:
            self._check_alike(rows, items)
        return self._collate(rows, items)

    def _read_items(self, rows: Sequence[int]) -> list[object]:
        read_many = getattr(self.dataset, "__getitems__", None)
        items: list[object] = read_many(list(rows)) if read_many else [self.dataset[row] for row in rows]
        for row, item in zip(rows, items, strict=True) if self.collate is default_collate else ():
            if not isinstance(item, tuple | list) or len(item) < 2:
                what = f"it is a {type(item).__name__}, not (input, target)"
                raise BadArgument(f"{self.who}, record {row}", what, f"use a Dataset of {ITEMS}")
        return items

    def _collate(self, rows: Sequence[int], items: list[object]) -> Batch:
        try:
            *inputs, targets = self.collate(items)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            if self.collate is default_collate:
                self._check_alike(rows, items)
            first = ", ".join(map(str, rows[:3])) + (", ..." if len(rows) > 3 else "")
            why = str(error).splitlines()[0].rstrip(".")
            what = f"cannot collate records {first} into a batch of inputs and targets: {why}"
            fix = "use records of one shape, or a DataLoader whose collate_fn returns (inputs, targets)"
            raise BadArgument(self.who, what, fix) from error
        if not inputs or not isinstance(targets, Tensor):
            fix = "use a collate_fn that returns (inputs, targets)"
            raise BadArgument(self.who, "a batch does not end with a tensor of targets", fix)
        return _join_arguments(inputs), targets

    def _check_alike(self, rows: Sequence[int], items: list[object]) -> None:
        """Refuse a record that differs from the first one."""
        first: dict[str, str] = {}
        for row, item in zip(rows, items, strict=True):
            where = f"{self.who}, record {row}"
            *inputs, target = cast(Sequence[object], item)
            leaves = {**name_leaves(_join_arguments(inputs)), "target": target}
            forms = {path: describe(as_tensor(where, path, leaf)) for path, leaf in leaves.items()}
            first = first or forms
            check_alike(where, forms, f"record {rows[0]}", first)


Source = Rows | Stream


def _join_arguments(inputs: Sequence[object]) -> Inputs:
    """Return a single input as it is, several as a tuple of forward's arguments."""
    return cast(Inputs, inputs[0] if len(inputs) == 1 else tuple(inputs))


def _has_index(given: object) -> TypeGuard[IndexedDataset]:
    return hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, IterableDataset)


def _is_array(given: object) -> bool:
    return isinstance(given, Tensor | np.ndarray | np.generic) or is_frame(given) or is_series(given)


def list_clients(given: object) -> list[Given]:
    """Return a list of clients; refuse the records of a single client, whose batches or columns would become clients.

    Args:
        given: the sequence of clients that a user passes.
    """
    if isinstance(given, DataLoader | Dataset | Mapping | str) or _is_array(given):
        what = f"clients is a {type(given).__name__}, not a list of clients"
        one = f"use a list, [client] for one client; each is {FORMS}"
        raise BadArgument("Federation", what, "use list(clients.values())" if isinstance(given, Mapping) else one)
    return list(cast(Sequence[Given], given))


def as_source(who: str, given: object) -> Source:
    """Return a user's records as a source.

    Args:
        who: the owner's name in messages, such as "client 0" or "test data".
        given: see `Given`. Arrays, frames and TensorDatasets stay in memory; other Datasets are read on demand. The
            order of batches differs from a DataLoader's, so that a resumed run continues with the next batch.

    Raises:
        BadArgument: the records have another form.
    """
    dataset, collate = (given.dataset, given.collate_fn) if isinstance(given, DataLoader) else (given, default_collate)
    if isinstance(given, DataLoader) and _has_index(dataset):
        _check_loader(who, given, len(dataset))
    if isinstance(dataset, TensorDataset) and collate is default_collate:
        if len(dataset.tensors) < 2:
            raise BadArgument(who, "a TensorDataset of one tensor has no targets", "use TensorDataset(inputs, targets)")
        return _store(who, _join_arguments(dataset.tensors[:-1]), dataset.tensors[-1])
    if isinstance(given, tuple | list) and len(given) == 2:
        return _store(who, *given)
    if isinstance(given, tuple | list | Mapping | str) or _is_array(given):
        length = f" of {len(given)}" if isinstance(given, tuple | list) else ""
        what = f"it is a {type(given).__name__}{length}, not records with their targets"
        raise BadArgument(who, what, f"use {FORMS}")
    if not _has_index(dataset):
        raise BadArgument(who, f"{type(dataset).__name__} has no length or no records by index", f"use {FORMS}")
    return Stream(who, dataset, collate)


def _store(who: str, inputs: object, targets: object) -> Rows:
    """Return a pair in memory as tensors; other leaves in the inputs are left to `check_form`."""

    def convert(path: pytree.KeyPath, leaf: object) -> object:
        if not _is_array(leaf):
            return leaf
        tensor = as_tensor(who, "inputs" + pytree.keystr(path), leaf)
        return tensor.double() if is_frame(leaf) else tensor  # columns are features, even if they hold integers

    parts = targets if isinstance(targets, tuple | list) else ()
    if any(isinstance(part, Tensor | np.ndarray) and part.ndim for part in parts):
        what = f"its targets are a {type(targets).__name__} of tensors; these look like the records of several clients"
        raise BadArgument(who, what, "give one (inputs, targets): torch.cat of all inputs, and of all targets")
    found = as_tensor(who, "targets", targets)
    if is_frame(targets):  # one column of classes, or several of numbers
        found = found[:, 0] if found.shape[1] == 1 and not found.is_floating_point() else found.double()
    if not found.dim():
        raise BadArgument(who, "targets are one number, not one per record", "give a target per record")
    return Rows(who, cast(Inputs, pytree.tree_map_with_path(convert, inputs)), found)


def _check_loader(who: str, loader: DataLoader[object], size: int) -> None:
    """Refuse a DataLoader that does not return each of the `size` records of its Dataset exactly once."""
    sampler = loader.sampler
    shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == size
    if loader.batch_size is None or not (shuffles or type(sampler) is SequentialSampler):
        kind = type(sampler if loader.batch_size else loader.batch_sampler or sampler).__name__
        what = f"the DataLoader chooses its records with a {kind}, which would be ignored"
        raise BadArgument(who, what, "use a DataLoader over torch.utils.data.Subset(dataset, indices)")


def choose_batch_size(clients: Sequence[object], given: int | None, default: int) -> int:
    """Return the given batch size, or the one that the clients' DataLoaders share, or the default."""
    sizes = {client.batch_size for client in clients if isinstance(client, DataLoader)}
    if given is not None or not sizes:
        return default if given is None else given
    if len(sizes) > 1 or None in sizes:
        what = f"the clients' DataLoaders have batches of {', '.join(map(str, sorted(sizes, key=str)))}"
        raise BadArgument("Federation", what, "set batch_size=32 for all of them")
    return cast(int, sizes.pop())


def check_sources(sources: Sequence[Source]) -> list[Source]:
    """Return the sources, with inputs in the structure of the first source; refuse sources that do not match.

    All records in memory are checked, but only the first two of a stream.
    """
    if not sources:
        raise BadArgument("Federation", "there are no clients", "give records: Federation(model, [(inputs, targets)])")
    found: list[Source] = []
    first: Batch | None = None
    for source in sources:
        if not len(source):
            raise BadArgument(source.who, "there are no records", "give at least one record, or leave it out")
        stored = source if isinstance(source, Rows) else None
        batch = (stored.inputs, stored.targets) if stored else source.take(range(min(2, len(source))))
        check_form(source.who, batch)
        first = first or batch
        check_alike(source.who, describe_forms(batch), sources[0].who, describe_forms(first))
        check_finite(source.who, batch, range(len(batch[1])))
        if stored:  # keys in one order
            own, structure = name_leaves(batch[0]), pytree.tree_structure(first[0])
            inputs = pytree.tree_unflatten([own[path] for path in name_leaves(first[0])], structure)
            source = replace(stored, inputs=cast(Inputs, inputs))
        found.append(source)
    return found


def check_form(who: str, batch: Batch) -> None:
    """Refuse inputs without tensors, leaves other than tensors and constants, and tensors without a row per record."""
    inputs, targets = batch
    leaves = name_leaves(inputs)
    for path, leaf in leaves.items():
        if not isinstance(leaf, Tensor | PLAIN):
            fix = "use torch.as_tensor for arrays, dict for other mappings"
            raise BadArgument(who, f"{path} is a {type(leaf).__name__}, not a tensor", fix)
    tensors = name_tensors(inputs)
    if not tensors:
        fix = "use a tensor (torch.tensor(inputs) of numbers), or a tuple or dict of forward's arguments"
        raise BadArgument(who, f"inputs, a {type(inputs).__name__}, hold no tensor", fix)
    for path, tensor in {**tensors, "targets": targets}.items():
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
            raise BadArgument(who, f"{path} are a sparse, nested or meta tensor", "use a dense tensor: .to_dense()")
        records = len(tensor) if tensor.dim() else 0
        if not records or records != len(targets):
            what = f"there are {records} records in {path} and {len(targets)} targets"
            raise BadArgument(who, what, "give one target per record")


def check_finite(who: str, batch: Batch, numbers: Sequence[int]) -> None:
    """Refuse NaN and infinity in inputs and targets; `numbers` are the indices of the records."""
    _refuse_infinite(who, batch, numbers, None, "NaN or infinity", "correct this record, or leave it out")


def check_range(who: str, batch: Batch, numbers: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse finite numbers that become infinite in another dtype, such as the model's."""
    what = f"a number that is infinite in {dtype}"
    _refuse_infinite(who, batch, numbers, dtype, what, "scale the records down, or train model.double()")


def _refuse_infinite(
    who: str, batch: Batch, numbers: Sequence[int], dtype: torch.dtype | None, what: str, fix: str
) -> None:
    """Refuse floats that are not finite, or not finite in a dtype with a smaller range."""
    for path, tensor in {**name_tensors(batch[0]), "targets": batch[1]}.items():
        if not tensor.is_floating_point() or (dtype and torch.finfo(tensor.dtype).max <= torch.finfo(dtype).max):
            continue
        finite = torch.isfinite(tensor.to(dtype) if dtype else tensor)
        if not finite.all():
            row = int((~finite.reshape(len(finite), -1).all(1)).nonzero()[0])
            raise BadArgument(f"{who}, record {numbers[row]}", f"{path} hold {what}", fix)
