"""Flower's differential privacy: mods that clients apply to their updates, and a strategy, both in Flower's own code.

Import this module only if flwr is installed (`pip install 'fedveil[flower]'`). Flower's mods work on the difference
between the parameters that a client sends and those that it received. Here, the received parameters are 0, so that the
difference is the update.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, Metadata, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from torch import nn

from fedveil.checks import check_positive, check_range
from fedveil.defences.filtered import (
    Arrays,
    Filter,
    Filtered,
    fresh_numpy_noise,
    from_arrays,
    quiet_logger,
    refuse_buffers,
    to_arrays,
)
from fedveil.defences.plain import PlainRound, PlainServer, PlainUpdate, average
from fedveil.errors import BadArgument, UpdateRefused
from fedveil.graph.inputs import Inputs
from fedveil.privacy.accounting import check_delta
from fedveil.scheme import Aggregate, Loss
from fedveil.scheme.result import recover_each

SERVER, CLIENT, TTL = 1, 2, 60.0  # node numbers and time to live of messages that never leave the process
CLIP, WEIGHT = "clipping_norm", "num-examples"  # keys of Flower's messages
TINY = 1e-15  # replaces one element of an all-zero update, because Flower divides by the norm
NextMod = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, NextMod], Message]


class FlowerLocalDp(Filtered):
    """Clients clip their update and add Gaussian noise (Flower's `LocalDpMod`).

    The standard deviation is sensitivity * sqrt(2 ln(1.25 / delta)) / epsilon. Two updates differ by up to twice the
    clipping norm, so the claim holds for one message only if sensitivity >= 2 clipping_norm and epsilon <= 1. Flower
    enforces neither condition and does not count messages. Flower accepts 0 for all settings except the clipping norm;
    here, such settings are refused. A server cannot choose the settings of clients on a network.

    Args:
        clipping_norm: maximum norm of an update.
        sensitivity: the change in the update that the noise should hide; by default, the clipping norm.
        epsilon: claimed epsilon of one message.
        delta: claimed delta of one message.
    """

    name = "flower:LocalDpMod"
    refuses_buffers = True

    def __init__(
        self, clipping_norm: float = 1.0, sensitivity: float | None = None, epsilon: float = 10.0, delta: float = 1e-5
    ) -> None:
        self.clipping_norm = check_positive(self.name, "clipping_norm", clipping_norm, "use clipping_norm=1")
        value = self.clipping_norm if sensitivity is None else sensitivity
        self.sensitivity = check_positive(self.name, "sensitivity", value, "use twice the clipping norm")
        self.epsilon = check_positive(self.name, "epsilon", epsilon, "use epsilon=10")
        self.delta = check_delta(self.name, delta)

    @property
    def noise(self) -> float:
        """The standard deviation of the noise."""
        return self.sensitivity * math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon

    def create_filter(self) -> Filter:
        """Return Flower's mod as a filter."""
        return mod_filter(LocalDpMod(self.clipping_norm, self.sensitivity, self.epsilon, self.delta), {})


class FlowerClipping(Filtered):
    """Clients clip their update, and the server adds Gaussian noise to the mean.

    Clients run Flower's `fixedclipping_mod`; the server runs Flower's `DifferentialPrivacyClientSideFixedClipping`
    around `FedAvg`. The standard deviation of the noise is noise_multiplier * clipping_norm / clients. The claim is
    about clients, holds only if all of them have the same number of records, and requires a trusted server.

    Args:
        clipping_norm: maximum norm of an update.
        noise_multiplier: standard deviation of the noise on the sum / clipping norm.
    """

    name = "flower:fixedclipping_mod"
    refuses_buffers = True
    remote_settings = ("clipping_norm", "noise_multiplier")

    def __init__(self, clipping_norm: float = 1.0, noise_multiplier: float = 1.0) -> None:
        self.clipping_norm = check_positive(self.name, "clipping_norm", clipping_norm, "use clipping_norm=1")
        fix = "use noise_multiplier=1; with 0, there is no guarantee"
        self.noise_multiplier = check_range(self.name, "noise_multiplier", noise_multiplier, 0, 1e30, fix)

    def create_filter(self) -> Filter:
        """Return Flower's mod as a filter; the server sends the clipping norm with every message."""
        return mod_filter(fixedclipping_mod, {CLIP: self.clipping_norm})

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> PlainServer:
        """Prepare the server; refuse buffers, which are averaged without noise."""
        refuse_buffers(self.name, model, example)
        return ClippingServer(self, model)


class ClippingServer(PlainServer):
    """Starts rounds in which Flower's strategy aggregates updates."""

    def __init__(self, settings: FlowerClipping, model: nn.Module) -> None:
        super().__init__(model)
        self._settings = settings

    def start_round(self, model: nn.Module, members: Sequence[int | str] | None = None) -> "ClippingRound":
        """Broadcast the model."""
        return ClippingRound(model, self.figures, self._settings)


class ClippingRound(PlainRound):
    """A round in which Flower's strategy averages updates and adds noise."""

    def __init__(self, model: nn.Module, figures: Mapping[str, float], settings: FlowerClipping) -> None:
        super().__init__(model, figures)
        self._settings = settings

    def recover(self, updates: Sequence[PlainUpdate], weights: Sequence[float]) -> Aggregate:
        """Return Flower's weighted mean with noise; buffers, which do not depend on the data, are averaged."""
        mean, settings = average(updates, weights, self._figures), self._settings
        strategy = DifferentialPrivacyClientSideFixedClipping(
            FedAvg(), settings.noise_multiplier, settings.clipping_norm, len(updates)
        )
        replies = [
            reply_to(instruction({}), to_arrays(update.gradients), weight)
            for update, weight in zip(updates, weights, strict=True)
        ]
        with quiet_logger("flwr"), fresh_numpy_noise():
            record, _ = strategy.aggregate_train(1, replies)
        if record is None:
            raise BadArgument(settings.name, "Flower's strategy returned no arrays", "use the supported flwr version")
        return replace(mean, gradients=from_arrays(read_arrays(record), mean.gradients))

    def recover_each(self, updates: Sequence[PlainUpdate]) -> list[Aggregate | UpdateRefused]:
        """Return each client's clipped update without noise, as the server sees it."""
        return recover_each(lambda update: average([update], [1.0], self._figures), updates)

    def combine(self, results: Sequence[Aggregate]) -> Aggregate:
        """Return the mean with equal weights and with noise; no other rule has a guarantee."""
        clipped_updates = [PlainUpdate(dict(result.gradients), dict(result.buffers)) for result in results]
        return self.recover(clipped_updates, [1.0] * len(clipped_updates))


def mod_filter(mod: Mod, config: dict[str, float]) -> Filter:
    """Return a function that calls a mod as a Flower client does, with a received model of zeros."""

    def apply(arrays: Arrays) -> Arrays:
        if all(not array.any() for array in arrays.values()):
            next(iter(arrays.values())).flat[0] = TINY
        request = instruction(config, {name: np.zeros_like(array) for name, array in arrays.items()})
        context = Context(run_id=1, node_id=CLIENT, node_config={}, state=RecordDict(), run_config={})
        with quiet_logger("flwr"), fresh_numpy_noise():
            reply = mod(request, context, lambda message, _: reply_to(message, arrays, 1.0))
        if reply.has_error():
            raise BadArgument("Flower", f"the mod failed: {reply.error.reason}", "use the supported flwr version")
        return read_arrays(next(iter(reply.content.array_records.values())))

    return apply


def instruction(config: dict[str, float], arrays: Arrays | None = None) -> Message:
    """Return the server's message to a client."""
    content = RecordDict({"arrays": to_record(arrays or {}), "config": ConfigRecord(dict(config))})
    metadata = Metadata(1, "instruction", SERVER, CLIENT, "", "", time.time(), TTL, MessageType.TRAIN)
    result: Message = Message(content=content, metadata=metadata)  # type: ignore[call-overload]  # outside a Flower task
    return result


def reply_to(message: Message, arrays: Arrays, weight: float) -> Message:
    """Return a client's reply with its update and its number of records."""
    content = RecordDict({"arrays": to_record(arrays), "metrics": MetricRecord({WEIGHT: weight})})
    return Message(content, reply_to=message)


def to_record(arrays: Arrays) -> ArrayRecord:
    """Return arrays as a Flower record."""
    return ArrayRecord({name: FlowerArray(array) for name, array in arrays.items()})


def read_arrays(record: ArrayRecord) -> Arrays:
    """Return the arrays of a Flower record."""
    return {name: array.numpy() for name, array in record.items()}
