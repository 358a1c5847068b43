"""No defence: clients get the model and send gradients (the paper's FedAvg)."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedveil.checks import number
from fedveil.defences.interface import Defence, Samples
from fedveil.errors import BadArgument, IncompleteUpdate, MisshapenUpdate, ModelMismatch, NonFiniteUpdate
from fedveil.graph.inputs import Inputs
from fedveil.graph.layout import look_inside
from fedveil.scheme import Aggregate, Loss, SquaredError
from fedveil.scheme.losses import per_sample
from fedveil.scheme.messages import LARGEST, SAME_CODE, check_trainable, match_model
from fedveil.scheme.outputs import head_axis, outputs_of, slope
from fedveil.scheme.ranges import smooth
from fedveil.wire import Packed, Tensors, Values, checked, those_under, under


@dataclass(frozen=True, eq=False)
class PlainUpdate:
    """Gradients and buffers, as they are."""

    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


Update = TypeVar("Update", bound=PlainUpdate)


class Plain(Defence):
    """Weighted mean of plain gradients.

    Args:
        rounding: a seed makes it a rounding baseline (docs/maths.md, 'What "equal" means'): every gradient tensor gets
            noise of one unit in the last place, to show what floating point alone does to a run.
    """

    linear = True
    _seed: int | None = None  # of what should be secret, in the defences that derive from this

    def __init__(self, rounding: int | None = None) -> None:
        self.name = "plain" if rounding is None else "rounding baseline"
        self._noise = None if rounding is None else torch.Generator().manual_seed(rounding)
        self._loss: Loss = SquaredError()
        self._axis: int | None = None
        self._bytes: dict[str, float] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def prepare(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """Remember the loss, where classes are, and how much travels."""
        self._loss, self._axis = loss, head_axis(model)
        trainable, buffers = tensors_of(model)
        up = size_of([*trainable.values(), *buffers.values()])
        self._shapes = {name: tuple(tensor.shape) for name, tensor in trainable.items()}
        self._bytes = {"bytes_down": size_of([*model.parameters(), *buffers.values()]), "bytes_up": up}

    prepare_client = prepare

    @property
    def repeatable(self) -> bool:
        """With a seed."""
        return self._seed is not None

    def broadcast(self, model: nn.Module) -> nn.Module:
        """The model itself: in one process nothing needs to be copied."""
        return model

    def client_step(self, model: nn.Module, broadcast: nn.Module, samples: Samples, client: int = 0) -> PlainUpdate:
        """Gradients of the loss; buffers are the client's own copies."""
        trainable, own = tensors_of(broadcast)
        outputs = outputs_of(broadcast, samples.inputs, own)
        with torch.no_grad():
            share = per_sample(self._loss, outputs, samples.weights)
            delta = slope(self._loss, outputs, samples.targets, self._axis) * share
        return PlainUpdate(gradients_of(trainable, outputs, delta), own)

    def accumulate(self, broadcast: nn.Module, total: Update | None, update: Update) -> tuple[nn.Module, Update]:
        """Sum of gradients; statistics go on from where the last batch left them."""
        if update.buffers:
            broadcast = copy.deepcopy(broadcast)
            broadcast.load_state_dict(update.buffers, strict=False)
        if total is not None:
            summed = {name: total.gradients[name] + g for name, g in update.gradients.items()}
            update = replace(update, gradients=summed)
        return broadcast, update

    def expect(self, update: PlainUpdate, last: Mapping[str, Tensor] | None = None) -> Tensors:
        """The gradients, each as one row."""
        rows = {name: gradient.unsqueeze(0) for name, gradient in update.gradients.items()}
        return {name: smooth(own, last[name] if last else None) for name, own in rows.items()}

    def sizes(self, broadcast: nn.Module, expected: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """As large as the last gradients, and as the buffers are."""
        return largest(under("gradient", dict(expected)) | under("buffer", dict(broadcast.named_buffers())))

    def rounding(self, each: Mapping[str, Sequence[float]]) -> float:
        """Every number has it once."""
        sizes = [own * math.sqrt(math.prod(self._shapes[name])) for name, (own,) in gradients_under(each).items()]
        return math.hypot(*sizes)

    def aggregate(self, updates: Sequence[PlainUpdate], weights: Sequence[float]) -> Aggregate:
        """sum_k |D_k| / |D| times client k's gradients and floating buffers."""
        shares = [weight / sum(weights) for weight in weights]
        gradients = _mean([update.gradients for update in updates], shares)
        buffers = _mean([update.buffers for update in updates], shares)
        if not _moderate([*gradients.values(), *(b for b in buffers.values() if b.is_floating_point())]):
            for position, update in enumerate(updates):
                for what, tensors in (("gradient", update.gradients), ("buffer", update.buffers)):
                    for name, tensor in tensors.items():
                        check_finite(position, what, name, tensor)
        if self._noise is not None:
            gradients = {name: self._rounded(g) for name, g in gradients.items()}
        return Aggregate(gradients, buffers, 0.0, self._bytes)

    def _rounded(self, gradient: Tensor) -> Tensor:
        draw = torch.randn(gradient.shape, generator=self._noise, dtype=gradient.dtype).to(gradient.device)
        size = gradient.pow(2).mean().sqrt()
        if not size.isfinite():  # the squares overflow
            size = gradient.double().pow(2).mean().sqrt().to(gradient.dtype)
        return gradient + torch.finfo(gradient.dtype).eps * size * draw

    def client_view(self, model: nn.Module, broadcast: nn.Module) -> nn.Module:
        """The true model."""
        return copy.deepcopy(broadcast)


def check_number(where: str, name: str, value: Any) -> float:
    """A setting that is a number, as a float; refuses one that is beyond `LARGEST`."""
    if not number(value) or not abs(value) <= LARGEST:
        raise BadArgument(where, f"{name} must be a number of at most {LARGEST:g}, got {value!r}")
    return float(value)


def tensors_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters that want gradients, and a client's own copies of the buffers."""
    trainable: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return trainable, {name: buffer.clone() for name, buffer in model.named_buffers()}


def gradients_of(
    trainable: Mapping[str, Tensor], roots: Tensor | Sequence[Tensor], slopes: Tensor | Sequence[Tensor]
) -> dict[str, Tensor]:
    """By name; 0 for a parameter that this pass did not use."""
    every = [(roots, slopes)] if isinstance(roots, Tensor) else zip(roots, slopes, strict=True)
    used = [(root, slope) for root, slope in every if root.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(trainable)
    if used:
        ends, along = zip(*used, strict=True)
        found = torch.autograd.grad(ends, list(trainable.values()), along, allow_unused=True)
    pairs = zip(trainable.items(), found, strict=True)
    return {name: torch.zeros_like(p) if gradient is None else gradient for (name, p), gradient in pairs}


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def split(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for each name again, in its shape and dtype."""
    pieces = torch.split(flat, [g.numel() for g in like.values()])
    return {name: piece.view(g.shape).to(g.dtype) for (name, g), piece in zip(like.items(), pieces, strict=True)}


def _moderate(tensors: Sequence[Tensor]) -> bool:
    """Whether all norms are finite; if not, something is NaN or infinite, or only its square overflows."""
    return math.isfinite(float(torch.stack(torch._foreach_norm(list(tensors))).sum()))


def _mean(dicts: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
    """Weighted mean by name; of counters the largest."""
    if len(dicts) == 1:
        return dict(dicts[0])
    mean = {}
    for name, first in dicts[0].items():
        tensors = [tensors[name] for tensors in dicts]
        if first.is_floating_point():
            mean[name] = torch.stack([t * share for t, share in zip(tensors, shares, strict=True)]).sum(0)
        else:
            mean[name] = torch.stack(tensors).amax(0)
    return mean


def largest(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """The largest magnitude in each tensor, as its only row."""
    return {name: [float(tensor.abs().max()) if tensor.numel() else 0.0] for name, tensor in tensors.items()}


def gradients_under(rows: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Those of gradients, by parameter name."""
    return {name.removeprefix("gradient/"): own for name, own in rows.items() if name.startswith("gradient/")}


def check_tensors(position: int, what: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse a client's tensors with other names, shapes or dtypes than those wanted, and what is not finite."""
    client = f"client {position}"
    for name, like in wanted.items():
        tensor = found.get(name)
        if tensor is None:
            raise IncompleteUpdate(client, f"{what} {name} is missing")
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            text = f"{tuple(tensor.shape)} {tensor.dtype}, not {tuple(like.shape)} {like.dtype}"
            raise MisshapenUpdate(client, f"{what} {name} is {text}")
        check_finite(position, what, name, tensor)
    strange = sorted(found.keys() - wanted.keys())
    if strange:
        raise MisshapenUpdate(client, f"{what} {strange[0][:80]!r} was not asked for")


def check_names(
    position: int, tensors: Mapping[str, Tensor], beginnings: tuple[str, ...], names: tuple[str, ...] = ()
) -> None:
    """Refuse a client's answer that holds tensors whose names neither begin like these nor are among `names`."""
    strange = next((name for name in tensors if not name.startswith(beginnings) and name not in names), None)
    if strange is not None:
        raise MisshapenUpdate(f"client {position}", f"tensor {strange[:80]!r} was not asked for")


def check_finite(position: int, what: str, name: str, tensor: Tensor) -> None:
    """Refuse a client's tensor that holds NaN or infinity."""
    if not torch.isfinite(tensor).all():
        raise NonFiniteUpdate(f"client {position}", f"{what} {name} holds NaN or infinity")


@dataclass(frozen=True)
class PlainMessages:
    """How messages travel: the model down, its gradients and buffers up. Those of other defences derive from this."""

    build: Callable[..., Defence]  # the defence's class; clients call it with the server's settings
    settings: tuple[str, ...] = ()  # all that a server may set: attributes that are also arguments of the class

    def pack(self, defence: Any, broadcast: Any) -> Packed:
        """Server: a broadcast as plain values and tensors."""
        parameters = dict(broadcast.named_parameters())
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        modes = [path for path, module in broadcast.named_modules() if module.training]
        tensors = under("parameter", parameters) | under("buffer", dict(broadcast.named_buffers()))
        return {"trainable": trained, "training": modes}, tensors

    def unpack(self, model: nn.Module, values: Values, tensors: Tensors, loss: Loss) -> Any:
        """Client: the broadcast, in a copy of the client's own architecture; one of another model is refused."""
        found = checked("broadcast", values, {"trainable": list[str], "training": list[str]})
        trainable, training = set(found["trainable"]), set(found["training"])
        parameters, buffers = those_under("parameter", tensors), those_under("buffer", tensors)
        inside = look_inside(model)
        match_model(inside, parameters, buffers, complete=True)
        check_trainable(found["trainable"], parameters)
        strange = sorted(training - {path for path, _ in inside.modes})
        if strange or len(training) < len(found["training"]):
            what = f"there is no module {strange[0][:80]!a}" if strange else "training names a module twice"
            raise ModelMismatch("broadcast", what, SAME_CODE)
        filled = copy.deepcopy(model)
        for sent, own in ((parameters, filled.named_parameters()), (buffers, filled.named_buffers())):
            for name, tensor in own:
                tensor.data = sent[name].to(tensor.device)
        for name, parameter in filled.named_parameters():
            parameter.requires_grad_(name in trainable)
        for path, module in filled.named_modules():
            module.training = path in training
        return filled

    def pack_update(self, defence: Any, update: Any) -> Packed:
        """Client: an upload as plain values and tensors."""
        return {}, under("gradient", update.gradients) | under("buffer", update.buffers)

    def unpack_update(self, defence: Any, model: nn.Module, values: Values, tensors: Tensors, position: int) -> Any:
        """Server: the upload of the client at that position; one that cannot be aggregated is refused."""
        check_names(position, tensors, ("gradient/", "buffer/"))
        device = next(model.parameters()).device
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        update = PlainUpdate(those_under("gradient", tensors), those_under("buffer", tensors))
        check_tensors(position, "gradient", update.gradients, self.wanted(defence, model))
        check_tensors(position, "buffer", update.buffers, dict(model.named_buffers()))
        return update

    def blank(self, defence: Any, model: nn.Module) -> Packed:
        """Server: an update of this round without its numbers, as it would travel."""
        return {}, under("gradient", self.wanted(defence, model)) | under("buffer", dict(model.named_buffers()))

    def wanted(self, defence: Any, model: nn.Module) -> Tensors:
        """Tensors like the gradients that an update must hold."""
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


MESSAGES = PlainMessages(Plain)
