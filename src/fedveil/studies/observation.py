"""Observations of a client of a federation: everything that an attack on it may use."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from fedveil.attacks import Observation, Round
from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.registry import Views, attacker_views, find_attackers
from fedveil.data import one_tensor
from fedveil.defences.registry import find
from fedveil.federation.local import Federation

ATTACKER = 0  # the client that attacks


def observe(federation: Federation, rounds: int = 1) -> Observation:
    """Return what the attacker observes in the last `rounds` rounds.

    The federation trains for rounds - 1 more rounds, in which the attacker's messages are recorded; the last broadcast
    is not answered.
    """
    defence, shards = federation.defence, federation.shards
    seen = [observe_round(federation)[ATTACKER] for _ in range(rounds - 1)]
    broadcast = federation.defence_server.start_round(federation.model).broadcast
    seen.append(Round(broadcast, defence.client_view(federation.model, broadcast)))
    inputs, targets = shards.records(ATTACKER)
    return Observation(
        defence.name,
        seen[-1].model,
        _architecture(federation.model),
        tuple(seen),
        one_tensor("attack", inputs),
        targets,
        federation.loss,
        float(federation.optimizer.param_groups[0]["lr"]),
        shards.sizes[ATTACKER] / sum(shards.sizes),
    )


def observe_all(federation: Federation, defence: str) -> Views:
    """Return the observation of each attacker on a defence: the published one, and what adaptive ones derive."""
    attackers = find_attackers(find(defence))
    return attacker_views(attackers, observe(federation, attackers.collected))


def observe_strongest(federation: Federation, defence: str) -> dict[str, Observation]:
    """Return the observations of the published attacker and of the strongest adaptive ones."""
    kept = (PUBLISHED, *find_attackers(find(defence)).strongest)
    return {name: found for name, found in observe_all(federation, defence).attackers.items() if name in kept}


def observe_round(federation: Federation) -> list[Round]:
    """Train one more round, and return it as each client observes it; updates of fused clients are not separate."""
    shards, number, caught = federation.shards, federation.round, list[Round]()

    def record_round(broadcast: Any, updates: Sequence[Any]) -> None:
        sent = copy.deepcopy(broadcast)
        view = federation.defence.client_view(federation.model, sent)
        for client, start in enumerate(shards.starts):
            rows = (shards.rows(client, number) - start).to(federation.device)
            caught.append(Round(sent, view, rows, None if federation.fused else updates[client]))

    federation.step(record_round)
    return caught[-len(shards.sizes) :]


def _architecture(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy with all values zero."""
    empty = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in [*empty.parameters(), *empty.buffers()]:
            tensor.zero_()
    return empty
