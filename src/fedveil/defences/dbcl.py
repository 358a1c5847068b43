"""Double-blind collaborative learning (Zhang and Wang, ICML 2021): clients train on a CountSketch of the weights.

A weight W of m units with n inputs each leaves the server as W~ = W S; S, new in every round and the same for all
clients, adds q of the n inputs, with random signs, into each of s = floor(n / q) buckets. A client forms X~ = X S and
Z = X~ W~^T + b, and sends Gamma = delta^T X~. The server steps along sum_k |D_k| / |D| Gamma_k S^T.

What that is: L_S(W), the loss of the network with weights W S S^T, has the gradient Gamma S^T with respect to W. So a
round is an exact gradient of L_S, and over the draw of S an unbiased one of E_S L_S. It is no unbiased gradient of the
plain loss: docs/defences/dbcl.md has the difference.

Differs from the original: one gradient per round in place of local epochs; clients hold W~, never W; any stride,
padding, dilation and groups.
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
from fedveil.defences.interface import Samples
from fedveil.defences.plain import Plain, PlainMessages, PlainUpdate, size_of
from fedveil.errors import BadArgument, ModelMismatch, StaleUpdate
from fedveil.graph.inputs import Inputs, call, calls_of
from fedveil.scheme import Aggregate, Loss
from fedveil.wire import Packed, Tensors, Values, checked


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
        """For work with `like`: its device and dtype."""
        return self.map(lambda tensor: tensor.to(like) if tensor.is_floating_point() else tensor.to(like.device))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Sketch":
        """The same with both tensors changed."""
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
    """What a client has in place of a layer: `weight` is W~ = W S, (m, s), `sketch` is S, the bias is as it was."""

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


@dataclass(frozen=True, eq=False)
class SketchedUpdate(PlainUpdate):
    """Gradients of the sketched network, (m, s) for sketched weights, its buffers, and the broadcast they answer."""

    number: int


class DBCL(Plain):
    """A new CountSketch of every layer in every round.

    It covers the weights of all Linear and Conv2d layers, except the first Conv2d and the last Linear that the model
    calls. These, biases, norms and buffers travel as they are. A weight that has no sketch is refused, unless `skip`
    names it.

    Args:
        q: inputs that share a bucket.
        skip_first_conv: send the first convolution as it is.
        skip_last: send the last Linear as it is.
        skip: modules or parameters that are sent as they are besides, by their path in the model.
        seed: repeatable sketches, for tests; otherwise the operating system seeds every broadcast anew.
    """

    linear = False

    def __init__(
        self,
        q: int = 2,
        *,
        skip_first_conv: bool = True,
        skip_last: bool = True,
        skip: Sequence[str] = (),
        seed: int | None = None,
    ) -> None:
        super().__init__()
        whole("dbcl", "q", q, 2, "DBCL(q=2): with one input per bucket, S hides nothing")
        whole("dbcl", "seed", 0 if seed is None else seed, 0, "DBCL(seed=0)")
        self.name, self.q, self.skip_first_conv, self.skip_last = "dbcl", q, skip_first_conv, skip_last
        self.skip = (skip,) if isinstance(skip, str) else tuple(skip)
        self._seed = seed
        self._names: tuple[str, ...] = ()
        self._number = 0
        self._drawn: dict[str, tuple[Sketch, torch.Size]] = {}
        self._down = 0

    def prepare(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """Choose the weights to sketch."""
        super().prepare(model, example, loss)
        twin = copy.deepcopy(model).eval()
        paths = {module: path for path, module in twin.named_modules()}
        with torch.no_grad(), calls_of(m for m in paths if isinstance(m, nn.Conv2d | nn.Linear)) as calls:
            call(twin, example)
        convs = [paths[each.module] for each in calls if isinstance(each.module, nn.Conv2d)]
        linears = [paths[each.module] for each in calls if isinstance(each.module, nn.Linear)]
        kept = (convs[:1] if self.skip_first_conv else []) + (linears[-1:] if self.skip_last else [])
        self._names = _choose(model, self.q, kept, self.skip)

    @property
    def sketched(self) -> tuple[str, ...]:
        """Names of the weights that clients never get."""
        if not self._names:
            raise BadArgument("dbcl", "no model was prepared yet", "prepare(model, example, loss) first")
        return self._names

    def broadcast(self, model: nn.Module) -> Any:
        """Sketch the model anew."""
        names = self.sketched
        self._number += 1
        chance = np.random.default_rng(None if self._seed is None else (self._seed, self._number))
        self._drawn = {}
        instead: dict[int, Any] = {}  # deepcopy's memo: it puts these in place of what they are made from
        for name in names:
            layer = model.get_submodule(name.rpartition(".")[0])
            weight = model.get_parameter(name)
            sketch = Sketch.draw(weight[0].numel(), self.q, chance).to(weight.detach())
            small = KINDS[type(layer)](layer, sketch)
            instead[id(layer)], instead[id(weight)] = small, small.weight
            self._drawn[name] = sketch, weight.shape
        network = copy.deepcopy(model, instead)
        entries = sum(sketch.inputs.numel() for sketch, _ in self._drawn.values())  # an index and its sign in 4 bytes
        self._down = size_of([*network.parameters(), *network.buffers()]) + 4 * entries
        return SketchedBroadcast(self._number, network)

    def client_step(self, model: nn.Module, broadcast: Any, samples: Samples, client: int = 0) -> SketchedUpdate:
        """Gradients of the sketched network: Gamma = delta^T X~ for sketched weights."""
        found = super().client_step(model, broadcast.network, samples, client)
        return SketchedUpdate(found.gradients, found.buffers, broadcast.number)

    def accumulate(self, broadcast: Any, total: Any, update: Any) -> tuple[Any, Any]:
        """As plain, of the sketched network."""
        network, update = super().accumulate(broadcast.network, total, update)
        return SketchedBroadcast(broadcast.number, network), update

    def check_number(self, number: int, position: int = 0) -> None:
        """Refuse an update that answers another broadcast than the last one."""
        if number != self._number:
            what = f"it answers broadcast {number}, whose sketch is gone; the last one is {self._number}"
            raise StaleUpdate(f"client {position}", what)

    def aggregate(self, updates: Sequence[Any], weights: Sequence[float]) -> Aggregate:
        """sum_k |D_k| / |D| Gamma_k S^T for sketched weights; of everything else the weighted mean.

        Its error is 0: it is the sketched network's gradient up to rounding. How far that lies from the plain one, the
        server cannot know.
        """
        if not self._drawn:
            raise BadArgument("dbcl", "there is no broadcast to answer", "broadcast(model) first")
        for position, update in enumerate(updates):
            self.check_number(update.number, position)
        mean = super().aggregate(updates, weights)
        gradients = dict(mean.gradients)
        for name, (sketch, shape) in self._drawn.items():
            if name in gradients:
                gradients[name] = sketch.up(gradients[name]).reshape(shape)
        up = size_of([*updates[0].gradients.values(), *mean.buffers.values()])
        return dataclasses.replace(mean, gradients=gradients, figures={"bytes_down": self._down, "bytes_up": up})

    def client_view(self, model: nn.Module, broadcast: Any) -> nn.Module:
        """The sketched network."""
        return super().client_view(model, broadcast.network)

    def state(self) -> dict[str, Any]:
        """How many broadcasts there were: with a seed, the next sketch follows from that."""
        return {"number": self._number}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting; the last sketch is not needed."""
        if "number" not in state:
            raise BadArgument("dbcl", "the checkpoint is of another defence", "resume with the defence that wrote it")
        self._number, self._drawn = int(state["number"]), {}


def _choose(model: nn.Module, q: int, kept: Sequence[str], skip: Sequence[str]) -> tuple[str, ...]:
    """Names of the weights to sketch; refuses those that have no sketch, and a model without any."""
    named = dict(model.named_parameters(remove_duplicate=False))
    homes = Counter(id(parameter) for parameter in named.values())

    def under(path: str, name: str) -> bool:
        return path in ("", name) or name.startswith(path + ".")

    for path in skip:
        if not any(under(path, name) for name in named):
            raise BadArgument("dbcl", f"skip names {path!r}, and the model has no parameters there")
    chosen = []
    for name, parameter in named.items():
        if parameter.dim() < 2 or any(under(path, name) for path in (*kept, *skip)):
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


class DBCLMessages(PlainMessages):
    """The sketched network and its sketches down, gradients of the sketched network up."""

    def pack(self, defence: DBCL, broadcast: SketchedBroadcast) -> Packed:
        """Sketches as the inputs of each bucket, and their signs as int8."""
        values, tensors = super().pack(defence, broadcast.network)
        for name in defence.sketched:
            sketch = broadcast.network.get_submodule(name.rpartition(".")[0]).sketch
            assert isinstance(sketch, Sketch)
            tensors |= {f"inputs/{name}": sketch.inputs.int(), f"signs/{name}": sketch.signs.to(torch.int8)}
        return values | {"number": broadcast.number, "sketched": list(defence.sketched)}, tensors

    def unpack(self, model: nn.Module, values: Values, tensors: Tensors, loss: Loss) -> SketchedBroadcast:
        """A `SketchedLayer` in place of each sketched layer."""
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
        filled = super().unpack(network, values, tensors, loss)
        for module in filled.modules():
            if isinstance(module, SketchedLayer):
                module.sketch = module.sketch.to(module.weight.detach())
        return SketchedBroadcast(found["number"], filled)

    def pack_update(self, defence: DBCL, update: SketchedUpdate) -> Packed:
        """With the number of the broadcast."""
        return {"number": update.number}, super().pack_update(defence, update)[1]

    def unpack_update(self, defence: DBCL, model: nn.Module, values: Values, tensors: Tensors, position: int) -> Any:
        """Also refuses one that does not answer the last broadcast."""
        number = checked("update", values, {"number": int})["number"]
        defence.check_number(number, position)
        plain = super().unpack_update(defence, model, values, tensors, position)
        return SketchedUpdate(plain.gradients, plain.buffers, number)

    def wanted(self, defence: DBCL, model: nn.Module) -> Tensors:
        """Sketched weights have one column per bucket."""
        whole = super().wanted(defence, model)
        small = {n: t.flatten(1)[:, : t[0].numel() // defence.q] for n, t in whole.items() if n in defence.sketched}
        return whole | small


MESSAGES = DBCLMessages(DBCL)
