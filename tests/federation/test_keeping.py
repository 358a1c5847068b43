"""With a folder nothing is lost: whatever ends a run, its last complete round is on disk, and can be resumed."""

import json
import logging
import os
import signal
import time

import pytest
import torch
from tests.engines import Loopback, LoopbackServer, member
from tests.federation.kept import (
    EVERY,
    HOW,
    LAST,
    PREVIOUS,
    ROUNDS,
    TEST,
    HalfWay,
    Plateau,
    adam,
    check_whole,
    equal,
    impatient,
    make,
    make_resumed,
    net,
    records_of,
    round_in,
    sgd,
    told,
)
from tests.sessions import watch
from tests.small import Records
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from fedveil.defences import Plain
from fedveil.errors import Diverged, TooFewAnswers
from fedveil.federation import Federation, checkpoint


@pytest.mark.parametrize("test", [TEST, None], ids=["evaluated", "not evaluated"])
def test_a_checkpoint_follows_each_evaluation_and_without_test_data_each_interval(tmp_path, test):
    seen = {}

    def look(record):
        seen[record["round"]] = round_in(tmp_path) if (tmp_path / LAST).exists() else 0

    make().fit(rounds=ROUNDS, test=test, evaluate_every=EVERY, folder=tmp_path, on_round=look)
    assert seen == {number: number // EVERY * EVERY for number in range(1, ROUNDS + 1)}
    assert round_in(tmp_path) == ROUNDS


def test_a_checkpoint_is_written_when_the_last_one_is_too_long_ago(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(checkpoint, "INTERVAL_SECONDS", 0.0)
    make().fit(rounds=3, evaluate_every=100, folder=tmp_path, on_round=lambda _: seen.append(round_in(tmp_path)))
    assert seen == [1, 2, 3]
    assert round_in(tmp_path, PREVIOUS) == 2


class Ended(Exception):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), Ended("why"), StopIteration()], ids=repr)
@pytest.mark.parametrize("number", [5, 8])
def test_what_a_callback_raises_goes_through_and_its_round_is_saved(tmp_path, error, number):
    def end(record):
        if record["round"] == number:
            raise error

    run = make()
    with pytest.raises(type(error)) as caught:
        run.fit(**HOW, folder=tmp_path, on_round=end)
    assert caught.value is error
    assert run.round == round_in(tmp_path) == number
    saved = json.loads(checkpoint.load(tmp_path / LAST)["records"])
    assert [record["round"] for record in saved] == list(range(1, number + 1))
    assert equal(make_resumed(tmp_path), run)
    check_whole(tmp_path)


def test_an_interrupt_in_the_exchange_leaves_the_round_before(tmp_path):
    rounds = []

    def interrupt(own):
        rounds.append(own)
        if len(rounds) == 7:
            raise KeyboardInterrupt

    run = make(defence=watch(Plain(), on_recover=interrupt))
    with pytest.raises(KeyboardInterrupt):
        run.fit(**HOW, folder=tmp_path)
    assert run.round == round_in(tmp_path) == 6
    check_whole(tmp_path)


class Interrupted(Records):
    """Test data whose reading is interrupted after some records."""

    def __init__(self, reads):
        super().__init__(*TEST)
        self.reads = reads

    def __getitem__(self, row):
        if self.read + 1 == self.reads:
            raise KeyboardInterrupt
        return super().__getitem__(row)


@pytest.mark.parametrize("evaluation", [2, 3])
def test_an_interrupt_in_an_evaluation_keeps_the_round_and_the_resumed_run_evaluates_it_first(tmp_path, evaluation):
    run, length = make(), len(TEST[0])
    with pytest.raises(KeyboardInterrupt):
        run.fit(**HOW | {"test": Interrupted((evaluation - 1) * length + 5)}, folder=tmp_path)
    assert round_in(tmp_path) == evaluation * EVERY
    last = json.loads(checkpoint.load(tmp_path / LAST)["records"])[-1]
    assert last["round"] == evaluation * EVERY
    assert "mse" not in last
    check_whole(tmp_path)


@pytest.mark.parametrize("number", [2, 5])
def test_a_step_that_is_interrupted_half_way_is_undone(tmp_path, number, monkeypatch):
    monkeypatch.setattr(HalfWay, "steps", 5 - number)
    run, reference = make(sgd(HalfWay)), make(sgd(torch.optim.SGD))
    reference.fit(rounds=number - 1)
    with pytest.raises(KeyboardInterrupt):
        run.fit(**HOW, folder=tmp_path)
    assert run.round == round_in(tmp_path) == number - 1
    assert equal(run, reference)
    buffers = [state["momentum_buffer"] for state in run.optimizer.state_dict()["state"].values()]
    others = [state["momentum_buffer"] for state in reference.optimizer.state_dict()["state"].values()]
    assert all(torch.equal(one, other) for one, other in zip(buffers, others, strict=True))
    check_whole(tmp_path, optimizer=sgd(torch.optim.SGD))


class Stubborn(HalfWay):
    """Its first restoration is interrupted, too."""

    restored = 0

    def load_state_dict(self, state_dict):
        self.restored += 1
        if self.restored == 1:
            raise KeyboardInterrupt
        super().load_state_dict(state_dict)


def test_a_second_interrupt_tears_nothing_either(tmp_path):
    run, whole = make(sgd(Stubborn)), make(sgd(torch.optim.SGD))
    with pytest.raises(KeyboardInterrupt):
        run.fit(**HOW, folder=tmp_path)
    assert round_in(tmp_path) == EVERY  # the last that was whole
    run.fit(**HOW, folder=tmp_path)
    whole.fit(**HOW)
    assert equal(run, whole)
    assert told(run) == told(whole)


class Struck(StepLR):
    """A schedule whose sixth step is interrupted when it has been made."""

    def step(self, epoch=None):
        super().step()
        if self.last_epoch == 6:
            raise KeyboardInterrupt


def test_a_step_of_the_schedule_that_is_interrupted_is_undone_with_its_round(tmp_path):
    run = make(schedule=lambda optimizer: Struck(optimizer, 5, 0.5))
    with pytest.raises(KeyboardInterrupt):
        run.fit(**HOW, folder=tmp_path)
    assert (run.round, run.schedule.last_epoch) == (5, 5)
    check_whole(tmp_path)


def test_a_schedule_that_waits_for_metrics_steps_once_for_each_evaluation(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make(schedule=impatient(Plateau)).fit(**HOW, folder=tmp_path)
    assert round_in(tmp_path) == 2 * EVERY
    check_whole(tmp_path, schedule=impatient(ReduceLROnPlateau))


def leaping():
    """Three steps of a usual size, and one that makes the model infinite."""
    schedule = lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda r: 1.0 if r < 3 else 1e44)  # noqa: E731
    return make(lambda p: torch.optim.SGD(p, 1e-6), schedule, size=1e3)


def test_after_a_divergence_the_model_in_memory_and_on_disk_is_the_last_finite_one(tmp_path):
    run, whole = leaping(), leaping()
    whole.fit(rounds=3)
    with pytest.raises(Diverged, match="the model in memory has the values before the step, the last finite ones"):
        run.fit(rounds=9, folder=tmp_path, evaluate_every=100)
    assert run.round == round_in(tmp_path) == 3
    assert equal(run, whole)
    assert [record["round"] for record in run.history.records] == [1, 2, 3]
    with pytest.raises(Diverged, match="the model in memory has the values after the step"):
        leaping().fit(rounds=9)


class Overflowing(nn.Module):
    """Infinity less infinity, unless it is trained."""

    def forward(self, inputs):
        return inputs if self.training else inputs * torch.inf - inputs * torch.inf


def test_a_round_whose_metric_is_not_a_number_is_undone(tmp_path):
    def odd():
        return Federation(nn.Sequential(net(), Overflowing()), [records_of(12, 1)], "plain", adam, batch_size=4)

    run, whole = odd(), odd()
    whole.fit(rounds=EVERY - 1)
    with pytest.raises(Diverged, match="mse is NaN, although the test data are finite"):
        run.fit(**HOW, folder=tmp_path)
    assert run.round == round_in(tmp_path) == EVERY - 1
    assert equal(run, whole)
    assert len(run.history.records) == EVERY - 1


def test_an_optimiser_that_is_not_finite_is_never_saved(tmp_path):
    run = make(size=1e25)  # the squares of the gradients are infinite, and steps of Adam are zero
    run.step()
    assert all(bool(value.isfinite().all()) for value in run.model.state_dict().values())
    with pytest.raises(Diverged, match=r"the optimizer's exp_avg_sq of parameter 0 holds NaN or infinity"):
        run.save(tmp_path / "saved")
    with pytest.raises(Diverged, match=r"the optimizer's exp_avg_sq of parameter 0 holds NaN or infinity"):
        make(size=1e25).fit(rounds=3, folder=tmp_path / "fitted")
    assert not list(tmp_path.rglob("*.pt"))


def over_a_network(engine):
    how = {"loss": "squared_error", "pause": 0.0, "attempts": 1, "patience": 0.1, "timeout": 1.0}
    return LoopbackServer(engine, net(), TEST[0][:2], "plain", adam, **how)


def test_a_run_whose_clients_are_gone_is_saved_and_a_new_server_resumes_it(tmp_path):
    members = {name: member(net, records_of(8, name), name) for name in range(2)}
    engine = Loopback(members)

    def leave(record):
        engine.down = set(members) if record["round"] == 5 else set()

    with pytest.raises(TooFewAnswers):
        over_a_network(engine).fit(**HOW, folder=tmp_path, on_round=leave)
    assert round_in(tmp_path) == 5
    again, whole = over_a_network(Loopback(members)), over_a_network(Loopback(members))
    again.fit(**HOW, folder=tmp_path, resume=True)
    whole.fit(**HOW)
    assert equal(again, whole)
    assert [record["round"] for record in again.history.records] == list(range(1, ROUNDS + 1))


def test_a_last_save_that_fails_is_a_warning_beside_the_error_that_ended_the_run(tmp_path, monkeypatch, caplog):
    def full(handle):
        raise OSError(28, "No space left on device")

    def end(record):
        if record["round"] == 6:
            monkeypatch.setattr(os, "fsync", full)
            raise Ended("why")

    with caplog.at_level(logging.WARNING, logger="fedveil"), pytest.raises(Ended, match="why"):
        make().fit(**HOW, folder=tmp_path, on_round=end)
    assert "round 6 could not be saved" in caplog.text
    assert "No space left on device" in caplog.text
    monkeypatch.undo()
    assert round_in(tmp_path) == 4
    check_whole(tmp_path)


def test_a_second_interrupt_does_not_stop_the_save(tmp_path, monkeypatch):
    real = checkpoint.save

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # in which Python would raise
        real(*arguments)

    def stop(record):
        if record["round"] == EVERY + 1:
            monkeypatch.setattr(checkpoint, "save", interrupted)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make().fit(**HOW, folder=tmp_path, on_round=stop)
    assert round_in(tmp_path) == EVERY + 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
