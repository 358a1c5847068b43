"""Differential privacy for clients, on top of any defence (docs/defences/privacy.md)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.defences.accountant import epsilon, library
from fedveil.defences.interface import Aggregate, Defence
from fedveil.errors import BadArgument, NonFiniteUpdate
from fedveil.graph.inputs import Inputs
from fedveil.scheme import Entropy, Loss
from fedveil.scheme.outputs import outputs_of

LEAST, MOST = 1e-30, 1e30  # of clip: squares and products stay far inside float64


class Private:
    """A defence whose rounds are differentially private: clients' gradients are clipped, and their sum gets noise.

        g_k   client k's gradient, as the inner defence recovers it from k's update alone
        c_k = g_k min(1, clip / |g_k|),  |.| over all parameters together
        G   = (sum_k c_k + N(0, (noise clip)^2 I)) / K,  K the number of clients in the round

    Every client counts 1 / K, whatever its weight |D_k|: a weight would say how much data it has.

    Guarantees: |c_k| <= clip, also after rounding (test_no_contribution_is_longer_than_clip). So whoever sees the
      models that come out of the rounds, all other clients together included, is bound by `epsilon()` in what they
      learn about a client's data. docs/defences/privacy.md has the terms.
    Not guaranteed: anything against the server, which sees g_k. Records of a round ("dp_clipped", "error") are the
      server's too: they carry no noise.

    A round is never repeated for its precision, and a model whose buffers follow the data (BatchNorm in training mode)
    is refused: both would tell about data what no noise covers. Of buffers the server keeps its own.

    A round's `error` is the inner defence's, the mean over clients with |c_k| as weights; the noise does not count as
    error. Its details are the inner's means; "dp_clipped", the share of clients that were clipped; and "epsilon", what
    is spent so far, if there is noise.

    Args:
        inner: any other defence.
        clip: the longest contribution of a client.
        noise: standard deviation of the noise on the sum, over clip. With 0 gradients are clipped, and nothing is
            guaranteed.
        delta: at which epsilon is given; far below 1 / clients.
        entropy: `Entropy.for_tests(seed)` for repeatable tests, in which nothing is private; otherwise noise comes from
            the operating system.
    """

    name: str
    fuses = False
    adapts = False
    durable = True

    def __init__(
        self,
        inner: Defence,
        clip: float,
        noise: float,
        *,
        delta: float = 1e-5,
        entropy: Entropy | None = None,
    ) -> None:
        where = "Private"
        if isinstance(inner, Private):
            raise BadArgument(where, f"{inner.name} is private already", "wrap a defence once")
        if not _number(clip) or not LEAST <= clip <= MOST:
            raise BadArgument(where, f"clip must be a norm from {LEAST:g} to {MOST:g}, got {clip!r}", "clip=1.0")
        if not _number(noise) or not 0 <= noise <= MOST:
            what = f"noise must be a number from 0 to {MOST:g}, got {noise!r}"
            raise BadArgument(where, what, "noise=1.0; with 0 nothing is guaranteed")
        if not _number(delta) or not 0 < delta < 1:
            raise BadArgument(where, f"delta must be above 0 and below 1, got {delta!r}", "delta=1e-5")
        if noise:
            library()  # say that it is missing before the first round, not after it
        self.inner, self.clip, self.noise, self.delta = inner, float(clip), float(noise), float(delta)
        self.name = f"{inner.name}+dp"
        self._entropy = entropy or Entropy()
        self._present: list[int] = []
        self._rounds = 0
        self._own: dict[int, int] = {}

    @property
    def for_tests_only(self) -> bool:
        """Whether the noise is repeatable, and therefore hides nothing."""
        return self._entropy.for_tests_only

    @property
    def repeatable(self) -> bool:
        """For tests only, or its inner defence is."""
        return self.for_tests_only or self.inner.repeatable

    @property
    def rounds(self) -> int:
        """The most rounds that any client took part in. Where nobody said who did, a round counts for all."""
        return self._rounds + max(self._own.values(), default=0)

    def epsilon(self, *, replace: bool = False) -> float:
        """What the rounds so far have spent, at `delta`; see `accountant.epsilon`."""
        return epsilon(self.rounds, self.noise, self.delta, replace=replace)

    def prepare(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """As the inner defence; refuses what would tell about clients' data besides the gradients."""
        moving = moving_buffers(model, example)
        if moving:
            what = f"buffer {moving[0]} follows the clients' data in training, and clipping and noise do not cover it"
            fix = "GroupNorm or LayerNorm in place of BatchNorm (--norm none for a ResNet), or model.eval()"
            raise BadArgument("Private", what, fix)
        self.inner.prepare(model, example, loss)
        if self.inner.adapts:
            what = f"{self.inner.name} chooses its next broadcast by the clients' answers, which no noise covers"
            raise BadArgument("Private", what, "Veil(decoys=2), or Veil(nodes=32), a fixed number")

    def prepare_client(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """As the inner defence: clipping and noise are the server's."""
        self.inner.prepare_client(model, example, loss)

    def forget(self) -> None:
        """The inner defence's secret."""
        self.inner.forget()

    def broadcast(self, model: nn.Module) -> Any:
        """The inner defence's."""
        self._present.clear()
        return self.inner.broadcast(model)

    def client_step(
        self,
        model: nn.Module,
        broadcast: Any,
        inputs: Inputs,
        targets: Tensor,
        weights: Tensor | None = None,
        client: int = 0,
    ) -> Any:
        """The inner defence's."""
        return self.inner.client_step(model, broadcast, inputs, targets, weights, client)

    def accumulate(self, broadcast: Any, total: Any, update: Any) -> tuple[Any, Any]:
        """The inner defence's."""
        return self.inner.accumulate(broadcast, total, update)

    def upload(self, update: Any, client: int = 0) -> Any:
        """The inner defence's; here, in one process, it also says who takes part."""
        self._present.append(client)
        return self.inner.upload(update, client)

    def aggregate(self, updates: Sequence[Any], weights: Sequence[float]) -> Aggregate:
        """Clip each client's gradient, add them up with noise, divide by their number; `weights` play no part."""
        if not updates:
            raise BadArgument("Private", "a round needs at least one update")
        found = self.inner.each(updates)
        like = found[0].gradients
        flat = [torch.cat([one.gradients[name].reshape(-1).double() for name in like]) for one in found]
        shorts = [shorten(own, self.clip, f"client {position}") for position, own in enumerate(flat)]
        total = torch.stack([short for short, _, _ in shorts]).sum(0)
        if self.noise:
            total = total + (self.noise * self.clip) * normal(len(total), self._entropy).to(total.device)
        self._count(len(updates))
        details = {key: sum(one.details.get(key, 0.0) for one in found) / len(found) for key in found[0].details}
        details["dp_clipped"] = sum(cut for _, _, cut in shorts) / len(found)
        if self.noise:
            details["epsilon"] = self.epsilon()
        size = sum(size for _, size, _ in shorts)
        wrong = sum(one.error * size for one, (_, size, _) in zip(found, shorts, strict=True))
        return Aggregate(_split(total / len(found), like), {}, wrong / size if size else 0.0, details)

    def each(self, updates: Sequence[Any]) -> list[Aggregate]:
        """Refused: single clients' gradients stay in here."""
        raise BadArgument("Private", "it gives away sums with noise, no single client's gradient", "use `inner`")

    def _count(self, updates: int) -> None:
        """One more round: for those who uploaded, if that is known of all; else for everyone."""
        if len(self._present) == len(set(self._present)) == updates:
            for client in self._present:
                self._own[client] = self._own.get(client, 0) + 1
        else:
            self._rounds += 1
        self._present.clear()

    def client_view(self, model: nn.Module, broadcast: Any) -> nn.Module:
        """The inner defence's."""
        return self.inner.client_view(model, broadcast)

    def state(self) -> dict[str, Any]:
        """The inner defence's state, and the rounds that were spent, under which settings."""
        return {
            "inner": self.inner.state(),
            "clip": self.clip,
            "noise": self.noise,
            "rounds": self._rounds,
            "own": dict(self._own),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting; refuses rounds that were spent with other settings."""
        for name in ("clip", "noise"):
            if state[name] != getattr(self, name):
                what = f"the rounds so far had {name} = {state[name]:g}, not {getattr(self, name):g}"
                raise BadArgument("Private", what, "go on with the settings that the run began with")
        self.inner.restore(state["inner"])
        self._rounds, self._own = int(state["rounds"]), dict(state["own"])
        self._present.clear()

    def client_state(self, client: int) -> dict[str, Any]:
        """The inner defence's."""
        return self.inner.client_state(client)

    def restore_client(self, client: int, state: Mapping[str, Any]) -> None:
        """The inner defence's."""
        self.inner.restore_client(client, state)


def innermost(defence: Defence) -> Defence:
    """The defence without privacy on top."""
    return defence.inner if isinstance(defence, Private) else defence


def shorten(flat: Tensor, clip: float, where: str = "gradient") -> tuple[Tensor, float, bool]:
    """A float64 vector of norm `clip` at most, that norm, and whether it was cut.

    The norm is bounded in exact arithmetic: the slack is what rounding may add to a norm of that many numbers and to
    their product with a factor. Scaling by the largest number first keeps squares from overflowing.
    """
    largest = float(flat.abs().max()) if len(flat) else 0.0
    if not math.isfinite(largest):
        raise NonFiniteUpdate(where, "its gradient holds NaN or infinity")
    if not largest:
        return flat, 0.0, False
    unit = flat / largest
    length = float(torch.linalg.vector_norm(unit))
    slack = (len(flat) + 8) * torch.finfo(torch.float64).eps
    if largest * length * (1 + slack) <= clip:
        return flat, largest * length, False
    return unit * (clip / length * (1 - slack)), clip, True


def normal(count: int, entropy: Entropy) -> Tensor:
    """Standard normal numbers in float64, each from 52 bits of a random word of its own.

    Not from a torch.Generator: it would hide noise for a whole round behind one seed.
    """
    uniform = ((entropy.words(count) >> np.uint64(12)) + 0.5) * 2.0**-52  # never 0 or 1
    drawn: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return drawn


def moving_buffers(model: nn.Module, example: Inputs) -> list[str]:
    """Names of the buffers that a forward pass changes; the model's own stay as they are."""
    before = dict(model.named_buffers())
    own = {name: buffer.clone() for name, buffer in before.items()}
    if not own:
        return []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outputs_of(model, example, own)
    return [name for name, buffer in own.items() if not torch.equal(buffer, before[name])]


def _split(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A tensor a name, in the dtype that it had."""
    pieces = torch.split(flat, [g.numel() for g in like.values()])
    return {name: piece.view(g.shape).to(g.dtype) for (name, g), piece in zip(like.items(), pieces, strict=True)}


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
