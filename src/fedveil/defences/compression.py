"""Compression of updates, which is sometimes mistaken for protection: top-k sparsification and 8-bit quantisation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedveil.checks import check_fraction
from fedveil.defences.encoding import count_bytes, split_vector, trainable_tensors
from fedveil.defences.interface import State, StateValue, read_state
from fedveil.defences.plain import AnyPlainRound, Plain, PlainClient, PlainCodec, PlainServer, PlainUpdate
from fedveil.defences.ppdl import PPDLCodec, select_largest
from fedveil.errors import BadArgument
from fedveil.graph.inputs import Inputs
from fedveil.scheme import Loss
from fedveil.scheme.recover import check_finite, check_tensors
from fedveil.wire import Packed, Tensors, Values, add_prefix, strip_prefix

MAX_LEVEL = 127  # the largest magnitude of a quantised element


class TopK(Plain):
    """Clients send only the largest elements of their update, and add the other elements to the next update.

    Aji and Heafield, 2017; Stich, Cordonnier and Jaggi, 2018 ("sparsified SGD with memory"). Buffers are sent
    unchanged.

    Args:
        fraction: fraction of an update's elements that a client sends.
    """

    name = "topk"
    fusable = linear = False
    remote_settings = ("fraction",)

    def __init__(self, fraction: float = 0.1) -> None:
        self.fraction = check_fraction("TopK", "fraction", fraction, "use fraction=1 to send the whole update")

    @property
    def codec(self) -> PPDLCodec:
        """The encoding of the model, the selected elements and the buffers."""
        return PPDLCodec(self.fraction)

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> PlainServer:
        """Prepare the server for a run."""
        server, parameters = PlainServer(model), list(trainable_tensors(model).values())
        if self.fraction < 1:
            total = sum(tensor.numel() for tensor in parameters)
            count = max(1, round(self.fraction * total))
            num_bytes = count * parameters[0].element_size() + min(4 * count, math.ceil(total / 8))
            server.figures["bytes_up"] = num_bytes + count_bytes(model.buffers())
        return server

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> "TopKClient":
        """Prepare clients for a run."""
        return TopKClient(self.fraction, model, loss)


class TopKClient(PlainClient):
    """Selects elements, and stores the elements that each client has not sent."""

    def __init__(self, fraction: float, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        self._fraction = fraction
        self._unsent: dict[int, Tensor] = {}

    def upload(self, update: PlainUpdate, client: int = 0) -> PlainUpdate:
        """Add the client's unsent elements, and return the largest elements of the sum."""
        check_finite(f"client {client}", "gradient", update.gradients)
        flat = torch.cat([gradient.reshape(-1) for gradient in update.gradients.values()])
        count = max(1, round(self._fraction * len(flat)))
        if count == len(flat):
            return update
        if client in self._unsent:
            flat = flat + self._unsent[client].to(flat)
        sparse = torch.where(select_largest(flat, count), flat, torch.zeros_like(flat))
        self._unsent[client] = flat - sparse
        return replace(update, gradients=split_vector(sparse, update.gradients))

    def state(self, client: int) -> State:
        """Return the client's unsent elements."""
        return {"unsent": self._unsent[client]} if client in self._unsent else {}

    def restore(self, client: int, state: Mapping[str, StateValue]) -> None:
        """Continue from `state`."""
        self._unsent.pop(client, None)
        if state:
            self._unsent[client] = read_state("TopK", state, "unsent", Tensor)


class Int8(Plain):
    """Clients round each tensor of their update to 255 levels, 8 bits per element.

    An element g becomes scale * round(g / scale), where scale is the tensor's largest magnitude / 127. Buffers are sent
    unchanged.
    """

    name = "int8"
    fusable = linear = False

    def __init__(self) -> None:
        """Do not call `Plain.__init__`, which would replace the class's name."""

    @property
    def codec(self) -> "Int8Codec":
        """The encoding of the model, the levels, the scales and the buffers."""
        return Int8Codec()

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> PlainServer:
        """Prepare the server for a run."""
        server = PlainServer(model)
        server.figures["bytes_up"] = count_bytes([*template(model).values(), *model.buffers()])
        return server

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> "Int8Client":
        """Prepare clients for a run."""
        return Int8Client(model, loss)


@dataclass(frozen=True, eq=False)
class Int8Update(PlainUpdate):
    """A quantised update: `gradients` are the levels times the scales."""

    levels: Tensors = field(default_factory=dict)
    scales: Tensors = field(default_factory=dict)


class Int8Client(PlainClient):
    """Quantises gradients."""

    def upload(self, update: PlainUpdate, client: int = 0) -> Int8Update:
        """Quantise each tensor; refuse tensors that are not finite."""
        check_finite(f"client {client}", "gradient", update.gradients)
        pairs = {name: quantise_tensor(gradient) for name, gradient in update.gradients.items()}
        levels, scales = ({name: pair[index] for name, pair in pairs.items()} for index in (0, 1))
        return Int8Update(restore_tensors(levels, scales), update.buffers, levels, scales)


def quantise_tensor(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8-bit levels and their scale; the scale is 0 if it underflows."""
    max_magnitude = values.abs().max() if values.numel() else values.new_zeros(())
    scale = max_magnitude / MAX_LEVEL
    levels = torch.where(scale > 0, values / scale, torch.zeros_like(values)).round().clamp(-MAX_LEVEL, MAX_LEVEL)
    return levels.to(torch.int8), scale


def restore_tensors(levels: Mapping[str, Tensor], scales: Mapping[str, Tensor]) -> Tensors:
    """Return levels times scales."""
    return {name: level.to(scales[name].dtype) * scales[name] for name, level in levels.items()}


def template(model: nn.Module) -> Tensors:
    """Return levels and scales with the shapes and dtypes that a client sends."""
    parameters = trainable_tensors(model)
    levels = {name: torch.zeros_like(value, dtype=torch.int8) for name, value in parameters.items()}
    return add_prefix("level", levels) | add_prefix("scale", {name: v.new_zeros(()) for name, v in parameters.items()})


class Int8Codec(PlainCodec):
    """Like `PlainCodec`, but encodes levels and scales."""

    def encode_update(self, update: PlainUpdate) -> Packed:
        """Encode levels, scales and buffers."""
        if not isinstance(update, Int8Update):
            raise BadArgument("int8", "the update is not quantised", "send the result of the client's `upload`")
        result = add_prefix("level", update.levels) | add_prefix("scale", update.scales)
        return {}, result | add_prefix("buffer", update.buffers)

    def decode_update(
        self, defence_round: AnyPlainRound, model: nn.Module, values: Values, tensors: Tensors, position: int
    ) -> PlainUpdate:
        """Decode an update; refuse levels or scales that do not match the model, and scales that are not finite."""
        client, expected = f"client {position}", self.template(defence_round, model)[1]
        device = next(model.parameters()).device
        on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
        check_tensors(client, "tensor", on_device, {name: (t.shape, t.dtype) for name, t in expected.items()}, device)
        check_finite(client, "tensor", on_device)
        gradients = restore_tensors(strip_prefix("level", on_device), strip_prefix("scale", on_device))
        check_finite(client, "gradient", gradients)
        return PlainUpdate(gradients, strip_prefix("buffer", on_device))

    def template(self, defence_round: AnyPlainRound, model: nn.Module) -> Packed:
        """Return an example of an encoded update."""
        return {}, template(model) | add_prefix("buffer", dict(model.named_buffers()))
