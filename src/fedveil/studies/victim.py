"""A federation to attack: trained, or taken from a run's folder, and what its first client observed of it."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from fedveil.attacks import Observed, Round
from fedveil.attacks.observed import PUBLISHED, Seen, observations
from fedveil.data import Data, one_tensor
from fedveil.defences.registry import find
from fedveil.federation.checkpoint import BEST
from fedveil.federation.evaluate import metrics, predict
from fedveil.federation.local import Federation
from fedveil.federation.server import History, Record
from fedveil.federation.setting import RECORDS
from fedveil.files import write_whole
from fedveil.plain_json import read_json, to_json
from fedveil.runs.build import load_data
from fedveil.runs.config import Config
from fedveil.runs.folder import RUN, holds_run, is_finished, resume_federation, train
from fedveil.runs.losses import primary_metric
from fedveil.studies.basis import AGAIN, Basis, explain_change
from fedveil.studies.jobs import Done, Progress, Result

ATTACKER = 0
BASIS = "basis.json"  # in the folder of a run that a study trained


@dataclasses.dataclass(frozen=True)
class Quality:
    """How good the server's model is on members and on held-out records.

    Attributes:
        metric: its name.
        train, test: its value on members and on held-out records.
        gap: how much better it is on members; without a gap there is nothing to infer.
    """

    metric: str
    train: float
    test: float
    gap: float


def on_round(epochs: int, progress: Progress) -> Callable[[Record], None]:
    """Rounds' records as progress."""
    return lambda record: progress(
        min(1.0, record["epoch"] / epochs), f"training, epoch {record['epoch']:.0f}/{epochs}"
    )


@dataclasses.dataclass(frozen=True)
class Trained(Result):
    """A run, round by round.

    Attributes:
        run: its folder.
        records: of its rounds.
        constant: the metric of the best answer that does not look at its input: the mean, or the commonest class.
    """

    run: str
    records: list[Record]
    constant: float

    @property
    def history(self) -> History:
        """As the server kept it."""
        return History(self.records)

    @property
    def metric(self) -> str:
        """The name of what counts."""
        return primary_metric(self.history.last)


@dataclasses.dataclass(frozen=True)
class TrainRun:
    """Train a federation, or go on with what is in the folder."""

    config: Config
    run: Path

    def __call__(self, progress: Progress, done: Done) -> Trained:
        """Train to the end."""
        federation, data = trained(self.config, self.run, progress, done.basis)
        return Trained(str(self.run), federation.history.records, constant(data))


def constant(data: Data) -> float:
    """See `Trained.constant`."""
    seen, asked = data.train.targets, data.test.targets
    if seen.is_floating_point():
        return float((asked.double() - seen.double().mean(0)).pow(2).mean())
    return float((asked == torch.mode(seen).values).double().mean())


def trained(config: Config, folder: Path, progress: Progress, basis: Basis | None = None) -> tuple[Federation, Data]:
    """The federation of a configuration after its last round; part of a study's own run is continued.

    A run that a study trained on another basis (version, data or code) is trained from the start; without `basis` it is
    taken as it is, for attacks that need the job that trains it. A run that is attacked as it is belongs to the user:
    its last checkpoint is read, and nothing is written there.
    """
    data = load_data(config)
    if basis and basis.checkpoint is not None:
        return resume_federation(config, folder, data), data
    if basis:
        remove_stale_run(folder, basis.training, progress)
    if not is_finished(config, folder):
        train(config, folder, resume=True, on_round=on_round(config.training.epochs, progress), data=data)
    return resume_federation(config, folder, data), data


def describe_run(config: Config, folder: Path) -> list[str]:
    """Return what readers must know of a user's run that is attacked: that it is unfinished, or its data changed."""
    federation = resume_federation(config, folder, load_data(config))
    notes, last = [], config.training.epochs * federation.rounds_per_epoch
    if not is_finished(config, folder) and federation.round < last:
        notes.append(f"This run is not finished: it is attacked after round {federation.round} of {last}.")
    if RECORDS in federation.changed:
        notes.append("The data changed since this run was trained: it has not seen the records that count as members.")
    return notes


def remove_stale_run(folder: Path, basis: Basis, progress: Progress) -> None:
    """Remove what a study trained in its folder on another basis, and write the basis of what is trained next."""
    path = folder / BASIS
    changed: str | None = "it was kept without the version and the data that it was made from"
    with contextlib.suppress(ValueError):  # a BadArgument is one, and so is a pydantic error
        changed = explain_change(TypeAdapter(Basis).validate_python(read_json(path)), basis)
    if changed is None:
        return
    if holds_run(folder):
        progress(0.0, f"{AGAIN}: {changed}")
        for name in (*RUN, BEST):
            (folder / name).unlink(missing_ok=True)
    write_whole(path, to_json(basis.plain(), indent=2) + "\n")


def quality_of(federation: Federation, data: Data) -> Quality:
    """The model on members and on held-out records."""
    train, test = (
        metrics(predict(federation.model, part.tensor.to(federation.device)).cpu(), part.targets)
        for part in (data.train, data.test)
    )
    name = primary_metric(train)
    gap = test[name] - train[name] if name in ("mse", "loss") else train[name] - test[name]
    return Quality(name, train[name], test[name], gap)


def observe(federation: Federation, rounds: int = 1) -> Observed:
    """What the attacker observed in the last `rounds` rounds.

    The federation goes on for rounds - 1 more rounds, in which what the attacker receives and sends is written down;
    the last broadcast stays without an answer.
    """
    defence, shards = federation.defence, federation.shards
    seen = [watch(federation)[ATTACKER] for _ in range(rounds - 1)]
    broadcast = defence.broadcast(federation.model)
    seen.append(Round(broadcast, defence.client_view(federation.model, broadcast)))
    inputs, targets = shards.records(ATTACKER)
    return Observed(
        defence.name,
        seen[-1].model,
        emptied(federation.model),
        tuple(seen),
        one_tensor("attack", inputs),
        targets,
        federation.loss,
        float(federation.optimizer.param_groups[0]["lr"]),
        shards.sizes[ATTACKER] / sum(shards.sizes),
    )


def observe_all(federation: Federation, defence: str) -> Seen:
    """What each attacker of a defence has: as published, and what those that know the defence make of it."""
    record = find(defence)
    return observations(record, observe(federation, record.collected))


def observe_strongest(federation: Federation, defence: str) -> dict[str, Observed]:
    """The same for few attackers: as published, and the strongest of the adaptive ones."""
    kept = (PUBLISHED, *find(defence).strongest)
    return {name: found for name, found in observe_all(federation, defence).attackers.items() if name in kept}


def emptied(model: torch.nn.Module) -> torch.nn.Module:
    """The architecture without any of its values."""
    empty = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in [*empty.parameters(), *empty.buffers()]:
            tensor.zero_()
    return empty


def watch(federation: Federation) -> list[Round]:
    """One more round of the federation, as each client observes it; uploads of fused clients are not told apart."""
    shards, number, caught = federation.shards, federation.round, list[Round]()

    def seen(broadcast: Any, updates: Sequence[Any]) -> None:
        sent = copy.deepcopy(broadcast)
        view = federation.defence.client_view(federation.model, sent)
        for client, start in enumerate(shards.starts):
            rows = (shards.rows(client, number) - start).to(federation.device)
            caught.append(Round(sent, view, rows, None if federation.fused else updates[client]))

    federation.step(seen)
    return caught[-len(shards.sizes) :]
