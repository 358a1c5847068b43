"""Pass inputs to a model's forward method, and intercept calls to its layers.

Inputs are a tensor, a tuple of arguments, or a mapping of keyword arguments, such as a dict or the output of a
tokenizer. Tuples and mappings may be nested and may contain integers or floats; the first dimension of every tensor is
the batch dimension. A mapping is passed as keyword arguments, ``model(**inputs)``; if forward takes a dict as its first
argument, pass a one-element tuple:
``({"ids": ids, "mask": mask},)``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fedveil.graph.operations import ADDMM, LAYERS, MATMUL
from fedveil.graph.outputs import find_predictions

Named = Mapping[str, Any]
Inputs = Tensor | Sequence[Any] | Named


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs as positional and keyword arguments for forward."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    structure = as_dicts(inputs)
    return ((), dict(structure)) if isinstance(structure, Mapping) else (tuple(structure), {})


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the model's predictions."""
    args, kwargs = arguments(inputs)
    return find_predictions(model, model(*args, **kwargs))


def as_dicts(inputs: Inputs) -> Inputs:
    """Convert all mappings in the inputs, such as a tokenizer's BatchEncoding, to dicts."""
    if isinstance(inputs, Tensor):
        return inputs

    def convert(leaf: object) -> object:  # pytree treats mappings of unregistered types as leaves
        return as_dicts(dict(leaf)) if isinstance(leaf, Mapping) else leaf

    return cast(Inputs, pytree.tree_map(convert, inputs))


def tensors(inputs: Inputs) -> list[Tensor]:
    """Return all tensors in the inputs, in a fixed order."""
    return [leaf for leaf in pytree.tree_leaves(as_dicts(inputs)) if isinstance(leaf, Tensor)]


def each(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Return the same structure, with mappings as dicts, and with `function` applied to every tensor."""
    return cast(Inputs, pytree.tree_map_only(Tensor, function, as_dicts(inputs)))


def count(inputs: Inputs) -> int:
    """Return the number of samples in the inputs; 0 if they contain no tensor."""
    leaves = tensors(inputs)
    return leaves[0].shape[0] if leaves and leaves[0].dim() else 0


def describe_form(inputs: Inputs) -> str:
    """Describe the form that all batches must have: the structure of the inputs, and all dims but the first."""
    leaves, structure = pytree.tree_flatten(as_dicts(inputs))
    return f"{structure}: {'; '.join(map(_describe_leaf, leaves))}"


def _describe_leaf(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return f"{leaf!r:.80}"
    kind = "float" if leaf.is_floating_point() else str(leaf.dtype).removeprefix("torch.")
    return f"{kind} {'x'.join(map(str, ('n', *leaf.shape[1:])))}"


@dataclass(eq=False)
class ModuleCall:
    """A call to a module in a forward pass: the first tensor passed to it, and its output."""

    module: nn.Module
    first_input: Tensor
    output: Any = None


@contextmanager
def record_calls(modules: Iterable[nn.Module]) -> Iterator[list[ModuleCall]]:
    """Record calls to these modules during forward passes, in the order in which the calls begin."""
    calls: list[ModuleCall] = []

    def begin(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        calls.extend(ModuleCall(module, tensor) for tensor in tensors((args, kwargs))[:1])

    def end(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        open_calls = [call for call in calls if call.module is module and call.output is None]
        for call in open_calls[-1:]:
            call.output = output

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(end))
        yield calls


class LayerOutputMode(TorchFunctionMode):
    """A mode that changes the output of the Linear, convolution or addmm that uses the given weight.

    Attributes:
        calls: the number of calls to the layer so far.
    """

    def __init__(self, weight: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.calls = 0
        self._weight, self._change = weight, change

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Named | None = None
    ) -> object:
        """Call the function, and change its result if it computes the layer."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        position, key = (2, "mat2") if name == ADDMM else (1, "weight")
        weight = args[position] if len(args) > position else (kwargs or {}).get(key)
        is_product = name in (MATMUL, f"__{MATMUL}__") and isinstance(args[1], Tensor) and self._is_view(args[1])
        if not is_product and (weight is not self._weight or (name not in LAYERS and name != ADDMM)):
            return result
        assert isinstance(result, Tensor)
        self.calls += 1
        return self._change(result)

    def _is_view(self, tensor: Tensor) -> bool:
        shares_memory = tensor.untyped_storage()._cdata == self._weight.untyped_storage()._cdata
        return shares_memory and tensor.numel() == self._weight.numel()


@contextmanager
def change_recomputed(model: nn.Module, weight: Tensor, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change the output of the layer that uses the weight when checkpoints recompute it during the backward pass."""
    stacks: list[ExitStack] = []

    def begin(*_: object) -> None:
        stacks.append(ExitStack())
        stacks[-1].enter_context(LayerOutputMode(weight, change))

    def end(*_: object) -> None:
        stacks.pop().close()

    owners = [module for module in model.modules() if any(tensor is weight for tensor in module._parameters.values())]
    with ExitStack() as stack:
        for module in owners:
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end, always_call=True).remove)
        yield
