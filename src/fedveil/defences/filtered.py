"""Base classes for defences that filter clients' updates, such as with another framework's filter."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedveil.defences.plain import Plain, PlainClient, PlainServer, PlainUpdate
from fedveil.errors import BadArgument, NonFiniteUpdate
from fedveil.graph.inputs import Inputs
from fedveil.scheme import Loss
from fedveil.scheme.recover import are_overflow_safe, check_finite
from fedveil.wire import Tensors

Array = NDArray[np.float32] | NDArray[np.float64]
Arrays = dict[str, Array]
Filter = Callable[[Arrays], Arrays]
WORDS = 624  # 32-bit words in the state of NumPy's global generator
_NUMPY = threading.Lock()  # held while the state of NumPy's global generator is replaced


class Filtered(Plain):
    """Clients filter their updates; the server averages the results.

    The update is a gradient, or the difference of two models. Buffers are not filtered.
    A defence whose claim would not hold for them sets `covers_buffers` to refuse a model with buffers that depend on
    the data.
    """

    fusable = linear = False
    covers_buffers = False

    def __init__(self) -> None:
        """Keep the class's name, which `Plain` would replace."""

    def create_filter(self) -> Filter:
        """Return a function that transforms an update, as arrays with at least one dimension."""
        raise NotImplementedError

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> PlainServer:
        """Prepare the server for a run."""
        return PlainServer(model)

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> PlainClient:
        """Prepare clients for a run; refuse buffers that the claim does not cover."""
        if self.covers_buffers:
            refuse_buffers(self.name, model, example)
        return FilteredClient(self.create_filter(), model, loss)


class FilteredClient(PlainClient):
    """Computes plain gradients, and filters them before they are sent."""

    def __init__(self, apply: Filter, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        self._apply = apply

    def upload(self, update: PlainUpdate, client: int = 0) -> PlainUpdate:
        """Filter an update; refuse non-finite updates, which other packages' filters may pass on."""
        if not are_overflow_safe(list(update.gradients.values())):
            check_finite(f"client {client}", "gradient", update.gradients)
            raise NonFiniteUpdate(f"client {client}", "the norm of its gradient overflows")
        result = self._apply(to_arrays(update.gradients))
        return replace(update, gradients=from_arrays(result, update.gradients))


def refuse_buffers(name: str, model: nn.Module, example: Inputs) -> None:
    """Refuse a model with buffers that depend on the data, because they are sent unfiltered."""
    from fedveil.defences.private import find_moving_tensors  # other filters do not need it

    if moving := find_moving_tensors(model, example):
        message = f"{moving[0]} depends on the clients' data, and is sent without noise"
        raise BadArgument(name, message, "use GroupNorm or LayerNorm instead of BatchNorm (--norm none for a ResNet)")


def to_arrays(gradients: Mapping[str, Tensor]) -> Arrays:
    """Return copies as arrays with at least one dimension: filters of other packages exempt scalars."""
    return {name: np.atleast_1d(gradient.detach().cpu().numpy()).copy() for name, gradient in gradients.items()}


def from_arrays(arrays: Mapping[str, Array], like: Mapping[str, Tensor]) -> Tensors:
    """Return tensors with the shapes, dtypes and devices of `like`."""
    return {name: torch.from_numpy(arrays[name]).reshape(tensor.shape).to(tensor) for name, tensor in like.items()}


@contextlib.contextmanager
def fresh_numpy_noise() -> Iterator[None]:
    """Seed NumPy's global generator from the operating system, and restore its state afterwards.

    Filters of other packages draw noise from this generator. A training script that seeds it (`numpy.random.seed(0)`)
    makes their noise predictable.
    """
    with _NUMPY:
        before = np.random.get_state()
        np.random.seed(np.frombuffer(os.urandom(4 * WORDS), dtype=np.uint32))
        try:
            yield
        finally:
            np.random.set_state(before)


@contextlib.contextmanager
def quiet_logger(name: str) -> Iterator[None]:
    """Suppress the messages below WARNING of a package that logs every call."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
