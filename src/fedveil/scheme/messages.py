"""What travels: a Broadcast from the server to clients, an Update back.

Both turn into a flat dict of arrays and a dict of plain values (`pack`) and back (`unpack`); nothing is pickled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import BadArgument
from fedveil.graph.head import TAILS, WITHIN, Tail
from fedveil.scheme.losses import Function, Loss, find_loss, named_loss

Arrays = dict[str, NDArray[Any]]
Tensors = dict[str, Tensor]


def pack_tensors(prefix: str, tensors: Mapping[str, Tensor]) -> Arrays:
    """Named tensors as arrays, under a prefix."""
    return {f"{prefix}/{name}": tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def unpack_tensors(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> Tensors:
    """The inverse: those under the prefix."""
    start = prefix + "/"
    found = {name[len(start) :]: array for name, array in arrays.items() if name.startswith(start)}
    return {name: torch.from_numpy(np.array(array)) for name, array in found.items()}


def _field(kind: str, metadata: Mapping[str, Any], name: str, wanted: type) -> Any:
    value = metadata.get(name)
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise BadArgument(kind, f"metadata field {name!r} must be {wanted.__name__}, got {type(value).__name__}")
    return value


def _tensor(kind: str, tensors: Tensors, name: str) -> Tensor:
    if name not in tensors:
        raise BadArgument(kind, f"the head's array {name!r} is missing")
    return tensors[name]


def _tail(kind: str, metadata: Mapping[str, Any]) -> Tail:
    found = metadata.get("tail")
    if found not in TAILS:
        raise BadArgument(kind, f"metadata field 'tail' must be one of {', '.join(TAILS)}, got {found!r}")
    return cast(Tail, found)


def _strings(kind: str, metadata: Mapping[str, Any], name: str) -> tuple[str, ...]:
    values = _field(kind, metadata, name, list)
    if not all(isinstance(value, str) for value in values):
        raise BadArgument(kind, f"metadata field {name!r} must be a list of str")
    return tuple(values)


def _loss(kind: str, metadata: Mapping[str, Any], own: "Loss | Function | None") -> Loss:
    name = _field(kind, metadata, "loss", str)
    settings = _field(kind, metadata, "loss_settings", dict)
    if own is not None and find_loss(own).name != name:
        raise BadArgument(kind, f"the server's loss is {name!r}, the one given {find_loss(own).name!r}")
    if own is not None:
        return find_loss(own)
    known = named_loss(name, settings)
    if known is None:
        raise BadArgument(kind, f"the loss {name!r} is the server's own function", "Broadcast.unpack(..., loss=it)")
    return known


@dataclass(frozen=True, eq=False)
class PublicHead:
    """The head's public part: the model as the paper sends it has weight base + (offset o direction) 1^T.

    Attributes:
        path: the head's module.
        weight: name of its weight.
        bias: name of its bias, if it has one.
        masked_bias: whether the bias carries the same noise, as the weight of an input that is always 1. One that is
            close to zero does not: it would show the noise.
        direction: r_a, one number an output.
        partition: the group of each output.
        offset: the size of the noise, one number per group; the paper's gamma is this plus the anchor's secret share.
        candidates: offsets for which clients compute gradients, a row of one number per group each; none where
            squared error's own terms do.
        decoys: whether one of the candidates is the true offset; else they are nodes of an interval around it.
        dim: which dim of the weight counts outputs.
        axis: which dim of what takes the noise counts outputs.
        tail: what follows the head, see `fedveil.graph.head.Head`.
    """

    path: str
    weight: str
    bias: str | None
    masked_bias: bool
    direction: Tensor
    partition: Tensor
    offset: Tensor
    candidates: Tensor
    decoys: bool
    dim: int
    axis: int
    tail: Tail

    @property
    def groups(self) -> int:
        """The paper's m."""
        return len(self.offset)

    @property
    def within(self) -> bool:
        """Whether what follows the head is more than a rearrangement of its outputs."""
        return self.tail in WITHIN

    def noise(self, like: Tensor) -> Tensor:
        """For each candidate t a row t o r_a, one number per output, in the dtype of `like`."""
        return (self.candidates[:, self.partition] * self.direction.double()).to(like)


@dataclass(frozen=True, eq=False)
class Broadcast:
    """All that leaves the server in a round.

    Attributes:
        round: its name, for the update to quote.
        model: name of the architecture.
        loss: what clients minimise.
        parameters: the veiled parameters; the head's centred (anchored).
        buffers: the veiled buffers, counters among them.
        trainable: names of the parameters whose gradients are wanted.
        training: paths of the modules that must be in training mode; all others in evaluation mode.
        head: None if the head is exposed.
        continued: whether buffers have one more dim in front, a row per candidate: where a client left them after its
            last batch under this broadcast.
    """

    round: str
    model: str
    loss: Loss
    parameters: Tensors
    buffers: Tensors
    trainable: tuple[str, ...]
    training: tuple[str, ...]
    head: PublicHead | None
    continued: bool = False

    def pack(self) -> tuple[Arrays, dict[str, Any]]:
        """Arrays and plain values."""
        arrays = pack_tensors("parameter", self.parameters) | pack_tensors("buffer", self.buffers)
        metadata: dict[str, Any] = {
            "kind": "broadcast",
            "round": self.round,
            "model": self.model,
            "loss": self.loss.name,
            "loss_settings": self.loss.settings(),
            "trainable": list(self.trainable),
            "training": list(self.training),
            "head": None,
        }
        if self.head:
            head = {
                "direction": self.head.direction,
                "partition": self.head.partition,
                "offset": self.head.offset,
                "candidates": self.head.candidates,
            }
            arrays |= pack_tensors("head", head)
            metadata["head"] = {"path": self.head.path, "weight": self.head.weight, "bias": self.head.bias}
            metadata["head"] |= {"dim": self.head.dim, "axis": self.head.axis}
            metadata["head"] |= {
                "tail": self.head.tail,
                "decoys": self.head.decoys,
                "masked_bias": self.head.masked_bias,
            }
        return arrays, metadata

    @classmethod
    def unpack(
        cls, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any], loss: "Loss | Function | None" = None
    ) -> "Broadcast":
        """The inverse of `pack`; a user's own loss does not travel and has to be given."""
        kind = "Broadcast.unpack"
        _expect(kind, metadata, "broadcast")
        names = metadata.get("head")
        head = None
        if names:
            public = unpack_tensors("head", arrays)
            head = PublicHead(
                path=_field(kind, names, "path", str),
                weight=_field(kind, names, "weight", str),
                bias=names.get("bias"),
                masked_bias=bool(names.get("masked_bias")),
                direction=_tensor(kind, public, "direction"),
                partition=_tensor(kind, public, "partition"),
                offset=_tensor(kind, public, "offset"),
                candidates=_tensor(kind, public, "candidates"),
                decoys=bool(names.get("decoys")),
                dim=_field(kind, names, "dim", int),
                axis=_field(kind, names, "axis", int),
                tail=_tail(kind, names),
            )
        return cls(
            round=_field(kind, metadata, "round", str),
            model=_field(kind, metadata, "model", str),
            loss=_loss(kind, metadata, loss),
            parameters=unpack_tensors("parameter", arrays),
            buffers=unpack_tensors("buffer", arrays),
            trainable=_strings(kind, metadata, "trainable"),
            training=_strings(kind, metadata, "training"),
            head=head,
        )


@dataclass(frozen=True, eq=False)
class Update:
    """A client's answer.

    Attributes:
        round: the broadcast's.
        model: the broadcast's.
        samples: how many samples the passes are averages over.
        passes: gradients by name, with one more axis in front: the passes G^, sigma~_1 ... sigma~_m, beta, or one for
            each of the broadcast's candidates.
        buffers: the client's buffers after its forward pass, still veiled; with a row per candidate where what follows
            the head ran once for each.
    """

    round: str
    model: str
    samples: int
    passes: Tensors
    buffers: Tensors

    def pack(self) -> tuple[Arrays, dict[str, Any]]:
        """Arrays and plain values."""
        arrays = pack_tensors("passes", self.passes) | pack_tensors("buffer", self.buffers)
        metadata = {"kind": "update", "round": self.round, "model": self.model, "samples": self.samples}
        return arrays, metadata

    @classmethod
    def unpack(cls, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]) -> "Update":
        """The inverse of `pack`."""
        kind = "Update.unpack"
        _expect(kind, metadata, "update")
        return cls(
            _field(kind, metadata, "round", str),
            _field(kind, metadata, "model", str),
            _field(kind, metadata, "samples", int),
            unpack_tensors("passes", arrays),
            unpack_tensors("buffer", arrays),
        )


def _expect(where: str, metadata: Mapping[str, Any], kind: str) -> None:
    found = metadata.get("kind")
    if found != kind:
        raise BadArgument(where, f"this message is {found!r}, not {kind!r}")
