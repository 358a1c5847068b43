"""The model as a client receives it."""

import copy

import torch
from torch import Tensor, nn

from fedveil.graph.compiled import find_original
from fedveil.graph.export import find_computed
from fedveil.graph.units import factor_along
from fedveil.scheme.broadcast import Broadcast, PublicHead


def client_view(model: nn.Module, broadcast: Broadcast, *, centred: bool = False) -> nn.Module:
    """Return the model as a client receives it: a copy of `model` with the broadcast's values.

    The head is base + offset, as in the paper. If `centred` is true, it is the base without the public offset. Any
    client can compute this model, and it predicts far better (docs/maths.md, "What a veil hides").
    """
    own = find_original(model)
    view = copy.deepcopy(own, dict[int, object](find_computed(own)))
    view.load_state_dict(dict(broadcast.parameters) | dict(broadcast.buffers), strict=False)
    head = broadcast.head
    if head and not centred:
        noise = head.offset[head.partition] * head.direction.double()
        move_head(view, head, noise.to(head.direction.dtype))
    return view


def move_head(model: nn.Module, head: PublicHead, noise: Tensor) -> None:
    """Add one number per output to the weights of a model's head, in place, and to its bias if the bias has noise."""
    weight = model.get_parameter(head.weight)
    with torch.no_grad():
        weight.add_(factor_along(noise, head.dim, weight.dim()))
        if head.bias and head.noisy_bias:
            model.get_parameter(head.bias).add_(noise)
