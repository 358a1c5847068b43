"""The paper's defence: perturb the model with one-time noise, and remove its effect from the clients' updates."""

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from fedveil.defences.interface import (
    Codec,
    Defence,
    DefenceClient,
    DefenceRound,
    DefenceServer,
    Ranges,
    Samples,
    State,
    StateValue,
    read_state,
)
from fedveil.graph import Plan, analyse
from fedveil.graph.build import Frozen
from fedveil.graph.coverage import restrict
from fedveil.graph.inputs import Inputs
from fedveil.scheme import Aggregate, Broadcast, Entropy, Loss, NoiseSettings, Perturbation, Update, VeilSession
from fedveil.scheme.broadcast import check_broadcast, client_view
from fedveil.scheme.client import client_step
from fedveil.scheme.comparison import check_exact
from fedveil.scheme.decoys import DEFAULT_DECOYS
from fedveil.scheme.losses import Function
from fedveil.scheme.perturbation import bound_passes, bound_rounding, predict_passes
from fedveil.scheme.recover import bound_magnitudes
from fedveil.wire import Packed, Tensors, Values, add_prefix, strip_prefix

if TYPE_CHECKING:
    from fedveil.privacy.gradients import RecordGradients

SEPARATE_FIELDS = ("loss", "loss_settings", "output")
HeadMode = Literal["linear", "exposed"]


class Veil(Defence[Broadcast, Update]):
    """Perturb the model with new noise in every round.

    To use a veil without a federation::

        plan = fedveil.analyse(model, example)
        perturbation = fedveil.Veil().perturb(model, plan, loss)
        update = fedveil.client_step(model, perturbation.broadcast, inputs, targets)
        result = perturbation.recover([update])

    Args:
        groups: the paper's m, at most 64; clients compute groups + 2 gradients and refuse larger values.
        additive: size of the noise on the head.
        multiplicative: bound on the factors of hidden units.
        permute: whether to apply a secret permutation to hidden units.
        head: "exposed" for models without a layer to which noise can be added; clients then see true predictions.
        min_coverage: refuse a model if less than this fraction of its parameter values can be perturbed.
        public: names of parameters whose values clients know; see `analyse`.
        frozen: "local" if every client has the parameters that are not trained, such as a published backbone: they are
            neither perturbed nor sent (docs/how-to/hugging-face.md).
        decoys: number of false head offsets sent with the true one, at most 64; by default `DEFAULT_DECOYS` (2), or
            none for squared error if nothing follows the head (`fedveil.scheme.decoys`).
        keep_noise: draw factors, permutation, direction and partition once, and keep them in memory for all rounds;
            they are drawn again for another model, a restored state or another process (docs/defences/veil.md).
        entropy: source of random numbers, by default the operating system; `Entropy.for_tests(seed)` repeats them.

    >>> import torch, fedveil
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> fedveil.Veil(groups=2).perturb(net, fedveil.analyse(net, torch.zeros(1, 4)))
    <Perturbation, redacted>
    """

    name = "veil"
    linear = True
    has_record_gradients = True

    def __init__(
        self,
        groups: int = 1,
        additive: float = 1.0,
        multiplicative: float = 4.0,
        *,
        permute: bool = True,
        head: HeadMode = "linear",
        min_coverage: float = 0.0,
        public: Collection[str] = (),
        frozen: Frozen = "sent",
        decoys: int | None = None,
        keep_noise: bool = False,
        entropy: Entropy | None = None,
    ) -> None:
        self.noise = NoiseSettings(groups, additive, multiplicative, permute, decoys, keep_noise)
        self.largest_factor = self.noise.multiplicative
        self._entropy, self.repeatable = entropy, entropy is not None and entropy.for_tests_only
        self.frozen = frozen
        self._analyse = partial(analyse, head=head, min_coverage=min_coverage, public=tuple(public), frozen=frozen)

    def start(self, plan: Plan, loss: str | Loss | Function = "squared_error") -> VeilSession:
        """Return the secret state of a run, which draws new noise for each broadcast; keep it for the whole run."""
        return VeilSession(plan, loss, self.noise, self._entropy)

    def perturb(self, model: nn.Module, plan: Plan, loss: str | Loss | Function = "squared_error") -> Perturbation:
        """Perturb a model once; for many rounds, `start` is faster."""
        return self.start(plan, loss).perturb(model)

    @property
    def codec(self) -> "VeilCodec":
        """The encoding of `Broadcast` and `Update`."""
        return VeilCodec()

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> "VeilServer":
        """Analyse the model, and prepare the server for a run."""
        return VeilServer(self.start(self._analyse(model, example), loss))

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> "VeilClient":
        """Prepare clients for a run."""
        return VeilClient(model)

    def arguments(self) -> dict[str, object]:
        """Return the settings of the noise and of the analysis."""
        return {**dataclasses.asdict(self.noise), **self._analyse.keywords}

    def for_records(self) -> "Veil":
        """Return a veil with decoys and without factors, which would change the norms of gradients."""
        result = copy.copy(self)
        result.noise = dataclasses.replace(self.noise, multiplicative=1.0, decoys=self.noise.decoys or DEFAULT_DECOYS)
        result.largest_factor = 1.0
        return result

    def client_view(self, model: nn.Module, broadcast: Broadcast) -> nn.Module:
        """Return the perturbed model as in the paper: base plus offset."""
        with torch.no_grad():
            return client_view(model, broadcast)


class VeilServer(DefenceServer[Broadcast, Update]):
    """Draws new noise for each broadcast."""

    def __init__(self, session: VeilSession) -> None:
        noise, self.session = session.settings, session
        self.plan = restrict(session.plan, factors=noise.multiplicative > 1, permutations=noise.permute)

    @property
    def draws(self) -> int:  # type: ignore[override]
        """The number of times that persistent noise has been drawn."""
        return self.session.draws

    def start_round(self, model: nn.Module, members: Sequence[int | str] | None = None) -> "VeilRound":
        """Perturb the model with new noise."""
        return VeilRound(self.session.perturb(model))

    def state(self) -> State:
        """Return the number of times that persistent noise has been drawn, but never the noise itself."""
        return {"draws": self.draws} if self.session.settings.keep_noise else {}

    def restore(self, state: Mapping[str, StateValue]) -> None:
        """Continue with new noise, because checkpoints never contain noise."""
        self.session.forget()
        self.session.draws = read_state("veil", state, "draws", int) if "draws" in state else 0


class VeilRound(DefenceRound[Broadcast, Update], Ranges[Update]):
    """A round with one `Perturbation` of the model."""

    def __init__(self, perturbation: Perturbation) -> None:
        self.perturbation, self.broadcast = perturbation, perturbation.broadcast

    def recover(self, updates: Sequence[Update], weights: Sequence[float]) -> Aggregate:
        """Recover the gradient from the weighted sum of the updates."""
        return self.perturbation.recover(updates, weights)

    def check_exact(self, model: nn.Module, inputs: Inputs, targets: Tensor | None) -> None:
        """Compare the recovered gradient of a batch with the plain one; see `fedveil.scheme.comparison`."""
        check_exact(self.perturbation, model, inputs, targets)

    def sum_template(self) -> Tensors:
        """Return tensors with one row per pass."""
        passes = self.perturbation.template().passes
        return {name: tensor.to(torch.float64) for name, tensor in passes.items()}

    def from_sums(self, sums: Tensors) -> Update:
        """Return an update with these sums as passes and with the buffers of the broadcast."""
        template = self.perturbation.template()
        passes = {name: tensor.to(template.passes[name].dtype) for name, tensor in sums.items()}
        buffers = {name: self.broadcast.buffers[name].expand(buffer.shape) for name, buffer in template.buffers.items()}
        return dataclasses.replace(template, passes=passes, buffers=buffers)

    def release(self, *, reuse: bool = False) -> None:
        """Discard the secret, except for noise that the server keeps for all rounds."""
        self.perturbation.release(reuse=reuse)

    def expect(self, update: Update, last_prediction: Mapping[str, Tensor] | None = None) -> Tensors:
        """Predict each pass of the next round before its factors are applied."""
        return predict_passes(self.perturbation.recovery, update, last_prediction)

    def bound(self, expected: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """Bound passes by the predicted values with the new noise, and buffers by their perturbed values."""
        passes = bound_passes(self.perturbation.recovery, expected)
        buffers = bound_magnitudes(add_prefix("buffer", self.broadcast.buffers))
        return {f"passes/{name}": tensor for name, tensor in passes.items()} | buffers

    def bound_rounding(self, row_errors: Mapping[str, Sequence[float]]) -> float:
        """Bound the gradient error, given the error of each pass."""
        return bound_rounding(self.perturbation.recovery, strip_prefix("passes", row_errors))


class VeilClient(DefenceClient[Broadcast, Update]):
    """Computes the perturbed gradient and its correction terms."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def step(self, broadcast: Broadcast, samples: Samples, client: int = 0) -> Update:
        """Compute the update for one batch; see `fedveil.client_step`."""
        return client_step(self._model, broadcast, samples.inputs, samples.targets, samples.weights)

    def record_gradients(self, broadcast: Broadcast) -> "RecordGradients":
        """Return an object that computes the gradients of each record for each candidate."""
        from fedveil.privacy.gradients import RecordGradients  # most runs do not need it

        return RecordGradients.from_broadcast(self._model, broadcast)

    def accumulate(self, broadcast: Broadcast, total: Update | None, update: Update) -> tuple[Broadcast, Update]:
        """Sum passes; the next batch continues with the updated running statistics."""
        if update.buffers:
            is_repeated = broadcast.head is not None and broadcast.head.tail == "repeated"
            broadcast = dataclasses.replace(broadcast, buffers=update.buffers, continued=is_repeated)
        if total is not None:
            passes = {name: total.passes[name] + tensor for name, tensor in update.passes.items()}
            update = dataclasses.replace(update, passes=passes, samples=total.samples + update.samples)
        return broadcast, update


class VeilCodec(Codec[Broadcast, Update]):
    """Encodes `Broadcast` and `Update` as plain values and tensors."""

    def encode_broadcast(self, broadcast: Broadcast) -> Packed:
        """Encode the broadcast without its loss and output, which the server sends separately for every defence."""
        values, tensors = broadcast.pack()
        return {name: value for name, value in values.items() if name not in SEPARATE_FIELDS}, tensors

    def decode_broadcast(self, model: nn.Module, values: Values, tensors: Tensors, loss: Loss) -> Broadcast:
        """Decode a broadcast; refuse one that does not match the model."""
        broadcast = Broadcast.unpack(values, tensors, loss)
        check_broadcast(model, broadcast)
        return broadcast

    def encode_update(self, update: Update) -> Packed:
        """Encode an update."""
        return update.pack()

    def decode_update(
        self,
        defence_round: DefenceRound[Broadcast, Update],
        model: nn.Module,
        values: Values,
        tensors: Tensors,
        position: int,
    ) -> Update:
        """Decode an update; refuse one that `recover` would not accept."""
        assert isinstance(defence_round, VeilRound)
        device = next(model.parameters()).device
        update = Update.unpack(values, {name: tensor.to(device) for name, tensor in tensors.items()})
        defence_round.perturbation.check(update, position)
        return update

    def template(self, defence_round: DefenceRound[Broadcast, Update], model: nn.Module) -> Packed:
        """Return an example of an encoded update for this round."""
        assert isinstance(defence_round, VeilRound)
        return defence_round.perturbation.template().pack()
