"""A model's tensors, and their order in one flat vector."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from fedveil.errors import AnalysisError

Home = tuple[dict[str, Any], str]


@dataclass(frozen=True)
class Inside:
    """A model's tensors by name, the dicts that hold each, and the training mode of every module."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    homes: dict[str, list[Home]]
    modes: tuple[tuple[str, bool], ...]


def look_inside(model: nn.Module) -> Inside:
    """Read a model in one pass, in the order of named_modules; a tensor is listed under its first name."""
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    homes: dict[int, list[Home]] = {}
    named: dict[str, list[Home]] = {}
    modes: list[tuple[str, bool]] = []
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, path: str, prefix: str) -> None:
        seen.add(module)
        modes.append((path, module.training))
        for found, own in ((parameters, module._parameters), (buffers, module._buffers)):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                known = homes.get(id(tensor))
                if known is None:
                    found[prefix + name] = tensor
                    known = homes[id(tensor)] = named[prefix + name] = []
                known.append((own, name))
        for name, child in module._modules.items():
            if child is not None and child not in seen:
                walk(child, prefix + name, f"{prefix}{name}.")

    walk(model, "", "")
    return Inside(parameters, buffers, named, tuple(modes))


@dataclass(frozen=True)
class Entry:
    """A tensor in the flat vector; `like` is a meta tensor of its shape."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    like: Tensor


@dataclass(frozen=True)
class Layout:
    """The order of tensors in the flat vector.

    Attributes:
        trainable: parameters that require gradients.
        frozen: parameters that do not.
        buffers: floating-point buffers.
        counters: other buffers, which are sent separately.
        unused: parameters that forward never reads, which are not sent.
    """

    trainable: tuple[Entry, ...]
    frozen: tuple[Entry, ...]
    buffers: tuple[Entry, ...]
    counters: tuple[str, ...]
    unused: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All tensors of the vector in order."""
        return self.trainable + self.frozen + self.buffers

    @cached_property
    def total(self) -> int:
        """The length of the vector."""
        return _length(self.entries)

    @cached_property
    def weights(self) -> int:
        """The length of its trainable part."""
        return _length(self.trainable)

    @cached_property
    def parameters(self) -> int:
        """The length of its trainable and frozen part."""
        return _length(self.trainable + self.frozen)

    @cached_property
    def name(self) -> str:
        """A short name for the architecture, equal for equal names, shapes and dtype of the tensors that are sent."""
        text = repr((sorted((entry.name, tuple(entry.shape)) for entry in self.entries), str(self.dtype)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _length(entries: tuple[Entry, ...]) -> int:
    return sum(entry.shape.numel() for entry in entries)


def flatten(tensors: Mapping[str, Tensor], entries: tuple[Entry, ...]) -> Tensor:
    """Return the entries' tensors as one vector."""
    flat: Tensor = _flatten_dense_tensors([tensors[entry.name] for entry in entries])  # type: ignore[no-untyped-call]
    return flat


def unflatten(flat: Tensor, entries: tuple[Entry, ...]) -> dict[str, Tensor]:
    """Invert `flatten`, by views."""
    pieces = _unflatten_dense_tensors(flat, [entry.like for entry in entries])  # type: ignore[no-untyped-call]
    return {entry.name: piece for entry, piece in zip(entries, pieces, strict=True)}


def lay_out(model: nn.Module, used: frozenset[str]) -> Layout:
    """Choose the order of the model's tensors in the flat vector."""
    inside = look_inside(model)
    parameters = {name: p for name, p in inside.parameters.items() if name in used}
    kinds = (
        {name: p for name, p in parameters.items() if p.requires_grad},
        {name: p for name, p in parameters.items() if not p.requires_grad},
        {name: b for name, b in inside.buffers.items() if b.is_floating_point()},
    )
    dtypes = {(tensor.dtype, tensor.device) for kind in kinds for tensor in kind.values()}
    if len(dtypes) != 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in dtypes)) or "no parameters"
        fix = "call model.to(device, torch.float32) before analyse"
        raise AnalysisError(type(model).__name__, f"its tensors must share one dtype and device, found {found}", fix)
    entries: list[list[Entry]] = [[], [], []]
    start = 0
    for row, kind in zip(entries, kinds, strict=True):
        for name, tensor in kind.items():
            row.append(Entry(name, tensor.shape, start, start + tensor.numel(), tensor.detach().to("meta")))
            start += tensor.numel()
    trainable, frozen, buffers = map(tuple, entries)
    counters = tuple(name for name in inside.buffers if name not in kinds[2])
    unused = tuple(name for name in inside.parameters if name not in used)
    return Layout(trainable, frozen, buffers, counters, unused, *dtypes.pop())
