"""No defence: clients receive the model and send plain gradients, or the result of local training (FedAvg)."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fedveil.defences import encoding
from fedveil.defences.interface import (
    Codec,
    Defence,
    DefenceClient,
    DefenceRound,
    DefenceServer,
    LocalTraining,
    Ranges,
    Samples,
    State,
    StateValue,
    read_state,
)
from fedveil.errors import BadArgument
from fedveil.graph.build import Frozen
from fedveil.graph.inputs import Inputs
from fedveil.scheme import Aggregate, Loss
from fedveil.scheme.losses import sample_weights
from fedveil.scheme.outputs import compute_outputs, head_axis, output_gradient
from fedveil.scheme.recover import are_overflow_safe, bound_magnitudes, check_finite, smooth
from fedveil.wire import Packed, Tensors, Values, strip_prefix

if TYPE_CHECKING:
    from fedveil.privacy.gradients import RecordGradients


@dataclass(frozen=True, eq=False)
class PlainUpdate:
    """Plain gradients and buffers."""

    gradients: Tensors
    buffers: Tensors


P = TypeVar("P", bound=PlainUpdate)
AnyPlainRound = DefenceRound[nn.Module, PlainUpdate]


class Plain(Defence[nn.Module, PlainUpdate]):
    """No defence: the server computes the weighted mean of plain gradients.

    With `local_epochs`, this is FedAvg (McMahan et al., AISTATS 2017). In every round, each client takes SGD steps on
    the model over all its records, and sends the change of the model. The server's optimizer applies the weighted mean
    of these changes as if it were a gradient. `torch.optim.SGD` with lr=1 and no momentum therefore computes the
    weighted mean of the clients' models; with another optimizer, this is FedOpt (Reddi et al., ICLR 2021). An epoch of
    the federation is one round.

    Args:
        local_epochs: number of times that a client goes through its records in a round; by default, clients send the
            gradient of one batch.
        local_lr: learning rate of the clients, by default 0.1.
        local_batch: number of records per local step; by default, the federation's batch size.
        local_momentum: momentum of the clients, which starts at zero in every round; by default 0.
        rounding: a seed for a rounding baseline (docs/maths.md, 'What "equal" means'): noise as large as a rounding
            error is added to every gradient, to show how much floating-point rounding alone affects a run.
        frozen: "local" if every client has the parameters that are not trained; they are then not sent.
    """

    linear = True
    clippable = True
    has_record_gradients = True
    remote_settings: ClassVar[tuple[str, ...]] = LocalTraining.NAMES
    local_epochs: int | None = None
    local_lr: float | None = None
    local_batch: int | None = None
    local_momentum: float | None = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Reset traits that a subclass must not inherit, because it may change gradients."""
        super().__init_subclass__(**kwargs)
        for trait in ("clippable", "has_record_gradients"):
            setattr(cls, trait, cls.__dict__.get(trait, False))

    def __init__(
        self,
        rounding: int | None = None,
        *,
        local_epochs: int | None = None,
        local_lr: float | None = None,
        local_batch: int | None = None,
        local_momentum: float | None = None,
        frozen: Frozen = "sent",
    ) -> None:
        if frozen not in ("sent", "local"):
            raise BadArgument("Plain", f'frozen must be "sent" or "local", got {frozen!r}')
        self.frozen = frozen
        self._rounding = rounding
        self._set_local_training("Plain", local_epochs, local_lr, local_batch, local_momentum)
        base_name = "plain" if self.local_training is None else "fedavg"
        self.name = base_name if rounding is None else "rounding baseline"

    def _set_local_training(
        self, where: str, epochs: int | None, lr: float | None, batch: int | None, momentum: float | None
    ) -> None:
        """Set the traits that depend on local training."""
        self.local_epochs, self.local_lr, self.local_batch, self.local_momentum = epochs, lr, batch, momentum
        values = {name: getattr(self, name) for name in LocalTraining.NAMES}
        self.local_training = LocalTraining.from_settings(where, values)
        if self.local_training is not None:
            self.fusable = self.has_record_gradients = False

    def require_record_gradients(self) -> None:
        """Raise an error if clients cannot compute per-record gradients."""
        if self.local_training is not None:
            message = "later local steps depend on all records, so the effect of a single record cannot be clipped"
            raise BadArgument("privacy", message, 'omit local_epochs, or protect clients with unit="client"')
        super().require_record_gradients()

    @property
    def codec(self) -> Codec[nn.Module, PlainUpdate]:
        """The encoding of the model, gradients and buffers."""
        return PlainCodec()

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> DefenceServer[nn.Module, PlainUpdate]:
        """Prepare the server for a run."""
        return PlainServer(model, self._rounding, frozen=self.frozen)

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> DefenceClient[nn.Module, PlainUpdate]:
        """Prepare clients for a run."""
        return PlainClient(model, loss)

    def client_view(self, model: nn.Module, broadcast: nn.Module) -> nn.Module:
        """Return a copy of the true model."""
        return copy.deepcopy(broadcast)


class PlainRound(AnyPlainRound, Ranges[PlainUpdate]):
    """A round that averages gradients and buffers."""

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
        noise = torch.randn(gradient.shape, generator=self._noise, dtype=gradient.dtype).to(gradient.device)
        rms = gradient.pow(2).mean().sqrt()
        if not rms.isfinite():  # the squares overflow
            rms = gradient.double().pow(2).mean().sqrt().to(gradient.dtype)
        return gradient + torch.finfo(gradient.dtype).eps * rms * noise

    def sum_template(self) -> Tensors:
        """Return one tensor per trainable parameter, with a single row."""
        parameters = encoding.trainable_tensors(self.broadcast)
        return {name: p.new_empty((1, *p.shape), device="meta", dtype=torch.float64) for name, p in parameters.items()}

    def from_sums(self, sums: Tensors) -> PlainUpdate:
        """Return an update with the sums as gradients."""
        parameters = encoding.trainable_tensors(self.broadcast)
        return PlainUpdate({name: sums[name][0].to(p.dtype) for name, p in parameters.items()}, {})

    def expect(self, update: PlainUpdate, last_prediction: Mapping[str, Tensor] | None = None) -> Tensors:
        """Predict the gradients; each has a single row."""
        rows = {name: gradient.unsqueeze(0) for name, gradient in update.gradients.items()}
        return {name: smooth(row, last_prediction[name] if last_prediction else None) for name, row in rows.items()}

    def bound(self, expected: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """Bound gradients by the predicted values, and buffers by their current values."""
        return bound_magnitudes(encoding.pack_gradients(expected, dict(self.broadcast.named_buffers())))

    def bound_rounding(self, row_errors: Mapping[str, Sequence[float]]) -> float:
        """Bound the gradient error, given an equal error in every element of a row."""
        sizes = {name: math.sqrt(p.numel()) for name, p in self.broadcast.named_parameters()}
        return math.hypot(*(value * sizes[name] for name, (value,) in strip_prefix("gradient", row_errors).items()))


class PlainServer(DefenceServer[nn.Module, PlainUpdate]):
    """Broadcasts the model itself, without copying it."""

    def __init__(
        self,
        model: nn.Module,
        rounding: int | None = None,
        round_type: type[PlainRound] = PlainRound,
        frozen: Frozen = "sent",
    ) -> None:
        bytes_up = encoding.count_bytes(encoding.template(model).values())
        sent_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad or frozen == "sent"]
        self.figures = {"bytes_down": encoding.count_bytes([*sent_parameters, *model.buffers()]), "bytes_up": bytes_up}
        self._noise = None if rounding is None else torch.Generator().manual_seed(rounding)
        self._round_type = round_type

    def start_round(self, model: nn.Module, members: Sequence[int | str] | None = None) -> PlainRound:
        """Broadcast the model."""
        return self._round_type(model, self.figures, self._noise)

    def state(self) -> State:
        """Return the state of the rounding baseline's generator, so that a resumed run draws the same noise."""
        return {} if self._noise is None else {"rounding": self._noise.get_state()}

    def restore(self, state: Mapping[str, StateValue]) -> None:
        """Continue with the generator's state."""
        if self._noise is not None:
            self._noise.set_state(read_state("Plain", state, "rounding", Tensor).cpu())


def average(updates: Sequence[PlainUpdate], weights: Sequence[float], figures: Mapping[str, float]) -> Aggregate:
    """Return the weighted mean of gradients and buffers; refuse updates that are not finite."""
    shares = [weight / sum(weights) for weight in weights]
    gradients = _average([update.gradients for update in updates], shares)
    buffers = _average([update.buffers for update in updates], shares)
    if not are_overflow_safe([*gradients.values(), *buffers.values()]):
        for position, update in enumerate(updates):
            check_finite(f"client {position}", "gradient", update.gradients)
            check_finite(f"client {position}", "buffer", update.buffers)
    return Aggregate(gradients, buffers, 0.0, figures)


def _average(tensors_by_client: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> Tensors:
    """Return the weighted mean of each tensor, or the maximum for integer tensors such as counters."""
    if len(tensors_by_client) == 1:
        return dict(tensors_by_client[0])
    mean = {}
    for name, first_tensor in tensors_by_client[0].items():
        tensors = [tensors_of_client[name] for tensors_of_client in tensors_by_client]
        if first_tensor.is_floating_point():
            mean[name] = torch.stack([t * share for t, share in zip(tensors, shares, strict=True)]).sum(0)
        else:
            mean[name] = torch.stack(tensors).amax(0)
    return mean


class PlainClient(DefenceClient[nn.Module, PlainUpdate]):
    """Computes plain gradients of the loss."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.loss, self.axis = loss, head_axis(model)
        self._model = model  # in one process, also the broadcast of every round, so the tensors are listed once
        self._tensors = dict(model.named_parameters()), dict(model.named_buffers())

    def step(self, broadcast: nn.Module, samples: Samples, client: int = 0) -> PlainUpdate:
        """Compute gradients for one batch; the buffers of the broadcast are copied, not changed."""
        parameters, model_buffers = self._tensors
        if broadcast is not self._model:
            parameters, model_buffers = dict(broadcast.named_parameters()), dict(broadcast.named_buffers())
        buffers = {name: buffer.clone() for name, buffer in model_buffers.items()}  # a forward pass may change them
        outputs = compute_outputs(broadcast, samples.inputs, buffers)
        with torch.no_grad():
            weights = sample_weights(outputs, samples.weights, self.loss)
            delta = output_gradient(self.loss, outputs, samples.targets, self.axis) * weights
        return PlainUpdate(compute_gradients(parameters, [outputs], [delta]), buffers)

    def train(
        self, broadcast: nn.Module, batches: Iterable[Samples], local: LocalTraining, client: int = 0
    ) -> PlainUpdate:
        """Take SGD steps on a copy of the model; return the total that they subtracted, and the last buffers."""
        model = copy.deepcopy(broadcast)
        initial_tensors, buffers = encoding.trainable_tensors(broadcast), dict(model.named_buffers())
        trainable_parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer, update = torch.optim.SGD(trainable_parameters.values(), local.lr, momentum=local.momentum), None
        for samples in batches:
            update = self.step(model, samples, client)
            for name, parameter in trainable_parameters.items():
                parameter.grad = update.gradients[name]
            optimizer.step()
            for name, value in update.buffers.items():
                buffers[name].copy_(value)
        assert update is not None
        return replace(
            update, gradients={name: initial_tensors[name] - p.detach() for name, p in trainable_parameters.items()}
        )

    def record_gradients(self, broadcast: nn.Module) -> "RecordGradients":
        """Return an object that computes the gradient of the loss for each record."""
        from fedveil.privacy.gradients import RecordGradients  # most runs do not need it

        return RecordGradients.from_model(broadcast, self.loss)

    def accumulate(self, broadcast: nn.Module, total: P | None, update: P) -> tuple[nn.Module, P]:
        """Sum the gradients, and load the buffers after the last batch into a copy of the broadcast."""
        if update.buffers:
            broadcast = copy.deepcopy(broadcast)
            broadcast.load_state_dict(update.buffers, strict=False)
        if total is not None:
            gradients = {name: total.gradients[name] + g for name, g in update.gradients.items()}
            update = replace(update, gradients=gradients)
        return broadcast, update


def compute_gradients(
    parameters: Mapping[str, Tensor], outputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> Tensors:
    """Return the gradient of each trainable parameter; it is 0 if the outputs do not depend on the parameter."""
    trainable_parameters = {name: p for name, p in parameters.items() if p.requires_grad}
    differentiable_pairs = [pair for pair in zip(outputs, cotangents, strict=True) if pair[0].requires_grad]
    result: Sequence[Tensor | None] = [None] * len(trainable_parameters)
    if differentiable_pairs:
        used_outputs, grad_outputs = zip(*differentiable_pairs, strict=True)
        result = torch.autograd.grad(used_outputs, list(trainable_parameters.values()), grad_outputs, allow_unused=True)
    pairs = zip(trainable_parameters.items(), result, strict=True)
    return {name: torch.zeros_like(p) if gradient is None else gradient for (name, p), gradient in pairs}


class PlainCodec(Codec[nn.Module, PlainUpdate]):
    """Encodes the model for clients, and its gradients and buffers for the server."""

    def encode_broadcast(self, broadcast: nn.Module) -> Packed:
        """Encode a model."""
        return encoding.pack_model(broadcast)

    def decode_broadcast(self, model: nn.Module, values: Values, tensors: Tensors, loss: Loss) -> nn.Module:
        """Decode a broadcast into a copy of the client's model."""
        return encoding.unpack_model(model, values, tensors)

    def encode_update(self, update: PlainUpdate) -> Packed:
        """Encode gradients and buffers."""
        return {}, encoding.pack_gradients(update.gradients, update.buffers)

    def decode_update(
        self, defence_round: AnyPlainRound, model: nn.Module, values: Values, tensors: Tensors, position: int
    ) -> PlainUpdate:
        """Decode gradients and buffers; refuse names, shapes or dtypes that do not match the model."""
        return PlainUpdate(*encoding.unpack_gradients(self.template(defence_round, model)[1], tensors, position))

    def template(self, defence_round: AnyPlainRound, model: nn.Module) -> Packed:
        """Return an example of an encoded update."""
        return {}, encoding.template(model)
