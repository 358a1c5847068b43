"""The paper's multi-layer perceptron."""

import itertools

from torch import nn

from fedveil.errors import BadArgument


def mlp(inputs: int, outputs: int, *, layers: int = 3, hidden: int = 50, bias: bool = True) -> nn.Sequential:
    """Build a ReLU network with `layers` hidden layers of `hidden` units and a linear head.

    The paper's L in {3, 5, 7} is `layers`, as its public code counts: L hidden layers, L + 1 weight matrices. The
    paper's networks have no biases (`bias=False`).
    """
    if layers < 1:
        raise BadArgument("mlp", f"layers must be at least 1, got {layers}")
    sizes = [inputs, *[hidden] * layers]
    stack: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        stack += [nn.Linear(before, after, bias=bias), nn.ReLU()]
    return nn.Sequential(*stack, nn.Linear(hidden, outputs, bias=bias))
