"""Inputs of a model's forward: a tensor, a tuple of arguments, or a dict of keyword arguments, nested or not."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedveil.errors import BadArgument

Inputs = Tensor | Sequence[object] | Mapping[str, object]
Batch = tuple[Inputs, Tensor]
"""Inputs and targets of the same records."""


def map_tensors(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Return the same structure with `change` applied to every tensor."""
    return cast(Inputs, pytree.tree_map_only(Tensor, change, inputs))


def name_leaves(inputs: object) -> dict[str, object]:
    """Return the leaves of the inputs by their path, such as "inputs", "inputs[0]" or "inputs['ids']"."""
    if isinstance(inputs, Tensor):
        return {"inputs": inputs}
    leaves, _ = pytree.tree_flatten_with_path(inputs)
    return {"inputs" + pytree.keystr(path): leaf for path, leaf in leaves}


def name_tensors(inputs: object) -> dict[str, Tensor]:
    """Return the tensors in the inputs by their path."""
    return {path: leaf for path, leaf in name_leaves(inputs).items() if isinstance(leaf, Tensor)}


def describe(tensor: Tensor, first: int = 0) -> str:
    """Describe the kind and shape of a tensor, without its first `first` dimensions."""
    return f"{'float' if tensor.is_floating_point() else 'integer'} of shape {tuple(tensor.shape[first:])}"


def describe_forms(batch: Batch) -> dict[str, str]:
    """Describe one record of every tensor in a batch, by path; other leaves are described by their value."""
    leaves = {**name_leaves(batch[0]), "targets": batch[1]}
    return {path: describe(leaf, 1) if isinstance(leaf, Tensor) else repr(leaf) for path, leaf in leaves.items()}


def check_alike(who: str, own: Mapping[str, str], other: str, wanted: Mapping[str, str]) -> None:
    """Refuse records whose structure, shape or kind of number differs from those of another owner.

    Args:
        who: the owner of the records, for messages.
        own: their forms, as `describe_forms` returns them.
        other: the owner of the records that they must match.
        wanted: the forms of the other owner's records.
    """
    for path in (*wanted, *own):
        found, like = (forms.get(path, "missing") for forms in (own, wanted))
        if found != like:
            what = f"{path} is {found:.60}, that of {other} is {like:.60}"
            raise BadArgument(who, what, "give all records one structure, one shape and one kind of number")


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches; input leaves that are not tensors are taken from the first batch."""
    if len(batches) == 1:
        return batches[0]
    inputs = pytree.tree_map(
        lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *(own for own, _ in batches)
    )
    return cast(Inputs, inputs), torch.cat([targets for _, targets in batches])
