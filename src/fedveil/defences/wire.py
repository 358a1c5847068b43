"""How each defence's broadcasts and updates travel: flat dicts of arrays and plain values, nothing pickled.

The veil's messages pack themselves (`fedveil.scheme.messages`); those of the other four are nn.Modules and gradients,
and what becomes of them is here. `check` is what a server asks of an update that came over a network.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.defences.dbcl import DBCL, KINDS, Sketch, SketchedBroadcast, SketchedUpdate
from fedveil.defences.interface import Defence
from fedveil.defences.plain import Plain, PlainUpdate
from fedveil.defences.ppdl import PPDL
from fedveil.defences.spn import SPN
from fedveil.defences.veil import Veil
from fedveil.errors import BadArgument, IncompleteUpdate, MisshapenUpdate, ModelMismatch, NonFiniteUpdate
from fedveil.scheme.losses import USERS, Loss
from fedveil.scheme.messages import Arrays, Broadcast, Tensors, Update, pack_tensors, unpack_tensors

Values = dict[str, Any]
Packed = tuple[Arrays, Values]


def _modes(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if module.training]


def _pack_model(model: nn.Module) -> Packed:
    parameters = dict(model.named_parameters())
    arrays = pack_tensors("parameter", parameters) | pack_tensors("buffer", dict(model.named_buffers()))
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    return arrays, {"trainable": trained, "training": _modes(model)}


def _texts(where: str, values: Mapping[str, Any], name: str) -> set[str]:
    found = values.get(name)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise BadArgument(where, f"metadata field {name!r} must be a list of str")
    return set(found)


def _fill(model: nn.Module, arrays: Arrays, values: Values) -> nn.Module:
    """A copy of the architecture with the values, the modes and the trainable parameters that were sent."""
    filled = copy.deepcopy(model)
    for kind, own in (("parameter", dict(filled.named_parameters())), ("buffer", dict(filled.named_buffers()))):
        sent = unpack_tensors(kind, arrays)
        for name in sorted(sent.keys() | own.keys()):
            shapes = [tuple(tensors[name].shape) if name in tensors else "nothing" for tensors in (sent, own)]
            if shapes[0] != shapes[1]:
                fix = "build the client's model with the code that built the server's"
                raise ModelMismatch(name, f"the broadcast has {shapes[0]}, the model {shapes[1]}", fix)
            own[name].data = sent[name].to(own[name].device)
    trained, training = (_texts("broadcast", values, key) for key in ("trainable", "training"))
    for name, parameter in filled.named_parameters():
        parameter.requires_grad_(name in trained)
    for path, module in filled.named_modules():
        module.training = path in training
    return filled


def _replaced(model: nn.Module, home: str, name: str, module: nn.Module) -> nn.Module:
    """The model with another module in this place, which may be all of it."""
    if not name:
        return module
    setattr(model.get_submodule(home), name, module)
    return model


def _check(client: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    """Names, shapes, dtypes and finiteness."""
    for name, like in wanted.items():
        tensor = found.get(name)
        if tensor is None:
            raise IncompleteUpdate(client, f"{what} {name} is missing")
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            text = f"{tuple(tensor.shape)} {tensor.dtype}, not {tuple(like.shape)} {like.dtype}"
            raise MisshapenUpdate(client, f"{what} {name} is {text}")
        if not torch.isfinite(tensor).all():
            raise NonFiniteUpdate(client, f"{what} {name} holds NaN or infinity")
    strange = sorted(found.keys() - wanted.keys())
    if strange:
        raise MisshapenUpdate(client, f"{what} {strange[0][:80]!r} was not asked for")


class PlainWire:
    """The model down, its gradients and buffers up."""

    kind: str = "plain"
    settings: tuple[str, ...] = ()  # attributes of the defence that are also arguments of its constructor

    def build(self, settings: Mapping[str, Any]) -> Defence:
        """A client's defence from the server's settings."""
        return Plain()

    def pack(self, defence: Any, broadcast: Any) -> Packed:
        """Server: a broadcast as arrays and plain values."""
        return _pack_model(broadcast)

    def unpack(self, model: nn.Module, arrays: Arrays, values: Values, loss: Loss) -> Any:
        """Client: the broadcast, in the client's own architecture."""
        return _fill(model, arrays, values)

    def pack_update(self, defence: Any, update: Any) -> Packed:
        """Client: an upload as arrays and plain values."""
        return pack_tensors("gradient", update.gradients) | pack_tensors("buffer", update.buffers), {}

    def unpack_update(self, defence: Any, model: nn.Module, arrays: Arrays, values: Values) -> Any:
        """Server: the upload."""
        return PlainUpdate(unpack_tensors("gradient", arrays), unpack_tensors("buffer", arrays))

    def check(self, defence: Any, model: nn.Module, update: Any, position: int = 0) -> None:
        """Server: refuse an upload that cannot be aggregated."""
        client = f"client {position}"
        _check(client, update.gradients, self.wanted(defence, model), "gradient")
        _check(client, update.buffers, dict(model.named_buffers()), "buffer")

    def wanted(self, defence: Any, model: nn.Module) -> Tensors:
        """Tensors like the gradients that an update must hold."""
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


class SPNWire(PlainWire):
    """As plain: heads and codes stay with clients."""

    kind = "spn"
    settings = ("weight", "bits", "margin", "lr")

    def build(self, settings: Mapping[str, Any]) -> Defence:
        """With the server's weight, bits, margin and learning rate."""
        return SPN(**settings)


class PPDLWire(PlainWire):
    """As plain, but of a thinned gradient only the numbers that were selected, and where they are."""

    kind = "ppdl"
    settings = ("fraction", "sigma", "clip")

    def build(self, settings: Mapping[str, Any]) -> Defence:
        """With the server's fraction, sigma and clip."""
        return PPDL(**settings)

    def pack_update(self, defence: PPDL, update: PlainUpdate) -> Packed:
        """Places as indices or as a bitmap, whichever is shorter."""
        if defence.fraction == 1:
            return super().pack_update(defence, update)
        flat = torch.cat([g.reshape(-1) for g in update.gradients.values()]).cpu().numpy()
        kept = np.flatnonzero(flat)
        places = np.packbits(flat != 0) if 32 * len(kept) > len(flat) else kept.astype(np.uint32)
        return {"selected": flat[kept], "places": places} | pack_tensors("buffer", update.buffers), {}

    def unpack_update(self, defence: PPDL, model: nn.Module, arrays: Arrays, values: Values) -> PlainUpdate:
        """With 0 where nothing was selected."""
        if defence.fraction == 1:
            return super().unpack_update(defence, model, arrays, values)  # type: ignore[no-any-return]
        wanted = self.wanted(defence, model)
        first, count = next(iter(wanted.values())), sum(like.numel() for like in wanted.values())
        numbers, places = arrays.get("selected"), arrays.get("places")
        if numbers is None or places is None or numbers.ndim != 1 or places.ndim != 1:
            raise BadArgument("update", "the arrays 'selected' and 'places' are missing or misshapen")
        if places.dtype == np.uint8:
            places = np.flatnonzero(np.unpackbits(places)[:count])
        if places.dtype.kind not in "iu" or len(places) != len(numbers) or (len(places) and places.max() >= count):
            raise BadArgument("update", f"{len(numbers)} numbers selected from {count} cannot be at these places")
        flat = torch.zeros(count, dtype=torch.from_numpy(numbers[:0].copy()).dtype)
        flat[torch.from_numpy(places.astype(np.int64))] = torch.from_numpy(numbers.copy())
        pieces = torch.split(flat.to(first.device), [like.numel() for like in wanted.values()])
        shaped = {name: p.view(like.shape) for (name, like), p in zip(wanted.items(), pieces, strict=True)}
        return PlainUpdate(shaped, unpack_tensors("buffer", arrays))


class DBCLWire(PlainWire):
    """The sketched network and its sketches down, gradients of the sketched network up."""

    kind = "dbcl"

    def build(self, settings: Mapping[str, Any]) -> Defence:
        """What is sketched, and how, the broadcast says."""
        return DBCL()

    def pack(self, defence: DBCL, broadcast: SketchedBroadcast) -> Packed:
        """Sketches as the inputs of each bucket, and their signs as int8."""
        arrays, values = _pack_model(broadcast.network)
        for name in defence.sketched:
            sketch = broadcast.network.get_submodule(name.rpartition(".")[0]).sketch
            assert isinstance(sketch, Sketch)
            arrays[f"inputs/{name}"] = sketch.inputs.cpu().numpy().astype(np.uint32)
            arrays[f"signs/{name}"] = sketch.signs.cpu().numpy().astype(np.int8)
        return arrays, values | {"number": broadcast.number, "sketched": list(defence.sketched)}

    def unpack(self, model: nn.Module, arrays: Arrays, values: Values, loss: Loss) -> SketchedBroadcast:
        """A `SketchedLayer` in place of each sketched layer."""
        network = copy.deepcopy(model)
        for name in sorted(_texts("broadcast", values, "sketched")):
            path = name.rpartition(".")[0]
            layer = dict(network.named_modules()).get(path)
            if type(layer) not in KINDS or f"inputs/{name}" not in arrays or f"signs/{name}" not in arrays:
                raise ModelMismatch(name, "the broadcast has a sketch for it, the model no layer that takes one")
            assert isinstance(layer, nn.Linear | nn.Conv2d)
            inputs = torch.from_numpy(arrays[f"inputs/{name}"].astype(np.int64))
            signs = torch.from_numpy(arrays[f"signs/{name}"].astype(np.float64))
            fan_in = layer.weight[0].numel()
            if inputs.dim() != 2 or inputs.shape != signs.shape or not inputs.numel() or int(inputs.max()) >= fan_in:
                raise ModelMismatch(name, f"the broadcast's sketch is not one of {fan_in} inputs")
            small = KINDS[type(layer)](layer, Sketch(inputs, signs, fan_in).to(layer.weight.detach()))
            home, _, last = path.rpartition(".")
            network = _replaced(network, home, last, small)
        filled = _fill(network, arrays, values)
        for module in filled.modules():
            if isinstance(getattr(module, "sketch", None), Sketch):
                module.sketch = module.sketch.to(module.weight.detach())  # type: ignore[operator]
        return SketchedBroadcast(int(values.get("number", 0)), filled)

    def pack_update(self, defence: DBCL, update: SketchedUpdate) -> Packed:
        """With the number of the broadcast."""
        arrays, _ = super().pack_update(defence, update)
        return arrays, {"number": update.number}

    def unpack_update(self, defence: DBCL, model: nn.Module, arrays: Arrays, values: Values) -> SketchedUpdate:
        """The broadcast's number is checked by the aggregate, and the round's token before that."""
        plain = super().unpack_update(defence, model, arrays, values)
        return SketchedUpdate(plain.gradients, plain.buffers, int(values.get("number", -1)))

    def check(self, defence: DBCL, model: nn.Module, update: SketchedUpdate, position: int = 0) -> None:
        """Also that it answers the last broadcast."""
        defence.check_number(update, position)
        super().check(defence, model, update, position)

    def wanted(self, defence: DBCL, model: nn.Module) -> Tensors:
        """Sketched weights have a column a bucket."""
        whole = super().wanted(defence, model)
        small = {n: t.flatten(1)[:, : t[0].numel() // defence.q] for n, t in whole.items() if n in defence.sketched}
        return whole | small


class VeilWire(PlainWire):
    """`Broadcast` and `Update`."""

    kind = "veil"

    def build(self, settings: Mapping[str, Any]) -> Defence:
        """Everything is in the broadcast."""
        return Veil()

    def pack(self, defence: Veil, broadcast: Broadcast) -> Packed:
        """See `Broadcast.pack`."""
        return broadcast.pack()

    def unpack(self, model: nn.Module, arrays: Arrays, values: Values, loss: Loss) -> Broadcast:
        """See `Broadcast.unpack`."""
        return Broadcast.unpack(arrays, values, loss if isinstance(loss, USERS) else None)

    def pack_update(self, defence: Veil, update: Update) -> Packed:
        """See `Update.pack`."""
        return update.pack()

    def unpack_update(self, defence: Veil, model: nn.Module, arrays: Arrays, values: Values) -> Update:
        """See `Update.unpack`."""
        return Update.unpack(arrays, values)

    def check(self, defence: Veil, model: nn.Module, update: Update, position: int = 0) -> None:
        """What `recover` asks, and that counters have their shape."""
        defence.check(update, position)
        counters = {name: b for name, b in model.named_buffers() if not b.is_floating_point()}
        found = {name: b for name, b in update.buffers.items() if not b.is_floating_point()}
        _check(f"client {position}", found, counters, "buffer")


WIRES: Sequence[tuple[type, PlainWire]] = (
    (Veil, VeilWire()),
    (DBCL, DBCLWire()),
    (SPN, SPNWire()),
    (PPDL, PPDLWire()),
    (Plain, PlainWire()),
)


def wire_of(defence: Defence) -> PlainWire:
    """How this defence's messages travel."""
    for kind, wire in WIRES:
        if isinstance(defence, kind):
            return wire
    known = ", ".join(wire.kind for _, wire in WIRES)
    raise BadArgument(type(defence).__name__, f"nobody knows how its messages travel, only those of {known}")


def named_wire(kind: object) -> PlainWire:
    """How messages of that kind travel."""
    for _, wire in WIRES:
        if wire.kind == kind:
            return wire
    known = ", ".join(wire.kind for _, wire in WIRES)
    raise BadArgument("broadcast", f"there is no defence {kind!r}", f"one of {known}; or a newer fedveil")
