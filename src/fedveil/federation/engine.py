"""Training together in one process."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedveil.defences import DBCL, PPDL, SPN, Aggregate, Defence, Plain, Veil
from fedveil.errors import BadArgument, Diverged, NonFiniteUpdate
from fedveil.federation import checkpoint
from fedveil.federation.evaluate import answers, better, metrics
from fedveil.federation.shards import Batch, gather
from fedveil.scheme.losses import BinaryCrossEntropy, Custom, Function, Loss, find_loss, one_hot

DEFENCES: dict[str, Callable[[], Defence]] = {"plain": Plain, "veil": Veil, "ppdl": PPDL, "dbcl": DBCL, "spn": SPN}
Schedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Record = dict[str, Any]
Seen = Callable[[Any, Sequence[Any]], None]


@dataclass
class History:
    """What happened, a record a round: round, epoch, seconds, error; metrics where the model was evaluated."""

    records: list[Record] = field(default_factory=list)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(round, value) of a metric."""
        return [(record["round"], record[name]) for record in self.records if name in record]

    @property
    def last(self) -> Record:
        """The latest evaluation."""
        return next((r for r in reversed(self.records) if r.get("evaluated")), {})


def mixes_samples(model: nn.Module) -> bool:
    """Whether a module's statistics tie the samples of a batch together, so that clients' batches must stay apart."""
    return any(isinstance(m, _NormBase) and (m.training or m.running_mean is None) for m in model.modules())


@lru_cache(maxsize=16)
def _weights(sizes: tuple[float, ...], counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each sample of the clients' batches |D_k| / (|D| times its batch's size)."""
    shares = [size / (sum(sizes) * count) for size, count in zip(sizes, counts, strict=True)]
    return torch.tensor(shares, dtype=torch.float64).repeat_interleave(torch.tensor(counts)).to(device, dtype)


class Federation:
    """A server and its clients in one process.

    Every round the server broadcasts, each client takes its next batch and answers, the server aggregates with
    |D_k| / |D| and lets its optimiser step. The same seed gives every defence the same batches.

    Args:
        model: the server's; trained in place.
        clients: (inputs, targets) of each.
        defence: "plain", "veil", "ppdl", "dbcl", "spn", or an object with the interface of `fedveil.defences.Defence`.
        optimizer: makes the server's optimiser from the parameters.
        schedule: makes a learning-rate schedule from the optimiser; it steps once an epoch.
        batch_size: records a client takes in a round.
        loss: "squared_error", "cross_entropy", "binary_cross_entropy", "log_cosh", "poisson", a loss object, or a
            function (outputs, targets) -> one value a sample. Class indices become one-hot rows, but for a function.
        whole_shard: each client goes through all its records in a round, under one veil, in batches.
        participation: share of the clients in a round.
        fuse: let batches of clients that share a broadcast go through one pass where no module ties samples together;
            a model whose own code does so needs fuse=False.
        seed: of the order of records and the choice of clients.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[Batch],
        defence: str | Defence = "veil",
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = torch.optim.Adam,
        *,
        schedule: Schedule | None = None,
        batch_size: int = 32,
        loss: str | Loss | Function = "squared_error",
        whole_shard: bool = False,
        participation: float = 1.0,
        fuse: bool = True,
        seed: int = 0,
    ) -> None:
        self.model = model
        first = next(model.parameters())
        self.device, self._dtype = first.device, first.dtype
        self.defence = self._named(defence) if isinstance(defence, str) else defence
        self.loss = find_loss(loss)
        self.shards = gather([self._targets(part) for part in clients], batch_size, seed, self.device)
        if not 0 < participation <= 1:
            raise BadArgument("Federation", f"participation must be above 0 and at most 1, got {participation}")
        self.whole_shard, self.participation = whole_shard, participation
        self.fused = fuse and self.defence.fuses and not mixes_samples(model) and not whole_shard
        self._parameters, self._buffers = dict(model.named_parameters()), dict(model.named_buffers())
        self.optimizer = optimizer([p for p in self._parameters.values() if p.requires_grad])
        self.schedule = schedule(self.optimizer) if schedule else None
        self.defence.prepare(model, self.shards.inputs[:2], self.loss)
        self.round = 0
        self.best: tuple[float, dict[str, Tensor]] | None = None
        self.history = History()

    @staticmethod
    def _named(name: str) -> Defence:
        if name not in DEFENCES:
            known = ", ".join(f'"{known}"' for known in DEFENCES)
            raise BadArgument("Federation", f"there is no defence {name!r}", f"use one of {known}")
        return DEFENCES[name]()

    def _targets(self, part: Batch) -> Batch:
        """Class indices as one-hot rows."""
        inputs, targets = part
        if targets.is_floating_point() or isinstance(self.loss, Custom):
            return inputs, targets
        with torch.no_grad():
            outputs = answers(self.model, inputs[:1].to(self.device)).cpu()
        template = outputs.expand(len(targets), *outputs.shape[1:])
        if isinstance(self.loss, BinaryCrossEntropy):
            return inputs, self.loss.dense(targets, template)
        if targets.shape != template.shape[:-1]:
            raise BadArgument("targets", f"shape is {tuple(targets.shape)}, want class indices (records,)")
        return inputs, one_hot(targets, template)

    def step(self, seen: Seen | None = None) -> Aggregate:
        """One round; `seen` gets what travelled in it: the broadcast and the uploads (one, if clients are fused)."""
        clients = self.shards.chosen(self.round, self.participation)
        sizes = [float(self.shards.sizes[client]) for client in clients]
        result = self._exchange(clients, sizes, seen)
        if result.again:
            result = self._exchange(clients, sizes, seen)
            result = dataclasses.replace(result, details={**result.details, "repeated": 1})
        self._apply(result)
        self.round += 1
        if self.schedule and self.round % self.rounds_per_epoch == 0:
            self.schedule.step()
        return result

    def _exchange(self, clients: Sequence[int], sizes: Sequence[float], seen: Seen | None) -> Aggregate:
        """Broadcast, the clients' work, and what the server makes of it; the model stays as it is."""
        broadcast = self.defence.broadcast(self.model)
        try:
            if self.fused:
                updates, sizes = [self._together(broadcast, clients, sizes)], [1.0]
            else:
                updates = [self._alone(broadcast, client) for client in clients]
            if seen:
                seen(broadcast, updates)
            return self.defence.aggregate(updates, sizes)
        except NonFiniteUpdate as error:
            fix = "lower the learning rate; the last checkpoint and the best model are kept"
            what = f"training diverged: {error.where}: {error.what}"
            raise Diverged(f"round {self.round}", what, fix) from error

    @property
    def rounds_per_epoch(self) -> int:
        """Rounds in which the largest client sees each of its records once."""
        return 1 if self.whole_shard else self.shards.rounds_per_epoch

    def _together(self, broadcast: Any, clients: Sequence[int], sizes: Sequence[float]) -> Any:
        """The clients' batches in one pass, each sample weighted by its client's share."""
        rows = [self.shards.rows(client, self.round) for client in clients]
        inputs, targets = self.shards.take(torch.cat(rows))
        weights = _weights(tuple(sizes), tuple([len(r) for r in rows]), self._dtype, inputs.device)
        return self.defence.upload(self.defence.client_step(self.model, broadcast, inputs, targets, weights))

    def _alone(self, broadcast: Any, client: int) -> Any:
        """One client's update."""
        shards = self.shards
        if not self.whole_shard:
            batch = shards.take(shards.rows(client, self.round))
            update = self.defence.client_step(self.model, broadcast, *batch, None, client)
            return self.defence.upload(update, client)
        total = None
        for rows in shards.shard(client):
            inputs, targets = shards.take(rows)
            weights = torch.full((len(rows),), 1 / shards.sizes[client], dtype=self._dtype, device=inputs.device)
            update = self.defence.client_step(self.model, broadcast, inputs, targets, weights, client)
            broadcast, total = self.defence.accumulate(broadcast, total, update)
        return self.defence.upload(total, client)

    def _apply(self, result: Aggregate) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = result.gradients.get(name)
        self.optimizer.step()
        for name, value in result.buffers.items():
            self._buffers[name].copy_(value)

    def fit(
        self,
        epochs: int = 1,
        *,
        test: Batch | None = None,
        rounds: int | None = None,
        evaluate_every: int | None = None,
        folder: Path | None = None,
        checkpoint_every: int | None = None,
        on_round: Callable[[Record], None] | None = None,
    ) -> History:
        """Train up to `epochs` epochs (or `rounds` rounds) from the start, whatever was done already.

        Args:
            epochs: how often the largest client goes through its records.
            test: held-out (inputs, targets); evaluated after each epoch.
            rounds: in place of epochs.
            evaluate_every: rounds, in place of an epoch.
            folder: where checkpoints go.
            checkpoint_every: rounds between checkpoints; at the end there is always one, and one after every round
                where the defence counts what rounds give away.
            on_round: called with each round's record.
        """
        last = rounds if rounds is not None else epochs * self.rounds_per_epoch
        every = evaluate_every or self.rounds_per_epoch
        started = time.perf_counter()
        while self.round < last:
            result = self.step()
            record: Record = {"round": self.round, "epoch": self.round / self.rounds_per_epoch, "error": result.error}
            record |= result.details
            if test is not None and (self.round % every == 0 or self.round == last):
                record |= self._evaluate(test)
            record["seconds"] = time.perf_counter() - started
            self.history.records.append(record)
            if on_round:
                on_round(record)
            due = self.defence.durable or (checkpoint_every and self.round % checkpoint_every == 0)
            if folder and (self.round == last or due):
                self.save(folder)
        return self.history

    def _evaluate(self, test: Batch) -> Record:
        inputs, targets = (part.to(self.device) for part in test)
        found = metrics(answers(self.model, inputs), targets, self.loss)
        name, value = next(iter(found.items()))
        if value != value:
            raise Diverged(f"round {self.round}", f"{name} is not a number", "lower the learning rate")
        if better(name, value, self.best[0] if self.best else None):
            self.best = value, {key: tensor.detach().clone() for key, tensor in self.model.state_dict().items()}
        return {**found, "evaluated": True}

    def state(self) -> dict[str, Any]:
        """Everything that the server's checkpoint holds: never a secret, and nothing that is private to a client."""
        return {
            "round": self.round,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "defence": {"name": self.defence.name, **self.defence.state()},
            "best": self.best,
            "records": self.history.records,
        }

    def save(self, folder: Path) -> None:
        """Write the clients' private states, a file each and only where there are any, and then the checkpoint."""
        for client in range(len(self.shards.sizes)):
            private = self.defence.client_state(client)
            if private:
                checkpoint.save(_private_file(folder, client, self.round), private)
        checkpoint.save(folder / "checkpoint.pt", self.state())
        for old in (folder / "clients").glob("*/*.pt"):
            if old.stem != str(self.round):
                old.unlink()

    def resume(self, folder: Path) -> None:
        """Go on from a folder's checkpoint: same data order and optimiser state, new secrets."""
        state = checkpoint.load(folder / "checkpoint.pt", self.device)
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise BadArgument(str(folder), f"the checkpoint is of another model or optimiser: {error}") from error
        if self.schedule and state["schedule"]:
            self.schedule.load_state_dict(state["schedule"])
        wrote = state["defence"]["name"]
        if wrote != self.defence.name:
            what = f"the checkpoint is of defence {wrote!r}, not {self.defence.name!r}"
            raise BadArgument(str(folder), what, "resume with the defence that wrote it")
        self.defence.restore(state["defence"])
        for client in range(len(self.shards.sizes)):
            private = _private_file(folder, client, state["round"])
            if private.exists():
                self.defence.restore_client(client, checkpoint.load(private, self.device))
        self.round, self.best = state["round"], state["best"]
        self.history = History(list(state["records"]))


def _private_file(folder: Path, client: int, number: int) -> Path:
    """Where a client keeps its own state after a round: its folder, not the server's checkpoint."""
    return folder / "clients" / str(client) / f"{number}.pt"
