"""A federation in a single process: the server, and an engine that sends no messages."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Generic

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedveil.checks import check_boolean, resume_autocast
from fedveil.defences.interface import AnyCodec, AnyDefence, AnyRound, B, DefenceClient, Samples, State, U
from fedveil.defences.registry import add_privacy, find_codec
from fedveil.errors import BadArgument, NonFiniteUpdate
from fedveil.federation import checkpoint
from fedveil.federation.checkpoint import StateTag
from fedveil.federation.client import compute_update, reply_to_step
from fedveil.federation.limits import Limits
from fedveil.federation.prepare import (
    HeldOut,
    Optimizer,
    Schedule,
    keep_random_state,
    make_shards,
    read_held_out,
    refuse_single,
)
from fedveil.federation.protocol import AnyReply, Channels, Fault, Member, Reply, SecureTerms, Step
from fedveil.federation.rounds import ClearRound, RoundPolicy
from fedveil.federation.server import Server
from fedveil.federation.state import RECORDS, CheckpointState, Setting, checksum_records
from fedveil.federation.targets import default_loss, one_output, warn_about_activation
from fedveil.files import make_folder, remove_partial_files
from fedveil.graph.foreign_code import unwrap
from fedveil.graph.inputs import Inputs
from fedveil.graph.outputs import Output, choose_output
from fedveil.records.shards import Shards
from fedveil.records.sources import (
    UserRecords,
    as_source,
    check_columns,
    check_same_columns,
    check_sources,
    choose_batch_size,
    list_clients,
)
from fedveil.scheme import Entropy
from fedveil.scheme.losses import Function, Loss, couples_samples

if TYPE_CHECKING:
    from fedveil.federation.description import RunTerms
    from fedveil.privacy import Privacy
    from fedveil.secagg import Party, Roster

BATCH_SIZE = 32
SECURE_ATTEMPTS = 5  # maximum number of attempts at a round with secure aggregation, where a sum may fail


@lru_cache(maxsize=16)
def _weights(sizes: tuple[int, ...], counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight of each sample in the clients' batches: |D_k| / (|D| x the size of client k's batch)."""
    shares = [size / (sum(sizes) * count) for size, count in zip(sizes, counts, strict=True)]
    return torch.tensor(shares, dtype=torch.float64).repeat_interleave(torch.tensor(counts)).to(device, dtype)


class LocalEngine(Generic[B, U]):
    """Clients in the server's process. Messages are Python objects, and clients' exceptions are not caught.

    Args:
        client: the clients' side of the defence.
        shards: the clients' records.
        dtype: the model's dtype.
        whole_shard: whether clients go through all their records in a round.
        fused: whether the batches of all clients in a round are processed in one pass.
    """

    stream, stable, traffic = "clients", True, None

    def __init__(
        self, client: DefenceClient[B, U], shards: Shards, dtype: torch.dtype, *, whole_shard: bool, fused: bool
    ) -> None:
        self.client, self.shards, self.whole_shard, self.fused = client, shards, whole_shard, fused
        self.dtype = dtype
        is_builtin = type(client).__module__.startswith("fedveil.")
        self.keeps_nothing = is_builtin and type(self) is LocalEngine  # a subclass may keep a broadcast
        self._parties: dict[Member, Party] = {}  # with secure aggregation

    def start_round(self) -> None:
        """Do nothing, because there is no traffic."""

    def members(self) -> list[Member]:
        """Return the indices of all clients."""
        return list(range(len(self.shards.sizes)))

    def ask(self, round_number: int, defence_round: AnyRound, members: Sequence[Member]) -> Iterator[AnyReply | Fault]:
        """Compute the clients' updates, in one pass if clients are fused."""
        clients = [int(member) for member in members]
        if self.fused:
            records = sum([self.shards.sizes[client] for client in clients])
            yield Reply(tuple(members), self._fused_update(defence_round.broadcast, clients, round_number), records)
            return
        updates = self.updates(defence_round.broadcast, clients, round_number)
        for client, update in zip(clients, updates, strict=True):
            yield Reply((client,), update, self.claim_records(client))

    @resume_autocast()
    def updates(
        self, broadcast: B, clients: Sequence[int], round_number: int, num_members: int | None = None
    ) -> list[U]:
        """Compute each client's update in a round; `num_members` is the number of clients in a secure sum."""
        defence_client, shards, dtype, whole_shard = self.client, self.shards, self.dtype, self.whole_shard
        return [
            compute_update(defence_client, broadcast, shards, dtype, client, round_number, whole_shard, num_members)
            for client in clients
        ]

    def claim_records(self, client: int) -> int:
        """Return the number of records that a client claims to have."""
        return self.shards.sizes[client]

    @resume_autocast()
    def _fused_update(self, broadcast: B, clients: Sequence[int], round_number: int) -> U:
        """Compute one update from all clients' batches, with each sample weighted by its client's share."""
        rows = [self.shards.rows(client, round_number) for client in clients]
        inputs, targets = self.shards.take(torch.cat(rows))
        sizes = tuple([self.shards.sizes[client] for client in clients])
        weights = _weights(sizes, tuple([len(row) for row in rows]), self.dtype, targets.device)
        return self.client.upload(self.client.step(broadcast, Samples(inputs, targets, weights)))

    def create_parties(self, codec: AnyCodec, integers: bool = False) -> "Roster":
        """Create an identity for each client for secure aggregation; return the roster."""
        from fedveil.secagg import Identity, Party, Policy, Roster

        self._codec, self._integers = codec, integers
        identities = [Identity.new(f"client-{client}") for client in self.members()]
        roster = Roster({identity.name: identity.public() for identity in identities})
        policy = Policy(min_records=1, max_sums_per_run=2**53, max_sums_per_day=2**53, key_hours=24 * 365)
        self._parties = {client: Party(identity, roster, policy=policy) for client, identity in enumerate(identities)}
        return roster

    def ask_masked(
        self,
        round_number: int,
        defence_round: AnyRound,
        members: Sequence[Member],
        terms: SecureTerms,
        channels: Channels,
    ) -> tuple[bytes, Iterator[tuple[Member, bytes] | Fault]]:
        """Compute the clients' masked updates; the masks are bound to the digest of `terms`."""
        from fedveil.federation.sums import encode_words

        digest = hashlib.sha256(json.dumps(terms.values()).encode()).digest()
        clients = [int(member) for member in members]

        def uploads() -> Iterator[tuple[Member, bytes] | Fault]:
            updates = self.updates(defence_round.broadcast, clients, round_number, len(terms.opening.roster))
            for client, update in zip(clients, updates, strict=True):
                _, tensors = self._codec.encode_update(update)
                records, party = self.claim_records(client), self._parties[client]
                words = encode_words(tensors, records, terms.opening, terms.clip, integers=self._integers)
                if not words[1]:  # a remote client would contribute nothing instead of raising
                    message = "its update contains NaN or infinity, although the records are finite"
                    raise NonFiniteUpdate(f"client {client}", message)
                yield client, party.upload(party.admit(terms.opening, digest), words)

        return digest, uploads()

    def run_step(
        self, step: Step, messages: Mapping[Member, bytes], channels: Channels | None, timeout: float | None = None
    ) -> Iterator[tuple[Member, bytes] | Fault]:
        """Yield the replies of the clients' parties to a step of secure aggregation."""
        for member, extra in messages.items():
            yield member, reply_to_step(step, extra, self._parties[member], lambda: 1)

    def close(self) -> None:
        """Do nothing, because there is no connection."""


class Federation(Server):
    """A server and its clients in one process.

    In every round, the server broadcasts the model, each client computes an update from its next batch, and the server
    averages the updates with weights |D_k| / |D| and steps its optimizer. With the same seed, every defence uses the
    same batches.

    Args:
        model: the server's model; trained in place.
        clients: the records of each client: (inputs, targets) as tensors, NumPy arrays or pandas frames, a Dataset of
            (input, target) or (input, input, ..., target), or a DataLoader, whose dataset and collate_fn are used.
            Datasets are read batch by batch and need not fit in memory. Inputs are a tensor, a tuple of forward's
            arguments or a mapping of its keyword arguments (docs/inputs.md); a dict may contain the targets as
            "labels". Floats are cast to the model's dtype.
        defence: a `fedveil.defences.Defence`, or its name: "plain", "veil", "ppdl", "dbcl", "spn", a name from another
            package, or `package.module:Name`.
        optimizer: a function that creates the server's optimizer from the parameters, such as `torch.optim.Adam`, or an
            optimizer for this model's parameters.
        schedule: a function that creates a learning-rate schedule from the optimizer, or a schedule.
            `ReduceLROnPlateau` steps after every evaluation, on the test loss or, with mode="max", on the accuracy.
        schedule_every: how often other schedules step: "epoch" or "round".
        clip_norm: the norm to which the gradient is clipped; by default, gradients are not clipped.
        batch_size: number of records per client and round; by default, the batch size of the DataLoaders, or 32.
        loss: a name (see `fedveil.scheme.LOSSES`), a Fedveil or torch loss, a function (outputs, targets) -> one
            value per sample, or a `BatchLoss` for the whole batch. By default, cross-entropy for integer
            targets (classes) and squared error for floats; if the targets are floats that are all 0 or 1, a loss must
            be given. A loss that does not fit the targets is refused (docs/losses.md). Targets may have positions
            (pixels, tokens): losses are summed over positions and averaged over samples.
        output: the choice of predictions in the result of the model's forward method: the name of an entry, such as
            "last_hidden_state", or a function of the result. By default, "logits" or the only floating-point tensor.
        whole_shard: whether each client goes through all its records in a round, in batches, with the same noise.
            Clients that train locally always do.
        participation: fraction of the clients that take part in a round.
        limits: bounds on each client, and the rule that combines their gradients: `fedveil.Limits`. By default, clients
            are trusted, and the weighted mean is used.
        privacy: settings for differential privacy: `fedveil.Privacy` (docs/defences/privacy.md).
        secure_aggregation: whether clients mask their updates, so that the server sees only sums
            (docs/secure-aggregation.md). In a single process, this is useful for tests and for measuring the overhead.
        fuse: whether to process the batches of all clients in one pass if neither a module nor the loss couples
            samples. Set fuse=False for a model that couples samples in its own code.
        seed: seed for the order of records and the choice of clients.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[UserRecords],
        defence: str | AnyDefence = "veil",
        optimizer: Optimizer = torch.optim.Adam,
        *,
        schedule: Schedule | None = None,
        schedule_every: str = "epoch",
        clip_norm: float | None = None,
        batch_size: int | None = None,
        loss: str | Loss | Function | None = None,
        output: Output | None = None,
        whole_shard: bool = False,
        participation: float = 1.0,
        limits: Limits | None = None,
        privacy: "Privacy | None" = None,
        secure_aggregation: bool = False,
        fuse: bool = True,
        seed: int = 0,
    ) -> None:
        where = "Federation"
        if not isinstance(model, nn.Module):
            message = f"model must be a torch.nn.Module, got {model!r:.60}"
            raise BadArgument(where, message, "pass an instance of a module: Net()")
        model = choose_output(unwrap(where, model), output)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            fix = "call model.requires_grad_(True)"
            raise BadArgument(where, "no parameter of the model requires a gradient", fix)
        for name, value in {"whole_shard": whole_shard, "secure_aggregation": secure_aggregation, "fuse": fuse}.items():
            check_boolean(where, name, value)
        clients = list_clients(clients)
        columns = check_columns(clients)
        sources = check_sources([as_source(f"client {index}", client) for index, client in enumerate(clients)])
        inputs, _ = sources[0].take(range(min(2, len(sources[0]))))
        template = one_output(model, inputs)  # raises if the model does not accept the records
        loss = default_loss(template, sources) if loss is None else loss
        policy = RoundPolicy(participation, attempts=SECURE_ATTEMPTS if secure_aggregation else 1, pause=0.0)
        train_batch_size = choose_batch_size(clients, batch_size, BATCH_SIZE)
        if privacy is not None:
            explicit_batch_size = choose_batch_size(clients, batch_size, 0)
            rate = 1.0 if whole_shard else _sampling_rate([len(source) for source in sources], explicit_batch_size)
            defence = add_privacy(defence, privacy, rate)
        super().__init__(model, defence, optimizer, schedule, schedule_every, clip_norm, loss, limits, policy, seed)
        self.columns = columns
        if (local_training := self.defence.local_training) is not None:
            train_batch_size, whole_shard = local_training.batch_size or train_batch_size, True
        self.shards = make_shards(model, self.loss, sources, train_batch_size, seed, self.dtype)
        warn_about_activation(model, self.loss, template)
        refuse_single(model, self.shards)
        self.whole_shard = whole_shard
        self._checksum: tuple[bytes, str | None] | None = None
        can_fuse = limits is None and not secure_aggregation and not whole_shard and self.shards.fusable
        fused = fuse and self.defence.fusable and can_fuse and not _couples_samples(model, self.loss)
        self.example = self.shards.example
        self.defence_server = self.defence.server(model, self.example, self.loss)
        client = self.defence.start_client(model, self.example, self.loss)
        self.use_engine(LocalEngine(client, self.shards, self.dtype, whole_shard=whole_shard, fused=fused))
        num_participants = max(1, round(participation * len(sources)))
        if limits is not None and num_participants < (minimum := limits.min_clients()):
            message = f"{limits.aggregator} with hostile={limits.hostile} needs {minimum} clients in a round"
            fix = "use more clients, or a smaller value for hostile"
            raise BadArgument(where, f"{message}, got {num_participants}", fix)
        if secure_aggregation:
            from fedveil.secagg import threshold

            roster = self.clients.create_parties(find_codec(self.defence), self.defence.integer_sums)
            steps = local_training.epochs * self.shards.rounds_per_epoch if local_training else 1
            self._start_secure(client, self.example, roster, Entropy().token(), sum(self.shards.sizes), steps)
            threshold(num_participants)  # raises if there are too few clients

    def use_engine(self, engine: LocalEngine[B, U]) -> None:
        """Replace the clients, for example with hostile ones; not supported with secure aggregation."""
        self.engine = self.clients = engine
        self.rounds = ClearRound(engine, self.model, self.history, self.limits, self.policy.min_answers)

    @property
    def rounds_per_epoch(self) -> int:
        """The number of rounds in which the largest client uses each of its records once."""
        if self.defence.sampling_rate is not None:
            return math.ceil(1 / self.defence.sampling_rate)
        return 1 if self.whole_shard else self.shards.rounds_per_epoch

    @property
    def terms(self) -> "RunTerms":
        """The settings and numbers of the clients."""
        from fedveil.federation.description import RunTerms

        sizes = list(self.shards.sizes)
        return RunTerms(False, len(sizes), sizes, self.shards.batch_size, self.whole_shard)

    def _comparison_batch(self) -> tuple[Inputs, Tensor | None]:
        """Return the first client's batch, with the random state restored so that the round draws the same numbers."""
        with keep_random_state():
            return self.shards.take(self.shards.rows(0, self.round))

    def _read_held_out(self, owner: str, records: UserRecords) -> HeldOut:
        """Check held-out records against the model, the loss and the clients' records."""
        check_same_columns(owner, records, "the clients", self.columns)
        return read_held_out(owner, records, self.model, self.loss, self.dtype, lambda: self.shards.example)

    def state(self) -> CheckpointState:
        """Return the content of a checkpoint, including the indices of clients with a private state."""
        return {**super().state(), "private": sorted(self._client_states())}

    def setting(self) -> Setting:
        """Return the settings that should stay the same when a run is resumed."""
        shards, local_training = self.shards, self.defence.local_training
        if self._checksum is None or self._checksum[0] != self._run:
            self._checksum = self._run, checksum_records(shards, self._run)
        return {
            **super().setting(),
            "numbers of records": list(shards.sizes),
            RECORDS: self._checksum[1],
            "batch size": shards.batch_size,
            "seed": shards.seed,
            "participation": [self.policy.participation, self.whole_shard],
            "local training": list(astuple(local_training)) if local_training else [],
        }

    def _restore_clients(self, states: Mapping[int, State]) -> None:
        """Restore the clients' private states; clients without a private state start from scratch."""
        client = self.defence.start_client(self.model, self.example, self.loss)
        for index, state in states.items():
            client.restore(index, state)
        self.clients.client = client

    def _client_states(self) -> dict[int, State]:
        states = {client: self.clients.client.state(client) for client in range(len(self.shards.sizes))}
        return {client: state for client, state in states.items() if state}

    def _save(self, folder: Path) -> set[int]:
        """Write the clients' private states to one file per client, then the checkpoint."""
        for client, state in self._client_states().items():
            path = _private_file(folder, client, self.round)
            make_folder(make_folder(folder / "clients", 0o700) / str(client), 0o700)
            checkpoint.save(path, state, self._tag)
        rounds = super()._save(folder)
        for client_folder in (folder / "clients").glob("*"):
            remove_partial_files(client_folder)
            for old_file in client_folder.glob("*.pt"):
                if old_file.stem not in map(str, rounds):
                    old_file.unlink()
        return rounds

    def _private_states(self, folder: Path, tag: StateTag, state: CheckpointState) -> dict[int, State]:
        """Load the private states of the checkpoint's round for all clients that had one."""
        result = {}
        for client in state.get("private", []):
            path = _private_file(folder, client, state["round"])
            if not path.exists():
                message = f"client {client}'s private state is missing"
                raise checkpoint.DamagedCheckpoint(str(path), message, checkpoint.RESTORE)
            result[client] = checkpoint.load(path, self.device, tag)
        return result


def _couples_samples(model: nn.Module, loss: Loss) -> bool:
    """Return whether the loss, or a normalisation layer in training mode, couples the samples of a batch."""
    layers = (module for module in model.modules() if isinstance(module, _NormBase))
    return couples_samples(loss) or any(layer.training or layer.running_mean is None for layer in layers)


def _sampling_rate(sizes: Sequence[int], batch_size: int) -> float:
    """Return the rate at which clients sample records; a batch size of 0 selects the default rate."""
    from fedveil.privacy.defaults import default_rate

    return min(1.0, batch_size / max(sizes)) if batch_size else default_rate(sum(sizes))


def _private_file(folder: Path, client: int, round_number: int) -> Path:
    return folder / "clients" / str(client) / f"{round_number}.pt"
