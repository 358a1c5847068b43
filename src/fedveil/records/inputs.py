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
    """Convert all mappings in the inputs, such as a tokenizer's BatchEncoding, to dicts."""

    def convert(leaf: object) -> object:  # pytree treats mappings of unregistered types as leaves
        return as_dicts(dict(leaf)) if isinstance(leaf, Mapping) else leaf

    return inputs if isinstance(inputs, Tensor) else pytree.tree_map(convert, inputs)


def map_tensors(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Return the same structure with `function` applied to every tensor."""
    return cast(Inputs, pytree.tree_map_only(Tensor, function, inputs))


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
    return f"{_describe_kind(tensor)} of shape {tuple(tensor.shape[skip:])}"


def _describe_kind(tensor: Tensor) -> str:
    return "float" if tensor.is_floating_point() else "integer"


def describe_forms(batch: Batch, *, sizes: bool = True) -> dict[str, str]:
    """Describe one record of each tensor in a batch, keyed by path; other leaves are described by their values.

    If `sizes` is false, only the number of dimensions is given, because batches may be padded to different lengths.
    """
    leaves = {**leaves_by_path(batch[0]), "targets": batch[1]}

    def describe_leaf(leaf: object) -> str:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        return describe(leaf, 1) if sizes else f"{_describe_kind(leaf)} with {max(0, leaf.dim() - 1)} dims"

    return {path: describe_leaf(leaf) for path, leaf in leaves.items()}


def describe_exactly(batch: Batch) -> str:
    """Describe the structure, shapes and dtypes of one record of a batch, and its constants."""
    tensors = [*tensors_by_path(batch[0]).values(), batch[1]]
    return repr((describe_forms(batch), [tensor.dtype for tensor in tensors]))


def check_same_form(owner: str, forms: Mapping[str, str], other_owner: str, expected: Mapping[str, str]) -> None:
    """Refuse records that differ in structure, shape or kind of number from the records of another owner.

    Args:
        owner: the owner of the records, for messages.
        forms: the forms of the records, as `describe_forms` returns them.
        other_owner: the other owner, for messages.
        expected: the forms of the other owner's records.
    """
    for path in (*expected, *forms):
        result, expected_form = (form_by_path.get(path, "missing") for form_by_path in (forms, expected))
        if result != expected_form:
            message = f"expected {path} to be {expected_form:.60}, as for {other_owner}, got {result:.60}"
            raise BadArgument(owner, message, "use the same structure, shape and kind of number for all records")


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches; input leaves that are not tensors are taken from the first batch."""
    if len(batches) == 1:
        return batches[0]
    inputs = pytree.tree_map(
        lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0],
        *(batch for batch, _ in batches),
    )
    return cast(Inputs, inputs), torch.cat([targets for _, targets in batches])
