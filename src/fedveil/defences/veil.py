"""The paper's defence: one-time noise on the model, lifted from what clients send."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.defences.interface import Aggregate, Defence, Samples, one_by_one
from fedveil.defences.plain import PlainMessages, check_names, check_tensors, largest
from fedveil.errors import BadArgument, UpdateRefused
from fedveil.graph import Plan, analyse
from fedveil.graph.inputs import Inputs
from fedveil.scheme import (
    Broadcast,
    Entropy,
    Loss,
    Secret,
    SquaredError,
    Update,
    client_step,
    client_view,
    draw_secret,
    perturb,
    recover,
)
from fedveil.scheme.client import check_broadcast
from fedveil.scheme.messages import MOST_GROUPS
from fedveil.scheme.passes import lifted_rounding, pass_sizes, without_noise
from fedveil.scheme.recover import blank_update, check_update, refuse_non_finite
from fedveil.scheme.secret import Kept, check_decoys
from fedveil.wire import Packed, Tensors, Values, under


class Veil(Defence):
    """A new secret in every round; with `keep_noise`, secrets that differ in their offset only.

    Args:
        groups: the paper's m, at most 64: clients compute groups + 2 gradients, and refuse more.
        additive: size of the noise on the head.
        multiplicative: bound of the factors on hidden units.
        permute: also permute units secretly.
        head: "exposed" for models of which no layer can take additive noise; then clients read true predictions.
        min_coverage: refuse a model of which less than this share of the parameters' values can be covered.
        public: names of parameters whose values clients know; see `analyse`.
        decoys: false offsets of the head beside the true one, at most 64; see `draw_secret`.
        keep_noise: draw factors, permutation, direction and partition once, and keep them over all rounds, in memory
            only: another model, a restored state or another process gets new ones (docs/defences/veil.md).
        entropy: `Entropy.for_tests(seed)` for repeatable tests.
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
        self.groups, self.additive, self.multiplicative, self.permute = groups, additive, multiplicative, permute
        if type(groups) is int and groups > MOST_GROUPS:
            what = f"groups must be at most {MOST_GROUPS}, got {groups}: clients compute a gradient for each"
            raise BadArgument("Veil", what, "use groups=1: it hides as much on average and costs least")
        check_decoys("Veil", decoys)
        self.decoys, self.keep_noise, self._entropy = decoys, keep_noise, entropy
        self._analyse = partial(analyse, head=head, min_coverage=min_coverage, public=tuple(public))  # type: ignore[arg-type]
        self._loss: Loss = SquaredError()
        self._plan: Plan | None = None
        self._secret: Secret | None = None
        self._kept: Kept | None = None
        self.draws = 0

    def prepare(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """Analyse the model; noise that was kept for another one is dropped."""
        self._plan, self._loss = self._analyse(model, example), loss
        self._kept, self.draws = None, 0

    def prepare_client(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """Nothing to do: all that a client needs is in the broadcast."""

    @property
    def repeatable(self) -> bool:
        """With `Entropy.for_tests`."""
        return self._entropy is not None and self._entropy.for_tests_only

    @property
    def plan(self) -> Plan:
        """What may be covered."""
        if self._plan is None:
            raise BadArgument("veil", "no model was prepared yet", "prepare(model, example, loss) first")
        return self._plan

    def broadcast(self, model: nn.Module) -> Broadcast:
        """Cover the model with a new secret; the last one is forgotten."""
        self._secret = draw_secret(
            self.plan,
            self._loss,
            self.groups,
            self.additive,
            self.multiplicative,
            permute=self.permute,
            decoys=self.decoys,
            kept=self._kept,
            entropy=self._entropy,
        )
        if self.keep_noise and self._kept is None:
            self._kept, self.draws = Kept(self._secret), self.draws + 1
        return perturb(model, self._secret)

    def client_step(self, model: nn.Module, broadcast: Broadcast, samples: Samples, client: int = 0) -> Update:
        """The perturbed gradient and its correction terms."""
        return client_step(model, broadcast, samples.inputs, samples.targets, samples.weights)

    def accumulate(self, broadcast: Broadcast, total: Update | None, update: Update) -> tuple[Broadcast, Update]:
        """Sum of passes; statistics go on, still veiled, from where the last batch left them."""
        if update.buffers:
            rows = broadcast.head is not None and broadcast.head.tail == "repeated"
            broadcast = dataclasses.replace(broadcast, buffers=update.buffers, continued=rows)
        if total is not None:
            passes = {name: total.passes[name] + more for name, more in update.passes.items()}
            update = dataclasses.replace(update, passes=passes, samples=total.samples + update.samples)
        return broadcast, update

    def _opened(self) -> Secret:
        if self._secret is None:
            raise BadArgument("veil", "there is no broadcast to answer", "broadcast(model) first")
        return self._secret

    def forget(self) -> None:
        """Drop the secret of the round; noise that is kept over rounds stays until `prepare` or `restore`."""
        self._secret = None

    def state(self) -> dict[str, Any]:
        """How often noise to keep was drawn, which clients can see anyway; never the noise."""
        return {"draws": self.draws} if self.keep_noise else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with new noise: what was kept is in no checkpoint, and noise of this process is dropped."""
        self._secret, self._kept, self.draws = None, None, int(state.get("draws", 0))

    def expect(self, update: Update, last: Mapping[str, Tensor] | None = None) -> Tensors:
        """Each pass, without its noise."""
        return without_noise(self._opened(), update, last)

    def sizes(self, broadcast: Broadcast, expected: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """As large as the last passes under the new noise, and as the veiled buffers are."""
        passes = pass_sizes(self._opened(), expected, self.multiplicative)
        return {f"passes/{name}": own for name, own in passes.items()} | largest(under("buffer", broadcast.buffers))

    def rounding(self, each: Mapping[str, Sequence[float]]) -> float:
        """Every pass has it, times its coefficient and its factors."""
        start = "passes/"
        passes = {name.removeprefix(start): own for name, own in each.items() if name.startswith(start)}
        return lifted_rounding(self._opened(), passes)

    def aggregate(self, updates: Sequence[Update], weights: Sequence[float]) -> Aggregate:
        """Lift the noise from the weighted sum, and forget the secret."""
        result = self._lifted(updates, weights)
        self._secret = None
        return result

    def each(self, updates: Sequence[Update]) -> list[Aggregate | UpdateRefused]:
        """Lift the noise from every update by itself, and forget the secret."""
        found = one_by_one(lambda update: self._lifted([update], [1.0]), updates)
        self._secret = None
        return found

    def _lifted(self, updates: Sequence[Update], weights: Sequence[float]) -> Aggregate:
        found = recover(self._opened(), updates, weights)
        return Aggregate(found.gradients, found.buffers, found.error, _traffic(found.passes, self.plan))

    def client_view(self, model: nn.Module, broadcast: Broadcast) -> nn.Module:
        """The model as the paper sends it: base plus offset."""
        with torch.no_grad():
            return client_view(model, broadcast)


def _traffic(passes: int, plan: Plan) -> dict[str, float]:
    """Bytes of a broadcast and of an update with that many passes, without their names and shapes."""
    layout, item = plan.layout, plan.layout.dtype.itemsize
    buffers = item * (layout.total - layout.parameters) + 8 * len(layout.counters)
    down, up = item * layout.parameters + buffers, item * layout.weights * passes + buffers
    if plan.head:
        down += (item + 8) * plan.head.outputs + 8 + 8 * passes  # direction, partition, offset, candidates
    return {"bytes_down": down, "bytes_up": up}


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
        return blank_update(defence._opened()).pack()

    def unpack_update(self, defence: Veil, model: nn.Module, values: Values, tensors: Tensors, position: int) -> Update:
        """What `recover` asks of an update, and that counters have their shape."""
        check_names(position, tensors, ("passes/", "buffer/"))
        device = next(model.parameters()).device
        update = Update.unpack(values, {name: tensor.to(device) for name, tensor in tensors.items()})
        check_update(defence._opened(), position, update)
        if not all(torch.isfinite(t).all() for t in (*update.passes.values(), *update.buffers.values())):
            refuse_non_finite([update], position)
        counters = {name: b for name, b in model.named_buffers() if not b.is_floating_point()}
        found = {name: b for name, b in update.buffers.items() if not b.is_floating_point()}
        check_tensors(position, "buffer", found, counters)
        return update


MESSAGES = VeilMessages(Veil)
