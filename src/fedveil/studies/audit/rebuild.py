"""Can a participant rebuild another's record? One victim record, two clients, a server of plain SGD."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks.adaptive import PUBLISHED
from fedveil.attacks.first_layer import first_linear, record_from_gradient, record_under_a_veil
from fedveil.attacks.leaks import from_difference, received, sketched_layers
from fedveil.attacks.observed import Observed
from fedveil.data import Data
from fedveil.errors import BadArgument
from fedveil.federation.local import Federation
from fedveil.federation.shards import generator
from fedveil.runs.config import Config, build_defence, build_loss, build_model
from fedveil.studies.agreement import mean_interval
from fedveil.studies.jobs import Tell
from fedveil.studies.victim import observe

OWN_BATCH, RATE = 4, 0.1
SHARD = 64  # the victim's records where clients send gradients of whole shards
Rebuild = Callable[[Observed], Tensor]


def from_plain_difference(observed: Observed) -> Tensor:
    """As published: the difference of two broadcasts is taken for a gradient."""
    leak = from_difference(observed)
    path = first_linear(observed.architecture)
    found = record_from_gradient(leak, path)
    for name, layer in sketched_layers(leak.model):
        if name == f"{path}.weight":
            return layer.sketch.map(lambda t: t.double() if t.is_floating_point() else t).up(found)
    return found


def from_support(observed: Observed) -> Tensor:
    """PPDL's attacker: only what was sent counts."""
    leak = received(from_difference(observed), learning_rate=observed.learning_rate)
    return record_from_gradient(leak, first_linear(observed.architecture))


REBUILDERS: dict[str, dict[str, Rebuild]] = {
    "veil": {"aligned": record_under_a_veil},
    "ppdl": {"masked": from_support},
}


def quality(found: Tensor, true: Tensor, peak: float) -> float:
    """PSNR = 10 log10(peak^2 / MSE) in dB, at most 100; `peak` is the range of the data."""
    error = float((torch.nan_to_num(found).flatten() - true.double().flatten()).square().mean())
    return min(100.0, 10 * math.log10(peak**2 / max(error, peak**2 * 1e-10)))


def trial(config: Config, data: Data, number: int) -> tuple[Observed, Tensor]:
    """Two rounds of a new network with the attacker's records and one of a victim's; what the attacker saw of them.

    Where clients send gradients of whole shards, the victim has 64 records and the attacker 4.
    """
    order = torch.randperm(len(data.train.targets), generator=generator("rebuild", config.seed, number))
    mine, victim = order[: len(order) // 2], order[-1:]
    if config.whole_shard:
        mine, victim = order[:OWN_BATCH], order[-SHARD:]
    clients = [(data.train.tensor[rows], data.train.targets[rows]) for rows in (mine, victim)]
    network = build_model(dataclasses.replace(config, seed=config.seed + number), data)
    federation = Federation(
        network.to(config.device),
        clients,
        build_defence(config),
        lambda p: torch.optim.SGD(p, RATE),
        batch_size=OWN_BATCH,
        loss=build_loss(config),
        whole_shard=config.whole_shard,
        fuse=False,
        seed=config.seed + number,
    )
    return observe(federation, rounds=2), data.train.tensor[victim]


def rebuilt(tell: Tell, config: Config, data: Data, trials: int) -> dict[str, Any]:
    """PSNR of each attacker's reconstructions, and of the floor: the mean of the attacker's own records."""
    low, high = float(data.train.tensor.min()), float(data.train.tensor.max())
    attackers = {PUBLISHED: from_plain_difference} | REBUILDERS.get(config.defence, {})
    found: dict[str, list[float]] = {name: [] for name in [*attackers, "floor"]}
    for number in range(trials):
        tell(number / trials, f"rebuilding record {number + 1}/{trials}")
        observed, true = trial(config, data, number)
        guesses = {name: attacker(observed).cpu().clamp(low, high) for name, attacker in attackers.items()}
        guesses["floor"] = observed.inputs.double().mean(0).cpu()
        for name, guess in guesses.items():
            found[name].append(max(quality(guess, record, high - low) for record in true))
    return {name: mean_interval(values) for name, values in found.items()}


def can_rebuild(config: Config, data: Data) -> str | None:
    """Why this attack does not fit the network, or None."""
    try:
        first_linear(build_model(config, data))
    except BadArgument as error:
        return str(error.what)
    return None
