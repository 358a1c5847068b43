"""Measure the epsilon of a private run with canaries: records whose gradient has a single non-zero coordinate.

Clients treat a canary like any other record: it is sampled at the run's rate, its gradient is clipped by the same
function, and the same noise is added. The auditor knows everything else. The score of a canary is its coordinate of the
noisy sums, minus the contribution of the real records. The measurement therefore detects errors in sampling, clipping
and noise. It does not test the gradients of real records; tests/privacy/test_gradients.py does.
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
MOST = 3000  # maximum default number of canaries; more would loosen the bound at delta = 1e-5


class CanaryClient:
    """A wrapper that adds canaries to the records of a federation's first client.

    Args:
        inner: the object that computes the clients' updates.
        coordinates: coordinates of the canaries that are included.
        clip: the clipping norm.
        rate: the sampling rate.
    """

    def __init__(self, inner: AnyClient, coordinates: NDArray[np.int64], clip: float, rate: float) -> None:
        self._inner, self._coordinates, self._clip, self._rate = inner, coordinates, clip, rate
        self._entropy = Entropy()
        self.contributed: Tensor | float = 0.0  # contribution of real records to each coordinate in the current round

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def step(self, broadcast: object, samples: Samples, client: int = 0) -> object:
        """Compute the clipped sum of a client's gradients; for the first client, add the canaries of this round."""
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
    """Train a private federation with canaries, and return a lower bound on its epsilon.

    Args:
        federation: a new federation in one process, with record-level `privacy=` and without a defence. A veil would
            not affect the result, since the same sum is recovered.
        rounds: number of rounds to train; the claimed epsilon is for these rounds.
        canaries: number of canaries; by default one per parameter, up to 3,000.
        seed: seed for the random coordinates and for the choice of the canaries to include.
        progress: called with the number of completed rounds and the total number of rounds.
    """
    privacy = getattr(federation.defence, "privacy", None)
    if privacy is None or federation.defence.base.name != "plain+dp":
        what = "epsilon can only be measured for a federation with record-level privacy and no other defence"
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
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in sums.values()])


def _split(flat: Tensor, template: Tensors) -> Tensors:
    pieces = torch.split(flat, [tensor.numel() for tensor in template.values()])
    return {name: piece.view(tensor.shape) for (name, tensor), piece in zip(template.items(), pieces, strict=True)}
