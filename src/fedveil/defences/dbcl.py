"""Double-blind collaborative learning (Zhang and Wang, ICML 2021): clients train on a CountSketch of the weights.

The server sends W~ = W S in place of a weight W with m units and n inputs. The sketch S is the same for all clients and
is redrawn in every round. The sketch sums q of the n inputs, with random signs, in each of s = floor(n / q) buckets. A
client computes X~ = X S and Z = X~ W~^T + b, and sends Gamma = delta^T X~. The server uses the gradient sum_k |D_k| /
|D| Gamma_k S^T. This is the exact gradient of the loss with weights W S S^T, but not an unbiased estimate of the plain
gradient (docs/defences/dbcl.md).

Differences from the original: clients compute one gradient per round instead of training for local epochs, they receive
W~ but never W, and Conv2d layers may have any stride, padding, dilation and groups.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.checks import check_count
from fedveil.defences import encoding
from fedveil.defences.interface import (
    Codec,
    Defence,
    DefenceClient,
    DefenceRound,
    DefenceServer,
    Samples,
    State,
    StateValue,
    read_state,
)
from fedveil.defences.plain import PlainClient, PlainUpdate, average
from fedveil.errors import BadArgument, ModelMismatch, StaleUpdate
from fedveil.graph.inputs import Inputs, call, record_calls
from fedveil.scheme import Aggregate, Loss
from fedveil.wire import Packed, Tensors, Values, check_fields


@dataclass(frozen=True, eq=False)
class Sketch:
    """The sketch S, stored as its nonzero entries."""

    inputs: Tensor  # (q, s): the indices of the inputs in each bucket; all other inputs are dropped
    signs: Tensor  # (q, s): 1 or -1 for each of these inputs
    fan_in: int  # number of inputs, n

    @classmethod
    def draw(cls, fan_in: int, q: int, rng: np.random.Generator) -> "Sketch":
        """Draw random buckets and independent random signs; fan_in mod q inputs are dropped."""
        shape = q, fan_in // q
        inputs = rng.permutation(fan_in)[: shape[0] * shape[1]].reshape(shape)
        signs = 1.0 - 2.0 * rng.integers(0, 2, shape)
        return cls(torch.from_numpy(inputs), torch.from_numpy(signs), fan_in)

    def to(self, reference: Tensor) -> "Sketch":
        """Return the sketch on the device and in the dtype of `reference`."""
        return self.map(
            lambda tensor: tensor.to(reference) if tensor.is_floating_point() else tensor.to(reference.device)
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> "Sketch":
        """Return the sketch with a function applied to both of its tensors."""
        return Sketch(function(self.inputs), function(self.signs), self.fan_in)

    def project(self, rows: Tensor) -> Tensor:
        """Return X S for rows X of shape (..., n); the result has shape (..., s)."""
        selected = rows.index_select(-1, self.inputs.flatten()) * self.signs.flatten()
        return selected.reshape(*rows.shape[:-1], *self.inputs.shape).sum(-2)

    def back_project(self, rows: Tensor) -> Tensor:
        """Return C S^T for rows C of shape (..., s); the result has shape (..., n), with 0 for dropped inputs."""
        signed_rows = (rows.unsqueeze(-2) * self.signs).flatten(-2)
        return rows.new_zeros((*rows.shape[:-1], self.fan_in)).index_copy(-1, self.inputs.flatten(), signed_rows)


class SketchedLayer(nn.Module):
    """A layer as clients receive it: `weight` is W~ = W S of shape (m, s), and the bias is unchanged."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear | nn.Conv2d, sketch: Sketch) -> None:
        super().__init__()
        self.sketch = sketch
        sketched_weight = sketch.project(layer.weight.detach().flatten(1))
        self.weight = nn.Parameter(sketched_weight, layer.weight.requires_grad)
        self.bias = copy.deepcopy(layer.bias)  # type: ignore[assignment]
        self.training = layer.training

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SketchedLayer":
        """Move or cast S with the module. S is not a buffer, because clients do not send it back."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.sketch = self.sketch.map(fn)
        return self


class SketchedLinear(SketchedLayer):
    """A sketched Linear, which computes (X S) W~^T + b."""

    def forward(self, x: Tensor) -> Tensor:
        """Sketch the inputs and apply the sketched weight."""
        return F.linear(self.sketch.project(x), self.weight, self.bias)


class SketchedConv2d(SketchedLayer):
    """A sketched Conv2d, which applies the sketched weight to every patch of an image.

    The layer computes a convolution with the kernel W~ S^T: for unfolded patches U, (U S) W~^T = U (W~ S^T)^T.
    Sketching U itself takes 2 to 6 times as long (see the measurements in docs/defences/dbcl.md).
    """

    def __init__(self, layer: nn.Conv2d, sketch: Sketch) -> None:
        super().__init__(layer, sketch)
        self.kernel = tuple(layer.weight.shape[1:])
        self.stride, self.padding = layer.stride, layer.padding
        self.dilation, self.groups = layer.dilation, layer.groups

    def forward(self, x: Tensor) -> Tensor:
        """Expand the sketched kernel and apply the convolution."""
        kernel = self.sketch.back_project(self.weight).reshape(-1, *self.kernel)
        return F.conv2d(x, kernel, self.bias, self.stride, self.padding, self.dilation, self.groups)


LAYER_TYPES = (nn.Linear, nn.Conv2d)  # layers that can be sketched


def sketch_network(model: nn.Module, sketches: Mapping[str, Sketch]) -> nn.Module:
    """Return a copy of a model with a `SketchedLayer` in place of each layer whose weight has a sketch."""
    memo: dict[int, nn.Module | nn.Parameter] = {}  # deepcopy uses these objects instead of copying the originals
    for name, sketch in sketches.items():
        layer = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(layer, LAYER_TYPES)
        replacement = SketchedConv2d(layer, sketch) if isinstance(layer, nn.Conv2d) else SketchedLinear(layer, sketch)
        memo[id(layer)], memo[id(layer.weight)] = replacement, replacement.weight
    return copy.deepcopy(model, memo)


@dataclass(frozen=True, eq=False)
class SketchedBroadcast:
    """The broadcast of a round: the model with a `SketchedLayer` for each layer whose weight is sketched."""

    number: int  # counts the server's broadcasts, starting at 1
    network: nn.Module

    @property
    def sketches(self) -> dict[str, Sketch]:
        """The sketch of each sketched weight, by the weight's name."""
        layers = [(path, layer) for path, layer in self.network.named_modules() if isinstance(layer, SketchedLayer)]
        return {f"{path}.weight".lstrip("."): layer.sketch for path, layer in layers}


@dataclass(frozen=True, eq=False)
class SketchedUpdate(PlainUpdate):
    """Gradients and buffers of the sketched network, and the number of the broadcast that they were computed from."""

    number: int


class DBCL(Defence[SketchedBroadcast, SketchedUpdate]):
    """Send clients a new CountSketch of the weights in every round.

    This hides the weights of all Linear and Conv2d layers except the first Conv2d and the last Linear that the model
    calls. The weights of these two layers, all biases, normalisation layers and buffers are sent unchanged. A model
    with a weight that cannot be sketched is refused, unless that weight is in `skip`.

    Args:
        q: number of inputs that share a bucket.
        skip_first_conv: whether to send the first Conv2d unchanged.
        skip_last: whether to send the last Linear unchanged.
        skip: paths of other modules or parameters to send unchanged.
        seed: makes sketches reproducible, for tests. By default, the operating system seeds every broadcast.
    """

    name = "dbcl"

    def __init__(
        self,
        q: int = 2,
        *,
        skip_first_conv: bool = True,
        skip_last: bool = True,
        skip: Sequence[str] = (),
        seed: int | None = None,
    ) -> None:
        check_count("dbcl", "q", q, 2, "use DBCL(q=2): with one input per bucket, S hides nothing")
        check_count("dbcl", "seed", 0 if seed is None else seed, 0, "use DBCL(seed=0)")
        self.q, self.skip_first_conv, self.skip_last = q, skip_first_conv, skip_last
        self.skip = (skip,) if isinstance(skip, str) else tuple(skip)
        self.seed, self.repeatable = seed, seed is not None

    @property
    def codec(self) -> "DBCLCodec":
        """The encoding of the sketched network, its sketches and its gradients."""
        return DBCLCodec()

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> "DBCLServer":
        """Prepare the server for a run: choose the weights to sketch."""
        model_copy = copy.deepcopy(model).eval()
        paths = {module: path for path, module in model_copy.named_modules()}
        with torch.no_grad(), record_calls(m for m in paths if isinstance(m, nn.Conv2d | nn.Linear)) as calls:
            call(model_copy, example)
        convs = [paths[call.module] for call in calls if isinstance(call.module, nn.Conv2d)]
        linears = [paths[call.module] for call in calls if isinstance(call.module, nn.Linear)]
        unsketched = (convs[:1] if self.skip_first_conv else []) + (linears[-1:] if self.skip_last else [])
        return DBCLServer(self.q, self.seed, _choose_weights(model, self.q, unsketched, self.skip))

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> "DBCLClient":
        """Prepare clients for a run."""
        return DBCLClient(PlainClient(model, loss))

    def client_view(self, model: nn.Module, broadcast: SketchedBroadcast) -> nn.Module:
        """Return a copy of the sketched network."""
        return copy.deepcopy(broadcast.network)


class DBCLServer(DefenceServer[SketchedBroadcast, SketchedUpdate]):
    """Draws new sketches for each broadcast."""

    def __init__(self, q: int, seed: int | None, sketched_names: tuple[str, ...]) -> None:
        self.sketched = sketched_names  # names of the weights that clients never receive
        self._q, self._seed, self._number = q, seed, 0

    def start_round(self, model: nn.Module, members: Sequence[int | str] | None = None) -> "DBCLRound":
        """Sketch the model."""
        self._number += 1
        rng = np.random.default_rng(None if self._seed is None else (self._seed, self._number))
        weights = {name: model.get_parameter(name).detach() for name in self.sketched}
        sketches = {name: Sketch.draw(w[0].numel(), self._q, rng).to(w) for name, w in weights.items()}
        broadcast = SketchedBroadcast(self._number, sketch_network(model, sketches))
        return DBCLRound(broadcast, model)

    def state(self) -> State:
        """Return the number of broadcasts so far, which determines the next sketch if there is a seed."""
        return {"number": self._number}

    def restore(self, state: Mapping[str, StateValue]) -> None:
        """Continue counting broadcasts from `state`."""
        self._number = read_state("dbcl", state, "number", int)


SketchedRound = DefenceRound[SketchedBroadcast, SketchedUpdate]


class DBCLRound(SketchedRound):
    """Maps the gradients of the sketched network back to the shapes of the model."""

    def __init__(self, broadcast: SketchedBroadcast, model: nn.Module) -> None:
        self.broadcast, self._model = broadcast, model

    def check_number(self, number: int, position: int = 0) -> None:
        """Refuse an update that was computed from another broadcast."""
        if number != self.broadcast.number:
            message = f"the update is for broadcast {number}, but the current broadcast is {self.broadcast.number}"
            raise StaleUpdate(f"client {position}", message)

    def recover(self, updates: Sequence[SketchedUpdate], weights: Sequence[float]) -> Aggregate:
        """Return sum_k |D_k| / |D| Gamma_k S^T for sketched weights, and the weighted mean of everything else.

        The reported error is 0, because the result is the gradient of the sketched network up to rounding. The server
        cannot know how much this result differs from the plain gradient.
        """
        for position, update in enumerate(updates):
            self.check_number(update.number, position)
        mean = average(updates, weights, {})
        gradients, network, num_entries = dict(mean.gradients), self.broadcast.network, 0
        for name, sketch in self.broadcast.sketches.items():
            num_entries += sketch.inputs.numel()
            if name in gradients:
                gradients[name] = sketch.back_project(gradients[name]).reshape(self._model.get_parameter(name).shape)
        # an entry of a sketch takes 4 bytes, for its index and its sign
        bytes_down = encoding.count_bytes([*network.parameters(), *network.buffers()]) + 4 * num_entries
        bytes_up = encoding.count_bytes([*updates[0].gradients.values(), *mean.buffers.values()])
        return dataclasses.replace(mean, gradients=gradients, figures={"bytes_down": bytes_down, "bytes_up": bytes_up})


class DBCLClient(DefenceClient[SketchedBroadcast, SketchedUpdate]):
    """Computes gradients of the sketched network."""

    def __init__(self, plain_client: PlainClient) -> None:
        self._plain = plain_client

    def step(self, broadcast: SketchedBroadcast, samples: Samples, client: int = 0) -> SketchedUpdate:
        """Compute Gamma = delta^T X~ for sketched weights, and plain gradients for all others."""
        result = self._plain.step(broadcast.network, samples, client)
        return SketchedUpdate(result.gradients, result.buffers, broadcast.number)

    def accumulate(
        self, broadcast: SketchedBroadcast, total: SketchedUpdate | None, update: SketchedUpdate
    ) -> tuple[SketchedBroadcast, SketchedUpdate]:
        """Sum gradients of the sketched network."""
        network, update = self._plain.accumulate(broadcast.network, total, update)
        return dataclasses.replace(broadcast, network=network), update


def _choose_weights(model: nn.Module, q: int, unsketched: Sequence[str], skip: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the weights to sketch, at least one; refuse a model if one of them cannot be sketched."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    uses = Counter(id(parameter) for parameter in parameters.values())

    def is_below(path: str, name: str) -> bool:
        return path in ("", name) or name.startswith(path + ".")

    for path in skip:
        if not any(is_below(path, name) for name in parameters):
            raise BadArgument("dbcl", f"skip contains {path!r}, but the model has no parameters there")
    result = []
    for name, parameter in parameters.items():
        if parameter.dim() < 2 or any(is_below(path, name) for path in (*unsketched, *skip)):
            continue
        path, _, short_name = name.rpartition(".")
        layer = model.get_submodule(path)
        obstacle = _find_obstacle(layer, short_name, q, parameter[0].numel(), is_shared=uses[id(parameter)] > 1)
        if obstacle:
            raise BadArgument(
                f"dbcl, {name}", obstacle, f"use DBCL(skip=({path or short_name!r},)) to send it unchanged"
            )
        result.append(name)
    if not result:
        message = "none of the weights would be sketched, so clients would receive the whole model"
        raise BadArgument("dbcl", message, "use a deeper model, or DBCL(skip_first_conv=False, skip_last=False)")
    return tuple(result)


def _find_obstacle(layer: nn.Module, name: str, q: int, fan_in: int, *, is_shared: bool) -> str | None:
    """Return the reason why a parameter cannot be sketched, or None if it can."""
    if type(layer) not in LAYER_TYPES or name != "weight":
        type_names = " and ".join(layer_type.__name__ for layer_type in LAYER_TYPES)
        return f"parameters of {type(layer).__name__} cannot be sketched, only the weights of {type_names}"
    if is_shared:
        return "several layers share this weight, and each would need its own sketch"
    if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
        return f"a convolution with padding_mode {layer.padding_mode!r} cannot be sketched"
    return f"the layer has {fan_in} inputs per unit, fewer than q = {q}" if fan_in < q else None


def check_sketch(name: str, inputs: Tensor, signs: Tensor, fan_in: int) -> None:
    """Refuse a sketch whose indices, dtypes or shapes are invalid, or with more than `fan_in` entries."""
    is_valid = inputs.dim() == 2 and inputs.shape == signs.shape and 0 < inputs.numel() <= fan_in
    is_valid = is_valid and inputs.dtype == torch.int32 and signs.dtype == torch.int8
    if not is_valid or not 0 <= int(inputs.min()) <= int(inputs.max()) < fan_in:
        raise ModelMismatch(name, f"the broadcast's sketch is not a valid sketch of {fan_in} inputs")


class DBCLCodec(Codec[SketchedBroadcast, SketchedUpdate]):
    """Encodes the sketched network and its sketches for clients, and its gradients for the server."""

    def encode_broadcast(self, broadcast: SketchedBroadcast) -> Packed:
        """Encode the sketched network; the inputs in each bucket are sent as int32, their signs as int8."""
        values, tensors = encoding.pack_model(broadcast.network)
        for name, sketch in broadcast.sketches.items():
            tensors |= {f"inputs/{name}": sketch.inputs.int(), f"signs/{name}": sketch.signs.to(torch.int8)}
        return values | {"number": broadcast.number, "sketched": list(broadcast.sketches)}, tensors

    def decode_broadcast(self, model: nn.Module, values: Values, tensors: Tensors, loss: Loss) -> SketchedBroadcast:
        """Decode the sketched network, with a `SketchedLayer` in place of each sketched layer."""
        result = check_fields("broadcast", values, {"number": int, "sketched": list[str]})
        layers, sketches = dict(model.named_modules()), dict[str, Sketch]()
        for name in result["sketched"]:
            path = name.rpartition(".")[0]
            layer = layers.pop(path, None)  # a layer cannot be sketched twice
            inputs, signs = (tensors.get(f"{kind}/{name}") for kind in ("inputs", "signs"))
            is_weight = name == f"{path}.weight".lstrip(".")
            if type(layer) not in LAYER_TYPES or not is_weight or inputs is None or signs is None:
                raise ModelMismatch(
                    name[:80], "the broadcast has a sketch for this weight, but the model has no such layer"
                )
            weight = model.get_parameter(name).detach()
            check_sketch(name, inputs, signs, weight[0].numel())
            sketches[name] = Sketch(inputs.long(), signs.double(), weight[0].numel()).to(weight)
        network = encoding.unpack_model(sketch_network(model, sketches), values, tensors)
        for module in network.modules():
            if isinstance(module, SketchedLayer):
                module.sketch = module.sketch.to(module.weight.detach())
        return SketchedBroadcast(result["number"], network)

    def encode_update(self, update: SketchedUpdate) -> Packed:
        """Encode gradients, buffers and the number of the broadcast."""
        return {"number": update.number}, encoding.pack_gradients(update.gradients, update.buffers)

    def decode_update(
        self, defence_round: SketchedRound, model: nn.Module, values: Values, tensors: Tensors, position: int
    ) -> SketchedUpdate:
        """Decode an update; refuse one that was computed from another broadcast."""
        assert isinstance(defence_round, DBCLRound)
        number = check_fields("update", values, {"number": int})["number"]
        defence_round.check_number(number, position)
        expected = self.template(defence_round, model)[1]
        return SketchedUpdate(*encoding.unpack_gradients(expected, tensors, position), number)

    def template(self, defence_round: SketchedRound, model: nn.Module) -> Packed:
        """Return an example of an encoded update; gradients have the shapes of the sketched weights."""
        return {"number": defence_round.broadcast.number}, encoding.template(defence_round.broadcast.network)
