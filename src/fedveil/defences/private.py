"""Differential privacy for clients, on top of any defence (docs/defences/privacy.md)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.checks import number
from fedveil.defences.accountant import epsilon, library
from fedveil.defences.interface import Defence
from fedveil.defences.plain import split
from fedveil.errors import BadArgument, NonFiniteUpdate, UpdateRefused
from fedveil.graph.inputs import Inputs
from fedveil.scheme import Aggregate, Entropy, Loss
from fedveil.scheme.outputs import outputs_of

LEAST, MOST = 1e-30, 1e30  # of clip: squares and products stay far inside float64


class Private:
    """A defence whose rounds are differentially private: clients' gradients are clipped, and their sum gets noise.

        g_k   client k's gradient, as the inner defence recovers it from k's update alone
        c_k = g_k min(1, clip / |g_k|),  |.| over all parameters together
        G   = (sum_k c_k + N(0, (noise clip)^2 I)) / K,  K the number of clients in the round

    Every client counts 1 / K, whatever its weight |D_k|: a weight would say how much data it has.

    Guarantees: |c_k| <= clip, also after rounding (test_no_contribution_is_longer_than_clip). So `epsilon()` bounds
      what anyone who sees the models after the rounds, all other clients together included, learns about a client's
      data. docs/defences/privacy.md has the terms.
    Not guaranteed: anything against the server, which sees g_k and, without noise, "dp_clipped" and "error".

    A model whose buffers follow the data (BatchNorm in training mode) is refused: they would reveal what no noise
    covers. The server keeps its own buffers.

    A round's `error` is the mean of the inner defence's over clients, with |c_k| as weights; noise is no error. Its
    figures are the inner's means, "dp_clipped", the share of clients that were clipped, and "epsilon" spent so far.

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
    linear = False
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
        if not number(clip) or not LEAST <= clip <= MOST:
            raise BadArgument(where, f"clip must be a norm from {LEAST:g} to {MOST:g}, got {clip!r}", "clip=1.0")
        if not number(noise) or not 0 <= noise <= MOST:
            what = f"noise must be a number from 0 to {MOST:g}, got {noise!r}"
            raise BadArgument(where, what, "noise=1.0; with 0 nothing is guaranteed")
        if not number(delta) or not 0 < delta < 1:
            raise BadArgument(where, f"delta must be above 0 and below 1, got {delta!r}", "delta=1e-5")
        if noise:
            library()  # say that it is missing before the first round, not after it
        self.inner, self.clip, self.noise, self.delta = inner, float(clip), float(noise), float(delta)
        self.name = f"{inner.name}+dp"
        self.prepare_client = inner.prepare_client  # what clients do and see is the inner defence's
        self.client_step, self.accumulate = inner.client_step, inner.accumulate
        self.client_state, self.restore_client = inner.client_state, inner.restore_client
        self.client_view, self.forget = inner.client_view, inner.forget
        self._entropy = entropy or Entropy()
        self._present: list[int] = []
        self._rounds = 0
        self._own: dict[int, int] = {}

    @property
    def repeatable(self) -> bool:
        """With `Entropy.for_tests`, or if the inner defence is."""
        return self._entropy.for_tests_only or self.inner.repeatable

    @property
    def rounds(self) -> int:
        """The most rounds that any client took part in. A round whose clients are unknown counts for all."""
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

    def broadcast(self, model: nn.Module) -> Any:
        """The inner defence's."""
        self._present.clear()
        return self.inner.broadcast(model)

    def upload(self, update: Any, client: int = 0) -> Any:
        """The inner defence's; here, in one process, it also says who takes part."""
        self._present.append(client)
        return self.inner.upload(update, client)

    def aggregate(self, updates: Sequence[Any], weights: Sequence[float]) -> Aggregate:
        """Clip each client's gradient, add them up with noise, divide by their number; `weights` are ignored."""
        found = []
        for one in self.inner.each(updates):
            if isinstance(one, UpdateRefused):
                raise one
            found.append(one)
        return self.total(found)

    def total(self, found: Sequence[Aggregate]) -> Aggregate:
        """The same of what each client's update says by itself."""
        if not found:
            raise BadArgument("Private", "a round needs at least one update")
        like = found[0].gradients
        flat = [torch.cat([one.gradients[name].reshape(-1).double() for name in like]) for one in found]
        shorts = [shorten(own, self.clip, f"client {position}") for position, own in enumerate(flat)]
        total = torch.stack([short for short, _, _ in shorts]).sum(0)
        self._count(len(found))  # before the noise is drawn, whatever interrupts that
        total = self._noisy(total)
        figures = {key: sum(one.figures.get(key, 0.0) for one in found) / len(found) for key in found[0].figures}
        figures["dp_clipped"] = sum(cut for _, _, cut in shorts) / len(found)
        if self.noise:
            figures["epsilon"] = self.epsilon()
        size = sum(size for _, size, _ in shorts)
        wrong = sum(one.error * size for one, (_, size, _) in zip(found, shorts, strict=True))
        return Aggregate(split(total / len(found), like), {}, wrong / size if size else 0.0, figures)

    def summed(self, mean: Aggregate, clients: int) -> Aggregate:
        """The same of the mean of gradients that so many clients have clipped themselves, under secure aggregation."""
        like = mean.gradients
        total = clients * torch.cat([gradient.reshape(-1).double() for gradient in like.values()])
        self._count(clients)
        total = self._noisy(total)
        spent = {"epsilon": self.epsilon()} if self.noise else {}
        return Aggregate(split(total / clients, like), {}, mean.error, {**mean.figures, **spent})

    def _noisy(self, total: Tensor) -> Tensor:
        if not self.noise:
            return total
        drawn = torch.from_numpy(self._entropy.normal(len(total))).to(total.device)
        return total + (self.noise * self.clip) * drawn

    def each(self, updates: Sequence[Any]) -> list[Aggregate | UpdateRefused]:
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

    def state(self) -> dict[str, Any]:
        """The inner defence's state, and the rounds that were spent, under which settings."""
        spent = {"clip": self.clip, "noise": self.noise, "rounds": self._rounds, "own": dict(self._own)}
        return {"inner": self.inner.state(), **spent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting; refuses rounds that were spent with other settings."""
        for name in ("clip", "noise"):
            if state[name] != getattr(self, name):
                what = f"the rounds so far had {name} = {state[name]:g}, not {getattr(self, name):g}"
                raise BadArgument("Private", what, "go on with the settings that the run began with")
        self.inner.restore(state["inner"])
        self._rounds, self._own = int(state["rounds"]), dict(state["own"])
        self._present.clear()

    def count_lost(self) -> None:
        """Count a round for everyone: one that clients saw, and that is not in the state that was restored."""
        self._rounds += 1


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


def moving_buffers(model: nn.Module, example: Inputs) -> list[str]:
    """Names of the buffers that a forward pass changes; the model's own stay as they are."""
    before = dict(model.named_buffers())
    own = {name: buffer.clone() for name, buffer in before.items()}
    if not own:
        return []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outputs_of(model, example, own)
    return [name for name, buffer in own.items() if not torch.equal(buffer, before[name])]
