"""Checks of records: one structure, one row per target, finite numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedveil.errors import BadArgument
from fedveil.records.inputs import Batch, Inputs, check_alike, describe_forms, name_leaves, name_tensors
from fedveil.records.sources import Rows, Source

PLAIN = bool | int | float | str | None


def check_sources(sources: Sequence[Source]) -> list[Source]:
    """Return the sources, with inputs in the structure of the first one's; refuse those that do not belong together.

    Records in memory are all checked, and the first two of a stream.
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
    """Refuse inputs without a tensor, leaves that are neither tensors nor constants, and tensors without a row each."""
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
    for path, tensor in _find_floats(batch):
        if (row := _find_row(tensor)) is not None:
            what = f"{path} hold NaN or infinity"
            raise BadArgument(f"{who}, record {numbers[row]}", what, "correct this record, or leave it out")


def check_range(who: str, batch: Batch, numbers: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse finite numbers that become infinite in another dtype, such as the model's."""
    for path, tensor in _find_floats(batch):
        if torch.finfo(tensor.dtype).max <= torch.finfo(dtype).max:
            continue
        if (row := _find_row(tensor.to(dtype))) is not None:
            what = f"{path} hold a number that is infinite in {dtype}"
            raise BadArgument(f"{who}, record {numbers[row]}", what, "scale the records down, or train model.double()")


def _find_floats(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    found = {**name_tensors(batch[0]), "targets": batch[1]}
    return ((path, tensor) for path, tensor in found.items() if tensor.is_floating_point())


def _find_row(tensor: Tensor) -> int | None:
    finite = torch.isfinite(tensor)
    return None if finite.all() else int((~finite.reshape(len(finite), -1).all(1)).nonzero()[0])
