"""Double-blind collaborative learning (Zhang and Wang, ICML 2021): clients train on a CountSketch of the weights.

A weight W of m units with n inputs each leaves the server as W~ = W S; S, new in every round and the same for all
clients, adds q of the n inputs, with random signs, into each of s = floor(n / q) buckets. A client forms X~ = X S and
Z = X~ W~^T + b, and sends Gamma = delta^T X~. The server steps along sum_k |D_k| / |D| Gamma_k S^T: the exact gradient
of the loss with weights W S S^T, and not an unbiased gradient of the plain loss (docs/defences/dbcl.md).

Differs from the original: one gradient per round, not local epochs; clients hold W~, never W; any convolution.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.checks import whole
from fedveil.defences.interface import Codec, Defence, DefenceClient, DefenceRound, DefenceServer, Samples, State
from fedveil.defences.plain import (
    PlainClient,
    PlainUpdate,
    accumulate,
    average,
    count_bytes,
    decode_gradients,
    encode_model,
    fill_model,
    trainable_tensors,
)
from fedveil.errors import BadArgument, ModelMismatch, StaleUpdate
from fedveil.graph.inputs import Inputs, call, calls_of
from fedveil.scheme import Aggregate, Loss
from fedveil.wire import Packed, Tensors, Values, add_prefix, checked


@dataclass(frozen=True, eq=False)
class Sketch:
    """S as the list of its entries that are not 0."""

    inputs: Tensor  # (q, s): which of the n inputs goes into which bucket; those that are not there are dropped
    signs: Tensor  # (q, s): 1 or -1 for each
    fan_in: int  # n

    @classmethod
    def draw(cls, fan_in: int, q: int, chance: np.random.Generator) -> "Sketch":
        """A uniform permutation, cut into buckets, and independent signs; the fan_in mod q inputs left are dropped."""
        shape = q, fan_in // q
        inputs = chance.permutation(fan_in)[: shape[0] * shape[1]].reshape(shape)
        signs = 1.0 - 2.0 * chance.integers(0, 2, shape)
        return cls(torch.from_numpy(inputs), torch.from_numpy(signs), fan_in)

    def to(self, like: Tensor) -> "Sketch":
        """Move it to the device and dtype of `like`."""
        return self.map(lambda tensor: tensor.to(like) if tensor.is_floating_point() else tensor.to(like.device))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Sketch":
        """Apply a function to both tensors."""
        return Sketch(change(self.inputs), change(self.signs), self.fan_in)

    def down(self, rows: Tensor) -> Tensor:
        """X S: (..., n) to (..., s)."""
        taken = rows.index_select(-1, self.inputs.flatten()) * self.signs.flatten()
        return taken.reshape(*rows.shape[:-1], *self.inputs.shape).sum(-2)

    def up(self, rows: Tensor) -> Tensor:
        """C S^T: (..., s) to (..., n), with 0 for the inputs that were dropped."""
        spread = (rows.unsqueeze(-2) * self.signs).flatten(-2)
        return rows.new_zeros((*rows.shape[:-1], self.fan_in)).index_copy(-1, self.inputs.flatten(), spread)


class SketchedLayer(nn.Module):
    """A layer as a client has it: `weight` is W~ = W S, (m, s), `sketch` is S, the bias is as it was."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear | nn.Conv2d, sketch: Sketch) -> None:
        super().__init__()
        self.sketch = sketch
        small = sketch.down(layer.weight.detach().flatten(1))
        self.weight = nn.Parameter(small, layer.weight.requires_grad)
        self.bias = copy.deepcopy(layer.bias)  # type: ignore[assignment]
        self.training = layer.training

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SketchedLayer":
        """Take S along wherever the module goes. It is no buffer: clients do not send it back."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.sketch = self.sketch.map(fn)
        return self


class SketchedLinear(SketchedLayer):
    """(X S) W~^T + b."""

    def forward(self, x: Tensor) -> Tensor:
        """The batch is sketched."""
        return F.linear(self.sketch.down(x), self.weight, self.bias)


class SketchedConv2d(SketchedLayer):
    """The same over the patches of an image.

    Computed as a convolution with W~ S^T, which clients can form from what they have: (U S) W~^T = U (W~ S^T)^T for
    the unfolded patches U. To sketch U itself takes 2 to 6 times as long (measured, docs/defences/dbcl.md).
    """

    def __init__(self, layer: nn.Conv2d, sketch: Sketch) -> None:
        super().__init__(layer, sketch)
        self.kernel = tuple(layer.weight.shape[1:])
        self.stride, self.padding = layer.stride, layer.padding
        self.dilation, self.groups = layer.dilation, layer.groups

    def forward(self, x: Tensor) -> Tensor:
        """The sketched kernel is spread out."""
        spread = self.sketch.up(self.weight).reshape(-1, *self.kernel)
        return F.conv2d(x, spread, self.bias, self.stride, self.padding, self.dilation, self.groups)


KINDS: dict[type, Callable[[Any, Sketch], SketchedLayer]] = {nn.Linear: SketchedLinear, nn.Conv2d: SketchedConv2d}


@dataclass(frozen=True, eq=False)
class SketchedBroadcast:
    """All that clients get in a round: the model with a `SketchedLayer` for each layer whose weight is sketched."""

    number: int  # which of the server's broadcasts it is
    network: nn.Module
    sketched: tuple[str, ...]  # names of the sketched weights


@dataclass(frozen=True, eq=False)
class SketchedUpdate(PlainUpdate):
    """Gradients of the sketched network, (m, s) for sketched weights, its buffers, and the broadcast they answer."""

    number: int


class DBCL(Defence[SketchedBroadcast, SketchedUpdate]):
    """A new CountSketch of every layer in every round.

    It hides the weights of all Linear and Conv2d layers, except the first Conv2d and the last Linear that the model
    calls. These, biases, norms and buffers travel as they are. A weight that has no sketch is refused, unless `skip`
    names it.

    Args:
        q: inputs that share a bucket.
        skip_first_conv: send the first convolution as it is.
        skip_last: send the last Linear as it is.
        skip: modules or parameters that are sent as they are besides, by their path in the model.
        seed: makes sketches repeatable, for tests; otherwise the operating system seeds every broadcast.
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
        whole("dbcl", "q", q, 2, "use DBCL(q=2): with one input per bucket, S hides nothing")
        whole("dbcl", "seed", 0 if seed is None else seed, 0, "use DBCL(seed=0)")
        self.q, self.skip_first_conv, self.skip_last = q, skip_first_conv, skip_last
        self.skip = (skip,) if isinstance(skip, str) else tuple(skip)
        self.seed, self.repeatable = seed, seed is not None

    @property
    def codec(self) -> "DBCLCodec":
        """The sketched network and its sketches down, its gradients up."""
        return DBCLCodec()

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> "DBCLServer":
        """Choose the weights to sketch."""
        twin = copy.deepcopy(model).eval()
        paths = {module: path for path, module in twin.named_modules()}
        with torch.no_grad(), calls_of(m for m in paths if isinstance(m, nn.Conv2d | nn.Linear)) as calls:
            call(twin, example)
        convs = [paths[each.module] for each in calls if isinstance(each.module, nn.Conv2d)]
        linears = [paths[each.module] for each in calls if isinstance(each.module, nn.Linear)]
        kept = (convs[:1] if self.skip_first_conv else []) + (linears[-1:] if self.skip_last else [])
        return DBCLServer(self.q, self.seed, _choose(model, self.q, kept, self.skip))

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> "DBCLClient":
        """Prepare clients for a run."""
        return DBCLClient(PlainClient(model, loss))

    def client_view(self, model: nn.Module, broadcast: SketchedBroadcast) -> nn.Module:
        """Return a copy of the sketched network."""
        return copy.deepcopy(broadcast.network)


class DBCLServer(DefenceServer[SketchedBroadcast, SketchedUpdate]):
    """Draws new sketches for each broadcast."""

    def __init__(self, q: int, seed: int | None, sketched: tuple[str, ...]) -> None:
        self.sketched = sketched  # names of the weights that clients never get
        self._q, self._seed, self._number = q, seed, 0

    def start_round(self, model: nn.Module, members: Sequence[int] | None = None) -> "DBCLRound":
        """Sketch the model."""
        self._number += 1
        chance = np.random.default_rng(None if self._seed is None else (self._seed, self._number))
        drawn: dict[str, tuple[Sketch, torch.Size]] = {}
        instead: dict[int, nn.Module | nn.Parameter] = {}  # deepcopy's memo: it puts these in place of the originals
        for name in self.sketched:
            layer = model.get_submodule(name.rpartition(".")[0])
            weight = model.get_parameter(name)
            sketch = Sketch.draw(weight[0].numel(), self._q, chance).to(weight.detach())
            small = KINDS[type(layer)](layer, sketch)
            instead[id(layer)], instead[id(weight)] = small, small.weight
            drawn[name] = sketch, weight.shape
        network = copy.deepcopy(model, instead)
        return DBCLRound(SketchedBroadcast(self._number, network, self.sketched), drawn)

    def state(self) -> State:
        """Return how many broadcasts there were: with a seed, the next sketch follows from that."""
        return {"number": self._number}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue counting."""
        if "number" not in state:
            raise BadArgument("dbcl", "the checkpoint is of another defence", "resume with the defence that wrote it")
        self._number = int(state["number"])


SketchedRound = DefenceRound[SketchedBroadcast, SketchedUpdate]


class DBCLRound(SketchedRound):
    """A sketched broadcast, and its sketches."""

    def __init__(self, broadcast: SketchedBroadcast, drawn: Mapping[str, tuple[Sketch, torch.Size]]) -> None:
        self.broadcast, self.drawn = broadcast, drawn
        network = broadcast.network
        entries = sum(sketch.inputs.numel() for sketch, _ in drawn.values())  # an index and its sign in 4 bytes
        self._down = count_bytes([*network.parameters(), *network.buffers()]) + 4 * entries

    def check_number(self, number: int, position: int = 0) -> None:
        """Refuse an update that answers another broadcast."""
        if number != self.broadcast.number:
            what = f"it answers broadcast {number}, whose sketch is gone; the last one is {self.broadcast.number}"
            raise StaleUpdate(f"client {position}", what)

    def recover(self, updates: Sequence[SketchedUpdate], weights: Sequence[float]) -> Aggregate:
        """Return sum_k |D_k| / |D| Gamma_k S^T for sketched weights, and the weighted mean of everything else.

        Its error is 0: it is the sketched network's gradient up to rounding. How far that is from the plain one, the
        server cannot know.
        """
        for position, update in enumerate(updates):
            self.check_number(update.number, position)
        mean = average(updates, weights, {})
        gradients = dict(mean.gradients)
        for name, (sketch, shape) in self.drawn.items():
            if name in gradients:
                gradients[name] = sketch.up(gradients[name]).reshape(shape)
        up = count_bytes([*updates[0].gradients.values(), *mean.buffers.values()])
        return dataclasses.replace(mean, gradients=gradients, figures={"bytes_down": self._down, "bytes_up": up})

    def list_gradients(self, model: nn.Module) -> Tensors:
        """Return tensors like the gradients of an update: sketched weights have one column per bucket."""
        found = trainable_tensors(model)
        for name, (sketch, _) in self.drawn.items():
            if name in found:
                found[name] = found[name].flatten(1)[:, : sketch.inputs.shape[1]]
        return found


class DBCLClient(DefenceClient[SketchedBroadcast, SketchedUpdate]):
    """Computes gradients of the sketched network."""

    def __init__(self, plain: PlainClient) -> None:
        self._plain = plain

    def step(self, broadcast: SketchedBroadcast, samples: Samples, client: int = 0) -> SketchedUpdate:
        """Compute Gamma = delta^T X~ for sketched weights, and plain gradients for others."""
        found = self._plain.step(broadcast.network, samples, client)
        return SketchedUpdate(found.gradients, found.buffers, broadcast.number)

    def accumulate(
        self, broadcast: SketchedBroadcast, total: SketchedUpdate | None, update: SketchedUpdate
    ) -> tuple[SketchedBroadcast, SketchedUpdate]:
        """Sum gradients of the sketched network."""
        network, update = accumulate(broadcast.network, total, update)
        return dataclasses.replace(broadcast, network=network), update


def _choose(model: nn.Module, q: int, kept: Sequence[str], skip: Sequence[str]) -> tuple[str, ...]:
    """Names of the weights to sketch; refuses those that have no sketch, and a model without any."""
    named = dict(model.named_parameters(remove_duplicate=False))
    homes = Counter(id(parameter) for parameter in named.values())

    def is_under(path: str, name: str) -> bool:
        return path in ("", name) or name.startswith(path + ".")

    for path in skip:
        if not any(is_under(path, name) for name in named):
            raise BadArgument("dbcl", f"skip names {path!r}, and the model has no parameters there")
    chosen = []
    for name, parameter in named.items():
        if parameter.dim() < 2 or any(is_under(path, name) for path in (*kept, *skip)):
            continue
        path, _, last = name.rpartition(".")
        layer = model.get_submodule(path)
        obstacle = _obstacle(layer, last, q, parameter[0].numel(), shared=homes[id(parameter)] > 1)
        if obstacle:
            raise BadArgument(f"dbcl, {name}", obstacle, f"to send it as it is: DBCL(skip=({path or last!r},))")
        chosen.append(name)
    if not chosen:
        what = "nothing in this model would be sketched: clients would get all of it"
        raise BadArgument("dbcl", what, "a deeper model, or DBCL(skip_first_conv=False, skip_last=False)")
    return tuple(chosen)


def _obstacle(layer: nn.Module, name: str, q: int, fan_in: int, *, shared: bool) -> str | None:
    """Why a parameter of a layer cannot be sketched, or None."""
    if type(layer) not in KINDS or name != "weight":
        known = " and ".join(kind.__name__ for kind in KINDS)
        return f"a {type(layer).__name__} has no sketch, only the weights of {known} have"
    if shared:
        return "several places share this weight, and each would need its own sketch"
    if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
        return f"a convolution with padding_mode {layer.padding_mode!r} has no sketch"
    return f"it has {fan_in} inputs per unit, fewer than q = {q}" if fan_in < q else None


def check_sketch(name: str, inputs: Tensor, signs: Tensor, fan_in: int) -> None:
    """Refuse a sketch that does not fit the inputs: indices, no more than there are, and a sign for each."""
    fits = inputs.dim() == 2 and inputs.shape == signs.shape and 0 < inputs.numel() <= fan_in
    fits = fits and inputs.dtype == torch.int32 and signs.dtype == torch.int8
    if not fits or not 0 <= int(inputs.min()) <= int(inputs.max()) < fan_in:
        raise ModelMismatch(name, f"the broadcast's sketch is not one of {fan_in} inputs")


class DBCLCodec(Codec[SketchedBroadcast, SketchedUpdate]):
    """The sketched network and its sketches down, gradients of the sketched network up."""

    def encode_broadcast(self, broadcast: SketchedBroadcast) -> Packed:
        """Encode sketches as the inputs of each bucket, and their signs as int8."""
        values, tensors = encode_model(broadcast.network)
        for name in broadcast.sketched:
            sketch = broadcast.network.get_submodule(name.rpartition(".")[0]).sketch
            assert isinstance(sketch, Sketch)
            tensors |= {f"inputs/{name}": sketch.inputs.int(), f"signs/{name}": sketch.signs.to(torch.int8)}
        return values | {"number": broadcast.number, "sketched": list(broadcast.sketched)}, tensors

    def decode_broadcast(self, model: nn.Module, values: Values, tensors: Tensors, loss: Loss) -> SketchedBroadcast:
        """Put a `SketchedLayer` in place of each sketched layer."""
        network = copy.deepcopy(model)
        found = checked("broadcast", values, {"number": int, "sketched": list[str]})
        layers = dict(network.named_modules())
        for name in found["sketched"]:
            path = name.rpartition(".")[0]
            layer = layers.pop(path, None)  # none is sketched twice
            inputs, signs = (tensors.get(f"{kind}/{name}") for kind in ("inputs", "signs"))
            own = type(layer) in KINDS and name == f"{path}.weight".lstrip(".")
            if not own or inputs is None or signs is None:
                raise ModelMismatch(name[:80], "the broadcast has a sketch for it, the model no layer that takes one")
            weight = network.get_parameter(name).detach()
            check_sketch(name, inputs, signs, weight[0].numel())
            small = KINDS[type(layer)](layer, Sketch(inputs.long(), signs.double(), weight[0].numel()).to(weight))
            if path:
                network.set_submodule(path, small)
            else:
                network = small
        filled = fill_model(network, values, tensors)
        for module in filled.modules():
            if isinstance(module, SketchedLayer):
                module.sketch = module.sketch.to(module.weight.detach())
        return SketchedBroadcast(found["number"], filled, tuple(found["sketched"]))

    def encode_update(self, update: SketchedUpdate) -> Packed:
        """Encode gradients, buffers and the number of the broadcast."""
        tensors = add_prefix("gradient", update.gradients) | add_prefix("buffer", update.buffers)
        return {"number": update.number}, tensors

    def decode_update(
        self, own: SketchedRound, model: nn.Module, values: Values, tensors: Tensors, position: int
    ) -> SketchedUpdate:
        """Decode an update; one that answers another broadcast is refused."""
        assert isinstance(own, DBCLRound)
        number = checked("update", values, {"number": int})["number"]
        own.check_number(number, position)
        plain = decode_gradients(own.list_gradients(model), model, tensors, position)
        return SketchedUpdate(plain.gradients, plain.buffers, number)

    def template(self, own: SketchedRound, model: nn.Module) -> Packed:
        """Return tensors like those of an update."""
        assert isinstance(own, DBCLRound)
        gradients, buffers = own.list_gradients(model), dict(model.named_buffers())
        return {"number": own.broadcast.number}, add_prefix("gradient", gradients) | add_prefix("buffer", buffers)
