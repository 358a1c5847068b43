"""Refuse code that changes gradients: hooks, and backward passes that users define.

The backward pass of a perturbed model has perturbed gradients. A hook or a backward pass that clamps, masks or rounds
them does not have the same effect as on plain gradients, and the recovered gradient would be wrong. Forward hooks are
part of forward, and work.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import Node

from fedveil.errors import NotExact

IN_STEP = "remove it; to change gradients, do so in the step of your own optimizer, which receives the recovered ones"
BY_AUTOGRAD = (
    "compute it with torch functions, whose derivatives autograd knows; for an identity with another gradient, such as "
    "a straight-through estimator, use x + (f(x) - x).detach()"
)
REENTRANT = "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
KNOWN_PACKERS = ("torch.utils.checkpoint", "torch.autograd.graph")  # they restore tensors exactly


MODULE_HOOK = "it has a backward hook, which would receive perturbed gradients"
TENSOR_HOOK = "it has a gradient hook (register_hook), which would not see the recovered gradient"
GLOBAL_HOOK = "a backward hook is registered for all modules, and would receive perturbed gradients"


def refuse_hooks(found: tuple[tuple[str, str], ...], model_name: str) -> None:
    """Refuse a model with hooks; `found` lists the path of a module or tensor, and the kind of hook."""
    for path, what in found:
        fix = "remove it: call remove() on the handle that registering it returned"
        raise NotExact(path or model_name, what, fix if what == GLOBAL_HOOK else IN_STEP)


def refuse_packing(where: str) -> None:
    """Refuse saved_tensors_hooks that may change tensors saved for the backward pass."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks and getattr(hooks[0], "__module__", None) not in KNOWN_PACKERS:
        what = "saved_tensors_hooks are active, which may change the activations that gradients are computed from"
        raise NotExact(where, what, "remove them; torch.utils.checkpoint and save_on_cpu work")


def new_nodes(outputs: list[Tensor], seen: set[Node]) -> Iterator[Node]:
    """Yield the nodes of the backward graph of these tensors that are not in `seen`, and add them to it."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions if following is not None]


def refuse_custom_backward(node: Node, where: str) -> None:
    """Refuse a node of the backward graph whose backward pass is not derived by PyTorch."""
    kind = type(node)
    own: Callable[..., object] | None = getattr(kind, "_forward_cls", None)
    if own is None and not node.name().startswith("torch::autograd::CppNode"):
        return
    module, name = getattr(own, "__module__", ""), getattr(own, "__qualname__", node.name())
    if module.startswith("torch._higher_order_ops"):
        return
    if own is torch.utils.checkpoint.CheckpointFunction:
        raise NotExact(where, "its reentrant checkpoint hides the backward pass of its layers", REENTRANT)
    what = f"the backward pass of {name} is user-defined, and would receive perturbed gradients"
    raise NotExact(where, what, BY_AUTOGRAD)
