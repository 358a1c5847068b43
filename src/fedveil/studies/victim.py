"""A federation to attack: trained, or taken from a run's folder, and what its first client saw of it."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks import Observed, Round
from fedveil.attacks.adaptive import PUBLISHED, ROUNDS, observations
from fedveil.data import Data, one_tensor
from fedveil.federation.evaluate import METRICS, metrics, predict
from fedveil.federation.local import Federation
from fedveil.runs.config import Config, load_data
from fedveil.runs.folder import finished, open_run, train

ATTACKER = 0
Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Scene:
    """The experimenter's side: the federation, and who is a member.

    Attributes:
        federation: after its last round.
        data: what it was trained on and what was held out.
        own: the attacker's records.
        victims: the other clients' records.
        train, test: the metric on members and on held-out records, from the server's model.
        metric: its name.
    """

    federation: Federation
    data: Data
    own: Batch
    victims: Batch
    train: float
    test: float
    metric: str

    @property
    def gap(self) -> float:
        """How much better the model is on members; without a gap there is nothing to infer."""
        return self.test - self.train if self.metric in ("mse", "loss") else self.train - self.test


def shown(epochs: int, tell: Callable[[float, str], None]) -> Callable[[dict[str, Any]], None]:
    """A round's record as progress."""
    return lambda record: tell(min(1.0, record["epoch"] / epochs), f"training, epoch {record['epoch']:.0f}/{epochs}")


def trained(config: Config, folder: Path, tell: Callable[[float, str], None]) -> tuple[Federation, Data]:
    """The federation of a configuration after its last round; a folder that holds part of the run is gone on with."""
    data = load_data(config)
    if not finished(config, folder):
        train(config, folder, resume=True, on_round=shown(config.epochs, tell), data=data)
    return open_run(folder, data)[1], data


def scene_of(federation: Federation, data: Data) -> Scene:
    """Who is a member of what."""
    shards, inputs = federation.shards, one_tensor("attack", federation.shards.inputs)
    places = zip(shards.starts, shards.sizes, strict=True)
    parts = [(inputs[start : start + size], shards.targets[start : start + size]) for start, size in places]
    others = [part for number, part in enumerate(parts) if number != ATTACKER]
    victims = torch.cat([x for x, _ in others]), torch.cat([y for _, y in others])
    found = [
        metrics(predict(federation.model, part.tensor.to(federation.device)).cpu(), part.targets)
        for part in (data.train, data.test)
    ]
    metric = next(name for name in METRICS if name in found[0])
    return Scene(federation, data, parts[ATTACKER], victims, found[0][metric], found[1][metric], metric)


def observe(federation: Federation, rounds: int = 1) -> Observed:
    """What the attacker saw of the last `rounds` rounds.

    The federation goes on for rounds - 1 more rounds, in which what the attacker is sent and sends is written down; the
    last broadcast stays without an answer.
    """
    defence, shards = federation.defence, federation.shards
    seen = [watch(federation) for _ in range(rounds - 1)]
    broadcast = defence.broadcast(federation.model)
    seen.append(Round(broadcast, defence.client_view(federation.model, broadcast)))
    start, size = shards.starts[ATTACKER], shards.sizes[ATTACKER]
    return Observed(
        defence.name,
        seen[-1].model,
        emptied(federation.model),
        tuple(seen),
        one_tensor("attack", shards.inputs)[start : start + size],
        shards.targets[start : start + size],
        federation.loss,
        float(federation.optimizer.param_groups[0]["lr"]),
        size / sum(shards.sizes),
    )


def observe_all(federation: Federation, defence: str, attackers: Sequence[str] | None = None) -> dict[str, Observed]:
    """What each attacker of a defence has: as published, and what those that know the defence make of it.

    `attackers` names the adaptive ones to take; all by default.
    """
    every = observations(defence, observe(federation, ROUNDS.get(defence, 1)))
    return {name: observed for name, observed in every.items() if attackers is None or name in (PUBLISHED, *attackers)}


def emptied(model: torch.nn.Module) -> torch.nn.Module:
    """The architecture without any of its values."""
    empty = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in [*empty.parameters(), *empty.buffers()]:
            tensor.zero_()
    return empty


def watch(federation: Federation) -> Round:
    """One more round of the federation, as the attacker sees it."""
    rows = federation.shards.rows(ATTACKER, federation.round)
    caught: list[Round] = []

    def seen(broadcast: Any, updates: Sequence[Any]) -> None:
        view = federation.defence.client_view(federation.model, broadcast)
        own = None if federation.fused else updates[ATTACKER]
        caught.append(Round(copy.deepcopy(broadcast), view, rows - federation.shards.starts[ATTACKER], own))

    federation.step(seen)
    return caught[-1]
