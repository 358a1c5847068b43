"""Base classes for defences that filter clients' updates, for example with a filter from another framework."""

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
STATE_WORDS = 624  # 32-bit words in the state of NumPy's global generator
_NUMPY_LOCK = threading.Lock()  # held while the state of NumPy's global generator is replaced


class Filtered(Plain):
    """Clients filter their updates; the server averages the results.

    The update is a gradient or the change of the model. Buffers are not filtered. If `refuses_buffers` is True, a model
    with buffers that depend on the data is refused, because the claim would not hold for them.
    """

    fusable = linear = False
    refuses_buffers = False

    def __init__(self) -> None:
        """Do not call `Plain.__init__`, which would replace the class's name."""

    def create_filter(self) -> Filter:
        """Return a function that transforms an update, as arrays with at least one dimension."""
        raise NotImplementedError

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> PlainServer:
        """Prepare the server for a run."""
        return PlainServer(model)

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> PlainClient:
        """Prepare clients for a run; refuse buffers to which the claim does not apply."""
        if self.refuses_buffers:
            refuse_buffers(self.name, model, example)
        return FilteredClient(self.create_filter(), model, loss)


class FilteredClient(PlainClient):
    """Computes plain gradients, and filters them before they are sent."""

    def __init__(self, apply: Filter, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        self._apply = apply

    def upload(self, update: PlainUpdate, client: int = 0) -> PlainUpdate:
        """Filter an update; refuse non-finite updates, which filters from other packages might pass on."""
        if not are_overflow_safe(list(update.gradients.values())):
            check_finite(f"client {client}", "gradient", update.gradients)
            raise NonFiniteUpdate(f"client {client}", "the norm of its gradient overflows")
        result = self._apply(to_arrays(update.gradients))
        return replace(update, gradients=from_arrays(result, update.gradients))


def refuse_buffers(name: str, model: nn.Module, example: Inputs) -> None:
    """Refuse a model with buffers that depend on the data, because they are sent unfiltered."""
    from fedveil.defences.private import find_mutated_tensors  # imported here because most filters do not need it

    if changing_tensors := find_mutated_tensors(model, example):
        message = f"{changing_tensors[0]} depends on the clients' data and is sent without noise"
        raise BadArgument(name, message, "use GroupNorm or LayerNorm instead of BatchNorm (--norm none for a ResNet)")


def to_arrays(gradients: Mapping[str, Tensor]) -> Arrays:
    """Return copies as arrays with at least one dimension, because filters from other packages exempt scalars."""
    return {name: np.atleast_1d(gradient.detach().cpu().numpy()).copy() for name, gradient in gradients.items()}


def from_arrays(arrays: Mapping[str, Array], reference: Mapping[str, Tensor]) -> Tensors:
    """Return tensors with the shapes, dtypes and devices of `reference`."""
    return {name: torch.from_numpy(arrays[name]).reshape(tensor.shape).to(tensor) for name, tensor in reference.items()}


@contextlib.contextmanager
def fresh_numpy_noise() -> Iterator[None]:
    """Seed NumPy's global generator from the operating system, and restore its state afterwards.

    Filters from other packages draw noise from this generator. A training script that seeds the generator
    (`numpy.random.seed(0)`) makes this noise predictable.
    """
    with _NUMPY_LOCK:
        state = np.random.get_state()
        np.random.seed(np.frombuffer(os.urandom(4 * STATE_WORDS), dtype=np.uint32))
        try:
            yield
        finally:
            np.random.set_state(state)


@contextlib.contextmanager
def quiet_logger(name: str) -> Iterator[None]:
    """Suppress the messages below WARNING of a package that logs every call."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
