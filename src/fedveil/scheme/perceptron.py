"""All backward passes of a perceptron at once.

For a stack of Linear and ReLU, all cotangents of a client step go back together: one product per layer gives the
gradients for all of them, one more the cotangents of its input. For small networks this saves most of the cost, which
is calls. The result is autograd's up to rounding (tests/scheme/test_perceptron.py).
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.wire import Tensors


def find_links(model: nn.Module, inputs: object, values: Collection[str]) -> list[str | None] | None:
    """The path of each Linear and None for each ReLU, in order; or None if the model is not such a stack."""
    if type(model) is not nn.Sequential or not isinstance(inputs, Tensor) or inputs.dim() != 2:
        return None
    links: list[str | None] = []
    for path, module in model._modules.items():
        if type(module) not in (nn.Linear, nn.ReLU) or module._forward_hooks or module._forward_pre_hooks:
            return None
        if any(f"{path}.{name}" not in values for name, own in module._parameters.items() if own is not None):
            return None  # a module or tensor that is used twice is listed under its first name only
        links.append(path if type(module) is nn.Linear else None)
    return None if model._forward_hooks or model._forward_pre_hooks else links


def forward(links: Sequence[str | None], values: Tensors, inputs: Tensor) -> list[Tensor]:
    """The input and every layer's output."""
    seen = [inputs]
    for path in links:
        x = seen[-1]
        seen.append(
            torch.relu(x) if path is None else F.linear(x, values[f"{path}.weight"], values.get(f"{path}.bias"))
        )
    return seen


def backward(
    links: Sequence[str | None], values: Tensors, seen: Sequence[Tensor], cotangents: Tensor, wanted: Collection[str]
) -> Tensors:
    """Gradients of the `wanted` parameters, one row per row of cotangents of the last output."""
    back = cotangents
    passes, samples, _ = back.shape
    found: Tensors = {}
    for number in reversed(range(len(links))):
        path = links[number]
        if path is None:
            back.mul_(seen[number + 1].sign())  # a ReLU's output has sign 0 or 1: its derivative
            continue
        weight, bias = f"{path}.weight", f"{path}.bias"
        if weight in wanted:
            found[weight] = torch.bmm(back.transpose(1, 2), seen[number].expand(passes, -1, -1))
        if bias in wanted:
            found[bias] = back.sum(1)
        if number:
            back = (back.view(passes * samples, -1) @ values[weight]).view(passes, samples, -1)
    return {name: found[name] for name in wanted}
