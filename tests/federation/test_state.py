"""Whatever ends a run, its last complete round is on disk; what a resumed run continues, compares and refuses."""

import copy
import itertools
import logging
import os
import pickle
import signal
import threading
import time

import pytest
import torch
from tests.federation import kept
from tests.federation.kept import EVERY, HOW, LAST, PREVIOUS, ROUNDS, check_whole, equal, impatient, make, round_in, sgd
from tests.oracle import worst
from tests.sessions import watch
from tests.small import adam, federation, net, pairs
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils import _pytree as pytree

import fedveil
from fedveil.defences import Plain, Private, Veil
from fedveil.errors import BadArgument, Diverged, FedveilError
from fedveil.federation import Federation, checkpoint
from fedveil.models import mlp


@pytest.mark.parametrize("test", [kept.TEST, None], ids=["evaluated", "not evaluated"])
def test_a_checkpoint_follows_each_evaluation_and_without_test_data_each_interval(tmp_path, test):
    seen = []
    make().fit(**HOW | {"test": test}, folder=tmp_path, on_round=lambda _: seen.append(round_in(tmp_path)))
    assert seen == [number // EVERY * EVERY for number in range(1, ROUNDS + 1)]


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
    run = make()
    with pytest.raises(type(error)) as caught:
        run.fit(**HOW, folder=tmp_path, on_round=kept.stop_at(number, error))
    assert caught.value is error
    assert run.round == round_in(tmp_path) == number
    again = kept.make_resumed(tmp_path)
    assert equal(again, run)
    check_whole(tmp_path)


def interrupt_exchange(number):
    rounds = itertools.count(1)

    def stop(own):
        if next(rounds) == number:
            raise KeyboardInterrupt

    return watch(make(), stop)


INTERRUPTED = {  # how the run is made, options of fit, its last complete round, how the resumed run is made
    "an exchange": (lambda: interrupt_exchange(7), {}, 6, {}),
    "an evaluation": (make, {"test": kept.Interrupted(15)}, 8, {}),
    "the last evaluation": (make, {"test": kept.Interrupted(25)}, 12, {}),
    "a step": (lambda: make(sgd(kept.HalfWay)), {}, 4, {"optimizer": sgd()}),
    "a step of the schedule": (lambda: make(schedule=lambda o: kept.Struck(o, 5, 0.5)), {}, 5, {}),
    "a plateau": (lambda: make(schedule=impatient(kept.Plateau)), {}, 8, {"schedule": impatient(ReduceLROnPlateau)}),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_leaves_the_last_complete_round(tmp_path, name):
    start, options, number, how = INTERRUPTED[name]
    run, reference = start(), make(**how)
    with pytest.raises(KeyboardInterrupt):
        run.fit(**HOW | options, folder=tmp_path)
    assert run.round == len(run.history.records) == round_in(tmp_path) == number
    reference.fit(**HOW | {"rounds": number})
    assert equal(run, reference)
    states = [one.optimizer.state_dict()["state"] for one in (run, reference)]
    assert all(torch.equal(one, other) for one, other in zip(*map(pytree.tree_leaves, states), strict=True))
    assert ("mse" in run.history.records[-1]) == (number % EVERY == 0 and number < EVERY * 2)
    check_whole(tmp_path, **how)


def test_a_second_interrupt_tears_nothing_either(tmp_path):
    run, whole = make(sgd(kept.Stubborn)), make(sgd())
    with pytest.raises(KeyboardInterrupt):
        run.fit(**HOW, folder=tmp_path)
    assert round_in(tmp_path) == EVERY  # the last that was whole
    run.fit(**HOW, folder=tmp_path)
    whole.fit(**HOW)
    assert equal(run, whole)
    assert kept.told(run) == kept.told(whole)


def leaping():
    """Three steps of a usual size, and one that makes the model infinite."""
    rates = lambda optimizer: LambdaLR(optimizer, lambda number: 1.0 if number < 3 else 1e44)  # noqa: E731
    return make(lambda parameters: torch.optim.SGD(parameters, 1e-6), rates, size=1e3)


def test_after_a_divergence_the_model_in_memory_and_on_disk_is_the_last_finite_one(tmp_path):
    run, whole = leaping(), leaping()
    whole.fit(rounds=3)
    with pytest.raises(Diverged, match=r"(?s)round 3: .*\S+ contains NaN .*memory has the values before the step"):
        run.fit(rounds=9, folder=tmp_path, checkpoint_every=1)
    assert [run.round, round_in(tmp_path), round_in(tmp_path, PREVIOUS)] == [3, 3, 2]
    assert equal(run, whole)
    assert equal(kept.make_resumed(tmp_path, optimizer=sgd()), whole)
    assert not list(tmp_path.glob("*.safetensors"))
    with pytest.raises(Diverged, match="the model in memory has the values after the step"):
        leaping().fit(rounds=9)


class Overflowing(nn.Module):
    """Infinity less infinity, unless it is trained."""

    def forward(self, inputs):
        return inputs if self.training else inputs * torch.inf - inputs * torch.inf


def test_a_round_whose_metric_is_not_a_number_is_undone(tmp_path):
    def odd():
        return Federation(nn.Sequential(net(), Overflowing()), pairs(12), "plain", adam, batch_size=4)

    run, whole = odd(), odd()
    whole.fit(rounds=EVERY - 1)
    with pytest.raises(Diverged, match="mse is NaN, although the held-out data are finite"):
        run.fit(**HOW, folder=tmp_path)
    assert run.round == len(run.history.records) == round_in(tmp_path) == EVERY - 1
    assert equal(run, whole)


def test_an_optimizer_that_is_not_finite_is_never_saved(tmp_path):
    run = make(size=1e25)  # the squares of the gradients are infinite, and steps of Adam are zero
    run.step()
    assert all(bool(value.isfinite().all()) for value in run.model.state_dict().values())
    for attempt in (run.save, lambda folder: make(size=1e25).fit(rounds=3, folder=folder)):
        with pytest.raises(Diverged, match=r"the optimizer's exp_avg_sq of parameter . contains NaN or infinity"):
            attempt(tmp_path)
    assert not list(tmp_path.rglob("*.pt"))


LIVE = ("status.json", "report.html")  # they say that the run failed


@pytest.mark.parametrize("spoil", ["parameter", "buffer"])
def test_a_model_that_was_made_infinite_elsewhere_is_not_saved_and_the_old_checkpoint_stays(tmp_path, spoil):
    run = Federation(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), pairs(12), "plain")
    run.fit(rounds=2, folder=tmp_path)
    files = lambda: {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name not in LIVE}  # noqa: E731
    before = files()
    with torch.no_grad():
        (run.model[0].weight if spoil == "parameter" else run.model[1].running_var)[0] = torch.inf
    for attempt in (lambda: run.save(tmp_path), lambda: run.fit(rounds=2, folder=tmp_path)):
        with pytest.raises(Diverged, match="contains NaN or infinity, so the model is not saved"):
            attempt()
    assert files() == before


@pytest.mark.full_disk
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


def test_resume_starts_a_run_continues_one_and_leaves_a_finished_one(tmp_path):
    first, again, done, other = [make() for _ in range(4)]
    first.fit(**HOW | {"rounds": 5}, folder=tmp_path, resume=True)
    before = (tmp_path / LAST).read_bytes()
    other.step()
    for run, resume in ((make(), False), (other, False), (other, True)):
        with pytest.raises(BadArgument, match=r"(?s)this folder contains another run.*resume=True.*another folder"):
            run.fit(**HOW, folder=tmp_path, resume=resume)
    assert (tmp_path / LAST).read_bytes() == before
    again.fit(**HOW | {"rounds": 7}, folder=tmp_path, resume=True)
    assert [record["round"] for record in again.history.records] == [1, 2, 3, 4, 5, 6, 7]
    done.fit(**HOW | {"rounds": 7}, folder=tmp_path, resume=True, on_round=lambda record: pytest.fail("a round"))
    assert done.history.records == again.history.records
    assert equal(done, again)
    with pytest.raises(BadArgument, match="resume=True needs the folder"):
        make().fit(rounds=1, resume=True)


@pytest.mark.parametrize(
    "schedule", [None, kept.halving, impatient(ReduceLROnPlateau)], ids=["none", "halving", "plateau"]
)
def test_resuming_with_another_learning_rate_says_which_one_is_used(tmp_path, caplog, schedule, request):
    slow, fast = (lambda parameters, rate=rate: torch.optim.SGD(parameters, rate) for rate in (0.01, 0.25))
    make(slow, schedule).fit(**HOW | {"rounds": 8}, folder=tmp_path)
    for same in (schedule, schedule or kept.halving):  # a new schedule is no other learning rate
        make(slow, same).resume(tmp_path)
    assert "learning rate" not in caplog.text
    make(fast, schedule).resume(tmp_path)
    plateau = request.node.callspec.id == "plateau"  # which does not say what rate it began with
    assert ("using the checkpoint's learning rate, 0.01, not 0.25" in caplog.text) != plateau


CHANGES = {
    "records": {"clients": [(inputs + 1.0, targets) for inputs, targets in pairs(12, 8)]},
    "numbers of records": {"clients": pairs(11, 8)},
    "batch size": {"batch_size": 3},
    "seed": {"seed": 1},
    "loss": {"loss": "huber"},
    "participation": {"participation": 0.5},
    "gradient clipping": {"clip_norm": 0.5},
}


@pytest.mark.parametrize("change", CHANGES)
def test_resuming_in_another_setting_says_what_is_other(tmp_path, caplog, change):
    def build(clients=None, batch_size=4, **how):
        return Federation(net(), clients or pairs(12, 8), "plain", batch_size=batch_size, **how)

    build().fit(rounds=3, folder=tmp_path)
    same, other = build(), build(**CHANGES[change])
    same.resume(tmp_path)
    assert (same.changed, caplog.text) == ([], "")
    other.resume(tmp_path)
    assert change in other.changed
    assert set(other.changed) <= {change, "records"}  # other numbers of records are other records
    assert f"was trained with different settings ({', '.join(other.changed)})" in caplog.text


def test_a_checkpoint_that_is_missing_broken_or_of_another_optimizer_or_model_is_refused(tmp_path):
    with pytest.raises(BadArgument, match="there is no checkpoint at this path"):
        make().resume(tmp_path)
    for broken in (b"", b"garbage", b"PK\x03\x04 half a file"):
        (tmp_path / LAST).write_bytes(broken)
        with pytest.raises(BadArgument, match=r"checkpoint.pt: the checkpoint cannot be read"):
            make().resume(tmp_path)
    (tmp_path / LAST).unlink()
    make().fit(rounds=3, folder=tmp_path)
    with pytest.raises(BadArgument, match="with the optimizer 'Adam', not 'SGD'"):
        make(sgd()).resume(tmp_path)
    with pytest.raises(BadArgument, match="for another model or optimizer"):
        Federation(mlp(3, 2, hidden=3), pairs(4), "plain").resume(tmp_path)


@pytest.mark.parametrize("best", [False, True])
def test_load_model_takes_the_checkpoint_if_it_is_newer(tmp_path, best):
    run = make()
    run.fit(**HOW | {"rounds": 4}, folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.fit(**HOW, folder=tmp_path, checkpoint_every=1, on_round=kept.stop_at(9))
    state = checkpoint.load(tmp_path / LAST)
    (_, first), (_, second) = run.history.curve("mse")
    assert first > second  # the best one is newer, too
    wanted = state["best"][1] if best else state["model"]
    found = fedveil.load_model(tmp_path, model=net(), best=best).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    run.fit(**HOW, folder=tmp_path)
    (tmp_path / LAST).unlink()
    (tmp_path / PREVIOUS).unlink()
    found = fedveil.load_model(tmp_path, model=net(), best=best).state_dict()
    wanted = run.best[1] if best else run.model.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    with pytest.raises(BadArgument, match=r"(?s)is a Sequential, which cannot be built.*pass the network: model="):
        fedveil.load_model(tmp_path)


def private():
    return Private(Plain(), 1.0, 0.5, entropy=fedveil.Entropy.for_tests(1))


def test_a_private_round_is_on_disk_before_a_callback_hears_of_it(tmp_path):
    spent = []

    def look(record):
        again = kept.make_resumed(tmp_path, defence=private())
        spent.append((record["epsilon"], again.defence_server.accountant.epsilon()))

    make(defence=private()).fit(rounds=3, folder=tmp_path, on_round=look)
    assert len(spent) == 3
    assert all(told == saved for told, saved in spent)


def test_a_round_whose_noise_was_drawn_counts_although_it_is_undone(tmp_path):
    run, again = make(sgd(kept.HalfWay), defence=private()), make(sgd(), defence=private())
    with pytest.raises(KeyboardInterrupt):
        run.fit(rounds=9, folder=tmp_path)
    assert (run.round, run.defence_server.accountant.rounds) == (4, 5)
    saved = (tmp_path / LAST).read_bytes()
    (tmp_path / LAST).write_bytes(b"garbage")
    back = kept.make_resumed(tmp_path, optimizer=sgd(), defence=private())
    assert (back.round, back.defence_server.accountant.rounds) == (4, 5)
    (tmp_path / LAST).write_bytes(saved)
    again.fit(rounds=9, folder=tmp_path, resume=True)
    assert (again.round, again.defence_server.accountant.rounds) == (9, 10)


def test_a_resumed_veil_draws_new_secrets_and_ends_as_plain_training(tmp_path):
    seen, data = [], [(inputs.double(), targets.double()) for inputs, targets in pairs(12, 8)]

    plain, *veiled = [
        Federation(net().double(), data, defence, adam, batch_size=4) for defence in ("plain", *["veil"] * 2)
    ]
    for run, rounds in zip(veiled, (4, 8), strict=True):
        watch(run, lambda own: seen.append(own.broadcast.round)).fit(rounds=rounds, folder=tmp_path, resume=True)
    plain.fit(rounds=8)
    assert len(set(seen)) == 8
    assert worst(veiled[1].model.state_dict(), plain.model.state_dict()) < 1e-9


def test_no_secret_is_in_a_checkpoint(tmp_path):
    secrets = []

    def leak(own):
        secrets.extend(own.perturbation.recovery.transform.scale.tolist())

    watch(make(defence=Veil()), leak).fit(rounds=3, folder=tmp_path)
    saved = pytree.tree_leaves(checkpoint.load(tmp_path / LAST))
    leaves = [torch.as_tensor(leaf).double() for leaf in saved if isinstance(leaf, torch.Tensor | int | float)]
    assert secrets
    assert not set(torch.cat([leaf.flatten() for leaf in leaves]).tolist()) & {s for s in secrets if abs(s) != 1}


def elsewhere(call):
    """What a call raises in another thread; None if it does not."""
    found = []

    def work():
        try:
            found.append(call())
        except BaseException as error:
            found[:] = [error]

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0] if isinstance(found[0], BaseException) else None


def test_other_threads_are_refused_while_one_trains_but_not_from_a_copy(tmp_path):
    run, seen = federation(), []
    run.fit(rounds=1, folder=tmp_path / "before")

    def disturb(record):
        copies = [copy.deepcopy(run), pickle.loads(pickle.dumps(run))]
        assert [elsewhere(other.step) for other in copies] == [None, None]
        run.save(tmp_path / "own")  # as callbacks may
        calls = (run.step, lambda: run.fit(rounds=9), lambda: run.save(tmp_path / "other"))
        seen.extend(elsewhere(call) for call in (*calls, lambda: run.resume(tmp_path / "before")))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.fit(rounds=4, on_round=disturb)
    assert len(seen) == 4
    for error in seen:
        assert isinstance(error, FedveilError)
        assert "Federation: another thread is using this object" in str(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "own"]
    assert elsewhere(run.step) is None  # nobody is inside any more
    assert run.round == 3
