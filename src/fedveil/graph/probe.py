"""Run forward on fake tensors, to detect code that its exported graph does not show.

A probe refuses code that changes gradients, and records the operations of a forward pass. If two records agree,
forward does not depend on the difference between the two passes, such as the number of samples.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedveil.errors import FedveilError, NotExact
from fedveil.graph.export import SAMPLES, SkipMode, check_example, copy_model, explain, silence_torch
from fedveil.graph.foreign_code import (
    HOOK_FIX,
    find_draws,
    new_nodes,
    read_generators,
    refuse_custom_backward,
    refuse_draws,
    refuse_packing,
    restore_generators,
)
from fedveil.graph.inputs import Inputs, Named, arguments, each
from fedveil.graph.outputs import return_predictions

HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
Operation = tuple[object, ...]  # a function and its flattened arguments, with tensors as numbers or names


@dataclass(eq=False)
class _Tensors:
    """The labels of the tensors in a pass; `references` keeps the tensors alive, so that no id is reused."""

    labels: dict[int, str]
    references: list[Tensor] = field(default_factory=list)

    def label(self, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf if isinstance(leaf, bool | int | float | str | None) else repr(leaf)
        label = self.labels.get(id(leaf))
        if label is None:
            self.references.append(leaf)
            label = self.labels[id(leaf)] = f"t{len(self.references)}"
        return label


class _OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records operations and their arguments."""

    def __init__(self, labels: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record: list[Operation] = []
        self._tensors = _Tensors(labels)

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Named | None = None
    ) -> object:
        """Record the operation, and run it."""
        label = self._tensors.label
        operands = [label(leaf) for leaf in pytree.tree_leaves((args, kwargs or {}))]
        result = func(*args, **(kwargs or {}))
        results = [label(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self.record.append((func, *operands, "->", *results))
        return result


class _HookMode(TorchFunctionMode):
    """A mode that refuses hooks that forward registers, and saved_tensors_hooks that it uses."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self._paths = paths

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Named | None = None
    ) -> object:
        """Check the function, and call it."""
        name = getattr(func, "__name__", "")
        if name in HOOKS:
            message = f"its forward method calls {name} on a tensor; the hook would receive perturbed gradients"
            raise NotExact(self._paths[-1], message, HOOK_FIX)
        reads_grad_fn = name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") == "grad_fn"
        if (
            reads_grad_fn and sys._getframe(1).f_globals.get("__name__") != nn.Module.__module__
        ):  # nn.Module reads it too
            message = "its forward method reads grad_fn, through which the backward pass can be changed"
            raise NotExact(self._paths[-1], message, "remove the code that uses grad_fn")
        refuse_packing(self._paths[-1])
        return func(*args, **(kwargs or {}))


@contextmanager
def _follow_modules(model: nn.Module, paths: list[str]) -> Iterator[None]:
    """Keep the path of the innermost running module at the end of `paths`; refuse custom backward passes in it."""
    checked_nodes: set[Node] = set()
    names = {id(module): name for name, module in model.named_modules()}

    def check(values: object) -> None:
        with torch._C.DisableTorchFunction():  # reading grad_fn is refused in forward
            for node in new_nodes(
                [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)], checked_nodes
            ):
                refuse_custom_backward(node, paths[-1])

    def begin(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        check((args, kwargs))  # the values that the calling module has computed
        name = names.get(id(module), "")
        paths.append(f"{name} ({type(module).__name__})" if name else type(module).__name__)

    def end(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        check(output)
        paths.pop()

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(end))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def probe(model: nn.Module, inputs: Inputs, samples: int = SAMPLES) -> list[Operation]:
    """Return the operations of a forward pass with this number of samples; refuse code that changes gradients.

    Raises:
        NotExact: forward defines a backward pass, registers a hook on a tensor, or packs saved tensors.
        NotTraceable: forward fails on fake tensors, or draws random numbers from NumPy or Python.
    """
    with silence_torch():
        with restore_generators():
            state = read_generators()
            operations = _record_operations(model, inputs, samples)
            has_drawn = read_generators() != state
        if has_drawn:
            with restore_generators(), find_draws() as functions:
                _record_operations(model, inputs, samples)
            refuse_draws(functions, type(model).__name__)
    return operations


def _record_operations(model: nn.Module, inputs: Inputs, samples: int) -> list[Operation]:
    model_copy, paths = return_predictions(copy_model(model)), [type(model).__name__]
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    with torch.enable_grad(), mode:
        values = {name: _make_fake(mode, tensor) for name, tensor in _state(model_copy).items()}
        args, kwargs = arguments(each(mode.from_tensor, check_example(model, inputs, samples)))
        labels = {id(value): name for name, value in values.items()}
        labels |= {id(leaf): f"input {n}" for n, leaf in enumerate(pytree.tree_leaves((args, kwargs)))}
        operations = _OperationMode(labels)
        try:
            with _follow_modules(model_copy, paths), _HookMode(paths), SkipMode(), operations:
                torch.func.functional_call(model_copy, values, args, kwargs)
        except FedveilError:
            raise
        except Exception as error:
            raise explain(model, model_copy, error) from None
    return operations.record


def _state(model: nn.Module) -> Mapping[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _make_fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    result: Tensor = mode.from_tensor(tensor.detach())
    return result.requires_grad_(tensor.requires_grad)


def agree(first: Sequence[Operation], second: Sequence[Operation], difference: int) -> bool:
    """Return whether two passes have the same operations; integers may differ by multiples of `difference`."""
    return len(first) == len(second) and all(
        len(a) == len(b) and all(_are_equal(x, y, difference) for x, y in zip(a, b, strict=True))
        for a, b in zip(first, second, strict=True)
    )


def _are_equal(first: object, second: object, difference: int) -> bool:
    if type(first) is int and type(second) is int and difference:
        return (first - second) % difference == 0
    return first is second or (type(first) is type(second) and first == second)
