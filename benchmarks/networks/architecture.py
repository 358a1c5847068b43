"""What a network of the collection is: how to build it, and what its forward takes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from fedveil.graph.inputs import Inputs

MakeInputs = Callable[[int, Generator], Inputs]


@dataclass(frozen=True)
class Architecture:
    """A small network.

    Attributes:
        name: as tables show it.
        family: "transformer", "vision", "recurrent", "text", "convolution", "set" or "table".
        build: makes the module, which returns one tensor.
        inputs: makes inputs for a number of samples; floating ones in float32.
        quick: whether it is among the few that every test run covers.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: MakeInputs
    quick: bool = False


def normal(*shape: int) -> MakeInputs:
    """One tensor of normal numbers."""
    return lambda samples, generator: torch.randn(samples, *shape, generator=generator)


def images(size: int, channels: int = 3) -> MakeInputs:
    """Square images."""
    return normal(channels, size, size)


def ids(vocabulary: int, samples: int, length: int, generator: Generator) -> Tensor:
    """Random integers below `vocabulary`."""
    return torch.randint(vocabulary, (samples, length), generator=generator)


def tokens(vocabulary: int, length: int) -> MakeInputs:
    """Token numbers of sentences that all have one length."""
    return lambda samples, generator: ids(vocabulary, samples, length, generator)
