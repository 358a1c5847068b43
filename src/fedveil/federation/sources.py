"""Records as users have them: arrays and frames in memory, or a Dataset that is read batch by batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data import default_collate as collate_alike

from fedveil.arrays import as_tensor, check_loader, is_frame, is_series
from fedveil.errors import BadArgument
from fedveil.graph.inputs import Inputs, each

Batch = tuple[Inputs, Tensor]
Given: TypeAlias = tuple[Any, Any] | Dataset[Any] | DataLoader[Any]
"""What a client's records or the test records may be."""
FORMS = "(inputs, targets) of tensors, NumPy arrays or pandas frames, a Dataset of (input, target), or a DataLoader"


@dataclass(frozen=True, eq=False)
class Rows:
    """Records in memory."""

    who: str  # messages name it so: "client 0"
    inputs: Inputs
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Sequence[int]) -> Batch:
        """These records as one batch."""
        chosen = torch.tensor(rows, dtype=torch.int64, device=self.targets.device)
        return each(lambda tensor: tensor[chosen.to(tensor.device)], self.inputs), self.targets[chosen]


@dataclass(frozen=True, eq=False)
class Stream:
    """Records of a Dataset, read when they are asked for: they need not fit into memory."""

    who: str
    dataset: Any
    collate: Callable[[list[Any]], Any] = collate_alike

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, rows: Sequence[int]) -> Batch:
        """These records as one batch."""
        read = getattr(self.dataset, "__getitems__", None)
        items = read(list(rows)) if read else [self.dataset[row] for row in rows]
        for row, item in zip(rows, items, strict=True) if self.collate is collate_alike else ():
            if not isinstance(item, tuple | list) or len(item) < 2:
                what = f"record {row} is a {type(item).__name__}, not (input, target)"
                raise BadArgument(self.who, what, "a Dataset of (input, target) or (input, input, ..., target)")
        try:
            *inputs, targets = self.collate(items)
        except (RuntimeError, TypeError, ValueError) as error:
            what = f"records {_few(rows)} do not make a batch of inputs and targets: {str(error).splitlines()[0]}"
            fix = "records of one shape, or a DataLoader whose collate_fn returns (inputs, targets)"
            raise BadArgument(self.who, what, fix) from error
        if not inputs or not isinstance(targets, Tensor):
            what = f"a batch of records {_few(rows)} has no targets as a tensor behind its inputs"
            raise BadArgument(self.who, what, "a collate_fn that returns (inputs, targets)")
        return inputs[0] if len(inputs) == 1 else tuple(inputs), targets


def _few(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:3])) + (", ..." if len(rows) > 3 else "")


Source = Rows | Stream


def list_clients(given: Any) -> list[Any]:
    """The clients one by one; refuses the records of one of them, whose batches or columns would become clients."""
    if isinstance(given, Mapping):
        fix = "list(clients.values()); clients are named by their place"
        raise BadArgument("Federation", f"clients is a {type(given).__name__}, not a list", fix)
    if isinstance(given, DataLoader | Dataset | Tensor | np.ndarray | str) or is_frame(given) or is_series(given):
        what = f"clients is a {type(given).__name__}, not a list of clients"
        raise BadArgument("Federation", what, f"use a list, [client] for one client; each is {FORMS}")
    return list(given)


def as_source(who: str, given: Any) -> Source:
    """What a user gives for a client or for test data, in memory or as a stream."""
    if isinstance(given, DataLoader):
        return _from_loader(who, given)
    if isinstance(given, TensorDataset):
        return _stored(who, *_split(who, given.tensors))
    if isinstance(given, tuple | list) and len(given) == 2:
        return _stored(who, *given)
    alone = isinstance(given, tuple | list | dict | str | Tensor | np.ndarray) or is_frame(given) or is_series(given)
    if isinstance(given, IterableDataset) or alone or not _by_index(given):
        raise BadArgument(who, _why_not(given), f"a list of clients, each {FORMS}" if alone else FORMS)
    return Stream(who, given)


def _split(who: str, tensors: Sequence[Tensor]) -> Batch:
    if len(tensors) < 2:
        raise BadArgument(who, "a TensorDataset of one tensor has no targets", "TensorDataset(inputs, targets)")
    return tensors[0] if len(tensors) == 2 else tuple(tensors[:-1]), tensors[-1]


def _by_index(given: object) -> bool:
    return hasattr(given, "__len__") and hasattr(given, "__getitem__")


def _why_not(given: object) -> str:
    if is_frame(given):
        return "it is a DataFrame without targets"
    if isinstance(given, IterableDataset) or (isinstance(given, Dataset) and not _by_index(given)):
        return f"a {type(given).__name__} has no records by number, so a round cannot choose its batch"
    length = f" of {len(given)}" if isinstance(given, tuple | list) else ""
    return f"it is a {type(given).__name__}{length}, not records with their targets"


def _stored(who: str, inputs: Any, targets: Any) -> Rows:
    """A pair in memory as tensors; what is neither a tensor nor an array is left to the checks of its place."""
    arrays = (np.ndarray, np.generic)

    def changed(leaf: Any) -> Any:
        if is_frame(leaf):  # its columns are features, also those of whole numbers
            return as_tensor(who, "inputs", leaf).double()
        return as_tensor(who, "inputs", leaf) if isinstance(leaf, arrays) or is_series(leaf) else leaf

    if isinstance(targets, tuple | list) and any(
        isinstance(part, Tensor | np.ndarray) and part.ndim for part in targets
    ):
        what = f"its targets are a {type(targets).__name__} of tensors; these look like the records of several clients"
        raise BadArgument(who, what, "give one (inputs, targets): torch.cat of all inputs, and of all targets")
    wanted = as_tensor(who, "targets", targets)
    if is_frame(targets):  # one column of classes, or several of numbers
        one = wanted.shape[1] == 1 and not wanted.is_floating_point()
        wanted = wanted[:, 0] if one else wanted.double()
    if not wanted.dim():
        raise BadArgument(who, "targets are one number, not one per record", "a tensor of targets")
    return Rows(who, cast(Inputs, pytree.tree_map(changed, inputs)), wanted)


def _from_loader(who: str, loader: DataLoader[Any]) -> Source:
    """The records of a loader. Their order is the federation's, so that a resumed run goes on with the next batch."""
    check_loader(who, loader)
    if isinstance(loader.dataset, TensorDataset) and loader.collate_fn is collate_alike:
        return _stored(who, *_split(who, loader.dataset.tensors))
    return Stream(who, loader.dataset, loader.collate_fn)


def batch_size_of(clients: Sequence[Any], given: int | None, default: int) -> int:
    """The batch size that was given, else that of the clients' DataLoaders if they agree, else the default."""
    own = {client.batch_size for client in clients if isinstance(client, DataLoader)}
    if given is not None or not own:
        return default if given is None else given
    if len(own) > 1 or None in own:
        what = f"the clients' DataLoaders have batches of {', '.join(map(str, sorted(own, key=str)))}"
        raise BadArgument("Federation", what, "batch_size=32, for all of them")
    return cast(int, own.pop())


def named(inputs: Inputs) -> dict[str, Any]:
    """Everything in the inputs by its place there, such as "inputs", "inputs[0]" or "inputs['ids']"."""
    if isinstance(inputs, Tensor):
        return {"inputs": inputs}
    leaves, _ = pytree.tree_flatten_with_path(inputs)
    return {"inputs" + pytree.keystr(path): leaf for path, leaf in leaves}


def check_finite(who: str, batch: Batch, numbers: Sequence[int]) -> None:
    """Refuse NaN and infinity in inputs and targets; `numbers` are those of the records."""
    for place, tensor in _find_floats(batch):
        if (row := _find_row(tensor)) is not None:
            what = f"{who}, record {numbers[row]}: {place} hold NaN or infinity"
            raise BadArgument("Federation", what, "mend or leave out this record")


def check_range(who: str, batch: Batch, numbers: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse finite numbers that become infinite in the model's dtype."""
    for place, tensor in _find_floats(batch):
        if torch.finfo(tensor.dtype).max <= torch.finfo(dtype).max:
            continue
        if (row := _find_row(tensor.to(dtype))) is not None:
            what = f"{who}, record {numbers[row]}: {place} hold a number that is infinite in the model's {dtype}"
            raise BadArgument("Federation", what, "scale the records down, or train model.double()")


def _find_floats(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    inputs, targets = batch
    for place, leaf in (named(inputs) | {"targets": targets}).items():
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield place, leaf


def _find_row(tensor: Tensor) -> int | None:
    finite = torch.isfinite(tensor)
    return None if finite.all() else int((~finite.reshape(len(finite), -1).all(1)).nonzero()[0])


def joined(parts: Sequence[Batch]) -> Batch:
    """Batches behind one another; what is no tensor in their inputs is the same for all."""
    if len(parts) == 1:
        return parts[0]
    inputs = pytree.tree_map(
        lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *(part[0] for part in parts)
    )
    return cast(Inputs, inputs), torch.cat([targets for _, targets in parts])
