"""The server's loop, wherever its clients are: rounds, optimizer, metrics, checkpoints."""

import contextlib
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fedveil.checks import one_of, positive, whole
from fedveil.defences.interface import AnyDefence, Defence
from fedveil.defences.registry import build
from fedveil.errors import BadArgument, NonFiniteUpdate
from fedveil.federation.evaluate import better, counting, metrics, predict_source
from fedveil.federation.finite import find_non_finite, find_non_finite_state, select_floats
from fedveil.federation.fitting import Callback, Plan, list_callbacks
from fedveil.federation.history import History, Record
from fedveil.federation.limits import Limits, limits_for
from fedveil.federation.optimise import Optimizer, Schedule, make_optimizer, make_schedule, plateau_value
from fedveil.federation.prepare import read_held_out
from fedveil.federation.snapshot import Snapshot
from fedveil.federation.stored import LOG, LOWER, Folder, Stored
from fedveil.federation.targets import attribute_targets
from fedveil.federation.threads import OneThread
from fedveil.graph.wrapped import refuse_wrapped
from fedveil.locks import locked
from fedveil.records.sources import Given, Source
from fedveil.scheme.losses import Function, Loss, find_loss
from fedveil.scheme.outputs import head_axis
from fedveil.scheme.result import Aggregate

__all__ = ["Callback", "Folder", "History", "Record", "Seen", "Server"]
Seen = Callable[[Any, Sequence[Any]], None]
SCALE = "scale inputs and targets, or change the loss or the model: without a step it is not the learning rate"
LEFT = "the model in memory keeps what the step made of it"
BACK = "the model in memory is that of before the step, the last finite one"


class Server(Stored):
    """A model, its optimiser and a defence; `exchange` says how clients are reached. Arguments as for `Federation`."""

    def __init__(
        self,
        model: nn.Module,
        defence: str | AnyDefence,
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
        if not isinstance(defence, str) and (isinstance(defence, type) or not isinstance(defence, Defence)):
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
        self.optimizer = make_optimizer(optimizer, self._parameters)
        self.schedule = make_schedule(schedule, self.optimizer)
        self.schedule_every = one_of(type(self).__name__, "schedule_every", schedule_every, ("epoch", "round"))
        self.clip_norm = None if clip_norm is None else positive(type(self).__name__, "clip_norm", clip_norm)
        self.round = 0
        self.best: tuple[float, dict[str, Tensor]] | None = None
        self.history = History()
        self.changed = list[str]()
        self._alone = OneThread(type(self).__name__)
        self._run = secrets.token_bytes(16)  # which checkpoints are this run's
        self._behind = False  # the last checkpoint on disk is bad, and the one before was used
        self._keeping = False  # a round that is interrupted is undone
        self._before: Snapshot | None = None  # of a round, or of an evaluation, that is not complete
        self._saved: tuple[object, ...] | None = None  # what was written last

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
            self._undo()
            result = self._exchange(seen)
            self._advance(result)
            return result

    def _exchange(self, seen: Seen | None = None) -> Aggregate:
        try:
            return self.exchange(seen)
        except NonFiniteUpdate as error:
            raise self._divergence(f"{error.where}: {error.what}", LOWER if self.round else SCALE) from error

    def _advance(self, result: Aggregate) -> None:
        """Step the optimiser, the round and the schedule."""
        self._apply(result)
        self.round += 1
        due = self.schedule_every == "round" or self.round % self.rounds_per_epoch == 0
        if self.schedule and due and not isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step()

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
            raise self._divergence(f"the optimiser's step overflows; {self._left}", LOWER) from error
        for name, value in result.buffers.items():
            self._buffers[name].copy_(value)
        infinite = find_non_finite(self._changing)
        if infinite is None and self._keeping:
            infinite = find_non_finite_state(self.optimizer.state_dict())
        if infinite is not None:
            raise self._divergence(f"after the step {infinite} holds NaN or infinity; {self._left}", LOWER)

    @property
    def _left(self) -> str:
        return LEFT if self._before is None else BACK

    def fit(
        self,
        epochs: int = 1,
        *,
        test: Given | None = None,
        rounds: int | None = None,
        evaluate_every: int | None = None,
        folder: Folder | None = None,
        resume: bool = False,
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
            folder: where checkpoints go, and at the end the last and the best model (`fedveil.load_model`). There is a
                checkpoint after each evaluation (without test data at the same interval), at least once a minute, and
                at the end. An exception or an interrupt leaves one of the last complete round that is finite, and goes
                through; a round that was half-way is undone, in memory too.
            resume: continue the run in the folder, if there is one. Without it such a folder is refused.
            checkpoint_every: rounds between further checkpoints. After every round of a durable defence there is one,
                for privacy accounting.
            patience: stop early after this number of evaluations without a better one.
            on_round: called with each round's record; or several such functions.

        Returns:
            One record per round: round, epoch, error (of the recovered gradient), lr, seconds since the start; and
            accuracy, auc, mse or loss where the model was evaluated.
        """
        home, calls = None if folder is None else Path(folder), list_callbacks(on_round)
        for name, count in {"epochs": epochs, "rounds": 0 if rounds is None else rounds}.items():
            whole("fit", name, count, 0)
        _check_every("evaluate_every", evaluate_every, 1)
        _check_every("checkpoint_every", checkpoint_every, 0)
        held = None if test is None else self._read_test(test)
        self._check_watched(held, patience)
        if resume and home is None:
            raise BadArgument("fit", "resume=True needs the folder of the run", "pass folder=, too")
        last = rounds if rounds is not None else epochs * self.rounds_per_epoch
        self._say_if_done(last, rounds is None)
        every = evaluate_every or self.rounds_per_epoch
        plan = Plan(last, every, held, patience, calls, home, checkpoint_every or 0, self.defence.durable)
        with self._alone, locked(home) if home else contextlib.nullcontext():
            self._undo()
            if home is None:
                self._train(plan)
                return self.history
            self._open(home, resume)
            self._keeping = True
            try:
                self._train(plan)
                self._write_models(home)
            except BaseException as error:
                self._keep(home, error)
                raise
            finally:
                self._keeping = False
        return self.history

    def _train(self, plan: Plan) -> None:
        """Train up to the plan's last round; an evaluation that was interrupted comes first."""
        before = self.history.records[-1]["seconds"] if self.history.records else 0.0  # of a run that was resumed
        started = time.perf_counter() - before
        if plan.test is not None and self.history.records and self.history.records[-1].get("evaluated") is False:
            self._complete(plan, started)
        while self.round < plan.last and not self.stalled(plan.patience):
            rate = self.optimizer.param_groups[0]["lr"]
            result = self._exchange()
            if self._keeping:
                self._before = Snapshot(self)
            self._advance(result)
            record: Record = {
                "round": self.round,
                "epoch": self.round / self.rounds_per_epoch,
                "error": result.error,
                "lr": float(rate),
                **result.figures,
                **result.notes,
                "seconds": time.perf_counter() - started,
            }
            if plan.evaluates(self.round):
                record["evaluated"] = False  # not yet
            self.history.records.append(record)
            self._complete(plan, started)

    def _complete(self, plan: Plan, started: float) -> None:
        """Evaluate the last round if that is due, write a checkpoint if that is due, and tell the callbacks."""
        record = self.history.records[-1]
        if plan.test is not None and record.get("evaluated") is False:
            self._evaluate(plan.test, record, started)
        self._before = None
        if plan.folder and (plan.saves(self.round) or self.stalled(plan.patience)):
            self.save(plan.folder)  # before anybody hears of the round: whatever follows, it counts
            plan.note_save()
        for call in plan.calls:
            call(dict(record))

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

    def _evaluate(self, test: Source, record: Record, started: float) -> None:
        """Enter the metrics of the test data into a record, and let those who wait for them know."""
        outputs, targets = predict_source(self.model, test)
        with attribute_targets(test.who):
            found = metrics(outputs, targets, self.loss, axis=head_axis(self.model))
        name = counting(found)
        value = found[name]
        if value != value:
            raise self._divergence(f"{name} is not a number, although the test data are finite", LOWER)
        if self._keeping:
            self._before = Snapshot(self)  # the round is complete, its evaluation is not
        if better(name, value, self.best[0] if self.best else None):
            self.best = value, {key: tensor.detach().clone() for key, tensor in self.model.state_dict().items()}
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(plateau_value(self.schedule, found))
        record.update(found, evaluated=True, seconds=time.perf_counter() - started)


def _check_every(name: str, rounds: int | None, least: int) -> None:
    """Refuse an interval that is not a number of rounds."""
    if rounds is not None:
        whole("fit", name, rounds, least, f"give {name} a number of rounds")
