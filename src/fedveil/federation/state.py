"""The state of a server: snapshots in memory for undoing interrupted rounds, and checkpoints on disk."""

import contextlib
import hashlib
import json
import logging
import os
import signal
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import StateDict
from torch.utils import _pytree as pytree

from fedveil.defences.interface import AnyDefence, AnyServer, State
from fedveil.errors import BadArgument, Diverged
from fedveil.federation import checkpoint
from fedveil.federation.checkpoint import StateTag
from fedveil.federation.history import History, RoundRecord
from fedveil.federation.stopping import Monitor
from fedveil.files import lock_folder
from fedveil.plain_json import parse_json
from fedveil.records.shards import MemoryShards, Shards
from fedveil.scheme.losses import Loss
from fedveil.scheme.recover import find_non_finite, select_floats
from fedveil.signals import handle

if TYPE_CHECKING:
    from fedveil.federation.results import RunSummary
    from fedveil.federation.server import Server

LOG = logging.getLogger("fedveil")
Folder = str | os.PathLike[str]
Setting = Mapping[str, object]  # values, keyed by their names in messages
OPTIMIZER, RECORDS = "optimizer", "records"
SPENT = "one more round would exceed the epsilon budget"
LOWER = "lower the learning rate; earlier checkpoints are still available"
CHUNK_SIZE = 2**20  # number of values hashed at a time
CHECKSUM_SIZE = 8  # bytes: enough to detect a change
T = TypeVar("T")


class CheckpointState(TypedDict):
    """The content of a server's checkpoint: no secrets, and no records of clients."""

    round: int
    model: dict[str, Tensor]
    optimizer: StateDict
    schedule: StateDict | None
    defence: State
    best: tuple[float, dict[str, Tensor]] | None
    best_by: NotRequired[str | None]
    setting: dict[str, object]
    records: str  # JSON, because torch is slow to pickle long lists
    private: NotRequired[list[int]]  # clients in this process that have a private state


def find_non_finite_state(optimizer: StateDict) -> str | None:
    """Return the name of the first non-finite tensor in an optimizer's state_dict, or None if all are finite."""
    tensors: dict[str, object] = {}
    for index, state in optimizer["state"].items():
        tensors |= {f"the optimizer's {key} of parameter {index}": value for key, value in state.items()}
    floats, result = select_floats(tensors), None
    for device in {tensor.device for tensor in floats.values()}:  # step counters may be on the CPU
        on_device = {name: tensor for name, tensor in floats.items() if tensor.device == device}
        result = result or find_non_finite(on_device)
    return result


def _copy_state(state: T) -> T:
    """Return a copy that shares no tensor, list or dict with the original."""
    return cast(T, pytree.tree_map(lambda value: value.detach().clone() if isinstance(value, Tensor) else value, state))


class Snapshot:
    """A copy of a server's parameters, buffers, optimizer, schedule, round and records.

    The defence's state is not included: a round whose noise was drawn counts for privacy even if it is undone.
    """

    def __init__(self, server: "StoredServer") -> None:
        self.is_partial = False  # whether a restore was started; if interrupted, it must be repeated
        self.round, self.records = server.round, list(server.history.records)
        self._best, self._best_by = server.best, server.best_by
        trainable_parameters = [value for value in server.model.parameters() if value.requires_grad]
        self._tensors = [(value, value.detach().clone()) for value in (*trainable_parameters, *server.model.buffers())]
        self._optimizer = _copy_state(server.optimizer.state_dict())
        self._schedule = _copy_state(server.schedule.state_dict()) if server.schedule else None

    def restore(self, server: "StoredServer") -> None:
        """Restore everything; may be called again after an interruption."""
        self.is_partial = True
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        server.optimizer.load_state_dict(_copy_state(self._optimizer))
        if server.schedule and self._schedule is not None:
            server.schedule.load_state_dict(_copy_state(self._schedule))
        server.round, server.best, server.best_by = self.round, self._best, self._best_by
        server.history.records[:] = self.records


def checksum_records(shards: Shards, key: bytes) -> str | None:
    """Return a short keyed checksum of all clients' records, or None if they are read batch by batch."""
    if not isinstance(shards, MemoryShards):
        return None
    result = hashlib.blake2b(key=key, digest_size=CHECKSUM_SIZE)
    for value in [*pytree.tree_leaves(shards.inputs), shards.targets]:
        if not isinstance(value, Tensor):
            result.update(repr(value).encode())
            continue
        result.update(f"{value.dtype} {tuple(value.shape)}".encode())
        for chunk in torch.split(value.detach().reshape(-1), CHUNK_SIZE):
            result.update(chunk.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


class StoredServer(ABC):
    """The saved part of a server: model, optimizer, schedule, defence, round, records and best model."""

    model: nn.Module
    device: torch.device
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler | None
    defence: AnyDefence
    defence_server: AnyServer
    loss: Loss
    clip_norm: float | None
    round: int
    best: tuple[float, dict[str, Tensor]] | None
    best_by: str | None  # the metric and mode that chose the best model; None if unknown
    history: History
    planned_rounds: int  # number of the last round that `fit` will run; 0 before the first call
    monitor: Monitor | None  # the monitored metric of the last call to fit
    summary: "RunSummary | None"  # summary of the last call to fit with a folder
    stopped: str | None  # the reason why training ended early
    changed: list[str]  # settings that differ from those of the resumed run
    _lock: AbstractContextManager[None]  # raises an error in a second thread
    _run: bytes  # identifies this run's checkpoints
    _uses_previous: bool  # whether the previous checkpoint is used because the last one on disk was bad
    _can_undo: bool  # whether interrupted rounds are undone
    _snapshot: Snapshot | None  # taken before a round or an evaluation that is not complete yet
    _saved_mark: tuple[object, ...] | None  # identifies the last saved state
    _described_folder: Path | None  # the folder to which the description of the run was written

    def _has_budget(self) -> bool:
        """Return whether the epsilon budget allows one more round; if not, record and log why training stops."""
        if not self.defence_server.has_budget:
            self.stopped = f"after round {self.round}: {SPENT}"
            LOG.warning("fedveil: training stops %s", self.stopped)
        return self.defence_server.has_budget

    def _keep_if_best(self, monitor: Monitor, value: float) -> None:
        """Copy the model's values if they are the best so far, or if another metric chose the best model before."""
        if self.best_by not in (None, str(monitor)) and self.best is not None:
            LOG.warning("fedveil: from now on, %s chooses the best model, not %s", monitor, self.best_by)
            self.best = None
        self.best_by = str(monitor)
        if monitor.improves(value, self.best[0] if self.best else None):
            self.best = value, {key: tensor.detach().clone() for key, tensor in self.model.state_dict().items()}

    def state(self) -> CheckpointState:
        """Return the content of a checkpoint."""
        return {
            "round": self.round,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "defence": {"name": self.defence.name, **self.defence_server.state()},
            "best": self.best,
            "best_by": self.best_by,
            "setting": dict(self.setting()),
            "records": json.dumps([asdict(record) for record in self.history.records]),
        }

    def setting(self) -> Setting:
        """Return the settings that should stay the same when a run is resumed."""
        optimizer = type(self.optimizer).__name__
        return {OPTIMIZER: optimizer, "loss": self.loss.name, "gradient clipping": self.clip_norm or 0.0}

    def save(self, folder: Folder) -> None:
        """Write a checkpoint, and keep the previous one."""
        with self._lock:
            self._undo()
            self._check_state()
            with lock_folder(run_path := Path(folder)):
                self._save(run_path)
            self._uses_previous, self._saved_mark = False, self._mark(run_path)

    def _check_state(self) -> None:
        """Refuse to save a model or an optimizer that is not finite."""
        if name := _find_divergence(self.model.state_dict(), self.optimizer.state_dict()):
            raise self._divergence(f"{name} contains NaN or infinity, so the model is not saved", LOWER)

    def _save(self, folder: Path) -> set[int]:
        """Write a checkpoint and the run's description; return the rounds of all checkpoints that exist now."""
        if self._described_folder != folder:
            self.describe(folder)
            self._described_folder = folder
        durable = self.defence.durable
        return checkpoint.save_last(folder, self.state(), self._tag, bad=self._uses_previous, durable=durable)

    def describe(self, folder: Path) -> None:
        """Write the description of the run, which an audit reads."""
        from fedveil.federation.description import write_description  # imported here because most runs have no folder

        write_description(cast("Server", self), folder)

    @property
    def _tag(self) -> StateTag:
        return StateTag(self._run, self.round)

    def resume(self, folder: Folder) -> None:
        """Continue from the checkpoint in a folder, with the same data order and optimizer state but new secrets.

        If the checkpoint is damaged or its model is not finite, the previous checkpoint is used; this is reported in a
        warning and in the last record.
        """
        errors: list[checkpoint.DamagedCheckpoint] = []
        folder = Path(folder)
        for path in checkpoint.list_checkpoints(folder) or [folder / checkpoint.LAST]:
            try:
                tag, content = checkpoint.read(path, self.device)
                state = cast(CheckpointState, content)
                if name := _find_divergence(state["model"], state["optimizer"]):
                    message = f"the checkpoint is from a run that diverged: {name} contains NaN or infinity"
                    raise checkpoint.DamagedCheckpoint(
                        str(path), message, "start the run again with a lower learning rate"
                    )
                client_states = self._private_states(folder, tag, state)
            except checkpoint.DamagedCheckpoint as error:
                errors.append(error)
                continue
            with self._lock:
                self._restore(folder, state, client_states)
            self._run = tag.run
            self._compare(folder, state)
            self._uses_previous = path.name != checkpoint.LAST
            self._snapshot, self._saved_mark = None, None if self._uses_previous else self._mark(folder)
            if self._uses_previous:
                self._explain_fallback(path, errors)
            return
        if len(errors) == 1:
            raise errors[0]
        raise BadArgument(errors[0].where, f"{errors[0].what}; {errors[1].where} is also damaged", errors[0].fix)

    def _private_states(self, folder: Path, tag: StateTag, state: CheckpointState) -> dict[int, State]:
        """Return the private states of clients in this process, by client; remote clients keep their own."""
        return {}

    def _explain_fallback(self, path: Path, errors: Sequence[checkpoint.DamagedCheckpoint]) -> None:
        """Report that the previous checkpoint is used, and count the lost round for privacy."""
        reason = f"{errors[0].where}: {errors[0].what}" if errors else f"there is no {checkpoint.LAST}"
        message = f"{reason}; the run continues from {path.name}, round {self.round}"
        LOG.warning("fedveil: %s", message)
        if self.history.records:
            last_record = self.history.records[-1]
            self.history.records[-1] = replace(last_record, notes={**last_record.notes, "went_back": message})
        if self.defence_server.accountant is not None:
            self.defence_server.accountant.count()

    def _restore(self, folder: Path, state: CheckpointState, client_states: Mapping[int, State]) -> None:
        expected_names = {"defence": self.defence.name, OPTIMIZER: type(self.optimizer).__name__}
        saved_names = {
            "defence": state["defence"]["name"],
            OPTIMIZER: state["setting"].get(OPTIMIZER, expected_names[OPTIMIZER]),
        }
        for name in expected_names:
            if saved_names[name] != expected_names[name]:
                message = (
                    f"the checkpoint was written with the {name} {saved_names[name]!r}, not {expected_names[name]!r}"
                )
                raise BadArgument(str(folder), message, f"resume with the same {name}")
        configured_lr = self._initial_lr()
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise BadArgument(str(folder), f"the checkpoint is for another model or optimizer: {error}") from error
        restored_lr = self._initial_lr()
        if None not in (restored_lr, configured_lr) and restored_lr != configured_lr:
            fix = 'set federation.optimizer.param_groups[0]["lr"] after resume(folder), then call fit'
            difference = f"{restored_lr}, not {configured_lr}; to change it, {fix}"
            LOG.warning("fedveil: using the checkpoint's learning rate, %s", difference)
        if self.schedule and state["schedule"]:
            self.schedule.load_state_dict(state["schedule"])
        self.defence_server.restore(state["defence"])
        self._restore_clients(client_states)
        self.round, self.best, self.best_by = state["round"], state["best"], state.get("best_by")
        records = [RoundRecord(**record) for record in parse_json(str(folder), state["records"])]
        self.history.records[:] = records

    def _restore_clients(self, states: Mapping[int, State]) -> None:
        """Restore the private states of clients in this process; remote clients keep their own."""
        return

    def _compare(self, folder: Path, state: CheckpointState) -> None:
        """Record which settings have changed, and warn about them."""
        old_settings, new_settings = state["setting"], self.setting()
        names = [name for name in old_settings if None not in (old_settings[name], new_settings.get(name))]
        self.changed = [name for name in names if old_settings[name] != new_settings[name]]
        if self.changed:
            message = f"the run in {folder} was trained with different settings ({', '.join(self.changed)})"
            LOG.warning("fedveil: %s; the history and the best model now combine both", message)

    def _initial_lr(self) -> float | None:
        """Return the optimizer's initial learning rate, or None if a schedule may have changed it."""
        group = self.optimizer.param_groups[0]
        lr = group.get("initial_lr", None if self.schedule else group["lr"])
        return None if lr is None else float(lr)

    def _open(self, folder: Path, resume: bool) -> None:
        """Resume the run in a folder, if there is one, or refuse to mix it with this run."""
        paths = checkpoint.list_checkpoints(folder)
        tag = checkpoint.read_tag(paths[0]) if paths else None
        is_same_run = tag.run == self._run if tag else self.round > 0
        if paths and not is_same_run and not (resume and self.round == 0):
            fix = "pass resume=True before the first round to continue that run, or choose another folder"
            raise BadArgument(str(folder), "this folder contains another run", fix)
        if paths and not is_same_run:
            self.resume(folder)
            LOG.info("fedveil: %s: resumed after round %d", folder, self.round)
        if self._uses_previous:
            self.save(folder)

    def _undo(self, *, diverged: bool = False) -> None:
        """Restore the last complete state if a round or an evaluation was interrupted or diverged."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        is_complete = self.round > snapshot.round and len(self.history.records) > len(snapshot.records)
        if diverged or snapshot.is_partial or not is_complete:
            snapshot.restore(self)
        self._snapshot = None

    @contextlib.contextmanager
    def _saving(self, folder: Path) -> Iterator[None]:
        """Write the models after training, or the last complete round after a failure; allow rounds to be undone."""
        self._can_undo = True
        try:
            yield
            self._write_models(folder)
        except BaseException as error:
            self._save_on_failure(folder, error)
            raise
        finally:
            self._can_undo = False

    def _save_on_failure(self, folder: Path, error: BaseException) -> None:
        """Save the last complete state; only log errors, so that the error that ended the run is raised."""
        try:
            with handle(signal.SIGINT, signal.SIG_IGN):  # a second Ctrl-C must not interrupt the save
                self._undo(diverged=isinstance(error, Diverged))
                accountant = self.defence_server.accountant
                has_counted_rounds = accountant is not None and accountant.rounds > 0
                if (self.round or has_counted_rounds) and (
                    self.defence.durable or self._saved_mark != self._mark(folder)
                ):
                    self.save(folder)
        except Exception as save_error:
            LOG.warning("fedveil: round %d could not be saved: %s", self.round, save_error)

    def _mark(self, folder: Path) -> tuple[object, ...]:
        """Return a value that changes whenever the checkpoint in a folder becomes outdated."""
        records = self.history.records
        return folder.resolve(), self._run, self.round, bool(records and records[-1].evaluated)

    def _write_models(self, folder: Path) -> None:
        """Write the last and the best model, and a checkpoint unless it is up to date."""
        if self.round and self._saved_mark != self._mark(folder):
            self.save(folder)
        self._check_state()
        self.describe(folder)  # once more, because more clients may have joined
        checkpoint.save_values(folder / checkpoint.MODEL, self.model.state_dict(), self.round)
        if self.best:
            checkpoint.save_values(folder / checkpoint.BEST, self.best[1], self.round)

    def _divergence(self, reason: str, fix: str) -> Diverged:
        return Diverged(f"round {self.round}", f"training diverged: {reason}", fix)


def _find_divergence(model: Mapping[str, Tensor], optimizer: StateDict) -> str | None:
    """Return the name of the first non-finite tensor of a model or its optimizer, or None if all are finite."""
    return find_non_finite(select_floats(model)) or find_non_finite_state(optimizer)
