"""With a folder nothing is lost: whatever ends a run, its last complete round is on disk, and can be resumed."""

import json
import logging
import os

import pytest
import torch
from tests.engines import Loopback, member
from tests.small import federation
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import Dataset

import fedveil
from fedveil.data import from_tensors
from fedveil.defences import Plain, Private
from fedveil.errors import BadArgument, Diverged, TooFewAnswers
from fedveil.federation import Federation, checkpoint, fitting
from fedveil.federation.rounds import RemoteServer
from fedveil.models import mlp
from fedveil.runs.folder import record_run

ROUNDS, EVERY = 12, 4
LAST, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"


def records_of(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator), torch.randn(count, 2, generator=generator)


TEST = records_of(10, 9)
HOW = {"rounds": ROUNDS, "test": TEST, "evaluate_every": EVERY}


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(3, 2, hidden=4, layers=2)


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def halving(optimizer):
    return StepLR(optimizer, 5, 0.5)


def make(optimizer=adam, schedule=halving, defence="plain", size=1.0):
    clients = [(inputs, size * targets) for inputs, targets in (records_of(12, 1), records_of(8, 2))]
    how = {"schedule": schedule, "schedule_every": "round", "batch_size": 4}
    return Federation(net(), clients, defence, optimizer, **how)


def round_in(folder, name=LAST):
    return checkpoint.load(folder / name)["round"]


def told(run):
    """The records but for the clock."""
    return [{name: value for name, value in record.items() if name != "seconds"} for record in run.history.records]


def equal(one, other):
    mine, others = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(value, others[name]) for name, value in mine.items())


def check_whole(folder, **how):
    """Resume what is in the folder; it must end as a run that nothing has happened to."""
    whole, again = make(**how), make(**how)
    whole.fit(**HOW)
    again.fit(**HOW, folder=folder, resume=True)
    assert equal(again, whole)
    assert told(again) == told(whole)
    assert [number for number, _ in again.history.curve("mse")] == list(range(EVERY, ROUNDS + 1, EVERY))
    assert again.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    return again


@pytest.mark.parametrize("test", [TEST, None], ids=["evaluated", "not evaluated"])
def test_a_checkpoint_follows_each_evaluation_and_without_test_data_each_interval(tmp_path, test):
    seen = {}

    def look(record):
        seen[record["round"]] = round_in(tmp_path) if (tmp_path / LAST).exists() else 0

    make().fit(rounds=ROUNDS, test=test, evaluate_every=EVERY, folder=tmp_path, on_round=look)
    assert seen == {number: (number - 1) // EVERY * EVERY for number in range(1, ROUNDS + 1)}
    assert round_in(tmp_path) == ROUNDS


def test_a_checkpoint_is_written_when_the_last_one_is_too_long_ago(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(fitting, "CHECKPOINT_SECONDS", 0.0)
    make().fit(
        rounds=3, evaluate_every=100, folder=tmp_path, on_round=lambda _: seen.append((tmp_path / LAST).exists())
    )
    assert seen == [False, True, True]
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


def make_resumed(folder):
    run = make()
    run.resume(folder)
    return run


class Broken(Plain):
    """A defence whose exchange ends by an interrupt."""

    at = 7

    def aggregate(self, updates, weights):
        self.at -= 1
        if not self.at:
            raise KeyboardInterrupt
        return super().aggregate(updates, weights)


def test_an_interrupt_in_the_exchange_leaves_the_round_before(tmp_path):
    run = make(defence=Broken())
    with pytest.raises(KeyboardInterrupt):
        run.fit(**HOW, folder=tmp_path)
    assert run.round == round_in(tmp_path) == 6
    check_whole(tmp_path)


class Interrupted(Dataset):
    """Test data that are read so often, and then no more."""

    def __init__(self, reads):
        self.reads = reads

    def __len__(self):
        return len(TEST[0])

    def __getitem__(self, row):
        self.reads -= 1
        if not self.reads:
            raise KeyboardInterrupt
        return TEST[0][row], TEST[1][row]


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


class HalfWay(torch.optim.SGD):
    """An optimiser whose fifth step is interrupted when the first parameter has moved, and its state with it."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 5:
            _, *others = [p for group in self.param_groups for p in group["params"]]
            kept = [p.grad for p in others]
            for parameter in others:
                parameter.grad = None
            super().step()
            for parameter, gradient in zip(others, kept, strict=True):
                parameter.grad = gradient
            raise KeyboardInterrupt
        return super().step()


def sgd(kind):
    return lambda parameters: kind(parameters, 1e-2, momentum=0.9)


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


class Plateau(ReduceLROnPlateau):
    """Its second step is interrupted when it has been made."""

    def step(self, metrics):
        super().step(metrics)
        if self.last_epoch == 2:
            raise KeyboardInterrupt


def impatient(kind):
    return lambda optimizer: kind(optimizer, patience=0, threshold=10.0)


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
    with pytest.raises(Diverged, match="the model in memory is that of before the step, the last finite one"):
        run.fit(rounds=9, folder=tmp_path, evaluate_every=100)
    assert run.round == round_in(tmp_path) == 3
    assert equal(run, whole)
    assert [record["round"] for record in run.history.records] == [1, 2, 3]
    with pytest.raises(Diverged, match="the model in memory keeps what the step made of it"):
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
    with pytest.raises(Diverged, match="mse is not a number, although the test data are finite"):
        run.fit(**HOW, folder=tmp_path)
    assert run.round == round_in(tmp_path) == EVERY - 1
    assert equal(run, whole)
    assert len(run.history.records) == EVERY - 1


def test_an_optimiser_that_is_not_finite_is_never_saved(tmp_path):
    run = make(size=1e25)  # the squares of the gradients are infinite, and steps of Adam are zero
    run.step()
    assert all(bool(value.isfinite().all()) for value in run.model.state_dict().values())
    with pytest.raises(Diverged, match=r"the optimiser's exp_avg_sq of parameter 0 holds NaN or infinity"):
        run.save(tmp_path / "saved")
    with pytest.raises(Diverged, match=r"the optimiser's exp_avg_sq of parameter 0 holds NaN or infinity"):
        make(size=1e25).fit(rounds=3, folder=tmp_path / "fitted")
    assert not list(tmp_path.rglob("*.pt"))


def over_a_network(engine):
    how = {"loss": "squared_error", "pause": 0.0, "attempts": 1, "patience": 0.1, "timeout": 1.0}
    return RemoteServer(engine, net(), TEST[0][:2], "plain", adam, **how)


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


def test_resume_starts_a_run_continues_one_and_leaves_a_finished_one(tmp_path):
    first = make()
    first.fit(**HOW | {"rounds": 5}, folder=tmp_path, resume=True)
    with pytest.raises(BadArgument, match=r"(?s)there is another run in this folder.*resume=True.*another folder"):
        make().fit(**HOW, folder=tmp_path)
    again = make()
    again.fit(**HOW | {"rounds": 7}, folder=tmp_path, resume=True)
    assert [record["round"] for record in again.history.records] == [1, 2, 3, 4, 5, 6, 7]
    done = make()
    done.fit(**HOW | {"rounds": 7}, folder=tmp_path, resume=True, on_round=lambda record: pytest.fail("a round"))
    assert done.history.records == again.history.records
    assert equal(done, again)
    with pytest.raises(BadArgument, match="resume=True needs the folder"):
        make().fit(rounds=1, resume=True)


def test_a_run_that_has_begun_elsewhere_does_not_replace_the_one_in_the_folder(tmp_path):
    make().fit(rounds=5, folder=tmp_path)
    before = (tmp_path / LAST).read_bytes()
    other = make()
    other.fit(rounds=2)
    for resume in (False, True):
        with pytest.raises(BadArgument, match="there is another run in this folder"):
            other.fit(rounds=3, folder=tmp_path, resume=resume)
    assert (tmp_path / LAST).read_bytes() == before


def stop_at(number):
    def end(record):
        if record["round"] == number:
            raise KeyboardInterrupt

    return end


@pytest.mark.parametrize("best", [False, True])
def test_load_model_takes_the_checkpoint_if_it_is_newer(tmp_path, best):
    run = make()
    run.fit(**HOW | {"rounds": 4}, folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.fit(**HOW, folder=tmp_path, checkpoint_every=1, on_round=stop_at(9))
    state = checkpoint.load(tmp_path / LAST)
    (_, first), (_, second) = run.history.curve("mse")
    assert first > second  # the best one is newer, too
    wanted = state["best"][1] if best else state["model"]
    found = fedveil.load_model(tmp_path, model=net(), best=best).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    run.fit(**HOW, folder=tmp_path)
    (tmp_path / LAST).unlink()
    (tmp_path / PREVIOUS).unlink()
    found = fedveil.load_model(tmp_path, model=net()).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in run.model.state_dict().items())


DATA = from_tensors("numbers", records_of(4, 3), TEST)
ABOUT = {"clients": 2, "model": "mlp"}


def recorded(folder, run=None, rounds=ROUNDS, **how):
    return record_run(run or make(), folder, DATA, ABOUT, "again", rounds=rounds, evaluate_every=EVERY, **how)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_is_refused_touches_nothing_in_the_folder(tmp_path):
    recorded(tmp_path, rounds=4)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    del before[".lock"]
    with pytest.raises(BadArgument, match=r"(?s)there is another run in this folder.*resume=True"):
        recorded(tmp_path)
    with pytest.raises(BadArgument, match="rounds"):
        recorded(tmp_path, rounds=-1, resume=True)
    for name, found in before.items():
        assert ((tmp_path / name).read_bytes(), (tmp_path / name).stat().st_mtime_ns) == found, name


def test_a_resumed_run_cuts_its_metrics_back_to_the_checkpoint_and_appends(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        recorded(tmp_path, on_round=stop_at(6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 7, "epoch": 1.0}\n{"round": 8, "ep')  # as a kill leaves them
    summary = recorded(tmp_path, resume=True)
    assert [line["round"] for line in lines(tmp_path)] == list(range(1, ROUNDS + 1))
    assert recorded(tmp_path, resume=True) == summary  # submitted again
    assert [line["round"] for line in lines(tmp_path)] == list(range(1, ROUNDS + 1))


def test_metrics_have_the_round_whose_evaluation_was_interrupted_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        recorded(tmp_path, make(schedule=impatient(Plateau)))
    assert [line["round"] for line in lines(tmp_path)] == list(range(1, 2 * EVERY + 1))
    assert "mse" not in lines(tmp_path)[-1]
    recorded(tmp_path, make(schedule=impatient(ReduceLROnPlateau)), resume=True)
    found = lines(tmp_path)
    assert [line["round"] for line in found] == list(range(1, ROUNDS + 1))
    assert [line["round"] for line in found if "mse" in line] == [4, 8, 12]


def private():
    return Private(Plain(), 1.0, 0.5, entropy=fedveil.Entropy.for_tests(1))


def test_a_round_whose_noise_was_drawn_counts_although_it_is_undone(tmp_path):
    run = make(sgd(HalfWay), defence=private())
    with pytest.raises(KeyboardInterrupt):
        run.fit(rounds=9, folder=tmp_path)
    assert (run.round, run.defence.rounds) == (4, 5)
    again = make(sgd(torch.optim.SGD), defence=private())
    again.fit(rounds=9, folder=tmp_path, resume=True)
    assert (again.round, again.defence.rounds) == (9, 10)
    (tmp_path / LAST).write_bytes(b"garbage")
    back = make(sgd(torch.optim.SGD), defence=private())
    back.resume(tmp_path)
    assert (back.round, back.defence.rounds) == (8, 10)


def test_the_one_before_counts_the_noise_of_a_round_that_was_undone(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make(sgd(HalfWay), defence=private()).fit(rounds=9, folder=tmp_path)
    (tmp_path / LAST).write_bytes(b"garbage")
    back = make(sgd(torch.optim.SGD), defence=private())
    back.resume(tmp_path)
    assert (back.round, back.defence.rounds) == (4, 5)


def test_the_last_record_is_there_without_an_evaluation_and_a_metric_says_why_it_is_not(tmp_path):
    history = federation().fit(rounds=2)
    assert history.last["round"] == 2
    assert {"epoch", "error", "lr", "seconds"} <= set(history.last)
    with pytest.raises(KeyError, match="no evaluation: pass test="):
        history.last["accuracy"]
    assert json.loads(json.dumps(history.last)) == history.records[-1]
    evaluated = make().fit(rounds=6, test=TEST, evaluate_every=4).last
    assert evaluated["round"] == 6
    assert "mse" in evaluated
