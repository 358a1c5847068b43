"""Read and check users' records: arrays and frames in memory, or a Dataset that is read batch by batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import default_collate

from fedveil.errors import BadArgument
from fedveil.records.arrays import as_tensor, is_frame, is_series
from fedveil.records.inputs import (
    Batch,
    Inputs,
    as_dicts,
    check_same_form,
    describe,
    describe_forms,
    leaves_by_path,
    map_tensors,
    tensors_by_path,
)

UserRecords: TypeAlias = tuple[object, object] | Mapping[str, object] | Dataset[object] | DataLoader[object]
"""Records in any form that users may pass."""
FORMS = "(inputs, targets) of tensors, NumPy arrays or pandas frames, a Dataset of (input, target), or a DataLoader"
CONSTANT_TYPES = bool | int | float | str | None  # types of constants that inputs may contain
ITEMS = '(input, target), (input, input, ..., target), or dicts with "labels"'
SUBSET_FIX = "use a DataLoader over torch.utils.data.Subset(dataset, indices)"
WEIGHTED_FIX = (
    "pass one factor per class to the loss, which has the same effect on average: loss=fedveil.CrossEntropy(weight=w); "
)
WEIGHTED_FIX += "or sample once, before training: DataLoader(torch.utils.data.Subset(dataset, list(sampler)))"
LABEL_NAMES = ("labels", "label", "label_ids")  # the names of targets in a dict, as in Hugging Face datasets


class IndexedDataset(Protocol):
    """A Dataset that has a length and can be indexed."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


@dataclass(frozen=True, eq=False)
class Rows:
    """Records in memory."""

    owner: str  # the name of the owner in messages, such as "client 0"
    inputs: Inputs
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Sequence[int]) -> Batch:
        """Return these records as one batch."""
        indices = torch.tensor(rows, dtype=torch.int64, device=self.targets.device)
        return map_tensors(lambda tensor: tensor[indices.to(tensor.device)], self.inputs), self.targets[indices]


@dataclass(frozen=True, eq=False)
class Stream:
    """Records of a Dataset, which are read on demand and need not fit in memory."""

    owner: str
    dataset: IndexedDataset
    collate: Callable[[list[Any]], Any] = default_collate

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def uses_default_collate(self) -> bool:
        """Whether records are stacked, so that their form in a batch does not depend on other records."""
        return self.collate is default_collate

    def take(self, rows: Sequence[int], *, check: bool = False) -> Batch:
        """Read these records as one batch; if `check` is true, refuse records that differ from the first one."""
        items = self._read_items(rows)
        if check and self.collate is default_collate:
            self._check_same_form(rows, items)
        return self._collate(rows, items)

    def _read_items(self, rows: Sequence[int]) -> list[object]:
        read_batch = getattr(self.dataset, "__getitems__", None)
        items: list[object] = read_batch(list(rows)) if read_batch else [self.dataset[row] for row in rows]
        if self.collate is not default_collate:
            return items
        for row, item in zip(rows, items, strict=True):
            both_dicts = isinstance(item, Mapping) and isinstance(items[0], Mapping)
            if not both_dicts and (not isinstance(item, tuple | list) or len(item) < 2):
                message = f"expected (input, target), got {type(item).__name__}"
                raise BadArgument(f"{self.owner}, record {row}", message, f"use a Dataset of {ITEMS}")
        return [self._read_fields(row, item) for row, item in zip(rows, items, strict=True)]

    def _read_fields(self, row: int, item: object) -> object:
        """Convert the numbers in a dict to tensors; other records are returned unchanged."""
        where = f"{self.owner}, record {row}"
        return (
            {name: as_tensor(where, name, field_value) for name, field_value in item.items()}
            if isinstance(item, Mapping)
            else item
        )

    def _collate(self, rows: Sequence[int], items: list[object]) -> Batch:
        try:
            batch = self.collate(items)
            inputs, targets = ([], None) if isinstance(batch, Mapping) else (batch[:-1], batch[-1])
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            if self.collate is default_collate:
                self._check_same_form(rows, items)
            shown_rows = ", ".join(map(str, rows[:3])) + (", ..." if len(rows) > 3 else "")
            reason = str(error).splitlines()[0].rstrip(".")
            message = f"cannot collate records {shown_rows} into a batch of inputs and targets: {reason}"
            fix = "use records of the same shape, or a DataLoader whose collate_fn returns (inputs, targets)"
            raise BadArgument(self.owner, message, fix) from error
        if isinstance(batch, Mapping):
            inputs, targets = split_labels(self.owner, batch)
            return inputs, as_tensor(self.owner, "labels", targets)
        if not inputs or not isinstance(targets, Tensor):
            fix = 'use a collate_fn that returns (inputs, targets), or a dict with "labels"'
            raise BadArgument(self.owner, "the last item of a batch is not a tensor of targets", fix)
        return cast(Inputs, as_dicts(_join_arguments(inputs))), targets

    def _check_same_form(self, rows: Sequence[int], items: list[object]) -> None:
        """Refuse records that differ in form from the first one."""
        expected_forms: dict[str, str] = {}
        for row, item in zip(rows, items, strict=True):
            where = f"{self.owner}, record {row}"
            if isinstance(item, Mapping):
                model_inputs, target = split_labels(where, item)
            else:
                *inputs, target = cast(Sequence[object], item)
                model_inputs = _join_arguments(inputs)
            leaves = {**leaves_by_path(model_inputs), "target": target}
            forms = {path: describe(as_tensor(where, path, leaf)) for path, leaf in leaves.items()}
            expected_forms = expected_forms or forms
            check_same_form(where, forms, f"record {rows[0]}", expected_forms)


Source = Rows | Stream


def split_labels(owner: str, batch: Mapping[str, object]) -> tuple[Inputs, object]:
    """Split a dict into forward's keyword arguments and the targets, the only entry whose key is in `LABEL_NAMES`."""
    names = [name for name in LABEL_NAMES if name in batch]
    if len(names) != 1:
        keys = ", ".join(map(str, batch))
        message = f"a dict has {'several' if names else 'no'} targets: its keys are {keys:.200}"
        raise BadArgument(owner, message, 'name the targets "labels"')
    return cast(Inputs, as_dicts({key: value for key, value in batch.items() if key != names[0]})), batch[names[0]]


def _join_arguments(inputs: Sequence[object]) -> Inputs:
    """Return a single input unchanged, and several inputs as a tuple of forward's arguments."""
    return cast(Inputs, inputs[0] if len(inputs) == 1 else tuple(inputs))


def _is_indexed(value: object) -> TypeGuard[IndexedDataset]:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, IterableDataset)


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray | np.generic) or is_frame(value) or is_series(value)


def list_clients(clients: object) -> list[UserRecords]:
    """Return a list of clients; refuse the records of a single client.

    Args:
        clients: the sequence of clients that the user passed.
    """
    if isinstance(clients, DataLoader | Dataset | Mapping | str) or _is_array(clients):
        message = f"clients must be a list of clients, got {type(clients).__name__}"
        fix = f"use a list ([client] for one client) in which each client is {FORMS}"
        raise BadArgument("Federation", message, "use list(clients.values())" if isinstance(clients, Mapping) else fix)
    return list(cast(Sequence[UserRecords], clients))


def list_columns(records: object) -> tuple[str, ...]:
    """Return the column names of inputs in a pandas DataFrame; () for inputs in another form."""
    inputs = records[0] if isinstance(records, tuple | list) and len(records) == 2 else None
    return tuple(map(str, inputs.columns)) if is_frame(inputs) else ()


def check_columns(clients: Sequence[object]) -> tuple[str, ...]:
    """Return the column names of the clients' DataFrames; refuse DataFrames whose columns or column order differ."""
    columns_by_client = {number: names for number, client in enumerate(clients) if (names := list_columns(client))}
    expected = next(iter(columns_by_client.values()), ())
    for number in columns_by_client:
        check_same_columns(f"client {number}", clients[number], f"client {min(columns_by_client)}", expected)
    return expected


def check_same_columns(owner: str, records: object, first_owner: str, expected: tuple[str, ...]) -> None:
    """Refuse a DataFrame of inputs whose columns or column order differ from `expected`, unless `expected` is empty."""
    names = list_columns(records)
    if names and expected and names != expected:
        message = f"expected the columns {', '.join(expected):.80}, as for {first_owner}, got {', '.join(names):.80}"
        raise BadArgument(owner, message, "use the same columns in the same order: frame[columns]")


def as_source(owner: str, records: object, *, gaps: bool = False) -> Source:
    """Convert a user's records to a source.

    Args:
        owner: the name of the owner in messages, such as "client 0" or "test data".
        records: see `UserRecords`. Arrays, frames and TensorDatasets stay in memory; other Datasets are read on demand.
            A DataLoader's order is not used, so that a resumed run can continue with the next batch.
        gaps: whether missing values and text in arrays and frames become NaN.

    Raises:
        BadArgument: the records have an unsupported form.
    """
    dataset, collate = (
        (records.dataset, records.collate_fn) if isinstance(records, DataLoader) else (records, default_collate)
    )
    if isinstance(records, DataLoader) and _is_indexed(dataset):
        _check_loader(owner, records, len(dataset))
    if isinstance(dataset, TensorDataset) and collate is default_collate:
        if len(dataset.tensors) < 2:
            raise BadArgument(
                owner, "a TensorDataset of one tensor has no targets", "use TensorDataset(inputs, targets)"
            )
        return _as_rows(owner, _join_arguments(dataset.tensors[:-1]), dataset.tensors[-1], gaps)
    if isinstance(records, tuple | list) and len(records) == 2:
        inputs, targets = records
        return _as_rows(owner, inputs, targets, gaps)
    if isinstance(records, Mapping) and any(name in records for name in LABEL_NAMES):
        return _as_rows(owner, *split_labels(owner, records), gaps)
    if isinstance(records, tuple | list | Mapping | str) or _is_array(records):
        length = f" of {len(records)}" if isinstance(records, tuple | list) else ""
        message = f"expected records and their targets, got a {type(records).__name__}{length}"
        raise BadArgument(owner, message, f"use {FORMS}")
    if not _is_indexed(dataset):
        raise BadArgument(owner, f"{type(dataset).__name__} has no length or cannot be indexed", f"use {FORMS}")
    return Stream(owner, dataset, collate)


def _as_rows(owner: str, inputs: object, targets: object, gaps: bool) -> Rows:
    """Convert inputs and targets to tensors; `check_form` later refuses leaves that are not arrays."""

    def convert(path: pytree.KeyPath, leaf: object) -> object:
        if not _is_array(leaf):
            return leaf
        tensor = as_tensor(owner, "inputs" + pytree.keystr(path), leaf, gaps=gaps)
        return tensor.double() if is_frame(leaf) else tensor  # columns are features, even if they contain integers

    parts = targets if isinstance(targets, tuple | list) else ()
    if any(isinstance(part, Tensor | np.ndarray) and part.ndim for part in parts):
        message = f"targets is a {type(targets).__name__} of tensors, as if these were the records of several clients"
        raise BadArgument(
            owner, message, "pass one pair (inputs, targets): concatenate all inputs, and all targets, with torch.cat"
        )
    result = as_tensor(owner, "targets", targets, gaps=gaps)
    if is_frame(targets):  # a single column of integers contains classes
        result = result[:, 0] if result.shape[1] == 1 and not result.is_floating_point() else result.double()
    if not result.dim():
        raise BadArgument(
            owner, "targets must have one value per record, got a single number", "pass one target per record"
        )
    return Rows(owner, cast(Inputs, pytree.tree_map_with_path(convert, as_dicts(inputs))), result)


def _check_loader(owner: str, loader: DataLoader[object], size: int) -> None:
    """Refuse a DataLoader that does not return each of the `size` records of its Dataset exactly once."""
    sampler = loader.sampler
    shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == size
    if loader.batch_size is None or not (shuffles or type(sampler) is SequentialSampler):
        kind = type(sampler if loader.batch_size else loader.batch_sampler or sampler).__name__
        message = f"the DataLoader chooses its records with a {kind}, which would be ignored"
        raise BadArgument(owner, message, WEIGHTED_FIX if isinstance(sampler, WeightedRandomSampler) else SUBSET_FIX)


def choose_batch_size(clients: Sequence[object], batch_size: int | None, default: int) -> int:
    """Return `batch_size` if it is not None; otherwise the batch size of the clients' DataLoaders, or the default."""
    sizes = {client.batch_size for client in clients if isinstance(client, DataLoader)}
    if batch_size is not None or not sizes:
        return default if batch_size is None else batch_size
    if len(sizes) > 1 or None in sizes:
        message = f"the clients' DataLoaders have different batch sizes: {', '.join(map(str, sorted(sizes, key=str)))}"
        raise BadArgument("Federation", message, "pass one batch_size for all clients, such as batch_size=32")
    return cast(int, sizes.pop())


def check_sources(sources: Sequence[Source]) -> list[Source]:
    """Return the sources, with dict keys in the same order as in the first source; refuse sources that differ in form.

    All records in memory are checked, but only the first two records of a stream.
    """
    if not sources:
        raise BadArgument("Federation", "there are no clients", "pass records: Federation(model, [(inputs, targets)])")
    result: list[Source] = []
    first_batch: Batch | None = None
    same_sizes = all(isinstance(source, Rows) or source.uses_default_collate for source in sources)
    for source in sources:
        if not len(source):
            raise BadArgument(source.owner, "there are no records", "pass at least one record, or omit this client")
        in_memory = source if isinstance(source, Rows) else None
        batch = (in_memory.inputs, in_memory.targets) if in_memory else source.take(range(min(2, len(source))))
        check_form(source.owner, batch)
        first_batch = first_batch or batch
        forms, expected = (describe_forms(part, sizes=same_sizes) for part in (batch, first_batch))
        check_same_form(source.owner, forms, sources[0].owner, expected)
        check_finite(source.owner, batch, range(len(batch[1])))
        if in_memory:  # put keys in the same order
            leaves, structure = leaves_by_path(batch[0]), pytree.tree_structure(first_batch[0])
            inputs = pytree.tree_unflatten([leaves[path] for path in leaves_by_path(first_batch[0])], structure)
            source = replace(in_memory, inputs=cast(Inputs, inputs))
        result.append(source)
    return result


def check_form(owner: str, batch: Batch) -> None:
    """Refuse inputs without tensors, leaves other than tensors and constants, and tensors without a row per record."""
    inputs, targets = batch
    leaves = leaves_by_path(inputs)
    for path, leaf in leaves.items():
        if not isinstance(leaf, Tensor | CONSTANT_TYPES):
            fix = "convert arrays with torch.as_tensor, and other mappings with dict"
            raise BadArgument(owner, f"{path} is a {type(leaf).__name__}, not a tensor", fix)
    tensors = tensors_by_path(inputs)
    if not tensors:
        fix = "use a tensor (torch.tensor(inputs) of numbers), or a tuple or dict of forward's arguments"
        raise BadArgument(owner, f"inputs of type {type(inputs).__name__} contain no tensor", fix)
    for path, tensor in {**tensors, "targets": targets}.items():
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
            raise BadArgument(owner, f"{path} is a sparse, nested or meta tensor", "use a dense tensor: .to_dense()")
        records = len(tensor) if tensor.dim() else 0
        if not records or records != len(targets):
            message = f"{path} has {records} records, but there are {len(targets)} targets"
            raise BadArgument(owner, message, "pass one target per record")


def check_finite(owner: str, batch: Batch, indices: Sequence[int]) -> None:
    """Refuse NaN and infinity in inputs and targets; `numbers` are the indices of the records."""
    _refuse_infinite(owner, batch, indices, None, "NaN or infinity", "correct this record, or omit it")


def check_range(owner: str, batch: Batch, indices: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse finite numbers that become infinite in another dtype, such as the model's."""
    content = f"a number that is infinite in {dtype}"
    _refuse_infinite(owner, batch, indices, dtype, content, "scale the records down, or train model.double()")


def _refuse_infinite(
    owner: str, batch: Batch, indices: Sequence[int], dtype: torch.dtype | None, content: str, fix: str
) -> None:
    """Refuse floats that are not finite, or not finite in `dtype` if it is given."""
    for path, tensor in {**tensors_by_path(batch[0]), "targets": batch[1]}.items():
        if not tensor.is_floating_point() or (dtype and torch.finfo(tensor.dtype).max <= torch.finfo(dtype).max):
            continue
        finite = torch.isfinite(tensor.to(dtype) if dtype else tensor)
        if not finite.all():
            row = int((~finite.reshape(len(finite), -1).all(1)).nonzero()[0])
            raise BadArgument(f"{owner}, record {indices[row]}", f"found {content} in {path}", fix)
