"""The server's training loop, which is the same for all engines."""

import contextlib
import dataclasses
import math
import secrets
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fedveil.checks import SingleThreadLock, check_choice, check_count, check_positive, suspend_autocast
from fedveil.defences.interface import AnyClient, AnyDefence, AnyRound, AnyServer, Defence
from fedveil.defences.registry import build
from fedveil.errors import BadArgument, NonFiniteUpdate, TooFewAnswers
from fedveil.federation import fitting
from fedveil.federation.evaluate import PRIMARY
from fedveil.federation.fitting import Callback, Evaluation, FitPlan, MetricChoices
from fedveil.federation.history import History, RoundRecord
from fedveil.federation.limits import Limits, adapt_limits
from fedveil.federation.prepare import (
    TEST,
    VALIDATION_DATA,
    HeldOut,
    Optimizer,
    Schedule,
    make_optimizer,
    make_schedule,
    read_held_out,
)
from fedveil.federation.protocol import Engine, FaultKind, FaultLog, Member
from fedveil.federation.rounds import Observer, RoundKind, RoundPolicy
from fedveil.federation.state import LOWER, SPENT, Folder, Snapshot, StoredServer, find_non_finite_state
from fedveil.federation.stopping import plateau_value
from fedveil.files import lock_folder
from fedveil.graph.foreign_code import find_original
from fedveil.graph.inputs import Inputs
from fedveil.records.shards import generator
from fedveil.records.sources import UserRecords
from fedveil.scheme.losses import Function, Loss, find_loss
from fedveil.scheme.recover import find_non_finite, select_floats
from fedveil.scheme.result import Aggregate, Note

if TYPE_CHECKING:
    from fedveil.federation.description import RunTerms
    from fedveil.federation.results import RunDetails
    from fedveil.federation.user_metrics import Metric
    from fedveil.secagg import Roster

SCALE = "scale inputs and targets, or change the loss or the model: the learning rate has had no effect yet"
NOT_RESTORED = "the model in memory has the values after the step"
RESTORED = "the model in memory has the values before the step, which were finite"
POLL_INTERVAL = 0.5  # seconds between checks for missing clients


class Server(StoredServer):
    """A server that trains a model. Subclasses provide the engine and the kind of round."""

    engine: Engine
    rounds: RoundKind
    defence_server: AnyServer
    example: Inputs  # the inputs of a few records, whose values do not matter
    columns: tuple[str, ...] = ()  # names of the inputs, if clients' records are frames in this process

    def __init__(
        self,
        model: nn.Module,
        defence: str | AnyDefence,
        optimizer: Optimizer,
        schedule: Schedule | None,
        schedule_every: str,
        clip_norm: float | None,
        loss: str | Loss | Function,
        limits: Limits | None,
        policy: RoundPolicy,
        seed: int,
    ) -> None:
        where = type(self).__name__
        model = find_original(model)
        self.model = model
        any_parameter = next(model.parameters())
        self.device, self.dtype = any_parameter.device, any_parameter.dtype
        if not isinstance(defence, str) and (isinstance(defence, type) or not isinstance(defence, Defence)):
            fix = 'use "plain" for no defence, "veil", or an object such as fedveil.defences.Veil()'
            raise BadArgument(where, f"defence must be a name or an instance of Defence, got {defence!r}", fix)
        self.defence = build(defence) if isinstance(defence, str) else defence
        self.limits = adapt_limits(self.defence, limits)
        self.loss = find_loss(loss)
        self._parameters, self._buffers = dict(model.named_parameters()), dict(model.named_buffers())
        trainable_parameters = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self._changing = select_floats({**trainable_parameters, **self._buffers})  # the tensors that a step changes
        if (name := find_non_finite(select_floats({**self._parameters, **self._buffers}))) is not None:
            fix = "use finite values; replace a mask of -inf with a bool tensor, or create it in forward"
            raise BadArgument(where, f"the model's {name} contains NaN or infinity", fix)
        self.optimizer = make_optimizer(optimizer, self._parameters)
        self.schedule = make_schedule(schedule, self.optimizer)
        self.schedule_every = check_choice(where, "schedule_every", schedule_every, ("epoch", "round"))
        self.clip_norm = None if clip_norm is None else check_positive(where, "clip_norm", clip_norm)
        policy.check(where)
        self.policy, self.seed, self._started = policy, seed, False
        self.round, self.best, self.history, self.changed, self.stopped = 0, None, History(), [], None
        self._lock = SingleThreadLock(where)
        self._run, self._uses_previous = secrets.token_bytes(16), False
        self._can_undo = False  # whether interrupted rounds are undone
        self._compared = False  # whether perturbed and plain gradients were compared
        self._snapshot = self._saved_mark = self._described_folder = self.monitor = self.best_by = self.summary = None
        self.planned_rounds = 0

    def __repr__(self) -> str:
        name, size = type(self.model).__name__, sum(parameter.numel() for parameter in self._parameters.values())
        text = f"{name} with {size:,} parameters, defence {self.defence.name!r}, {len(self.engine.members())} clients"
        return f"{type(self).__name__}({text}, round {self.round})"

    @property
    @abstractmethod
    def rounds_per_epoch(self) -> int:
        """The number of rounds in which the largest client uses each of its records once."""

    @property
    @abstractmethod
    def terms(self) -> "RunTerms":
        """The engine's part of the description of the run."""

    def _start_secure(
        self,
        client: AnyClient,
        example: Inputs,
        roster: "Roster",
        session: str,
        records: int | None = None,
        steps: int = 1,
    ) -> None:
        """Use secure aggregation; refuse settings that cannot be combined with it."""
        from fedveil.federation.secure_round import SecureRound
        from fedveil.federation.sums import Sums, check_combination

        check_combination(self.defence, self.model, self.limits)
        sums = Sums(self.defence, client, self.model, example, records, steps)
        self.rounds = SecureRound(self.engine, sums, roster, session, self.policy.min_answers)

    def close(self) -> None:
        """Release the connection after the last round; with secure aggregation, clients forget the run's keys."""
        try:
            self.rounds.close()
        finally:
            self.engine.close()

    def step(self, on_exchange: Observer | None = None) -> Aggregate:
        """Run one round; call `on_exchange` with the broadcast and the updates (one update if clients are fused)."""
        with self._lock:
            if self._snapshot is not None:
                self._undo()
            if not self.defence_server.has_budget:
                raise BadArgument("privacy", SPENT, "use the model as it is, or start a run with a larger epsilon")
            result = self._exchange(on_exchange)
            self._advance(result)
            return result

    def _exchange(self, on_exchange: Observer | None = None) -> Aggregate:
        try:
            return self.exchange(on_exchange)
        except NonFiniteUpdate as error:
            raise self._divergence(f"{error.where}: {error.what}", LOWER if self.round else SCALE) from error

    @suspend_autocast()
    def exchange(self, on_exchange: Observer | None = None) -> Aggregate:
        """Broadcast the model and aggregate the replies; repeat with new noise if too few replies are valid."""
        policy, faults = self.policy, FaultLog(self.round)
        deadline = time.monotonic() + policy.patience
        self.engine.start_round()
        for attempt in range(1, policy.attempts + 1):
            members = self._choose_members(faults, deadline)
            start_time, can_reuse = time.perf_counter(), False
            defence_round = self.defence_server.start_round(self.model, members if self.engine.stable else None)
            try:
                if not self._compared:
                    self._compare_gradients(defence_round)
                result = self.rounds.collect(self.round, defence_round, members, faults, on_exchange)
                can_reuse = on_exchange is None and self.engine.keeps_nothing
            finally:
                defence_round.release(reuse=can_reuse)  # no secret is left, however the attempt ends
            if result is not None:
                return self._describe(result, len(members), faults, attempt, start_time)
            if attempt < policy.attempts:
                time.sleep(policy.pause)
        raise self._explain_failure(faults, members)

    def _compare_gradients(self, defence_round: AnyRound) -> None:
        """Compare a recovered gradient with a plain one; refuse a model for which they differ."""
        defence_round.check_exact(self.model, *self._comparison_batch())
        self._compared = True

    @abstractmethod
    def _comparison_batch(self) -> tuple[Inputs, Tensor | None]:
        """Return inputs that the server may use to compare gradients, and their targets if known."""

    def _describe(self, result: Aggregate, num_asked: int, faults: FaultLog, attempt: int, start: float) -> Aggregate:
        """Add faults, traffic and times to the result of a round."""
        traffic = self.engine.traffic
        if traffic is None and not faults.faults:
            return result
        notes: dict[str, Note] = {**result.notes, **({"faults": faults.texts()} if faults.faults else {})}
        figures = dict(result.figures)
        if traffic is not None:
            answer_time = self.rounds.answer_time
            figures |= {"asked": num_asked, **traffic.figures()}
            figures |= {"seconds_waiting": answer_time - start, "seconds_recovery": time.perf_counter() - answer_time}
            figures |= {"attempts": attempt} if attempt > 1 else {}
        return dataclasses.replace(result, figures=figures, notes=notes)

    def _choose_members(self, faults: FaultLog, deadline: float) -> list[Member]:
        """Wait for enough clients and choose among them, if possible without clients that sent wrong replies."""
        policy = self.policy
        num_required = policy.min_answers
        if not self._started:
            num_required = max(policy.wait_for or 1, num_required, self.rounds.min_clients)
        while len(members := self.engine.members()) < num_required:
            if time.monotonic() >= deadline:
                message = f"only {len(members)} of {num_required} clients are present after {policy.patience:g} s"
                raise faults.too_few_answers(message)
            time.sleep(min(POLL_INTERVAL, policy.patience))
        self._started = True
        if faults.faults:
            other_members = [member for member in members if member not in faults.wrong_members]
            members = other_members if len(other_members) >= policy.min_answers else members
        count = max(policy.min_answers, round(policy.participation * len(members)))
        if count < len(members):
            order = torch.randperm(len(members), generator=generator(self.engine.stream, self.seed, self.round))
            members = [members[index] for index in sorted(order[:count].tolist())]
        return self.rounds.select(self.round, members)

    def _explain_failure(self, faults: FaultLog, members: Sequence[Member]) -> NonFiniteUpdate | TooFewAnswers:
        divergences = [fault for fault in faults.faults if fault.kind is FaultKind.NOT_FINITE]
        if divergences and {fault.member for fault in divergences}.issuperset(members):
            sender = "all clients" if len(members) > 1 else f"client {members[0]}"
            return NonFiniteUpdate(sender, divergences[-1].text)
        num_required = max(self.policy.min_answers, self.rounds.min_clients)
        suffix = f" (required by {self.limits.aggregator})" if self.limits and self.rounds.min_clients > 1 else ""
        shortage = f"fewer than {num_required} valid replies{suffix}" if num_required > 1 else "no valid reply"
        message = f"{shortage} after {self.policy.attempts} attempt{'s' if self.policy.attempts > 1 else ''}"
        return faults.too_few_answers(message)

    def _advance(self, result: Aggregate) -> None:
        """Step the optimizer and the schedule, and increment the round."""
        self._apply(result)
        self.round += 1
        is_due = self.schedule_every == "round" or self.round % self.rounds_per_epoch == 0
        if self.schedule and is_due and not isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step()

    def _apply(self, result: Aggregate) -> None:
        """Step the optimizer and replace the buffers; raise if the model is no longer finite."""
        model_note = NOT_RESTORED if self._snapshot is None else RESTORED
        for name, parameter in self._parameters.items():
            parameter.grad = result.gradients.get(name)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self.clip_norm)
        try:
            self.optimizer.step()
        except (RuntimeError, OverflowError) as error:
            if "overflow" not in str(error):
                raise
            raise self._divergence(f"the optimizer's step overflows; {model_note}", LOWER) from error
        for name, value in result.buffers.items():
            self._buffers[name].copy_(value)
        non_finite = find_non_finite(self._changing)
        if non_finite is None and self._can_undo:
            non_finite = find_non_finite_state(self.optimizer.state_dict())
        if non_finite is not None:
            raise self._divergence(f"after the step, {non_finite} contains NaN or infinity; {model_note}", LOWER)

    def fit(
        self,
        epochs: int | None = None,
        *,
        test: UserRecords | None = None,
        validation: UserRecords | None = None,
        rounds: int | None = None,
        evaluate_every: int | None = None,
        track_test: bool = False,
        metrics: "Mapping[str, Metric] | None" = None,
        monitor: str | None = None,
        mode: str | None = None,
        folder: Folder | None = None,
        resume: bool = False,
        checkpoint_every: int | None = None,
        patience: int | None = None,
        on_round: Callback | Sequence[Callback] | None = None,
        verbose: bool | None = None,
        details: "RunDetails | None" = None,
    ) -> History:
        """Train for up to `epochs` epochs, or `rounds` rounds, counted from the start of the run.

        Args:
            epochs: number of times that the largest client goes through its records, by default 1. With privacy for
                records, the default is to train for the number of rounds that the noise was chosen for.
            test: test records in any form that is accepted for clients. Without `validation`, they are evaluated after
                each epoch and choose the best model, whose metrics are then optimistic (docs/how-to/metrics.md).
            validation: records that are evaluated after each epoch and choose the best model; the test records are then
                evaluated once, at the end. No privacy guarantee covers validation or test records.
            rounds: number of rounds, instead of epochs.
            evaluate_every: number of rounds between evaluations; by default, one epoch.
            track_test: with `validation`, whether to evaluate the test records every time as well.
            metrics: additional metrics by name: functions (targets, predictions), as in scikit-learn, objects with
                update(outputs, targets), compute and reset, as in torchmetrics, or `Probabilities`.
            monitor: the metric that decides on the best model, `patience` and `ReduceLROnPlateau`: one of `metrics`, or
                one of Fedveil's; by default, the accuracy or, without classes, the loss or the mean squared error.
            mode: "min" if smaller values are better, or "max"; required for metrics that are not Fedveil's.
            folder: folder for the files of the run: settings, records, status, report page, checkpoints and, at the
                end, the last and the best model (`fedveil.load_model`). A checkpoint is written after each evaluation
                (without test data, at the same interval), at least once a minute, and at the end. After an exception or
                an interrupt, it contains the last complete round; an incomplete round is undone, including in memory.
            resume: whether to continue the run in the folder, if any; otherwise, a folder with a run is refused.
            checkpoint_every: number of rounds between additional checkpoints. A durable defence saves after every
                round, for privacy accounting.
            patience: stop after this number of evaluations without improvement.
            on_round: a function that is called with each round's record, or a list of functions.
            verbose: whether to show a progress bar; by default, only in a terminal or a notebook.
            details: details for the report page that the server does not know.

        Returns:
            The history: one record per round, with metrics if the model was evaluated.
        """
        path, callbacks = None if folder is None else Path(folder), fitting.list_callbacks(on_round)
        last_round = fitting.choose_last_round(self, epochs, rounds)
        for name, interval, low in (("evaluate_every", evaluate_every, 1), ("checkpoint_every", checkpoint_every, 0)):
            if interval is not None:
                check_count("fit", name, interval, low, f"set {name} to a number of rounds")
        sources = {VALIDATION_DATA: validation, TEST: test}
        held_out = {name: None if data is None else self._read_held_out(name, data) for name, data in sources.items()}
        evaluation = MetricChoices(metrics or {}, monitor, mode, patience, track_test).plan(self, *held_out.values())
        if resume and path is None:
            raise BadArgument("fit", "resume=True needs the folder of the run", "pass folder= as well")
        period, save_options = evaluate_every or self.rounds_per_epoch, (checkpoint_every or 0, self.defence.durable)
        plan = FitPlan(last_round, period, evaluation, patience, callbacks, path, *save_options)
        self.monitor = evaluation.monitor if evaluation else None
        with self._lock, lock_folder(path) if path else contextlib.nullcontext(), plan.show_progress(verbose):
            self._undo()
            if path is not None:
                self._open(path, resume)
            with fitting.track_run(self, plan, details), self._saving(path) if path else contextlib.nullcontext():
                self._train(plan)
        return self.history

    def _train(self, plan: FitPlan) -> None:
        """Complete an evaluation that was interrupted, then train up to the plan's last round."""
        records = self.history.records
        start_time = time.perf_counter() - (records[-1].seconds if records else 0.0)  # a resumed run's clock continues
        if plan.evaluation is not None and records and records[-1].evaluated is False:
            self._complete(plan, start_time)
        while self.round < plan.last_round and not plan.has_stalled(records) and self._has_budget():
            lr = float(self.optimizer.param_groups[0]["lr"])
            result = self._exchange()
            if self._can_undo:
                self._snapshot = Snapshot(self)
            self._advance(result)
            epoch, seconds = self.round / self.rounds_per_epoch, time.perf_counter() - start_time
            is_due = plan.ends_interval(self.round) or not self.defence_server.has_budget
            evaluated = False if plan.evaluation is not None and is_due else None  # False: not yet evaluated
            record = RoundRecord(self.round, epoch, result.error, lr, seconds, evaluated)
            records.append(dataclasses.replace(record, figures=result.figures, notes=result.notes))
            self._complete(plan, start_time)

    def _complete(self, plan: FitPlan, start_time: float) -> None:
        """Evaluate the model and write a checkpoint, if due, and call the callbacks."""
        records = self.history.records
        if plan.evaluation is not None and records[-1].evaluated is False:
            records[-1] = self._evaluate(plan, plan.evaluation, records[-1], start_time)
        self._snapshot = None
        if plan.folder is not None and (plan.should_save(self.round) or plan.has_stalled(records)):
            self.save(plan.folder)  # before the callbacks, so that the round counts whatever they do
            plan.last_save_time = time.monotonic()
        for callback in plan.callbacks:
            callback(records[-1])

    def _read_held_out(self, owner: str, records: UserRecords) -> HeldOut:
        """Check held-out records against the model and the loss."""
        return read_held_out(owner, records, self.model, self.loss, self.dtype)

    def _evaluate(self, plan: FitPlan, evaluation: Evaluation, record: RoundRecord, start_time: float) -> RoundRecord:
        """Return the record with metrics; update the best model and, if it monitors a metric, the schedule."""
        result, monitor = evaluation.measure(self), evaluation.monitor
        value = result[monitor.name]
        if math.isnan(value) and monitor.name in PRIMARY:
            raise self._divergence(f"{monitor.name} is NaN, although the held-out data are finite", LOWER)
        if self._can_undo:
            self._snapshot = Snapshot(self)  # the round is complete, but its evaluation is not
        self._keep_if_best(monitor, value)
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(plateau_value(self.schedule, result, monitor))
        metrics = {monitor.prefix + name: metric for name, metric in result.items()}
        record = dataclasses.replace(record, metrics=metrics, evaluated=True)
        is_last = plan.has_stalled([*self.history.records[:-1], record]) or not self.defence_server.has_budget
        metrics |= evaluation.measure_test(self, self.round >= plan.last_round or is_last)
        return dataclasses.replace(record, seconds=time.perf_counter() - start_time)
