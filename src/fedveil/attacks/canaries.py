"""Measure the epsilon of a private run with canaries: records whose gradient is a single coordinate.

Clients treat a canary like any other record: it is sampled at the run's rate, its gradient is clipped by the same
function, and the run's own noise is added. The auditor knows everything else, and scores a canary by its coordinate of
the noisy sums minus the contribution of the records. So a wrong rate, clipping or noise is detected. The gradients of
records are not tested here, but against a loop (tests/privacy/test_gradients.py).
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.checks import check_count
from fedveil.defences.interface import AnyClient, Samples
from fedveil.errors import BadArgument
from fedveil.federation.local import Federation
from fedveil.privacy.gradients import clip_factors
from fedveil.privacy.measure import MeasuredEpsilon, measure
from fedveil.privacy.samplers import poisson_sample
from fedveil.scheme import Entropy
from fedveil.wire import Tensors

LENGTH = 10.0  # norm of a canary's gradient before clipping, relative to the clipping norm
GUESSES = 0.5  # fraction of the canaries that the auditor guesses
MOST = 3000  # default number of canaries; with more, the bound is less sharp at delta = 1e-5


class CanaryClient:
    """The clients of a federation; the first of them has canaries among its records.

    Args:
        inner: the clients.
        coordinates: coordinates of the canaries that are included.
        clip: the clipping norm.
        rate: the sampling rate.
    """

    def __init__(self, inner: AnyClient, coordinates: NDArray[np.int64], clip: float, rate: float) -> None:
        self._inner, self._coordinates, self._clip, self._rate = inner, coordinates, clip, rate
        self._entropy = Entropy()
        self.contributed: Tensor | float = 0.0  # by records in the current round, to each coordinate

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def step(self, broadcast: object, samples: Samples, client: int = 0) -> object:
        """Compute the clipped sum of a client, with the canaries of this round."""
        update = self._inner.step(broadcast, samples, client)
        flat = _flatten(update.sums)
        self.contributed = self.contributed + flat
        if client == 0:
            chosen = self._coordinates[poisson_sample(self._entropy, len(self._coordinates), self._rate)]
            length = LENGTH * self._clip
            squares = torch.tensor([length**2], dtype=torch.float64)
            flat[torch.from_numpy(chosen)] += length * float(clip_factors(squares, torch.tensor([True]), self._clip, 1))
            update = type(update)(_split(flat, update.sums))
        return update


def measure_epsilon(
    federation: Federation,
    rounds: int,
    *,
    canaries: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> MeasuredEpsilon:
    """Train a private federation with canaries, and return the lower bound that an auditor proves for its epsilon.

    Args:
        federation: a new federation in one process, with `privacy=` for records and without a defence. A veil would
            change nothing that is tested here, since the same sum is recovered.
        rounds: number of rounds to train; the claimed epsilon is for these rounds.
        canaries: number of canaries; by default up to 3,000, at most one per parameter.
        seed: seed for the choice of coordinates and of the canaries that are included.
        progress: called with the number of completed rounds and the number of all rounds.
    """
    privacy = getattr(federation.defence, "privacy", None)
    if privacy is None or federation.defence.base.name != "plain+dp":
        what = "epsilon is measured for federations with record privacy and without another defence"
        raise BadArgument("measure_epsilon", what, 'use Federation(..., "plain", privacy=fedveil.Privacy(...))')
    numbers = sum(p.numel() for p in federation.model.parameters() if p.requires_grad)
    count = check_count("measure_epsilon", "canaries", min(MOST, numbers) if canaries is None else canaries, 10)
    if count > numbers:
        raise BadArgument("measure_epsilon", f"the model has {numbers} parameters, fewer than {count} canaries")
    draw = np.random.default_rng(seed)
    coordinates, included = draw.permutation(numbers)[:count], draw.random(count) < 0.5
    client = CanaryClient(federation.clients.client, coordinates[included], privacy.clip, privacy.rate)
    federation.clients.client = client  # type: ignore[assignment]
    total = sum(federation.shards.sizes)
    scores = np.zeros(count)
    for number in range(rounds):
        client.contributed = 0.0
        result = federation.step()
        noisy = _flatten({name: g.unsqueeze(0) for name, g in result.gradients.items()}) * privacy.rate * total
        scores += (noisy - client.contributed)[torch.from_numpy(coordinates)].numpy()
        if progress:
            progress(number + 1, rounds)
    accountant = federation.defence_server.accountant
    assert accountant is not None
    return measure(scores, included, accountant.epsilon(), accountant.delta, int(GUESSES * count))


def _flatten(sums: Tensors) -> Tensor:
    return torch.cat([own.detach().double().reshape(-1) for own in sums.values()])


def _split(flat: Tensor, like: Tensors) -> Tensors:
    pieces = torch.split(flat, [own.numel() for own in like.values()])
    return {name: piece.view(own.shape) for (name, own), piece in zip(like.items(), pieces, strict=True)}
