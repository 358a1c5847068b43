"""The paper's defence: one-time noise on the model, lifted from what clients send."""

import dataclasses
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from fedveil.defences.interface import Aggregate, Stateless, one_by_one
from fedveil.errors import BadArgument
from fedveil.graph import Plan, analyse
from fedveil.graph.inputs import Inputs
from fedveil.scheme import (
    Broadcast,
    Entropy,
    Loss,
    NodeCount,
    Recovered,
    Secret,
    SquaredError,
    Update,
    client_step,
    client_view,
    draw_secret,
    perturb,
    recover,
)
from fedveil.scheme.nodes import SPREAD, Spectrum
from fedveil.scheme.recover import check_update, refuse_non_finite
from fedveil.scheme.secret import check_decoys

MISSED = 10  # times the tolerance


class Veil(Stateless):
    """A new secret in every round.

    Args:
        groups: the paper's m.
        additive: size of the noise on the head.
        multiplicative: bound of the factors on hidden units.
        permute: also permute units secretly.
        head: "exposed" for models of which no layer can take additive noise; then clients read true predictions.
        min_coverage: refuse a model of which less than this share of the parameters' values can be covered.
        public: names of parameters whose values clients know; see `analyse`.
        decoys: false offsets of the head beside the true one; see `draw_secret`.
        tolerance: for losses other than squared error, nodes in place of decoys: as many as keep the relative error of
            the gradient below this, going by the clients' gradients.
        nodes: nodes in place of decoys, a fixed number of them. Then no round is repeated, and no tolerance is watched;
            `error` is.
        spread: of the nodes; see `draw_secret`.
        entropy: `Entropy.for_tests(seed)` for repeatable tests.
    """

    name = "veil"

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
        tolerance: float | None = None,
        nodes: int | None = None,
        spread: float = SPREAD,
        entropy: Entropy | None = None,
    ) -> None:
        self.groups, self.additive, self.multiplicative, self.permute = groups, additive, multiplicative, permute
        self._head, self._entropy = head, entropy
        self._asked = {"min_coverage": min_coverage, "public": tuple(public)}
        self._plan: Plan | None = None
        self._secret: Secret | None = None
        self._loss: Loss = SquaredError()
        self.decoys = decoys
        self._spread, self._fixed = spread, nodes
        self._count = NodeCount(tolerance) if tolerance is not None and nodes is None else None
        check_decoys("Veil", decoys)
        if decoys is not None and (nodes is not None or tolerance is not None):
            given = "nodes" if nodes is not None else "tolerance"
            what = f"decoys={decoys} needs no {given}: nodes are another way to recover a loss"
            raise BadArgument("Veil", what, f"leave out decoys or {given}")
        if tolerance is not None and not (isinstance(tolerance, int | float) and 0 < tolerance < math.inf):
            raise BadArgument("Veil", f"tolerance must be a number above 0, got {tolerance!r}", "tolerance=1e-6")

    def prepare(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """Analyse the model."""
        self._plan = analyse(model, example, head=self._head, **self._asked)  # type: ignore[arg-type]
        self._loss = loss
        by_nodes = not isinstance(loss, SquaredError) and self._plan.head is not None
        self.adapts = by_nodes and self._count is not None  # the number of nodes is public, and follows gradients

    def prepare_client(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """Nothing to do: all that a client needs is in the broadcast."""

    @property
    def repeatable(self) -> bool:  # type: ignore[override]
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
            nodes=self._fixed if self._count is None else self._count,
            spread=self._spread,
            entropy=self._entropy,
        )
        return perturb(model, self._secret)

    def client_step(
        self,
        model: nn.Module,
        broadcast: Broadcast,
        inputs: Inputs,
        targets: Tensor,
        weights: Tensor | None = None,
        client: int = 0,
    ) -> Update:
        """The perturbed gradient and its correction terms."""
        return client_step(model, broadcast, inputs, targets, weights)

    def accumulate(self, broadcast: Broadcast, total: Update | None, update: Update) -> tuple[Broadcast, Update]:
        """Sum of passes; statistics go on, still veiled, from where the last batch left them."""
        if update.buffers:
            rows = broadcast.head is not None and broadcast.head.tail == "repeated"
            broadcast = dataclasses.replace(broadcast, buffers=update.buffers, continued=rows)
        if total is not None:
            passes = {name: total.passes[name] + more for name, more in update.passes.items()}
            update = dataclasses.replace(update, passes=passes, samples=total.samples + update.samples)
        return broadcast, update

    def check(self, update: Update, position: int = 0) -> None:
        """Refuse an update that does not answer the last broadcast, or that is not finite."""
        check_update(self._opened(), position, update)
        if not all(torch.isfinite(t).all() for t in (*update.passes.values(), *update.buffers.values())):
            refuse_non_finite([update])

    def forget(self) -> None:
        """Drop the secret."""
        self._secret = None

    def aggregate(self, updates: Sequence[Update], weights: Sequence[float]) -> Aggregate:
        """Lift the noise from the weighted sum, and forget the secret."""
        recovered = recover(self._opened(), updates, weights)
        self._secret = None
        self._observe([recovered])
        return self._result(recovered)

    def each(self, updates: Sequence[Update]) -> list[Aggregate]:
        """Lift the noise from every update by itself, and forget the secret."""
        secret = self._opened()
        found = one_by_one(lambda update: recover(secret, [update], [1.0]), updates)
        self._secret = None
        self._observe(found)
        return [self._result(recovered) for recovered in found]

    def _opened(self) -> Secret:
        if self._secret is None:
            raise BadArgument("veil", "there is no broadcast to answer", "broadcast(model) first")
        return self._secret

    def _observe(self, found: Sequence[Recovered]) -> None:
        """Let the count of nodes learn from a round: from the update that wanted most."""
        spectra = [recovered.spectrum for recovered in found if recovered.spectrum]
        if spectra and self._count:
            self._count.observe(max(spectra, key=Spectrum.truncation))

    def _result(self, recovered: Recovered) -> Aggregate:
        details, again = _traffic(recovered.passes, self.plan), False
        if recovered.spectrum:
            details["nodes"] = len(recovered.spectrum.sizes)
            tolerance = self._count.tolerance if self._count else math.inf
            again = recovered.spectrum.truncation() > MISSED * tolerance
        return Aggregate(recovered.gradients, recovered.buffers, recovered.error, details, again)

    def client_view(self, model: nn.Module, broadcast: Broadcast) -> nn.Module:
        """The model as the paper sends it: base plus offset."""
        with torch.no_grad():
            return client_view(model, broadcast)


def _traffic(passes: int, plan: Plan) -> dict[str, float]:
    """Bytes of a broadcast and of an update with that many passes, without their names and shapes."""
    layout, item = plan.layout, plan.layout.dtype.itemsize
    buffers = item * (layout.total - layout.parameters) + 8 * len(layout.counters)
    head = 0
    if plan.head:
        head = (item + 8) * plan.head.outputs + 8 + 8 * passes  # direction, partition, offset, candidates
    return {
        "bytes_down": item * layout.parameters + buffers + head,
        "bytes_up": item * layout.weights * passes + buffers,
    }
