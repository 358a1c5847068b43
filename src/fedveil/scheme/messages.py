"""What travels: a Broadcast from the server to clients, an Update back.

Both turn into plain values and tensors (`pack`), which `fedveil.wire` makes bytes of, and back (`unpack`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from torch import Tensor

from fedveil.checks import one_of
from fedveil.errors import BadArgument
from fedveil.graph.head import TAILS, WITHIN, Tail
from fedveil.scheme.losses import LOSSES, Function, Loss, find_loss
from fedveil.wire import Packed, Tensors, checked, those_under, under


@dataclass(frozen=True, eq=False)
class PublicHead:
    """The head's public part: the model as the paper sends it has weight base + (offset o direction) 1^T.

    Attributes:
        path: the head's module.
        weight, bias: names of its weight, and of its bias if it has one.
        masked_bias: whether the bias carries the same noise, as the weight of an input that is always 1. One that is
            close to zero does not: it would show the noise.
        direction: r_a, one number per output.
        partition: the group of each output.
        offset: the size of the noise, one number per group; the paper's gamma is this plus the anchor's secret share.
        candidates: offsets for which clients compute gradients, one row each; one of them is true, the others decoys.
            None for squared error by its own terms.
        dim, axis: which dim counts outputs, of the weight and of what takes the noise.
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
    dim: int
    axis: int
    tail: Tail

    @property
    def groups(self) -> int:
        """The paper's m."""
        return len(self.offset)

    @property
    def decoys(self) -> bool:
        """Whether there are candidates."""
        return len(self.candidates) > 0

    @property
    def within(self) -> bool:
        """Whether what follows the head is more than a rearrangement of its outputs."""
        return self.tail in WITHIN

    def noise(self, like: Tensor) -> Tensor:
        """For each candidate t a row t o r_a, one number per output, in the dtype of `like`."""
        return (self.candidates[:, self.partition] * self.direction.double()).to(like)


_BROADCAST = {"round": str, "model": str, "trainable": list[str], "training": list[str]}
_UPDATE = {"round": str, "model": str, "samples": int}
_HEAD_TENSORS = tuple(each.name for each in fields(PublicHead) if each.type is Tensor)
_HEAD = {each.name: each.type for each in fields(PublicHead) if each.type is not Tensor} | {"tail": str}


def _check_forms(where: str, values: object, tensors: object) -> None:
    """Refuse what is not a dict of values and one of tensors by name."""
    for what, found in (("values", values), ("tensors", tensors)):
        if not isinstance(found, Mapping) or not all(type(name) is str for name in found):
            raise BadArgument(where, f"{what} are {type(found).__name__}, not a dict by name")


def known_loss(where: str, loss: str, loss_settings: Mapping[str, Any], own: Loss | None) -> Loss:
    """The loss that the server named; a user's own function does not travel, and has to be given."""
    if own is not None and own.name != loss:
        raise BadArgument(where, f"the server's loss is {loss!r}, the one given {own.name!r}")
    if own is None and loss not in LOSSES:
        raise BadArgument(where, f"the loss {loss!r} is the server's own function", f"{where}(..., loss=it)")
    try:
        return own or LOSSES[loss](**loss_settings)
    except TypeError as error:
        raise BadArgument("loss", f"{loss} has no settings {sorted(loss_settings)}: {error}") from error


@dataclass(frozen=True, eq=False)
class Broadcast:
    """All that leaves the server in a round.

    Attributes:
        round, model: names of the round and of the architecture, for the update to quote.
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

    def pack(self) -> Packed:
        """Plain values and tensors."""
        tensors = under("parameter", self.parameters) | under("buffer", self.buffers)
        values: dict[str, Any] = {"round": self.round, "model": self.model}
        values |= {"trainable": list(self.trainable), "training": list(self.training)}
        values |= {"loss": self.loss.name, "loss_settings": self.loss.settings(), "head": None}
        if self.head:
            values["head"] = {name: getattr(self.head, name) for name in _HEAD}
            tensors |= under("head", {name: getattr(self.head, name) for name in _HEAD_TENSORS})
        return values, tensors

    @classmethod
    def unpack(
        cls, values: Mapping[str, Any], tensors: Mapping[str, Tensor], loss: "Loss | Function | str | None" = None
    ) -> "Broadcast":
        """The inverse of `pack`; a user's own loss does not travel and has to be given."""
        where = "Broadcast.unpack"
        _check_forms(where, values, tensors)
        found = checked(where, values, _BROADCAST)
        found |= {name: tuple(found[name]) for name in ("trainable", "training")}
        own = None if loss is None else find_loss(loss)
        if own is None or "loss" in values:
            own = known_loss(where, **checked(where, values, {"loss": str, "loss_settings": dict}), own=own)
        head = None
        if values.get("head") is not None:
            named = checked(where, checked(where, values, {"head": dict})["head"], _HEAD)
            named["tail"] = cast(Tail, one_of(where, "tail", named["tail"], TAILS))
            public = those_under("head", tensors)
            for name in _HEAD_TENSORS:
                if name not in public:
                    raise BadArgument(where, f"the head's tensor {name!r} is missing")
            head = PublicHead(**(named | {name: public[name] for name in _HEAD_TENSORS}))
        parameters, buffers = those_under("parameter", tensors), those_under("buffer", tensors)
        return cls(loss=own, parameters=parameters, buffers=buffers, head=head, **found)


@dataclass(frozen=True, eq=False)
class Update:
    """A client's answer.

    Attributes:
        round, model: the broadcast's.
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

    def pack(self) -> Packed:
        """Plain values and tensors."""
        tensors = under("passes", self.passes) | under("buffer", self.buffers)
        return {name: getattr(self, name) for name in _UPDATE}, tensors

    @classmethod
    def unpack(cls, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "Update":
        """The inverse of `pack`; refuses tensors that are neither passes nor buffers."""
        where = "Update.unpack"
        _check_forms(where, values, tensors)
        found = checked(where, values, _UPDATE)
        update = cls(**found, passes=those_under("passes", tensors), buffers=those_under("buffer", tensors))
        if len(update.passes) + len(update.buffers) < len(tensors):
            strange = next(name for name in tensors if not name.startswith(("passes/", "buffer/")))
            raise BadArgument(where, f"{strange[:80]!a} was not asked for")
        return update
