"""What every server does, wherever its clients are: rounds, optimiser, metrics, checkpoints."""

import contextlib
import json
import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fedveil.checks import one_of, positive, whole
from fedveil.defences import Aggregate, Defence, Private
from fedveil.defences.registry import build
from fedveil.errors import BadArgument, Diverged, NonFiniteUpdate
from fedveil.federation import checkpoint
from fedveil.federation.evaluate import better, counting, metrics, predict_source
from fedveil.federation.finite import find_non_finite, select_floats
from fedveil.federation.held_out import read_held_out
from fedveil.federation.limits import Limits, limits_for
from fedveil.federation.optimise import Optimizer, Schedule, optimizer_of, plateau_value, schedule_of
from fedveil.federation.sources import Given, Source
from fedveil.federation.targets import targets_of
from fedveil.federation.threads import OneThread
from fedveil.graph.wrapped import refuse_wrapped
from fedveil.locks import locked
from fedveil.plain_json import parse_json
from fedveil.scheme.losses import Function, Loss, find_loss
from fedveil.scheme.outputs import head_axis

LOG = logging.getLogger("fedveil")
Record = dict[str, Any]
Folder = str | os.PathLike[str]
Callback = Callable[[Record], object]
Seen = Callable[[Any, Sequence[Any]], None]
LOWER = "lower the learning rate; checkpoints that were written before are kept"
SCALE = "scale inputs and targets, or change the loss or the model: without a step it is not the learning rate"
LEFT = "the model in memory keeps what the step made of it"


@dataclass
class History:
    """One record per round: round, epoch, seconds, error; metrics where the model was evaluated."""

    records: list[Record] = field(default_factory=list)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(round, value) of a metric."""
        return [(record["round"], record[name]) for record in self.records if name in record]

    @property
    def last(self) -> Record:
        """The latest evaluation."""
        return next((r for r in reversed(self.records) if r.get("evaluated")), {})


class Server(ABC):
    """A model, its optimiser and a defence; `exchange` says how clients are reached. Arguments as for `Federation`."""

    def __init__(
        self,
        model: nn.Module,
        defence: str | Defence,
        optimizer: Optimizer,
        *,
        schedule: Schedule | None = None,
        schedule_every: str = "epoch",
        clip_norm: float | None = None,
        loss: str | Loss | Function,
        limits: Limits | None = None,
    ) -> None:
        refuse_wrapped(type(self).__name__, model)
        self.model = model
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        if not isinstance(defence, str) and (isinstance(defence, type) or not hasattr(defence, "broadcast")):
            what = f"defence is {defence!r}"
            raise BadArgument(
                type(self).__name__, what, '"plain" for none, "veil", or an object like fedveil.defences.Veil()'
            )
        self.defence = build(defence) if isinstance(defence, str) else defence
        self.limits = limits_for(self.defence, limits)
        self.loss = find_loss(loss)
        self._parameters, self._buffers = dict(model.named_parameters()), dict(model.named_buffers())
        trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        self._changing = select_floats(trained | self._buffers)  # in a step
        if (name := find_non_finite(select_floats(self._parameters | self._buffers))) is not None:
            fix = "give it finite values; a mask of -inf can be a bool tensor, or made in forward"
            raise BadArgument(type(self).__name__, f"the model's {name} holds NaN or infinity", fix)
        self.optimizer = optimizer_of(optimizer, self._parameters)
        self.schedule = schedule_of(schedule, self.optimizer)
        self.schedule_every = one_of(type(self).__name__, "schedule_every", schedule_every, ("epoch", "round"))
        self.clip_norm = None if clip_norm is None else positive(type(self).__name__, "clip_norm", clip_norm)
        self.round = 0
        self.best: tuple[float, dict[str, Tensor]] | None = None
        self.history = History()
        self._alone = OneThread(type(self).__name__)
        self._run = secrets.token_bytes(16)  # which checkpoints are this run's
        self._behind = False  # the last checkpoint on disk is bad, and the one before was used

    @property
    @abstractmethod
    def rounds_per_epoch(self) -> int:
        """Rounds in which the largest client sees each of its records once."""

    @abstractmethod
    def exchange(self, seen: Seen | None = None) -> Aggregate:
        """Broadcast, the clients' work, and what the server makes of it; the model stays as it is."""

    def step(self, seen: Seen | None = None) -> Aggregate:
        """One round; `seen` gets what travelled in it: the broadcast and the uploads (one, if clients are fused)."""
        with self._alone:
            try:
                result = self.exchange(seen)
            except NonFiniteUpdate as error:
                raise self._divergence(f"{error.where}: {error.what}", LOWER if self.round else SCALE) from error
            finally:
                self.defence.forget()  # no secret is left, however the exchange ends
            self._apply(result)
            self.round += 1
            due = self.schedule_every == "round" or self.round % self.rounds_per_epoch == 0
            if self.schedule and due and not isinstance(self.schedule, ReduceLROnPlateau):
                self.schedule.step()
            return result

    def _apply(self, result: Aggregate) -> None:
        """Let the optimiser step, and take over the buffers; a model that becomes infinite is refused."""
        for name, parameter in self._parameters.items():
            parameter.grad = result.gradients.get(name)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self.clip_norm)
        try:
            self.optimizer.step()
        except (RuntimeError, OverflowError) as error:
            if "overflow" not in str(error):
                raise
            raise self._divergence(f"the optimiser's step overflows; {LEFT}", LOWER) from error
        for name, value in result.buffers.items():
            self._buffers[name].copy_(value)
        if (infinite := find_non_finite(self._changing)) is not None:
            raise self._divergence(f"after the step {infinite} holds NaN or infinity; {LEFT}", LOWER)

    def _divergence(self, what: str, fix: str) -> Diverged:
        return Diverged(f"round {self.round}", f"training diverged: {what}", fix)

    def fit(
        self,
        epochs: int = 1,
        *,
        test: Given | None = None,
        rounds: int | None = None,
        evaluate_every: int | None = None,
        folder: Folder | None = None,
        checkpoint_every: int | None = None,
        patience: int | None = None,
        on_round: Callback | Sequence[Callback] | None = None,
    ) -> History:
        """Train up to `epochs` epochs (or `rounds` rounds) from the start, whatever was done already.

        There are no local epochs: clients compute gradients of a masked model, which the server alone can step.

        Args:
            epochs: how often the largest client goes through its records.
            test: held-out records, in any form that clients may have; evaluated after each epoch.
            rounds: in place of epochs.
            evaluate_every: rounds, in place of an epoch.
            folder: where checkpoints go, and at the end the last and the best model (`fedveil.load_model`).
            checkpoint_every: rounds between checkpoints. There is always one at the end, and, for privacy accounting,
                one after every round of a durable defence.
            patience: stop early after so many evaluations without a better one.
            on_round: called with each round's record; or several such functions.

        Returns:
            One record per round: round, epoch, error (of the recovered gradient), lr, seconds since the start; and
            accuracy, auc, mse or loss where the model was evaluated.
        """
        home, calls = None if folder is None else Path(folder), _several(on_round)
        for name, count in {"epochs": epochs, "rounds": 0 if rounds is None else rounds}.items():
            whole("fit", name, count, 0)
        _check_every("evaluate_every", evaluate_every, 1)
        _check_every("checkpoint_every", checkpoint_every, 0)
        held = None if test is None else self._read_test(test)
        self._check_watched(held, patience)
        last = rounds if rounds is not None else epochs * self.rounds_per_epoch
        self._say_if_done(last, rounds is None)
        every = evaluate_every or self.rounds_per_epoch
        before = self.history.records[-1]["seconds"] if self.history.records else 0.0  # of a run that was resumed
        started = time.perf_counter() - before
        with self._alone, locked(home) if home else contextlib.nullcontext():
            if home and self.round == 0 and checkpoint.found_in(home):
                fix = "federation.resume(folder) before fit to go on with it, or another folder"
                raise BadArgument(str(home), "there is another run in this folder", fix)
            if home and self._behind:
                self.save(home)
            while self.round < last and not self.stalled(patience):
                rate = self.optimizer.param_groups[0]["lr"]
                result = self.step()
                record: Record = {
                    "round": self.round,
                    "epoch": self.round / self.rounds_per_epoch,
                    "error": result.error,
                    "lr": float(rate),
                }
                record |= result.details
                if held is not None and (self.round % every == 0 or self.round == last):
                    record |= self._evaluate(held)
                record["seconds"] = time.perf_counter() - started
                self.history.records.append(record)
                for call in calls:
                    call(record)
                due = self.defence.durable or (checkpoint_every and self.round % checkpoint_every == 0)
                if home and (self.round == last or due or self.stalled(patience)):
                    self.save(home)
            if home:
                self._check_model()
                checkpoint.save_values(home / checkpoint.MODEL, self.model.state_dict())
            if home and self.best:
                checkpoint.save_values(home / checkpoint.BEST, self.best[1])
        return self.history

    def _read_test(self, test: Given) -> Source:
        """Test data, checked against the model and the loss."""
        return read_held_out(test, self.model, self.loss, self.dtype)

    def _say_if_done(self, last: int, in_epochs: bool) -> None:
        """Warn of a second call of fit that trains nothing: it counts from the start, not from the last call."""
        if 0 < last <= self.round:
            unit, more = ("epochs", self.round // self.rounds_per_epoch) if in_epochs else ("rounds", self.round)
            what = f"{unit} count from the start, and round {self.round} is done already"
            LOG.warning("fedveil: fit trains nothing: %s; fit(%s=%d) trains more", what, unit, more + 1)

    def _check_watched(self, test: Source | None, patience: int | None) -> None:
        """Refuse to wait for better metrics where nothing is evaluated."""
        waiting = "patience" if patience is not None else "ReduceLROnPlateau"
        if patience is not None:
            whole("fit", "patience", patience)
        if test is None and (patience is not None or isinstance(self.schedule, ReduceLROnPlateau)):
            raise BadArgument("fit", f"{waiting} needs a metric, and there are no test data", "fit(..., test=test)")

    def stalled(self, patience: int | None) -> bool:
        """Whether the last `patience` evaluations were no better than one before them."""
        records = self.history.records
        if patience is None or not records or not records[-1].get("evaluated"):
            return False
        name = counting(records[-1])
        values, best = [value for _, value in self.history.curve(name)], 0
        for place, value in enumerate(values):
            best = place if better(name, value, values[best]) else best
        return len(values) - 1 - best >= patience

    def _evaluate(self, test: Source) -> Record:
        outputs, targets = predict_source(self.model, test)
        with targets_of(test.who):
            found = metrics(outputs, targets, self.loss, axis=head_axis(self.model))
        name = counting(found)
        value = found[name]
        if value != value:
            raise self._divergence(f"{name} is not a number, although the test data are finite", LOWER)
        if better(name, value, self.best[0] if self.best else None):
            self.best = value, {key: tensor.detach().clone() for key, tensor in self.model.state_dict().items()}
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(plateau_value(self.schedule, found))
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
            "records": json.dumps(self.history.records),  # as one text: torch pickles a long list slowly
        }

    def save(self, folder: Folder) -> None:
        """Write the checkpoint; the one before stays beside it."""
        with self._alone:
            self._check_model()
            with locked(home := Path(folder)):
                self._save(home)
            self._behind = False

    def _check_model(self) -> None:
        """Refuse to save a model that is not finite."""
        if (name := find_non_finite(select_floats(self.model.state_dict()))) is not None:
            raise self._divergence(f"{name} holds NaN or infinity, and such a model is not saved", LOWER)

    def _save(self, folder: Path) -> set[int]:
        """Write the checkpoint; returns the rounds of those that are there now."""
        return checkpoint.save_last(folder, self.state(), self._belongs, bad=self._behind)

    @property
    def _belongs(self) -> checkpoint.Belongs:
        return checkpoint.Belongs(self._run, self.round)

    def resume(self, folder: Folder) -> None:
        """Go on from a folder's checkpoint: same data order and optimiser state, new secrets.

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
            self._behind = path.name != checkpoint.LAST
            if self._behind:
                self._say_why(path, damaged)
            return
        if len(damaged) == 1:
            raise damaged[0]
        raise BadArgument(damaged[0].where, f"{damaged[0].what}; so is {damaged[1].where}", damaged[0].fix)

    def _private_states(
        self, folder: Path, belongs: checkpoint.Belongs | None, state: dict[str, Any]
    ) -> dict[int, dict[str, Any]]:
        """What clients of this process keep to themselves, by client; of other processes' nothing is here."""
        return {}

    def _say_why(self, path: Path, damaged: Sequence[checkpoint.Damaged]) -> None:
        """Say that the checkpoint before the last one is used; the round between them counts for privacy."""
        why = f"{damaged[0].where}: {damaged[0].what}" if damaged else f"there is no {checkpoint.LAST}"
        text = f"{why}; the run goes on from {path.name}, round {self.round}"
        LOG.warning("fedveil: %s", text)
        if self.history.records:
            self.history.records[-1]["went_back"] = text
        if isinstance(self.defence, Private):
            self.defence.count_lost()

    def _restore(self, folder: Path, state: dict[str, Any], private: Mapping[int, dict[str, Any]]) -> None:
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
        for client, own in private.items():
            self.defence.restore_client(client, own)
        self.round, self.best = state["round"], state["best"]
        records = state["records"]
        self.history = History(parse_json(str(folder), records) if isinstance(records, str) else list(records))


def _check_every(name: str, rounds: int | None, least: int) -> None:
    """Refuse what is no number of rounds."""
    if rounds is not None:
        whole("fit", name, rounds, least, f"give {name} a number of rounds")


def _several(given: Callback | Sequence[Callback] | None) -> Sequence[Callback]:
    """The callbacks as a list; whatever cannot be called is refused."""
    calls = [] if given is None else list(given) if isinstance(given, Sequence) else [given]
    for call in calls:
        if not callable(call):
            raise BadArgument("fit", f"on_round is {call!r}", "a function of a round's record, or a list of them")
    return calls
