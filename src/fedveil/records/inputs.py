"""Inputs to a model's forward: a tensor, a tuple of arguments or a dict of keyword arguments, which may be nested."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedveil.errors import BadArgument

Inputs = Tensor | Sequence[object] | Mapping[str, object]
Batch = tuple[Inputs, Tensor]
"""The inputs and targets of a batch of records."""


def as_dicts(inputs: object) -> object:
    """Return the same structure with every mapping as a dict, such as a tokenizer's BatchEncoding."""

    def convert(leaf: object) -> object:  # pytree regards mappings of unknown types as leaves
        return as_dicts(dict(leaf)) if isinstance(leaf, Mapping) else leaf

    return inputs if isinstance(inputs, Tensor) else pytree.tree_map(convert, inputs)


def map_tensors(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Return the same structure with `change` applied to every tensor."""
    return cast(Inputs, pytree.tree_map_only(Tensor, change, inputs))


def leaves_by_path(inputs: object) -> dict[str, object]:
    """Return the leaves of the inputs, keyed by path, such as "inputs", "inputs[0]" or "inputs['ids']"."""
    if isinstance(inputs, Tensor):
        return {"inputs": inputs}
    leaves, _ = pytree.tree_flatten_with_path(inputs)
    return {"inputs" + pytree.keystr(path): leaf for path, leaf in leaves}


def tensors_by_path(inputs: object) -> dict[str, Tensor]:
    """Return the tensors in the inputs, keyed by path."""
    return {path: leaf for path, leaf in leaves_by_path(inputs).items() if isinstance(leaf, Tensor)}


def describe(tensor: Tensor, skip: int = 0) -> str:
    """Describe the kind of number and the shape of a tensor, without its first `skip` dimensions."""
    return f"{'float' if tensor.is_floating_point() else 'integer'} of shape {tuple(tensor.shape[skip:])}"


def describe_forms(batch: Batch, *, sizes: bool = True) -> dict[str, str]:
    """Describe one record of each tensor in a batch, keyed by path; other leaves are described by their values.

    Without `sizes`, only the number of dims is described, for batches that are padded to different lengths.
    """
    leaves = {**leaves_by_path(batch[0]), "targets": batch[1]}

    def form(leaf: object) -> str:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        return describe(leaf, 1) if sizes else f"{describe(leaf, leaf.dim())[:-2]}{max(0, leaf.dim() - 1)} dims"

    return {path: form(leaf) for path, leaf in leaves.items()}


def describe_exactly(batch: Batch) -> str:
    """Describe the structure, shapes and dtypes of one record of a batch, and its constants."""
    tensors = [*tensors_by_path(batch[0]).values(), batch[1]]
    return repr((describe_forms(batch), [tensor.dtype for tensor in tensors]))


def check_same_form(owner: str, forms: Mapping[str, str], other: str, expected: Mapping[str, str]) -> None:
    """Refuse records that differ in structure, shape or kind of number from the records of another owner.

    Args:
        owner: the owner of the records, for messages.
        forms: the forms of the records, as `describe_forms` returns them.
        other: the other owner, for messages.
        expected: the forms of the other owner's records.
    """
    for path in (*expected, *forms):
        result, expected_form = (form_by_path.get(path, "missing") for form_by_path in (forms, expected))
        if result != expected_form:
            what = f"{path} is {result:.60}, but that of {other} is {expected_form:.60}"
            raise BadArgument(owner, what, "use the same structure, shape and kind of number for all records")


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches; input leaves that are not tensors are taken from the first batch."""
    if len(batches) == 1:
        return batches[0]
    inputs = pytree.tree_map(
        lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0],
        *(batch for batch, _ in batches),
    )
    return cast(Inputs, inputs), torch.cat([targets for _, targets in batches])
