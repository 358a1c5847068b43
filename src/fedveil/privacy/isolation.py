"""Isolate records: a record for which a computation fails, or that a module stores, must not affect other records."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))  # hooks and registries; parameters and buffers are passed to each call


def attempt(function: Callable[[], T]) -> T | None:
    """Return the result of `function`, or None if it fails. Extensions may raise a BaseException."""
    try:
        return function()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None


@contextlib.contextmanager
def keep_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules on exit, such as hidden states and lists of earlier inputs."""
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    custom = [value for _, before in attributes for name, value in before.items() if name not in _TORCH_ATTRIBUTES]
    tensors = [(value, value.detach().clone(), value._version) for value in custom if isinstance(value, Tensor)]
    containers = [(value, value.copy()) for value in custom if isinstance(value, list | dict | set)]
    try:
        yield
    finally:
        for current, before in attributes:
            for name in current.keys() - before.keys():
                del current[name]
            current.update(before)
        for tensor, values, version in tensors:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(values)
        for container, items in containers:
            container.clear()
            container.extend(items) if isinstance(container, list) else container.update(items)
