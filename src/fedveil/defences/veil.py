"""The paper's defence: one-time noise on the model, removed from the updates that clients send."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.defences.interface import Defence, Samples
from fedveil.defences.plain import PlainMessages, check_names, check_tensors, largest
from fedveil.errors import BadArgument, UpdateRefused
from fedveil.graph import Plan, analyse
from fedveil.graph.inputs import Inputs
from fedveil.scheme import (
    Aggregate,
    Broadcast,
    Entropy,
    Loss,
    NoiseSettings,
    Perturbation,
    Update,
    VeilSession,
    client_step,
    client_view,
)
from fedveil.scheme.client import check_broadcast
from fedveil.scheme.losses import Function
from fedveil.wire import Packed, Tensors, Values, under


class Veil(Defence):
    """Perturb the model with new noise in every round.

    By itself, without a federation::

        plan = fedveil.analyse(model, example)
        perturbation = fedveil.Veil().perturb(model, plan, loss)
        update = fedveil.client_step(model, perturbation.broadcast, inputs, targets)
        result = perturbation.recover([update])

    Args:
        groups: the paper's m, at most 64: clients compute groups + 2 gradients, and refuse more.
        additive: size of the noise on the head.
        multiplicative: bound of the factors on hidden units.
        permute: also permute units secretly.
        head: "exposed" for models of which no layer can take additive noise; then clients read true predictions.
        min_coverage: refuse a model if a smaller fraction of its parameters' values can be perturbed.
        public: names of parameters whose values clients know; see `analyse`.
        decoys: number of false offsets of the head beside the true one, at most 64; see `NoiseSettings`.
        keep_noise: draw factors, permutation, direction and partition once, and keep them for all rounds, in memory
            only: another model, a restored state or another process gets new ones (docs/defences/veil.md).
        entropy: `Entropy.for_tests(seed)` for repeatable tests.

    >>> import torch, fedveil
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> fedveil.Veil(groups=2).perturb(net, fedveil.analyse(net, torch.zeros(1, 4)))
    <Perturbation, redacted>
    """

    name = "veil"
    linear = True

    def __init__(
        self,
        groups: int = 1,
        additive: float = 1.0,
        multiplicative: float = 4.0,
        *,
        permute: bool = True,
        head: str = "linear",
        min_coverage: float = 0.0,
        public: Collection[str] = (),
        decoys: int | None = None,
        keep_noise: bool = False,
        entropy: Entropy | None = None,
    ) -> None:
        self.noise = NoiseSettings(groups, additive, multiplicative, permute, decoys, keep_noise)
        self._entropy = entropy
        self._analyse = partial(analyse, head=head, min_coverage=min_coverage, public=tuple(public))  # type: ignore[arg-type]
        self._session: VeilSession | None = None
        self._current: Perturbation | None = None

    def start(self, plan: Plan, loss: str | Loss | Function = "squared_error") -> VeilSession:
        """Return the secret state of a run, which draws new noise for each broadcast; keep it for the whole run."""
        return VeilSession(plan, loss, self.noise, self._entropy)

    def perturb(self, model: nn.Module, plan: Plan, loss: str | Loss | Function = "squared_error") -> Perturbation:
        """Perturb a model once; `start` is faster for many rounds."""
        return self.start(plan, loss).perturb(model)

    def prepare(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """Analyse the model; noise that was kept for another one is dropped."""
        self._session, self._current = self.start(self._analyse(model, example), loss), None

    def prepare_client(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """Do nothing: all that a client needs is in the broadcast."""

    @property
    def repeatable(self) -> bool:
        """Whether entropy is `Entropy.for_tests`."""
        return self._entropy is not None and self._entropy.for_tests_only

    @property
    def session(self) -> VeilSession:
        """The state of the run."""
        if self._session is None:
            raise BadArgument("veil", "no model was prepared yet", "call prepare(model, example, loss) first")
        return self._session

    @property
    def plan(self) -> Plan:
        """The analysis of the model."""
        return self.session.plan

    @property
    def draws(self) -> int:
        """How often noise to keep was drawn."""
        return self.session.draws

    @property
    def current(self) -> Perturbation:
        """The perturbation of the last broadcast."""
        if self._current is None:
            raise BadArgument("veil", "there is no broadcast to answer", "call broadcast(model) first")
        return self._current

    def broadcast(self, model: nn.Module) -> Broadcast:
        """Perturb the model with new noise; that of the last broadcast is dropped."""
        self._current = self.session.perturb(model)
        return self._current.broadcast

    def client_step(self, model: nn.Module, broadcast: Broadcast, samples: Samples, client: int = 0) -> Update:
        """Compute the perturbed gradient and its correction terms."""
        return client_step(model, broadcast, samples.inputs, samples.targets, samples.weights)

    def accumulate(self, broadcast: Broadcast, total: Update | None, update: Update) -> tuple[Broadcast, Update]:
        """Sum passes; perturbed statistics continue from where the last batch left them."""
        if update.buffers:
            rows = broadcast.head is not None and broadcast.head.tail == "repeated"
            broadcast = dataclasses.replace(broadcast, buffers=update.buffers, continued=rows)
        if total is not None:
            passes = {name: total.passes[name] + more for name, more in update.passes.items()}
            update = dataclasses.replace(update, passes=passes, samples=total.samples + update.samples)
        return broadcast, update

    def forget(self, *, reuse: bool = False) -> None:
        """Drop the secret of the round; noise that is kept for all rounds stays until `prepare` or `restore`."""
        if self._current is not None:
            self._current.release(reuse=reuse)
        self._current = None

    def state(self) -> dict[str, Any]:
        """Return how often noise to keep was drawn, which clients can see anyway; never the noise."""
        return {"draws": self.draws} if self.noise.keep_noise else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with new noise: what was kept is in no checkpoint, and noise of this process is dropped."""
        self.forget()
        self.session.forget()
        self.session.draws = int(state.get("draws", 0))

    def expect(self, update: Update, last: Mapping[str, Tensor] | None = None) -> Tensors:
        """Predict each pass of the next round before its factors are applied."""
        return self.current.expect(update, last)

    def sizes(self, broadcast: Broadcast, expected: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """Bound passes by the last ones under the new noise, and buffers by their perturbed values."""
        passes = self.current.bound_passes(expected)
        return {f"passes/{name}": own for name, own in passes.items()} | largest(under("buffer", broadcast.buffers))

    def rounding(self, each: Mapping[str, Sequence[float]]) -> float:
        """Bound the gradient error by each pass's error, times its coefficient and its factors."""
        start = "passes/"
        passes = {name.removeprefix(start): own for name, own in each.items() if name.startswith(start)}
        return self.current.bound_rounding(passes)

    def aggregate(self, updates: Sequence[Update], weights: Sequence[float]) -> Aggregate:
        """Recover the gradient of the weighted sum."""
        return self.current.recover(updates, weights)

    def each(self, updates: Sequence[Update]) -> list[Aggregate | UpdateRefused]:
        """Recover the gradient of every update separately."""
        return self.current.recover_each(updates)

    def client_view(self, model: nn.Module, broadcast: Broadcast) -> nn.Module:
        """Return the model as the paper sends it: base plus offset."""
        with torch.no_grad():
            return client_view(model, broadcast)


class VeilMessages(PlainMessages):
    """`Broadcast` and `Update`; all that a client needs is in the broadcast."""

    def pack(self, defence: Veil, broadcast: Broadcast) -> Packed:
        """The broadcast without its loss, which travels beside it for every defence."""
        values, tensors = broadcast.pack()
        return {name: value for name, value in values.items() if name not in ("loss", "loss_settings")}, tensors

    def unpack(self, model: nn.Module, values: Values, tensors: Tensors, loss: Loss) -> Broadcast:
        """See `Broadcast.unpack`; refuses one that is for another model."""
        broadcast = Broadcast.unpack(values, tensors, loss)
        check_broadcast(model, broadcast)
        return broadcast

    def pack_update(self, defence: Veil, update: Update) -> Packed:
        """See `Update.pack`."""
        return update.pack()

    def blank(self, defence: Veil, model: nn.Module) -> Packed:
        """An `Update` of this round, of one record."""
        return defence.current.template().pack()

    def unpack_update(self, defence: Veil, model: nn.Module, values: Values, tensors: Tensors, position: int) -> Update:
        """What `recover` asks of an update, and that counters have their shape."""
        check_names(position, tensors, ("passes/", "buffer/"))
        device = next(model.parameters()).device
        update = Update.unpack(values, {name: tensor.to(device) for name, tensor in tensors.items()})
        defence.current.check(update, position)
        counters = {name: b for name, b in model.named_buffers() if not b.is_floating_point()}
        found = {name: b for name, b in update.buffers.items() if not b.is_floating_point()}
        check_tensors(position, "buffer", found, counters)
        return update


MESSAGES = VeilMessages(Veil)
