"""Keep records apart: a record for which a computation fails, or which a module remembers, must not affect others."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
_OF_TORCH = frozenset(vars(nn.Module()))  # hooks and registries; parameters and buffers are passed to each call


def attempt(work: Callable[[], T]) -> T | None:
    """Return the result of `work`, or None if it fails. Extensions may raise errors that are not an Exception."""
    try:
        return work()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None


@contextlib.contextmanager
def keep_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules afterwards, such as a hidden state or a list of what they have seen."""
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    owned = [own for _, known in attributes for name, own in known.items() if name not in _OF_TORCH]
    tensors = [(own, own.detach().clone(), own._version) for own in owned if isinstance(own, Tensor)]
    containers = [(own, own.copy()) for own in owned if isinstance(own, list | dict | set)]
    try:
        yield
    finally:
        for own, known in attributes:
            for name in own.keys() - known.keys():
                del own[name]
            own.update(known)
        for tensor, values, version in tensors:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(values)
        for container, items in containers:
            container.clear()
            container.extend(items) if isinstance(container, list) else container.update(items)
