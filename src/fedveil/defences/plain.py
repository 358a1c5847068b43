"""No defence: clients get the model and send gradients (the paper's FedAvg)."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedveil.checks import number
from fedveil.defences.interface import (
    Codec,
    Defence,
    DefenceClient,
    DefenceRound,
    DefenceServer,
    Ranges,
    Samples,
)
from fedveil.errors import BadArgument, IncompleteUpdate, MisshapenUpdate, ModelMismatch, NonFiniteUpdate
from fedveil.graph.inputs import Inputs
from fedveil.graph.layout import look_inside
from fedveil.scheme import Aggregate, Loss
from fedveil.scheme.losses import per_sample
from fedveil.scheme.messages import LARGEST, SAME_CODE, check_trainable, match_model
from fedveil.scheme.outputs import compute_outputs, head_axis, slope
from fedveil.scheme.ranges import smooth
from fedveil.wire import Packed, Tensors, Values, add_prefix, checked, strip_prefix


@dataclass(frozen=True, eq=False)
class PlainUpdate:
    """Gradients and buffers, as they are."""

    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


P = TypeVar("P", bound=PlainUpdate)


class Plain(Defence[nn.Module, PlainUpdate]):
    """Weighted mean of plain gradients.

    Args:
        rounding: a seed makes it a rounding baseline (docs/maths.md, 'What "equal" means'): every gradient tensor gets
            noise of one unit in the last place, to show what floating point alone does to a run.
    """

    linear = True
    clippable = True

    def __init_subclass__(cls, **named: object) -> None:
        """Have each class say for itself whether clients can clip: one that changes gradients must not inherit it."""
        super().__init_subclass__(**named)
        cls.clippable = cls.__dict__.get("clippable", False)

    def __init__(self, rounding: int | None = None) -> None:
        self.name = "plain" if rounding is None else "rounding baseline"
        self._rounding = rounding

    @property
    def codec(self) -> Codec[nn.Module, PlainUpdate]:
        """The model down, its gradients and buffers up."""
        return PlainCodec()

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> DefenceServer[nn.Module, PlainUpdate]:
        """Prepare the server for a run."""
        return PlainServer(model, self._rounding)

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> DefenceClient[nn.Module, PlainUpdate]:
        """Prepare clients for a run."""
        return PlainClient(model, loss)

    def client_view(self, model: nn.Module, broadcast: nn.Module) -> nn.Module:
        """Return a copy of the true model."""
        return copy.deepcopy(broadcast)


class PlainServer(DefenceServer[nn.Module, PlainUpdate]):
    """Broadcasts the model itself: in one process nothing needs to be copied."""

    def __init__(self, model: nn.Module, rounding: int | None = None) -> None:
        trainable, buffers = split_tensors(model)
        up = count_bytes([*trainable.values(), *buffers.values()])
        self.figures = {"bytes_down": count_bytes([*model.parameters(), *buffers.values()]), "bytes_up": up}
        self._noise = None if rounding is None else torch.Generator().manual_seed(rounding)

    def start_round(self, model: nn.Module, members: Sequence[int] | None = None) -> "PlainRound":
        """Broadcast the model."""
        return PlainRound(model, self.figures, self._noise)


class PlainRound(DefenceRound[nn.Module, PlainUpdate], Ranges[PlainUpdate]):
    """Averages gradients and buffers."""

    def __init__(
        self, model: nn.Module, figures: Mapping[str, float], rounding_noise: torch.Generator | None = None
    ) -> None:
        self.broadcast, self._figures, self._noise = model, figures, rounding_noise

    def recover(self, updates: Sequence[PlainUpdate], weights: Sequence[float]) -> Aggregate:
        """Return sum_k |D_k| / |D| times client k's gradients and floating-point buffers."""
        result = average(updates, weights, self._figures)
        if self._noise is None:
            return result
        return replace(result, gradients={name: self._round(g) for name, g in result.gradients.items()})

    def _round(self, gradient: Tensor) -> Tensor:
        draw = torch.randn(gradient.shape, generator=self._noise, dtype=gradient.dtype).to(gradient.device)
        size = gradient.pow(2).mean().sqrt()
        if not size.isfinite():  # the squares overflow
            size = gradient.double().pow(2).mean().sqrt().to(gradient.dtype)
        return gradient + torch.finfo(gradient.dtype).eps * size * draw

    def expect(self, update: PlainUpdate, last: Mapping[str, Tensor] | None = None) -> Tensors:
        """Predict the gradients, each as one row."""
        rows = {name: gradient.unsqueeze(0) for name, gradient in update.gradients.items()}
        return {name: smooth(own, last[name] if last else None) for name, own in rows.items()}

    def bound(self, expected: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """Bound gradients by the last ones, and buffers by their values."""
        buffers = dict(self.broadcast.named_buffers())
        return largest(add_prefix("gradient", dict(expected)) | add_prefix("buffer", buffers))

    def bound_rounding(self, rows: Mapping[str, Sequence[float]]) -> float:
        """Bound the gradient error: every number has that of its row once."""
        sizes = {name: math.sqrt(p.numel()) for name, p in self.broadcast.named_parameters()}
        return math.hypot(*(own * sizes[name] for name, (own,) in strip_prefix("gradient", rows).items()))


def average(updates: Sequence[PlainUpdate], weights: Sequence[float], figures: Mapping[str, float]) -> Aggregate:
    """Return the weighted mean of gradients and buffers; a client whose update is not finite is named."""
    shares = [weight / sum(weights) for weight in weights]
    gradients = _mean([update.gradients for update in updates], shares)
    buffers = _mean([update.buffers for update in updates], shares)
    if not _is_moderate([*gradients.values(), *(b for b in buffers.values() if b.is_floating_point())]):
        for position, update in enumerate(updates):
            for what, tensors in (("gradient", update.gradients), ("buffer", update.buffers)):
                for name, tensor in tensors.items():
                    check_finite(position, what, name, tensor)
    return Aggregate(gradients, buffers, 0.0, figures)


class PlainClient(DefenceClient[nn.Module, PlainUpdate]):
    """Computes gradients of the loss."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.loss, self.axis = loss, head_axis(model)

    def step(self, broadcast: nn.Module, samples: Samples, client: int = 0) -> PlainUpdate:
        """Compute the gradients for one batch; buffers are the client's own copies."""
        trainable, own = split_tensors(broadcast)
        outputs = compute_outputs(broadcast, samples.inputs, own)
        with torch.no_grad():
            share = per_sample(self.loss, outputs, samples.weights)
            delta = slope(self.loss, outputs, samples.targets, self.axis) * share
        return PlainUpdate(compute_gradients(trainable, outputs, delta), own)

    def accumulate(
        self, broadcast: nn.Module, total: PlainUpdate | None, update: PlainUpdate
    ) -> tuple[nn.Module, PlainUpdate]:
        """Sum gradients; statistics continue from where the last batch left them."""
        return accumulate(broadcast, total, update)


def accumulate(broadcast: nn.Module, total: P | None, update: P) -> tuple[nn.Module, P]:
    """Sum gradients, and put the buffers of the last batch into a copy of the broadcast."""
    if update.buffers:
        broadcast = copy.deepcopy(broadcast)
        broadcast.load_state_dict(update.buffers, strict=False)
    if total is not None:
        summed = {name: total.gradients[name] + g for name, g in update.gradients.items()}
        update = replace(update, gradients=summed)
    return broadcast, update


def check_number(where: str, name: str, value: object) -> float:
    """Return a setting that is a number as a float; refuse one beyond `LARGEST`."""
    if not number(value) or not abs(value) <= LARGEST:
        raise BadArgument(where, f"{name} must be a number of at most {LARGEST:g}, got {value!r}")
    return float(value)


def split_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters that require gradients, and copies of the buffers."""
    trainable: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return trainable, {name: buffer.clone() for name, buffer in model.named_buffers()}


def compute_gradients(
    trainable: Mapping[str, Tensor], roots: Tensor | Sequence[Tensor], slopes: Tensor | Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return gradients by name; 0 for a parameter that this pass did not use."""
    every = [(roots, slopes)] if isinstance(roots, Tensor) else zip(roots, slopes, strict=True)
    used = [(root, slope) for root, slope in every if root.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(trainable)
    if used:
        ends, along = zip(*used, strict=True)
        found = torch.autograd.grad(ends, list(trainable.values()), along, allow_unused=True)
    pairs = zip(trainable.items(), found, strict=True)
    return {name: torch.zeros_like(p) if gradient is None else gradient for (name, p), gradient in pairs}


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of some tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_moderate(tensors: Sequence[Tensor]) -> bool:
    """Whether all norms are finite; if not, something is NaN or infinite, or only its square overflows."""
    return math.isfinite(float(torch.stack(torch._foreach_norm(list(tensors))).sum()))


def _mean(dicts: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
    """Return the weighted mean by name; of counters the largest."""
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
    """Return the largest magnitude in each tensor, as its only row."""
    return {name: [float(tensor.abs().max()) if tensor.numel() else 0.0] for name, tensor in tensors.items()}


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


class PlainCodec(Codec[nn.Module, PlainUpdate]):
    """The model down, its gradients and buffers up."""

    def encode_broadcast(self, broadcast: nn.Module) -> Packed:
        """Encode a model."""
        return encode_model(broadcast)

    def decode_broadcast(self, model: nn.Module, values: Values, tensors: Tensors, loss: Loss) -> nn.Module:
        """Decode a model into a copy of the client's own."""
        return fill_model(model, values, tensors)

    def encode_update(self, update: PlainUpdate) -> Packed:
        """Encode gradients and buffers."""
        return {}, add_prefix("gradient", update.gradients) | add_prefix("buffer", update.buffers)

    def decode_update(
        self,
        own: DefenceRound[nn.Module, PlainUpdate],
        model: nn.Module,
        values: Values,
        tensors: Tensors,
        position: int,
    ) -> PlainUpdate:
        """Decode gradients and buffers of the model's names, shapes and dtypes."""
        return decode_gradients(trainable_tensors(model), model, tensors, position)

    def template(self, own: DefenceRound[nn.Module, PlainUpdate], model: nn.Module) -> Packed:
        """Return tensors like those of an update."""
        return {}, add_prefix("gradient", trainable_tensors(model)) | add_prefix("buffer", dict(model.named_buffers()))


def trainable_tensors(model: nn.Module) -> Tensors:
    """Return the parameters that require gradients, detached."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def encode_model(model: nn.Module) -> Packed:
    """Encode a model: its tensors, which of them are trained, and which modules are in training mode."""
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    modes = [path for path, module in model.named_modules() if module.training]
    tensors = add_prefix("parameter", parameters) | add_prefix("buffer", dict(model.named_buffers()))
    return {"trainable": trained, "training": modes}, {name: tensor.detach() for name, tensor in tensors.items()}


def fill_model(model: nn.Module, values: Values, tensors: Tensors) -> nn.Module:
    """Return a copy of a client's model with the values of a broadcast; one of another model is refused."""
    found = checked("broadcast", values, {"trainable": list[str], "training": list[str]})
    trainable, training = set(found["trainable"]), set(found["training"])
    parameters, buffers = strip_prefix("parameter", tensors), strip_prefix("buffer", tensors)
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


def decode_gradients(like: Tensors, model: nn.Module, tensors: Tensors, position: int) -> PlainUpdate:
    """Decode the gradients and buffers of the client at a position; gradients must be like those given."""
    check_names(position, tensors, ("gradient/", "buffer/"))
    device = next(model.parameters()).device
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    update = PlainUpdate(strip_prefix("gradient", tensors), strip_prefix("buffer", tensors))
    check_tensors(position, "gradient", update.gradients, like)
    check_tensors(position, "buffer", update.buffers, dict(model.named_buffers()))
    return update
