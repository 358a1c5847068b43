"""Can a participant rebuild another's record? One victim record, two clients, a server of plain SGD."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from fedveil.attacks.first_layer import first_linear, from_plain_difference
from fedveil.attacks.observed import PUBLISHED, Observed
from fedveil.attacks.similarity import psnr
from fedveil.data import Data
from fedveil.defences.registry import find
from fedveil.errors import BadArgument
from fedveil.federation.shards import generator
from fedveil.lookup import imported
from fedveil.runs.build import build_model
from fedveil.runs.config import Config
from fedveil.studies.estimates import Estimate, average
from fedveil.studies.gradients.run import two_clients
from fedveil.studies.jobs import Progress
from fedveil.studies.victim import observe

OWN_BATCH, RATE = 4, 0.1
SHARD = 64  # the victim's records where clients send gradients of whole shards
Rebuild = Callable[[Observed], Tensor]


def quality(found: Tensor, true: Tensor, peak: float) -> float:
    """PSNR = 10 log10(peak^2 / MSE) in dB, at most 100; `peak` is the range of the data."""
    return psnr(torch.nan_to_num(found).reshape(1, -1), true.reshape(1, -1), peak=peak, most=100.0)[0]


def trial(config: Config, data: Data, number: int) -> tuple[Observed, Tensor]:
    """Two rounds of a new network with the attacker's records and one of a victim's; what the attacker saw of them.

    Where clients send gradients of whole shards, the victim has 64 records and the attacker 4.
    """
    seed, whole = config.training.seed, config.training.whole_shard
    order = torch.randperm(len(data.train.targets), generator=generator("rebuild", seed, number))
    mine, victim = (order[:OWN_BATCH], order[-SHARD:]) if whole else (order[: len(order) // 2], order[-1:])
    config, parts = config.changed(seed=seed + number), [data.train.take(rows) for rows in (mine, victim)]
    federation = two_clients(config, build_model(config, data), parts, RATE, OWN_BATCH, whole_shard=whole)
    return observe(federation, rounds=2), data.train.tensor[victim]


def rebuilt(progress: Progress, config: Config, data: Data, trials: int) -> dict[str, Estimate]:
    """PSNR of each attacker's reconstructions, and of the floor: the mean of the attacker's own records."""
    low, high = float(data.train.tensor.min()), float(data.train.tensor.max())
    attackers: dict[str, Rebuild] = {PUBLISHED: from_plain_difference}
    for label, spec in find(config.defence.name).rebuilders.items():
        attackers[label] = cast(Rebuild, imported(spec, "an attacker", "my_package.attacks:rebuild"))
    found: dict[str, list[float]] = {name: [] for name in [*attackers, "floor"]}
    for number in range(trials):
        progress(number / trials, f"rebuilding record {number + 1}/{trials}")
        observed, true = trial(config, data, number)
        guesses = {name: attacker(observed).cpu().clamp(low, high) for name, attacker in attackers.items()}
        guesses["floor"] = observed.inputs.double().mean(0).cpu()
        for name, guess in guesses.items():
            found[name].append(max(quality(guess, record, high - low) for record in true))
    return {name: average(values) for name, values in found.items()}


def can_rebuild(config: Config, data: Data) -> str | None:
    """Why this attack does not fit the network, or None."""
    try:
        first_linear(build_model(config, data))
    except BadArgument as error:
        return str(error.what)
    return None
