"""The state of a server: restored in memory if a round is interrupted, and kept on disk as checkpoints."""

import json
import logging
import os
import signal
from abc import ABC
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from fedveil.defences.interface import AnyDefence, AnyServer
from fedveil.errors import BadArgument, Diverged
from fedveil.federation import checkpoint
from fedveil.federation.finite import find_non_finite, find_non_finite_state, select_floats
from fedveil.federation.history import History
from fedveil.federation.setting import Setting, list_changes
from fedveil.federation.snapshot import Snapshot
from fedveil.federation.threads import OneThread
from fedveil.locks import locked
from fedveil.plain_json import parse_json
from fedveil.scheme.losses import Loss
from fedveil.signals import handle

LOG = logging.getLogger("fedveil")
Folder = str | os.PathLike[str]
OPTIMISER = "optimiser"
LOWER = "lower the learning rate; checkpoints that were written before are kept"


class Stored(ABC):
    """A server as far as it is kept: model, optimiser, schedule, defence, round, records and best model."""

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
    history: History
    changed: list[str]  # settings that differ from those of the run that was resumed
    _alone: OneThread
    _run: bytes  # which checkpoints are this run's
    _behind: bool  # the last checkpoint on disk is bad, and the one before was used
    _before: Snapshot | None  # of a round, or of an evaluation, that is not complete
    _saved: tuple[object, ...] | None  # what was written last

    def state(self) -> dict[str, Any]:
        """Return everything that the server's checkpoint holds: never a secret, and no record of a client."""
        return {
            "round": self.round,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "defence": {"name": self.defence.name, **self.defence_server.state()},
            "best": self.best,
            "setting": dict(self.setting()),
            "records": json.dumps(self.history.records),  # as one text: torch pickles a long list slowly
        }

    def setting(self) -> Setting:
        """Return the settings that should be the same when a run is resumed."""
        optimizer = type(self.optimizer).__name__
        return {OPTIMISER: optimizer, "loss": self.loss.name, "gradient clipping": self.clip_norm or 0.0}

    def save(self, folder: Folder) -> None:
        """Write the checkpoint; the one before stays beside it."""
        with self._alone:
            self._undo()
            self._check_state()
            with locked(home := Path(folder)):
                self._save(home)
            self._behind, self._saved = False, self._mark(home)

    def _check_state(self) -> None:
        """Refuse to save a model or an optimiser that is not finite."""
        name = find_non_finite(select_floats(self.model.state_dict()))
        name = name or find_non_finite_state(self.optimizer.state_dict())
        if name is not None:
            raise self._divergence(f"{name} holds NaN or infinity, and such a model is not saved", LOWER)

    def _save(self, folder: Path) -> set[int]:
        """Write the checkpoint; returns the rounds of those that are there now."""
        counts = self.defence.durable
        return checkpoint.save_last(folder, self.state(), self._belongs, bad=self._behind, counts=counts)

    @property
    def _belongs(self) -> checkpoint.Belongs:
        return checkpoint.Belongs(self._run, self.round)

    def resume(self, folder: Folder) -> None:
        """Continue from a folder's checkpoint: same data order and optimiser state, new secrets.

        If it is damaged, or its model is not finite, the one before is used; a warning and the last record say so.
        """
        damaged: list[checkpoint.Damaged] = []
        folder = Path(folder)
        for path in checkpoint.found_in(folder) or [folder / checkpoint.LAST]:
            try:
                belongs, state = checkpoint.read(path, self.device)
                checkpoint.check_model(path, state)
                private = self._private_states(folder, belongs, state)
            except checkpoint.Damaged as error:
                damaged.append(error)
                continue
            with self._alone:
                self._restore(folder, state, private)
            self._run = belongs.run if belongs else self._run
            self._compare(folder, state)
            self._behind = path.name != checkpoint.LAST
            self._before, self._saved = None, None if self._behind else self._mark(folder)
            if self._behind:
                self._say_why(path, damaged)
            return
        if len(damaged) == 1:
            raise damaged[0]
        raise BadArgument(damaged[0].where, f"{damaged[0].what}; so is {damaged[1].where}", damaged[0].fix)

    def _private_states(
        self, folder: Path, belongs: checkpoint.Belongs | None, state: dict[str, Any]
    ) -> dict[int, dict[str, Any]]:
        """Return the private states of clients in this process, by client; remote clients keep their own."""
        return {}

    def _say_why(self, path: Path, damaged: Sequence[checkpoint.Damaged]) -> None:
        """Say that the checkpoint before the last one is used; the round between them counts for privacy."""
        why = f"{damaged[0].where}: {damaged[0].what}" if damaged else f"there is no {checkpoint.LAST}"
        text = f"{why}; the run continues from {path.name}, round {self.round}"
        LOG.warning("fedveil: %s", text)
        if self.history.records:
            self.history.records[-1]["went_back"] = text
        if self.defence_server.accountant is not None:
            self.defence_server.accountant.count()

    def _restore(self, folder: Path, state: dict[str, Any], private: Mapping[int, dict[str, Any]]) -> None:
        wrote = state["defence"]["name"]
        if wrote != self.defence.name:
            what = f"the checkpoint is of defence {wrote!r}, not {self.defence.name!r}"
            raise BadArgument(str(folder), what, "resume with the defence that wrote it")
        own = type(self.optimizer).__name__
        if (optimizer := state.get("setting", {}).get(OPTIMISER, own)) != own:
            what = f"the checkpoint is of the optimiser {optimizer}, not {own}"
            raise BadArgument(str(folder), what, "resume with the optimiser that wrote it")
        asked = self._first_rate()
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise BadArgument(str(folder), f"the checkpoint is of another model or optimiser: {error}") from error
        kept = self._first_rate()
        if None not in (kept, asked) and kept != asked:
            how = 'set federation.optimizer.param_groups[0]["lr"] after resume(folder), then call fit'
            told = f"{kept}, not {asked}; to change it, {how}"
            LOG.warning("fedveil: the checkpoint's learning rate is used, %s", told)
        if self.schedule and state["schedule"]:
            self.schedule.load_state_dict(state["schedule"])
        self.defence_server.restore(state["defence"])
        self._restore_clients(private)
        self.round, self.best = state["round"], state["best"]
        records = state["records"]
        self.history = History(parse_json(str(folder), records) if isinstance(records, str) else list(records))

    def _restore_clients(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Restore the private states of clients in this process; remote clients keep their own."""
        return

    def _compare(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Record which settings changed, and warn of them; earlier versions wrote no settings."""
        self.changed = list_changes(state.get("setting", {}), self.setting())
        if self.changed:
            what = f"the run in {folder} was trained with a different setting ({', '.join(self.changed)})"
            LOG.warning("fedveil: %s; its history and best model now mix both", what)

    def _first_rate(self) -> float | None:
        """The learning rate that the optimiser was made with; None if a schedule has changed it since."""
        group = self.optimizer.param_groups[0]
        rate = group.get("initial_lr", None if self.schedule else group["lr"])
        return None if rate is None else float(rate)

    def _open(self, folder: Path, resume: bool) -> None:
        """Continue the run in a folder, or refuse to mix it with this one."""
        found = checkpoint.found_in(folder)
        header = checkpoint.header(found[0]) if found else None
        own = header.run == self._run if header else self.round > 0
        if found and not own and not (resume and self.round == 0):
            fix = "pass resume=True before the first round to continue it, or choose another folder"
            raise BadArgument(str(folder), "there is another run in this folder", fix)
        if found and not own:
            self.resume(folder)
            LOG.info("fedveil: %s: resumed after round %d", folder, self.round)
        if self._behind:
            self.save(folder)

    def _undo(self, *, diverged: bool = False) -> None:
        """Go back to the last complete state if a round or an evaluation was interrupted half-way, or diverged."""
        before = self._before
        if before is None:
            return
        complete = self.round > before.round and len(self.history.records) > before.count
        if diverged or before.begun or not complete:
            before.restore(self)
        self._before = None

    def _keep(self, folder: Path, error: BaseException) -> None:
        """Write the last complete state; if that fails, the error that ended the run is still the one to be seen."""
        try:
            with handle(signal.SIGINT, signal.SIG_IGN):  # a second Ctrl-C must not stop the save
                self._undo(diverged=isinstance(error, Diverged))
                accountant = self.defence_server.accountant
                counted = accountant is not None and accountant.rounds > 0
                if (self.round or counted) and (self.defence.durable or self._saved != self._mark(folder)):
                    self.save(folder)
        except Exception as failure:
            LOG.warning("fedveil: round %d could not be saved: %s", self.round, failure)

    def _mark(self, folder: Path) -> tuple[object, ...]:
        """Return a value that changes whenever the checkpoint in a folder becomes outdated."""
        records = self.history.records
        return folder.resolve(), self._run, self.round, bool(records and records[-1].get("evaluated"))

    def _write_models(self, folder: Path) -> None:
        """Write the last and the best model, and the checkpoint if it is older."""
        if self.round and self._saved != self._mark(folder):
            self.save(folder)
        self._check_state()
        checkpoint.save_values(folder / checkpoint.MODEL, self.model.state_dict(), self.round)
        if self.best:
            checkpoint.save_values(folder / checkpoint.BEST, self.best[1], self.round)

    def _divergence(self, what: str, fix: str) -> Diverged:
        return Diverged(f"round {self.round}", f"training diverged: {what}", fix)
