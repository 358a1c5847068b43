"""Hostile clients: what they upload in place of an honest update, to ruin the model.

The hostile clients of a round work together. They see the uploads of all honest clients, as the literature assumes, and
never a secret. Removing a veil is linear: a multiple of an upload, or a mean of several, is the same multiple or mean
of the gradients, so that the attacks need not know the noise. Standard deviations are not (see `little_is_enough`).

- A little is enough: Baruch, Baruch, Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning",
  NeurIPS 2019.
- Inner-product manipulation: Xie, Koyejo, Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product
  Manipulation", UAI 2019.
- Sign flip, scaled noise: for example Li, Xu, Chen, Giannakis, Ling, "RSA: Byzantine-Robust Stochastic Aggregation
  Methods for Distributed Learning from Heterogeneous Datasets", AAAI 2019.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from fedveil.checks import whole
from fedveil.errors import BadArgument
from fedveil.federation.limits import REMEMBERED, Limits, norm
from fedveil.federation.local import Federation
from fedveil.records.shards import generator

Tensors = Mapping[str, Tensor]
CLAIMED = 10**12  # records
SCALE, BELOW, SMALL = 1e4, 0.9, 0.5  # of honest updates; of the bound; of the honest mean
BUFFER = -1000.0


@dataclass(frozen=True, eq=False)
class Sight:
    """What a hostile client knows when it answers.

    Attributes:
        own: the tensors that it would send if it were honest.
        honest: those of the honest clients.
        hostile: how many clients are hostile, itself included.
        bound: the longest upload that counts, as far as it can tell from the limits and the honest uploads.
        chance: where its random numbers come from.
    """

    own: Tensors
    honest: Sequence[Tensors]
    hostile: int
    bound: float
    chance: torch.Generator

    @property
    def clients(self) -> int:
        """How many there are in the round."""
        return len(self.honest) + self.hostile

    def mean(self) -> dict[str, Tensor]:
        """Of the honest uploads."""
        return {name: torch.stack([one[name] for one in self.honest]).mean(0) for name in self.own}


def length(tensors: Tensors) -> float:
    """The norm of all numbers together."""
    return norm(list(tensors.values()))


def times(factor: float, tensors: Tensors) -> dict[str, Tensor]:
    """Every number multiplied."""
    return {name: factor * tensor for name, tensor in tensors.items()}


def sign_flip(sight: Sight) -> Tensors:
    """Its own honest update with the other sign."""
    return times(-1.0, sight.own)


def deviations(clients: int, hostile: int) -> float:
    """How many standard deviations from the mean still look honest: the z of Baruch et al.

    s = floor(n / 2) + 1 - f honest clients must lie farther out than the hostile ones, for these to have a majority on
    their side; z is the normal quantile of (n - s) / n. (Some implementations take (n - f - s) / (n - f), which is
    smaller, and 0 for one of five.)

    >>> round(deviations(50, 24), 2)
    1.75
    """
    beyond = clients // 2 + 1 - hostile
    return NormalDist().inv_cdf((clients - beyond) / clients) if 0 < beyond < clients else 0.0


def little_is_enough(sight: Sight) -> Tensors:
    """The mean of the honest less z standard deviations, number by number.

    Under a veil these are the deviations of what is uploaded, not of the gradients.
    """
    z = deviations(sight.clients, sight.hostile)
    spread = {name: torch.stack([one[name] for one in sight.honest]).std(0) for name in sight.own}
    return {name: centre - z * spread[name] for name, centre in sight.mean().items()}


def inner_product(sight: Sight, factor: float | None = None) -> Tensors:
    """A negative multiple of the honest mean.

    Args:
        sight: what the client knows.
        factor: the paper's epsilon; by default 2 (n - f) / f, with which the mean of all n clients is the mean of the
            honest times -(n - f) / n.
    """
    factor = 2 * len(sight.honest) / sight.hostile if factor is None else factor
    return times(-factor, sight.mean())


def scaled_noise(sight: Sight) -> Tensors:
    """A random direction, 10,000 times as long as honest updates."""
    noise = {name: torch.randn(like.shape, generator=sight.chance).to(like) for name, like in sight.own.items()}
    return times(SCALE * length(sight.mean()) / length(noise), noise)


def overflow(sight: Sight, *, squares: bool = False) -> Tensors:
    """Finite numbers near the largest of the dtype (1e37 in float32), or near the root of it (1e20)."""

    def size(dtype: torch.dtype) -> float:
        largest = torch.finfo(dtype).max
        return 5.4 * math.sqrt(largest) if squares else 0.03 * largest

    return {name: torch.full_like(like, size(like.dtype)) for name, like in sight.own.items()}


def below_bound(sight: Sight) -> Tensors:
    """The honest mean with the other sign, at 0.9 of the length that still counts."""
    mean = sight.mean()
    return times(-BELOW * sight.bound / length(mean), mean)


def honest(sight: Sight) -> Tensors:
    """What an honest client sends."""
    return sight.own


def broken_buffers(buffers: Tensors) -> dict[str, Tensor]:
    """Statistics of -1000, and counters at the largest number there is."""
    return {
        name: torch.full_like(own, BUFFER if own.is_floating_point() else torch.iinfo(own.dtype).max)
        for name, own in buffers.items()
    }


@dataclass(frozen=True)
class Attack:
    """What a hostile client does.

    Attributes:
        summary: one line about it.
        craft: its gradients (under a veil: passes), from what it knows.
        buffers: what becomes of its buffers; by default nothing.
        claim: records that it says it has; by default those it has.
    """

    summary: str
    craft: Callable[[Sight], Tensors]
    buffers: Callable[[Tensors], Tensors] | None = None
    claim: int | None = None


ATTACKS: Mapping[str, Attack] = {
    "sign-flip": Attack("its own update with the other sign", sign_flip),
    "little-is-enough": Attack("z standard deviations from the honest mean", little_is_enough),
    "inner-product": Attack("turns the mean of all clients round", inner_product),
    "small-inner-product": Attack("minus half of the honest mean", partial(inner_product, factor=SMALL)),
    "scaled-noise": Attack("a random direction, 10,000 times as long", scaled_noise),
    "overflow": Attack("finite numbers near the largest", overflow),
    "square-overflow": Attack("finite numbers whose squares are infinite", partial(overflow, squares=True)),
    "below-bound": Attack("the honest mean turned round, at 0.9 of the bound on norms", below_bound),
    "records": Attack("claims 10^12 records, and flips the sign", sign_flip, claim=CLAIMED),
    "buffers": Attack("statistics of -1000, counters of 2**63 - 1", honest, buffers=broken_buffers),
}
"""By name."""


def sent(upload: Any) -> Tensors:
    """The tensors of an upload that become gradients: of a veil its passes."""
    found = getattr(upload, "passes", None) or getattr(upload, "gradients", None)
    if not isinstance(found, Mapping):
        what = f"{type(upload).__name__} has neither gradients nor passes"
        raise BadArgument("poisoning", what, "a defence whose uploads are dataclasses that have one of them")
    return found


def poisoned(attack: Attack, upload: Any, sight: Sight) -> Any:
    """A client's upload as the attack has it."""
    changes = {"passes" if hasattr(upload, "passes") else "gradients": dict(attack.craft(sight))}
    if attack.buffers:
        changes["buffers"] = dict(attack.buffers(upload.buffers))
    return dataclasses.replace(upload, **changes)


class Poisoned(Federation):
    """A federation whose last clients are hostile. Further arguments are those of `Federation`.

    Args:
        *given: of `Federation`.
        attack: what hostile clients do.
        hostile: how many there are.
        **named: of `Federation`.
    """

    def __init__(self, *given: Any, attack: Attack, hostile: int = 1, **named: Any) -> None:
        super().__init__(*given, **{**named, "fuse": False})
        clients = len(self.shards.sizes)
        if whole("poisoning", "hostile", hostile, 0) >= clients:
            raise BadArgument("poisoning", f"{hostile} of {clients} clients are hostile", "leave an honest one")
        self.attack, self.hostile = attack, range(clients - hostile, clients)
        self._lengths: list[float] = []  # of honest uploads, round by round

    def answers(self, broadcast: Any, clients: Sequence[int]) -> list[Any]:
        """What each of the clients uploads; the hostile ones look at the others' uploads first."""
        uploads = super().answers(broadcast, clients)
        others = [sent(upload) for client, upload in zip(clients, uploads, strict=True) if client not in self.hostile]
        if not others or len(others) == len(clients):
            return uploads
        bound, count = self._bound(uploads, others), len(clients) - len(others)
        for place, client in enumerate(clients):
            if client in self.hostile:
                chance = generator("poisoning", self.shards.seed, self.round, client)
                sight = Sight(sent(uploads[place]), others, count, bound, chance)
                uploads[place] = poisoned(self.attack, uploads[place], sight)
        return uploads

    def _bound(self, uploads: Sequence[Any], others: Sequence[Tensors]) -> float:
        """The longest upload that counts; without a bound, the one that the default limits would have.

        Lengths of uploads under a veil tell nothing about other rounds, which have other noise.
        """
        middle = min((len(uploads) - 1) // 2, len(others) - 1)  # as `Limits` have it when hostile updates are longer
        self._lengths.append(sorted(map(length, others))[middle])
        rounds = 1 if hasattr(uploads[0], "passes") else REMEMBERED + 1
        return ((self.limits or Limits()).norm_factor or 1.0) * max(self._lengths[-rounds:])

    def claims(self, client: int) -> int:
        """The records that a client says it has."""
        honest = super().claims(client)
        return (self.attack.claim or honest) if client in self.hostile else honest
