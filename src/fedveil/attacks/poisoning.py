"""Hostile clients, which replace their honest updates to ruin the model.

The hostile clients in a round cooperate. As the literature assumes, they see the uploads of all honest clients, but no
secrets. Recovery from a veil is linear: a multiple or mean of uploads is recovered as the same multiple or mean of the
gradients, so these attacks work without knowing the noise. This does not hold for standard deviations (see
`little_is_enough`).

- A little is enough: Baruch, Baruch, Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning",
  NeurIPS 2019.
- Inner-product manipulation: Xie, Koyejo, Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product
  Manipulation", UAI 2019.
- Sign flip and scaled noise: for example, Li, Xu, Chen, Giannakis, Ling, "RSA: Byzantine-Robust Stochastic Aggregation
  Methods for Distributed Learning from Heterogeneous Datasets", AAAI 2019.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor

from fedveil.checks import check_count
from fedveil.defences.interface import B, U
from fedveil.errors import BadArgument
from fedveil.federation.limits import PAST_ROUNDS, Limits, norm
from fedveil.federation.local import LocalEngine
from fedveil.records.shards import generator

Tensors = Mapping[str, Tensor]
CLAIMED_RECORDS = 10**12  # number of records that a hostile client claims to have
NOISE_SCALE = 1e4  # norm of scaled noise, relative to the honest mean
BOUND_FRACTION = 0.9  # norm relative to the largest norm that is accepted
SMALL_FACTOR = 0.5  # factor of the small inner-product attack
BUFFER_VALUE = -1000.0  # value to which running statistics are set


@dataclass(frozen=True, eq=False)
class HostileView:
    """The information that a hostile client uses for its update.

    Attributes:
        own_update: the tensors that the client would send if it were honest.
        honest_updates: the tensors of the honest clients.
        num_hostile: number of hostile clients, including this one.
        bound: the largest norm that is accepted, estimated from the limits and the honest uploads.
        rng: random number generator.
    """

    own_update: Tensors
    honest_updates: Sequence[Tensors]
    num_hostile: int
    bound: float
    rng: torch.Generator

    def mean(self) -> dict[str, Tensor]:
        """Return the mean of the honest uploads."""
        return {name: torch.stack([upload[name] for upload in self.honest_updates]).mean(0) for name in self.own_update}


def total_norm(tensors: Tensors) -> float:
    """Return the joint norm of all tensors."""
    return norm(list(tensors.values()))


def scale(factor: float, tensors: Tensors) -> dict[str, Tensor]:
    """Multiply all tensors by a factor."""
    return {name: factor * tensor for name, tensor in tensors.items()}


def sign_flip(view: HostileView) -> Tensors:
    """Return the client's honest update with the opposite sign."""
    return scale(-1.0, view.own_update)


def stealthy_deviations(clients: int, hostile: int) -> float:
    """Return z of Baruch et al.: the largest number of standard deviations from the mean at which updates look honest.

    To form a majority, the hostile clients need s = floor(n / 2) + 1 - f honest clients that are farther from the mean
    than they are; z is the normal quantile of (n - s) / n. Some implementations use (n - f - s) / (n - f), which is
    smaller and yields z = 0 for one hostile client out of five.

    >>> round(stealthy_deviations(50, 24), 2)
    1.75
    """
    supporters = clients // 2 + 1 - hostile
    return NormalDist().inv_cdf((clients - supporters) / clients) if 0 < supporters < clients else 0.0


def little_is_enough(view: HostileView) -> Tensors:
    """Return the mean of the honest uploads minus z standard deviations, for each element.

    With a veil, these are standard deviations of the uploads, not of the gradients.
    """
    z = stealthy_deviations(len(view.honest_updates) + view.num_hostile, view.num_hostile)
    deviations = {
        name: torch.stack([upload[name] for upload in view.honest_updates]).std(0) for name in view.own_update
    }
    return {name: mean - z * deviations[name] for name, mean in view.mean().items()}


def inner_product(view: HostileView, factor: float | None = None) -> Tensors:
    """Return a negative multiple of the honest mean.

    Args:
        view: the view of the hostile client.
        factor: the paper's epsilon; by default 2 (n - f) / f, for which the mean over all n clients is the honest mean
            times -(n - f) / n.
    """
    factor = 2 * len(view.honest_updates) / view.num_hostile if factor is None else factor
    return scale(-factor, view.mean())


def scaled_noise(view: HostileView) -> Tensors:
    """Return a random direction with 10,000 times the norm of the honest mean."""
    noise = {name: torch.randn(tensor.shape, generator=view.rng).to(tensor) for name, tensor in view.own_update.items()}
    return scale(NOISE_SCALE * total_norm(view.mean()) / total_norm(noise), noise)


def overflow(view: HostileView, *, squares: bool = False) -> Tensors:
    """Return finite values near the maximum of the dtype (1e37 in float32) or, if `squares`, near its square root."""

    def value_for(dtype: torch.dtype) -> float:
        maximum = torch.finfo(dtype).max
        return 5.4 * math.sqrt(maximum) if squares else 0.03 * maximum

    return {name: torch.full_like(tensor, value_for(tensor.dtype)) for name, tensor in view.own_update.items()}


def below_bound(view: HostileView) -> Tensors:
    """Return the honest mean with the opposite sign and 0.9 times the largest norm that is accepted."""
    mean = view.mean()
    return scale(-BOUND_FRACTION * view.bound / total_norm(mean), mean)


def honest_update(view: HostileView) -> Tensors:
    """Return the client's honest update."""
    return view.own_update


def break_buffers(buffers: Tensors) -> dict[str, Tensor]:
    """Return buffers with all running statistics set to -1000, and counters set to the maximum of their dtype."""
    return {
        name: torch.full_like(tensor, BUFFER_VALUE if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
        for name, tensor in buffers.items()
    }


@dataclass(frozen=True)
class HostileStrategy:
    """The behaviour of a hostile client.

    Attributes:
        summary: a one-line description.
        craft: function that computes the client's gradients (with a veil, its passes) from its view.
        buffers: function that changes the client's buffers; by default, they are unchanged.
        claim: number of records that the client claims to have; by default, the true number.
    """

    summary: str
    craft: Callable[[HostileView], Tensors]
    buffers: Callable[[Tensors], Tensors] | None = None
    claim: int | None = None


ATTACKS: Mapping[str, HostileStrategy] = {
    "sign-flip": HostileStrategy("their honest update with the opposite sign", sign_flip),
    "little-is-enough": HostileStrategy("z standard deviations from the honest mean", little_is_enough),
    "inner-product": HostileStrategy("a negative multiple of the honest mean, which reverses the mean", inner_product),
    "small-inner-product": HostileStrategy(
        "minus half of the honest mean", partial(inner_product, factor=SMALL_FACTOR)
    ),
    "scaled-noise": HostileStrategy("a random direction with 10,000 times the norm", scaled_noise),
    "overflow": HostileStrategy("finite values near the maximum of the dtype", overflow),
    "square-overflow": HostileStrategy("finite values whose squares overflow", partial(overflow, squares=True)),
    "below-bound": HostileStrategy("the reversed honest mean, with 0.9 times the largest accepted norm", below_bound),
    "records": HostileStrategy("the sign-flip update, with a claim of 10^12 records", sign_flip, claim=CLAIMED_RECORDS),
    "buffers": HostileStrategy("statistics of -1000 and counters of 2**63 - 1", honest_update, buffers=break_buffers),
}


def find_tensors(upload: object) -> tuple[str, Tensors]:
    """Return the name and tensors of the field that contains an upload's gradients or, with a veil, its passes."""
    for name in ("passes", "gradients"):
        tensors = getattr(upload, name, None)
        if dataclasses.is_dataclass(upload) and isinstance(tensors, Mapping):
            return name, tensors
    message = f"{type(upload).__name__} has neither gradients nor passes"
    raise BadArgument("poisoning", message, "use a defence whose uploads are dataclasses with one of these fields")


def poison(strategy: HostileStrategy, upload: U, view: HostileView) -> U:
    """Change a client's upload according to a strategy."""
    changes = {find_tensors(upload)[0]: dict(strategy.craft(view))}
    if strategy.buffers:
        changes["buffers"] = dict(strategy.buffers(getattr(upload, "buffers", {})))
    return dataclasses.replace(upload, **changes)  # type: ignore[type-var]


class HostileEngine(LocalEngine[B, U]):
    """An engine in which the last clients are hostile.

    Args:
        clients: the honest clients (`Federation.clients`).
        strategy: the behaviour of hostile clients.
        hostile: number of hostile clients.
        limits: the server's limits, which hostile clients know.
    """

    def __init__(
        self, clients: LocalEngine[B, U], strategy: HostileStrategy, hostile: int = 1, limits: Limits | None = None
    ) -> None:
        super().__init__(clients.client, clients.shards, clients.dtype, whole_shard=clients.whole_shard, fused=False)
        num_clients = len(self.shards.sizes)
        if check_count("poisoning", "hostile", hostile, 0) >= num_clients:
            message = f"{hostile} of {num_clients} clients are hostile"
            raise BadArgument("poisoning", message, "leave at least one honest client")
        self.strategy, self.hostile, self._limits = (
            strategy,
            range(num_clients - hostile, num_clients),
            limits or Limits(),
        )
        self._norms: list[float] = []  # one norm per round, from the honest uploads

    def updates(self, broadcast: B, clients: Sequence[int], number: int, members: int | None = None) -> list[U]:
        """Return each client's upload; hostile clients see the honest uploads before they answer."""
        uploads = super().updates(broadcast, clients, number)
        pairs = zip(clients, uploads, strict=True)
        honest_tensors = [find_tensors(upload)[1] for client, upload in pairs if client not in self.hostile]
        if not honest_tensors or len(honest_tensors) == len(clients):
            return uploads
        bound, num_hostile = self._bound(uploads, honest_tensors), len(clients) - len(honest_tensors)
        for index, client in enumerate(clients):
            if client in self.hostile:
                rng = generator("poisoning", self.shards.seed, number, client)
                view = HostileView(find_tensors(uploads[index])[1], honest_tensors, num_hostile, bound, rng)
                uploads[index] = poison(self.strategy, uploads[index], view)
        return uploads

    def _bound(self, uploads: Sequence[U], honest_tensors: Sequence[Tensors]) -> float:
        """Return the largest norm that is accepted, with a norm factor of 1 if the limits have none.

        With a veil, only the norms of the current round count, since the noise differs between rounds.
        """
        median_index = min(
            (len(uploads) - 1) // 2, len(honest_tensors) - 1
        )  # the median in `Limits`, if hostile norms are larger
        self._norms.append(sorted(map(total_norm, honest_tensors))[median_index])
        rounds = 1 if find_tensors(uploads[0])[0] == "passes" else PAST_ROUNDS + 1
        return (self._limits.norm_factor or 1.0) * max(self._norms[-rounds:])

    def claim_records(self, client: int) -> int:
        """Return the number of records that a client claims to have."""
        true_number = super().claim_records(client)
        return (self.strategy.claim or true_number) if client in self.hostile else true_number
