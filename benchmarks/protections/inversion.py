"""Records rebuilt from the update that the server sees, through the first layer of an MLP."""

import math
import statistics
from functools import cache

import torch
from torch import Tensor, nn

from benchmarks.cells import Figures
from benchmarks.protections.tasks import (
    CLIENTS,
    TASKS,
    Protection,
    divide,
    federation_of,
    make_privacy,
    new_model,
    records,
    trained_model,
)
from fedveil.attacks.first_layer import first_linear, record_from_agreeing_rows, record_from_gradient
from fedveil.attacks.leaked_gradients import Leak
from fedveil.attacks.observation import DoesNotApply
from fedveil.attacks.scores import proportion
from fedveil.records.shards import generator
from fedveil.scheme.losses import find_loss

ROUNDS = 400
KNOWN = 20.0  # dB closer than the mean record: a hundredth of its squared distance
MAX_GAIN = 100.0  # dB
NETWORKS = 3  # at the end of training
FEW = 1  # records per client in the worst case


def batch_of(name: str) -> int:
    """Return the number of records that a client uses in a round."""
    return max(1, round(TASKS[name].rate * (len(records(name).train.targets) // CLIENTS)))


def invert_updates(name: str, protection: Protection, count: int, trained: bool, rounds: int = ROUNDS) -> Figures:
    """Return in how many rounds the server knows a record, and the median gain over the mean record in dB.

    Each client has `count` records, all in its update. The network is new, or at the end of training; in every round
    records, noise and network are drawn again (networks at the end of training: one of three).
    """
    gains, chance = [], []
    for number in range(rounds):
        order = torch.randperm(len(records(name).train.targets), generator=generator("inversion", number))
        chosen, other = order[: CLIENTS * count], order[-1]
        model = trained_model(name, protection.epsilon, number % NETWORKS) if trained else new_model(name, number)
        leak, rows = server_view(name, protection, model, chosen, number)
        truth = records(name).train.tensor[rows].flatten(1).double()
        gains.append(max(gain(name, guess, truth) for guess in guesses(leak)))
        chance.append(gain(name, records(name).train.tensor[other].flatten().double(), truth))
    known = proportion(sum(value >= KNOWN for value in gains), rounds)
    return {
        "known": [known.value, known.low, known.high],
        "gain": statistics.median(gains),
        "chance": sum(value >= KNOWN for value in chance) / rounds,  # the same rate for an unrelated record
        "records": len(truth),
    }


def server_view(
    name: str, protection: Protection, model: nn.Module, chosen: Tensor, number: int
) -> tuple[Leak, Tensor]:
    """Return the gradient that the server sees, and the indices of the records behind it.

    Under secure aggregation that is the sum over five clients, and with differential privacy its noise; otherwise the
    first client's update, clipped but without noise, since the server adds that itself.
    """
    train, parts = records(name).train, divide(chosen, number)
    clients = [(train.tensor[rows], train.targets[rows]) for rows in parts]
    privacy = make_privacy(name, protection, rate=1.0)
    federation = federation_of(
        name, protection, model, clients, batch_size=len(parts[0]), privacy=privacy, fuse=False, seed=number
    )
    broadcast = federation.defence_server.start_round(federation.model).broadcast
    members = range(CLIENTS) if protection.secure else range(1)
    updates = federation.clients.updates(broadcast, members, 0, CLIENTS if protection.secure else None)
    tensors = [one.gradients if privacy is None else {n: s[0] for n, s in one.sums.items()} for one in updates]
    gradients = {key: torch.stack([own[key] for own in tensors]).sum(0) for key in tensors[0]}
    return Leak(model, gradients, find_loss(TASKS[name].loss)), chosen if protection.secure else parts[0]


def guesses(leak: Leak) -> list[Tensor]:
    """Return the records that the attacks on a dense first layer find; they need no scale."""
    path, found = first_linear(leak.model), []
    for attack in (record_from_gradient, record_from_agreeing_rows):
        try:
            found.append(torch.nan_to_num(attack(leak, path)))
        except DoesNotApply:
            continue
    return found


@cache
def reference(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean training record, and the smallest and the largest number in any of them."""
    train = records(name).train.tensor.flatten(1).double()
    return train.mean(0), train.min(), train.max()


def gain(name: str, guess: Tensor, truth: Tensor) -> float:
    """Return how much closer a guess comes to one of the records than the mean record, in dB, for the best of them."""
    mean, low, high = reference(name)
    guess = guess.clamp(low, high)
    far, near = ((own - truth).square().mean(1) for own in (mean, guess))
    ratio = float((far / near.clamp_min(1e-300)).max())
    return min(MAX_GAIN, 10 * math.log10(max(ratio, 1e-300)))
