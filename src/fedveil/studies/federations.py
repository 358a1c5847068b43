"""Train or load the federations that studies use, measure their quality, and record what a client observes."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from fedveil.attacks import Observation, Round
from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.registry import Views, attacker_views, find_attackers
from fedveil.data import Data, one_tensor
from fedveil.defences.registry import find
from fedveil.federation.checkpoint import BEST
from fedveil.federation.evaluate import metrics, predict
from fedveil.federation.history import History, RoundRecord
from fedveil.federation.local import Federation
from fedveil.federation.results import primary_metric
from fedveil.federation.state import RECORDS
from fedveil.files import write_atomically
from fedveil.plain_json import read_json, to_json
from fedveil.progress import Progress
from fedveil.runs.build import load_data
from fedveil.runs.folder import RUN_FILES, contains_run, is_finished, resume_federation, train
from fedveil.runs.settings import Config
from fedveil.studies.basis import COMPUTED_AGAIN, Basis, explain_change
from fedveil.studies.jobs import JobResults, Result

ATTACKER = 0  # index of the attacking client
BASIS_FILE = "basis.json"  # written to the folder of every run that a study trains


@dataclass(frozen=True)
class Quality:
    """Quality of the server's model on members and on held-out records.

    Attributes:
        metric: name of the metric.
        train, test: value of the metric on members and on held-out records.
        gap: how much better the model performs on members; without a gap, membership cannot be inferred.
    """

    metric: str
    train: float
    test: float
    gap: float


@dataclass(frozen=True)
class TrainedRun(Result):
    """The history of a training run.

    Attributes:
        run: folder of the run.
        records: one record per round.
        constant: test metric of the best constant prediction, which is the mean or the most common class.
    """

    run: str
    records: list[RoundRecord]
    constant: float

    @property
    def history(self) -> History:
        """The records as a `History`."""
        return History(self.records)

    @property
    def metric(self) -> str:
        """The name of the primary metric."""
        return primary_metric(self.history.metrics)


@dataclass(frozen=True)
class TrainRun:
    """A task that trains a federation, and resumes an unfinished run in the folder."""

    config: Config
    run: Path

    def __call__(self, progress: Progress, results: JobResults) -> TrainedRun:
        """Train until the last epoch."""
        federation, data = load_or_train(self.config, self.run, progress, results.basis)
        return TrainedRun(str(self.run), federation.history.records, constant_metric(data))


def round_progress(epochs: int, progress: Progress) -> Callable[[RoundRecord], None]:
    """Return a callback that reports training progress after each round."""
    return lambda record: progress(min(1.0, record.epoch / epochs), f"training, epoch {record.epoch:.0f}/{epochs}")


def constant_metric(data: Data) -> float:
    """Return the test metric of the best constant prediction, which is the mean or the most common class."""
    train, test = data.train.targets, data.test.targets
    if train.is_floating_point():
        return float((test.double() - train.double().mean(0)).pow(2).mean())
    return float((test == torch.mode(train).values).double().mean())


def load_or_train(config: Config, folder: Path, progress: Progress, basis: Basis) -> tuple[Federation, Data]:
    """Return the federation trained with a configuration, and its data; resume an unfinished run.

    A run that a study trained on a different basis (version, data or code) is trained again from the start. If the
    basis has a checkpoint, the run belongs to the user and is only read.
    """
    data = load_data(config)
    if basis.checkpoint is None:
        remove_stale_run(folder, basis.training, progress)
        if not is_finished(config, folder):
            train(config, folder, resume=True, on_round=round_progress(config.training.epochs, progress), data=data)
    return resume_federation(config, folder, data), data


def describe_run(config: Config, folder: Path) -> list[str]:
    """Return notes on a user's run: whether it is unfinished, and whether its data have changed."""
    federation = resume_federation(config, folder, load_data(config))
    notes, num_rounds = [], config.training.epochs * federation.rounds_per_epoch
    if not is_finished(config, folder) and federation.round < num_rounds:
        notes.append(
            f"This run is unfinished: the attack uses its state after round {federation.round} of {num_rounds}."
        )
    if RECORDS in federation.changed:
        notes.append(
            "The data have changed since this run was trained, so it may not have been trained on the supposed members."
        )
    return notes


def remove_stale_run(folder: Path, basis: Basis, progress: Progress) -> None:
    """Remove a run that a study trained on a different basis, and write the new basis."""
    path, reason = folder / BASIS_FILE, f"{BASIS_FILE} cannot be read"
    with contextlib.suppress(ValueError):  # includes BadArgument and pydantic's errors
        change = explain_change(TypeAdapter(Basis).validate_python(read_json(path)), basis)
        if change is None:
            return
        reason = change
    if contains_run(folder):
        progress(0.0, f"{COMPUTED_AGAIN}: {reason}")
        for name in (*RUN_FILES, BEST):
            (folder / name).unlink(missing_ok=True)
    write_atomically(path, to_json(basis.to_plain(), indent=2) + "\n")


def measure_quality(federation: Federation, data: Data) -> Quality:
    """Measure the server's model on members and on held-out records."""
    train, test = (
        metrics(predict(federation.model, part.tensor.to(federation.device)).cpu(), part.targets)
        for part in (data.train, data.test)
    )
    name = primary_metric(train)
    gap = test[name] - train[name] if name in ("mse", "loss") else train[name] - test[name]
    return Quality(name, train[name], test[name], gap)


def observe(federation: Federation, rounds: int = 1) -> Observation:
    """Return the attacker's observation of `rounds` rounds.

    The federation is trained for `rounds - 1` more rounds while the attacker's messages are recorded. The attacker does
    not answer the last broadcast.
    """
    defence, shards = federation.defence, federation.shards
    observed_rounds = [observe_round(federation)[ATTACKER] for _ in range(rounds - 1)]
    broadcast = federation.defence_server.start_round(federation.model).broadcast
    observed_rounds.append(Round(broadcast, defence.client_view(federation.model, broadcast)))
    inputs, targets = shards.records(ATTACKER)
    records = one_tensor("attack", inputs), targets, federation.loss
    lr, weight = float(federation.optimizer.param_groups[0]["lr"]), shards.sizes[ATTACKER] / sum(shards.sizes)
    architecture = _architecture(federation.model)
    return Observation(
        defence.name, observed_rounds[-1].model, architecture, tuple(observed_rounds), *records, lr, weight
    )


def observe_all(federation: Federation, defence: str) -> Views:
    """Return each attacker's observation under a defence, and the reason for each attacker without an observation."""
    attackers = find_attackers(find(defence))
    return attacker_views(attackers, observe(federation, attackers.broadcasts_needed))


def observe_strongest(federation: Federation, defence: str) -> dict[str, Observation]:
    """Return the observations of the published attacker and of the strongest adaptive attackers."""
    names = (PUBLISHED, *find_attackers(find(defence)).strongest)
    return {name: observation for name, observation in observe_all(federation, defence)[0].items() if name in names}


def observe_round(federation: Federation) -> list[Round]:
    """Train for one more round, and return what each client observes; fused clients have no separate updates."""
    shards, round_index, observed_rounds = federation.shards, federation.round, list[Round]()
    local_training = federation.defence.local_training

    def record_round(broadcast: Any, updates: Sequence[Any]) -> None:
        message = copy.deepcopy(broadcast)
        view = federation.defence.client_view(federation.model, message)
        for client, offset in enumerate(shards.starts):
            upload = None if federation.clients.fused else updates[client]
            if local_training is None:
                rows = (shards.rows(client, round_index) - offset).to(federation.device)
                observed_rounds.append(Round(message, view, rows, upload))
                continue
            steps = [
                (row - offset).to(federation.device)
                for row in shards.local_rows(client, round_index, local_training.epochs)
            ]
            rows = torch.arange(shards.sizes[client], device=federation.device)
            observed_rounds.append(Round(message, view, rows, upload, local_training, tuple(steps)))

    federation.step(record_round)
    return observed_rounds[-len(shards.sizes) :]


def _architecture(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of the model with all values set to zero."""
    result = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in [*result.parameters(), *result.buffers()]:
            tensor.zero_()
    return result
