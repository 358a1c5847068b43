"""What a model's forward takes: one tensor, a tuple of arguments, or a dict of keyword arguments.

Tuples and dicts may be nested and hold integers or floating-point numbers; the first dimension of every tensor counts
samples. A dict is passed as keyword arguments, ``model(**inputs)``; for a forward that takes a dict as its first
argument, use a tuple of one: ``({"ids": ids, "mask": mask},)``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.utils import _pytree as pytree

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of forward."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs), {}


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output."""
    args, kwargs = arguments(inputs)
    return model(*args, **kwargs)


def tensors(inputs: Inputs) -> list[Tensor]:
    """All tensors, in a fixed order."""
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def each(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """The same structure with `change` applied to every tensor."""
    return cast(Inputs, pytree.tree_map_only(Tensor, change, inputs))


def count(inputs: Inputs) -> int:
    """The number of samples; 0 if there is no tensor."""
    found = tensors(inputs)
    return found[0].shape[0] if found and found[0].dim() else 0
