"""Rebuilding a record of another client: one victim record, two clients, a server of plain SGD."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.attacks.first_layer import first_linear
from fedveil.attacks.generic import rebuild_record
from fedveil.attacks.observation import PUBLISHED, DoesNotApply, Observation, attempt
from fedveil.attacks.registry import find_attackers
from fedveil.attacks.scores import Estimate, average
from fedveil.attacks.similarity import psnr
from fedveil.data import Data
from fedveil.defences.registry import find
from fedveil.progress import Progress
from fedveil.records.shards import generator
from fedveil.runs.build import build_model
from fedveil.runs.config import Config
from fedveil.studies.audit.results import FLOOR
from fedveil.studies.federations import observe
from fedveil.studies.gradients.run import few_clients, plain_sgd

OWN_BATCH, RATE = 4, 0.1
SHARD = 64  # the victim's records where clients send gradients of whole shards
MAX_SEARCHES = 5  # records that are rebuilt by a search


def quality(found: Tensor, true: Tensor, peak: float) -> float:
    """Return PSNR = 10 log10(peak^2 / MSE) in dB, at most 100; `peak` is the range of the data."""
    return psnr(torch.nan_to_num(found).reshape(1, -1), true.reshape(1, -1), peak=peak, maximum=100.0)[0]


def trial(config: Config, data: Data, number: int, rounds: int = 2) -> tuple[Observation, Tensor]:
    """Run a few rounds of a new network with the attacker's records and one of a victim; return what the attacker saw.

    Where clients send gradients of whole shards, the victim has 64 records and the attacker 4.
    """
    seed, whole = config.training.seed, config.training.whole_shard
    order = torch.randperm(len(data.train.targets), generator=generator("rebuild", seed, number))
    mine, victim = (order[:OWN_BATCH], order[-SHARD:]) if whole else (order[: len(order) // 2], order[-1:])
    config, parts = config.changed(seed=seed + number), [data.train.take(rows) for rows in (mine, victim)]
    federation = few_clients(config, build_model(config, data), parts, plain_sgd(RATE), OWN_BATCH, whole_shard=whole)
    return observe(federation, rounds), data.train.tensor[victim]


@dataclass(frozen=True)
class Reconstructions:
    """PSNR by attacker and of the floor, and why other attackers have none."""

    psnr: dict[str, Estimate]
    left_out: dict[str, str]


def rebuild(progress: Progress, config: Config, data: Data, trials: int) -> Reconstructions:
    """Return the PSNR of each attacker's reconstructions, and of the floor: the mean of the attacker's records.

    An attacker that does not apply, or fails, in one trial is left out of all. A search takes seconds, so that there
    are at most five.
    """
    low, high = float(data.train.tensor.min()), float(data.train.tensor.max())
    known = find_attackers(find(config.defence.name))
    attackers = {PUBLISHED: rebuild_record, **known.rebuilders}
    found: dict[str, list[float]] = {}
    left_out: dict[str, str] = {}
    trials = trials if has_dense_start(config, data) else min(trials, MAX_SEARCHES)
    for number in range(trials):
        progress(number / trials, f"rebuilding record {number + 1}/{trials}")
        observed, true = trial(config, data, number, known.rebuild_rounds)
        guesses: dict[str, Tensor] = {FLOOR: observed.inputs.double().mean(0).cpu()}
        for name in [name for name in attackers if name not in left_out]:
            guess = attempt(attackers[name], observed)
            if isinstance(guess, str):
                left_out[name] = guess
            else:
                guesses[name] = guess.cpu().clamp(low, high)
        for name, guess in guesses.items():
            found.setdefault(name, []).append(max(quality(guess, one, high - low) for one in true))
    psnr = {name: average(found[name]) for name in [*attackers, FLOOR] if name in found and name not in left_out}
    return Reconstructions(psnr if len(psnr) > 1 else {}, left_out)


def has_dense_start(config: Config, data: Data) -> bool:
    """Whether the network starts with a Linear, whose gradient shows a record without any search."""
    try:
        first_linear(build_model(config, data))
    except DoesNotApply:
        return False
    return True
