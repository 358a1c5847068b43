"""Training together in one process."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedveil.checks import check_boolean, share
from fedveil.defences.interface import AnyDefence, AnyRound, Samples
from fedveil.errors import Aborted, BadArgument, NonFiniteUpdate, TooFewAnswers, UpdateRefused
from fedveil.federation import checkpoint
from fedveil.federation.client import client_update
from fedveil.federation.engine import Member
from fedveil.federation.history import History, Record
from fedveil.federation.limits import Limits, aggregate
from fedveil.federation.optimise import Optimizer, Schedule
from fedveil.federation.prepare import make_shards, read_held_out, refuse_single
from fedveil.federation.secure import LocalParties, Sums, check_combination, encode_words
from fedveil.federation.server import Seen, Server
from fedveil.federation.setting import RECORDS, Setting, checksum_records
from fedveil.federation.targets import one_output, usual_loss, warn_of_activation
from fedveil.files import make_folder, sweep
from fedveil.graph.wrapped import refuse_wrapped
from fedveil.records.checks import check_sources
from fedveil.records.sources import Given, Source, as_source, choose_batch_size, list_clients
from fedveil.scheme.losses import Function, Loss, couples_samples
from fedveil.scheme.result import Aggregate
from fedveil.secagg import threshold

__all__ = ["Federation", "History", "Record"]
BATCH = 32  # records, unless somebody says otherwise
FINITE = "although the records are finite"


@lru_cache(maxsize=16)
def _weights(sizes: tuple[float, ...], counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each sample of the clients' batches |D_k| / (|D| times its batch's size)."""
    shares = [size / (sum(sizes) * count) for size, count in zip(sizes, counts, strict=True)]
    return torch.tensor(shares, dtype=torch.float64).repeat_interleave(torch.tensor(counts)).to(device, dtype)


class Federation(Server):
    """A server and its clients in one process.

    Every round the server broadcasts, each client takes its next batch and answers, the server aggregates with
    |D_k| / |D| and lets its optimiser step. The same seed gives every defence the same batches.

    Args:
        model: the server's; trained in place.
        clients: the records of each: (inputs, targets) as tensors, NumPy arrays or pandas frames, a Dataset of
            (input, target) or (input, input, ..., target), or a DataLoader over one, of which the dataset and the
            collate_fn are used. Datasets are read batch by batch and need not fit into memory. Inputs are what forward
            takes: a tensor, a tuple of arguments or a dict of keyword arguments (docs/inputs.md). Floating numbers get
            the model's dtype.
        defence: its name ("plain", "veil", "ppdl", "dbcl", "spn", one of another package, or `package.module:Name`),
            or an object with the interface of `fedveil.defences.Defence`.
        optimizer: makes the server's optimiser from the parameters, as `torch.optim.Adam` does; or an optimiser of
            this model's parameters.
        schedule: makes a learning-rate schedule from the optimiser, or is one. `ReduceLROnPlateau` steps after every
            evaluation, on the test loss or, with mode="max", on the accuracy.
        schedule_every: "epoch" or "round": how often other schedules step.
        clip_norm: longest gradient that the optimiser gets; a longer one is scaled down to it.
        batch_size: records a client takes in a round; by default that of the clients' DataLoaders, or 32.
        loss: a name (`fedveil.scheme.LOSSES` has them), a loss object, a function (outputs, targets) -> one value per
            sample, or a `BatchLoss` of the whole batch. By default cross-entropy for classes (integers), squared error
            for quantities; floating-point targets of 0 and 1 alone need a name. One that cannot learn from the targets
            is refused (docs/losses.md). Class indices become one-hot rows, but for a function. Targets may have
            positions (pixels, tokens): their losses are summed, those of samples averaged.
        whole_shard: each client goes through all its records in a round, under one veil, in batches.
        participation: share of the clients in a round.
        limits: bounds on each client, and how clients' gradients are combined: `fedveil.Limits`. By default clients are
            trusted, and their weighted mean is taken.
        secure_aggregation: clients mask their updates, and the server sees sums only (docs/secure-aggregation.md). Here
            all of them are in one process: to test, and to measure what it costs.
        fuse: let batches of clients that share a broadcast go through one pass where no module and no loss ties samples
            together; a model whose own code does so needs fuse=False.
        seed: of the order of records and the choice of clients.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[Given],
        defence: str | AnyDefence = "veil",
        optimizer: Optimizer = torch.optim.Adam,
        *,
        schedule: Schedule | None = None,
        schedule_every: str = "epoch",
        clip_norm: float | None = None,
        batch_size: int | None = None,
        loss: str | Loss | Function | None = None,
        whole_shard: bool = False,
        participation: float = 1.0,
        limits: Limits | None = None,
        secure_aggregation: bool = False,
        fuse: bool = True,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise BadArgument("Federation", f"model is {model!r:.60}, not a torch.nn.Module", "Net(), not Net")
        refuse_wrapped("Federation", model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise BadArgument("Federation", "no parameter of the model requires a gradient", "requires_grad_(True)")
        for name, value in {"whole_shard": whole_shard, "secure_aggregation": secure_aggregation, "fuse": fuse}.items():
            check_boolean("Federation", name, value)
        clients = list_clients(clients)
        sources = check_sources([as_source(f"client {number}", client) for number, client in enumerate(clients)])
        one = one_output(model, sources[0].take(range(min(2, len(sources[0]))))[0])  # refuses a model that does not fit
        super().__init__(
            model,
            defence,
            optimizer,
            schedule=schedule,
            schedule_every=schedule_every,
            clip_norm=clip_norm,
            loss=usual_loss(model, sources) if loss is None else loss,
            limits=limits,
        )
        size = choose_batch_size(clients, batch_size, BATCH)
        self.shards = make_shards(model, self.loss, sources, size, seed, self.dtype)
        warn_of_activation(model, self.loss, one)
        self._checked: tuple[bytes, str | None] | None = None
        refuse_single(model, self.shards)
        share("Federation", "participation", participation)
        self.whole_shard, self.participation = whole_shard, participation
        norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        tied = couples_samples(self.loss) or any(norm.training or norm.running_mean is None for norm in norms)
        self.fused = fuse and self.defence.fusable and not tied and not whole_shard and limits is None
        self.fused = self.fused and not secure_aggregation
        taking_part = len(self.shards.choose_clients(0, participation))
        if limits is not None and taking_part < limits.needed():
            what = f"{limits.aggregator} with hostile={limits.hostile} needs {limits.needed()} clients in a round"
            raise BadArgument("Federation", f"{what}, not {taking_part}", "more clients, or a smaller hostile=")
        self._example = self.shards.example
        self.defence_server = self.defence.server(model, self._example, self.loss)
        self._client = self.defence.client(model, self._example, self.loss)
        ours = type(self._client).__module__.startswith("fedveil.")
        self._owns_broadcasts = ours and type(self).answers is Federation.answers  # others may keep what they get
        self._parties, self._sums = None, None
        if secure_aggregation:
            check_combination(self.defence, model, limits)
            threshold(taking_part)  # refuses too few
            self._parties = LocalParties(len(sources))
            self._sums = Sums(self.defence, self._client, model, self._example, sum(self.shards.sizes))

    @property
    def rounds_per_epoch(self) -> int:
        """Rounds in which the largest client sees each of its records once."""
        return 1 if self.whole_shard else self.shards.rounds_per_epoch

    def _read_test(self, test: Given) -> Source:
        """Test data, checked against the model, the loss and the clients' records."""
        return read_held_out(test, self.model, self.loss, self.dtype, lambda: self.shards.example)

    def exchange(self, seen: Seen | None = None) -> Aggregate:
        """Broadcast, the clients' work, and what the server makes of it; the model stays as it is."""
        clients = self.shards.choose_clients(self.round, self.participation)
        own_round, reuse = self.defence_server.start_round(self.model, clients), False
        try:
            if self._sums is not None and self._parties is not None:
                result = self._aggregate_securely(self._sums, self._parties, own_round, clients)
            else:
                result = self._aggregate(own_round, clients, seen)
            reuse = seen is None and self._owns_broadcasts
            return result
        finally:
            own_round.release(reuse=reuse)  # no secret is left, however the exchange ends

    def _aggregate(self, own_round: AnyRound, clients: Sequence[int], seen: Seen | None) -> Aggregate:
        sizes, broadcast = [float(self.claims(client)) for client in clients], own_round.broadcast
        if self.fused:
            updates, sizes = [self._together(broadcast, clients, sizes)], [1.0]
        else:
            updates = self.answers(broadcast, clients)
        if seen:
            seen(broadcast, updates)
        if self.limits is not None:
            return self._aggregate_limited(own_round, self.limits, clients, updates)
        try:
            return own_round.recover(updates, sizes)
        except NonFiniteUpdate as error:
            who = "the pass that all clients share" if self.fused else _name_client(error, clients)
            raise NonFiniteUpdate(who, f"{error.what}, {FINITE}") from error

    def _aggregate_securely(
        self, sums: Sums, parties: LocalParties, own_round: AnyRound, clients: Sequence[int]
    ) -> Aggregate:
        """Run one round of secure aggregation; a sum that wrapped around is lost, and the model stays as it is.

        Elsewhere a client whose update is not finite contributes nothing; here, where nothing is hidden, it is named.
        """
        opening = parties.opening(clients, self.round, sums.layout(own_round))
        words = {}
        for client, update in zip(clients, self.answers(own_round.broadcast, clients), strict=True):
            _, tensors = sums.codec.encode_update(update)
            words[client] = encode_words(tensors, self.claims(client), opening, sums.clip)
            if not words[client][1]:
                raise NonFiniteUpdate(f"client {client}", f"its update holds NaN or infinity, {FINITE}")
        try:
            return sums.aggregate(own_round, parties.total(opening, words), opening)
        except Aborted as error:
            return Aggregate({}, {}, 0.0, notes={"skipped": error.what})

    def answers(self, broadcast: Any, clients: Sequence[int]) -> list[Any]:
        """Compute each client's upload."""
        answer = partial(client_update, self._client, broadcast, self.shards, number=self.round)
        return [answer(client=client, whole_shard=self.whole_shard, dtype=self.dtype) for client in clients]

    def claims(self, client: int) -> int:
        """The records that a client says it has."""
        return self.shards.sizes[client]

    def _aggregate_limited(
        self, own_round: AnyRound, limits: Limits, clients: Sequence[int], updates: Sequence[Any]
    ) -> Aggregate:
        """Aggregate what is not refused; the record names who was."""
        claims: dict[Member, int] = {client: self.claims(client) for client in clients}
        own: dict[Member, Any] = dict(zip(clients, updates, strict=True))
        outcome = aggregate(own_round, own, claims, self.model, limits, past=self.history.records)
        told = [f"client {client}: {error.what}" for client, error in outcome.refused.items()]
        if outcome.result is None:
            if len(told) == len(clients) and all(isinstance(e, NonFiniteUpdate) for e in outcome.refused.values()):
                client, error = next(iter(outcome.refused.items()))
                raise NonFiniteUpdate(f"client {client}", f"{error.what}, {FINITE}") from error
            what = f"{len(clients) - len(told)} updates are left, too few for {limits.aggregator}"
            raise TooFewAnswers(f"round {self.round}", "; ".join([what, *told]), "more clients, or a smaller hostile=")
        return outcome.recorded(told)

    def _together(self, broadcast: Any, clients: Sequence[int], sizes: Sequence[float]) -> Any:
        """The clients' batches in one pass, each sample weighted by its client's share."""
        rows = [self.shards.rows(client, self.round) for client in clients]
        inputs, targets = self.shards.take(torch.cat(rows))
        weights = _weights(tuple(sizes), tuple([len(r) for r in rows]), self.dtype, targets.device)
        samples = Samples(inputs, targets, weights)
        return self._client.upload(self._client.step(broadcast, samples))

    def state(self) -> dict[str, Any]:
        """Return everything that the checkpoint holds: of clients, numbers of records, a checksum, who has a state."""
        return {**super().state(), "private": sorted(self._private())}

    def setting(self) -> Setting:
        """Return the settings that should be the same when a run is resumed."""
        shards = self.shards
        return {
            **super().setting(),
            "numbers of records": list(shards.sizes),
            RECORDS: self._checksum(self._run),
            "batch size": shards.batch_size,
            "seed": shards.seed,
            "participation": [self.participation, self.whole_shard],
        }

    def _checksum(self, run: bytes) -> str | None:
        """Return the checksum of the records, computed once for a run."""
        if self._checked is None or self._checked[0] != run:
            self._checked = run, checksum_records(self.shards, run)
        return self._checked[1]

    def _restore_clients(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Restore the clients' private states; clients without one start again."""
        self._client = self.defence.client(self.model, self._example, self.loss)
        for client, state in states.items():
            self._client.restore(client, state)

    def _private(self) -> dict[int, dict[str, Any]]:
        states = {client: self._client.state(client) for client in range(len(self.shards.sizes))}
        return {client: state for client, state in states.items() if state}

    def _save(self, folder: Path) -> set[int]:
        """Write the clients' private states, one file per client that has any, and then the checkpoint."""
        for client, state in self._private().items():
            path = _private_file(folder, client, self.round)
            make_folder(make_folder(folder / "clients", 0o700) / str(client), 0o700)
            checkpoint.save(path, state, self._belongs)
        rounds = super()._save(folder)
        for home in (folder / "clients").glob("*"):
            sweep(home)
            for old in home.glob("*.pt"):
                if old.stem not in map(str, rounds):
                    old.unlink()
        return rounds

    def _private_states(
        self, folder: Path, belongs: checkpoint.Belongs | None, state: dict[str, Any]
    ) -> dict[int, dict[str, Any]]:
        """Those of the checkpoint's round, of all clients that had one."""
        found = {}
        for client in state.get("private", range(len(self.shards.sizes))):
            path = _private_file(folder, client, state["round"])
            if "private" in state and not path.exists():
                what = f"client {client}'s private state is gone"
                raise checkpoint.Damaged(str(path), what, "restore it from a copy, or start the run anew")
            if path.exists():
                found[client] = checkpoint.load(path, self.device, belongs)
        return found


def _name_client(error: UpdateRefused, clients: Sequence[int]) -> str:
    """The client whose update a defence refuses: a defence knows only its place among the round's updates."""
    known = {f"client {place}": f"client {client}" for place, client in enumerate(clients)}
    return known.get(error.where, error.where)


def _private_file(folder: Path, client: int, number: int) -> Path:
    return folder / "clients" / str(client) / f"{number}.pt"
