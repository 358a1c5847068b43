"""A hostile disk: damaged checkpoints, and kills at any moment. No run is lost or continues with other values."""

import errno
import json
import math
import os
import random
import signal

import pytest
import torch
from safetensors.torch import load_file
from tests.asks import of_bytes
from tests.configs import config_of
from tests.federation.kept import (
    EVERY,
    LAST,
    PREVIOUS,
    ROUNDS,
    TEST,
    Plateau,
    equal,
    impatient,
    make,
    round_in,
    stop_at,
)
from tests.small import SMALL, federation
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fedveil.defences import PPDL, Plain, Private
from fedveil.errors import BadArgument
from fedveil.federation import Federation, checkpoint
from fedveil.runs.folder import is_finished, train


def values(run):
    return torch.nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()


def damaged(content, chance):
    """Content with one bit flipped, cut, doubled or with zeros: never the same."""
    found = of_bytes(content, chance)
    return found if found != content else damaged(content, chance)


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_no_damage_loads_with_other_values_and_no_run_is_lost(tmp_path, count, caplog):
    run, chance, seen = federation(), random.Random(count), {}
    for rounds in (2, 4):
        run.fit(rounds=rounds, folder=tmp_path, test=TEST, evaluate_every=2)
        seen[rounds] = values(run)
    good = (tmp_path / LAST).read_bytes()
    for _ in range(count):
        (tmp_path / LAST).write_bytes(damaged(good, chance))
        again = federation()
        caplog.clear()
        again.resume(tmp_path)
        assert again.round == 2
        assert torch.equal(values(again), seen[2])
        assert "the run continues from checkpoint.previous.pt, round 2" in caplog.text
        with pytest.raises(checkpoint.DamagedCheckpoint):
            checkpoint.load(tmp_path / LAST)
    again.fit(rounds=4, folder=tmp_path)
    assert torch.equal(values(again), seen[4])


def make_infinite(path):
    """Change a checkpoint into that of a model that has diverged."""
    tag, state = checkpoint.read(path)
    next(iter(state["model"].values())).view(-1)[0] = math.inf
    checkpoint.save(path, {name: value for name, value in state.items() if name != "format"}, tag)


def check_finite(folder):
    states = [checkpoint.load(path)["model"] for path in checkpoint.list_checkpoints(folder)]
    assert all(bool(tensor.isfinite().all()) for state in states for tensor in state.values())


def test_a_checkpoint_of_a_model_that_diverged_is_skipped_for_the_one_before(tmp_path, caplog):
    federation().fit(rounds=3, folder=tmp_path, checkpoint_every=1)
    make_infinite(tmp_path / LAST)
    run = federation()
    run.resume(tmp_path)
    assert run.round == 2
    assert "the checkpoint is from a run that diverged: 0.weight contains NaN or infinity" in caplog.text
    assert "checkpoint.previous.pt, round 2" in run.history.records[-1]["went_back"]
    run.fit(rounds=4, folder=tmp_path, checkpoint_every=1, on_round=lambda record: check_finite(tmp_path))
    check_finite(tmp_path)
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(tmp_path / checkpoint.MODEL).values())


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (cut_off, r"checkpoint.pt: .*damaged.*; .*checkpoint.previous.pt is also damaged"),
        (make_infinite, r"(?s)from a run that diverged.*Fix: start the run again with a lower"),
    ],
)
def test_with_two_bad_checkpoints_the_run_is_refused_by_name(tmp_path, spoil, text):
    federation().fit(rounds=2, folder=tmp_path, checkpoint_every=1)
    for name in (LAST, PREVIOUS):
        spoil(tmp_path / name)
    with pytest.raises(BadArgument, match=text):
        federation().resume(tmp_path)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_going_back_is_in_the_metrics_and_ends_as_if_nothing_had_happened(tmp_path, capfd):
    whole = train(config_of(**SMALL, epochs=4), tmp_path / "whole")
    config, folder = config_of(**SMALL, epochs=2), tmp_path / "run"
    train(config, folder)
    assert is_finished(config, folder)
    content = (folder / LAST).read_bytes()
    (folder / LAST).write_bytes(content[:99] + bytes(40) + content[139:])
    assert not is_finished(config, folder)
    summary = train(config_of(**SMALL, epochs=4), folder, resume=True)
    assert [line["round"] for line in lines(folder)] == list(range(1, whole.rounds + 1))
    assert [line["round"] for line in lines(folder) if "went_back" in line] == [whole.rounds // 4]
    assert summary.rounds == whole.rounds
    assert round_in(folder, PREVIOUS) == 3 * whole.rounds // 4


def test_private_states_of_both_rounds_are_kept_and_belong_to_their_checkpoint(tmp_path):
    def start():
        return federation(PPDL(0.5, sigma=0.1))

    whole, again, other = start(), start(), tmp_path / "other"
    whole.fit(rounds=6, folder=tmp_path, checkpoint_every=2)
    assert sorted(path.name for path in (tmp_path / "clients" / "0").iterdir()) == ["4.pt", "6.pt"]
    (tmp_path / "clients" / "1" / "6.pt").write_bytes(b"garbage")  # the checkpoint of round 6 is good, and no use
    again.resume(tmp_path)
    assert again.round == 4
    again.fit(rounds=6)
    assert equal(again, whole)
    start().fit(rounds=6, folder=other, checkpoint_every=2)
    for number in (4, 6):
        content = (other / "clients" / "1" / f"{number}.pt").read_bytes()
        (tmp_path / "clients" / "1" / f"{number}.pt").write_bytes(content)
    with pytest.raises(BadArgument, match="the checkpoint belongs to another run or round"):
        start().resume(tmp_path)


def test_the_one_before_is_of_the_same_run_and_good(tmp_path, monkeypatch):
    federation().fit(rounds=4, folder=tmp_path, evaluate_every=2)
    new = federation()
    new.step()
    new.save(tmp_path)
    assert not (tmp_path / PREVIOUS).exists()
    new.fit(rounds=2, folder=tmp_path)
    assert round_in(tmp_path, PREVIOUS) == 1
    (tmp_path / LAST).write_bytes(b"garbage")
    again, seen = federation(), []
    again.resume(tmp_path)
    monkeypatch.setattr(checkpoint, "save", lambda *words: seen.append(round_in(tmp_path, PREVIOUS)))
    again.save(tmp_path)
    assert seen == [1]  # while the new one is being written, too


@pytest.mark.full_disk
@pytest.mark.parametrize("links", [True, False])
def test_a_full_disk_costs_neither_checkpoint_with_links_or_copies(tmp_path, monkeypatch, links):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = federation()
    with monkeypatch.context() as patch:
        if not links:
            patch.setattr(os, "link", full)
        run.fit(rounds=4, folder=tmp_path, evaluate_every=2)
    assert round_in(tmp_path, PREVIOUS) == 2
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadArgument, match="cannot be written: No space left on device"):
        run.fit(rounds=6, folder=tmp_path)
    assert round_in(tmp_path) == round_in(tmp_path, PREVIOUS) == 4


def test_a_round_that_is_lost_counts_for_privacy_however_often_that_happens(tmp_path):
    federation(Private(Plain(), 1.0, 1.0)).fit(rounds=4, folder=tmp_path)
    for lost in (1, 2):  # rounds 4, and 4 again, were seen by clients
        (tmp_path / LAST).write_bytes(b"garbage")
        again = federation(Private(Plain(), 1.0, 1.0))
        again.resume(tmp_path)
        assert (again.round, again.defence_server.accountant.rounds) == (3, 3 + lost)
        again.fit(rounds=4, folder=tmp_path)


def test_a_damaged_state_of_a_study_is_computed_again(tmp_path, caplog):
    path = tmp_path / "gan.pt"
    checkpoint.save_keyed(path, "this", {"epoch": 3})
    assert checkpoint.load_keyed(path, "this", checkpoint.CPU)["epoch"] == 3
    assert checkpoint.load_keyed(path, "that", checkpoint.CPU) is None
    path.write_bytes(path.read_bytes()[:-9])
    assert checkpoint.load_keyed(path, "this", checkpoint.CPU) is None
    assert "computing the state again" in caplog.text


def record(folder, run=None, rounds=ROUNDS, every=EVERY, **how):
    return (run or make()).fit(test=TEST, folder=folder, rounds=rounds, evaluate_every=every, **how)


def test_a_run_that_is_refused_touches_nothing_in_the_folder(tmp_path):
    record(tmp_path, rounds=4)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    del before[".lock"]
    with pytest.raises(BadArgument, match=r"(?s)this folder contains another run.*resume=True"):
        record(tmp_path)
    with pytest.raises(BadArgument, match="rounds"):
        record(tmp_path, rounds=-1, resume=True)
    for name, found in before.items():
        assert ((tmp_path / name).read_bytes(), (tmp_path / name).stat().st_mtime_ns) == found, name


def test_a_resumed_run_cuts_its_metrics_back_to_the_checkpoint_and_appends(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path, on_round=stop_at(6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 7, "epoch": 1.0}\n{"round": 8, "ep')  # as a kill leaves them
    summary = record(tmp_path, resume=True)
    assert record(tmp_path, resume=True) == summary  # submitted again
    assert [line["round"] for line in lines(tmp_path)] == list(range(1, ROUNDS + 1))
    clock = [line["seconds"] for line in lines(tmp_path)]
    assert clock == sorted(clock)  # of both parts together


def test_metrics_have_the_round_whose_evaluation_was_interrupted_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path, make(schedule=impatient(Plateau)))
    assert [line["round"] for line in lines(tmp_path)] == list(range(1, 2 * EVERY + 1))
    assert "mse" not in lines(tmp_path)[-1]
    record(tmp_path, make(schedule=impatient(ReduceLROnPlateau)), resume=True)
    assert [line["round"] for line in lines(tmp_path)] == list(range(1, ROUNDS + 1))
    assert [line["round"] for line in lines(tmp_path) if "mse" in line] == [4, 8, 12]


def in_child(work):
    """Start a process that does some work; it never returns into the test."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    finally:
        os._exit(1)


def kill(*words):
    os.kill(os.getpid(), signal.SIGKILL)


def was_killed(child):
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_run_that_is_killed_at_every_tenth_is_whole_in_the_end(tmp_path):
    folder, whole, rounds, every = tmp_path / "killed", tmp_path / "whole", 100, 11
    how = {"rounds": rounds, "every": every, "resume": True}  # no tenth is an evaluation but the last
    record(whole, federation(), **how)
    summary = json.loads((whole / "summary.json").read_text())
    for number in range(10, rounds + 1, 10):
        end = lambda own, number=number: own["round"] == number and kill()  # noqa: E731
        assert was_killed(in_child(lambda end=end: record(folder, federation(), on_round=end, **how)))
        assert number - every <= round_in(folder) <= number
    record(folder, federation(), **how)
    found = json.loads((folder / "summary.json").read_text())
    assert all(found[name] == summary[name] for name in ("rounds", "mse", "best"))
    for one, other in zip(lines(folder), lines(whole), strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    one, other = (load_file(home / checkpoint.MODEL) for home in (folder, whole))
    assert all(torch.equal(one[name], other[name]) for name in one)


MOMENTS = ("open", "fdopen", "fsync", "replace", "link", "unlink")


def noisy():
    return federation(PPDL(0.5, sigma=0.1, seed=1))  # clients have a private state


def killed_at(folder, moment, number, after):
    """Let a child train, and kill itself before or after its n-th call of a function that writes."""
    real, count = getattr(os, moment), 0

    def deadly(*words, **named):
        nonlocal count
        count += 1
        if count == number and not after:
            kill()
        try:
            return real(*words, **named)
        finally:  # it may raise
            if count == number:
                kill()

    def work():
        setattr(os, moment, deadly)
        noisy().fit(rounds=2000, folder=folder, checkpoint_every=1, resume=True)

    return was_killed(in_child(work))


@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_at_any_moment_lose_no_run(tmp_path, kills, caplog):
    chance, whole, known, furthest = random.Random(kills), noisy(), [], {}
    for number in range(kills):
        folder = tmp_path / str(number % max(1, kills // 10))  # each run is killed ten times
        assert killed_at(folder, chance.choice(MOMENTS), chance.randint(1, 30), chance.random() < 0.5)
        there = checkpoint.list_checkpoints(folder)
        assert there or folder not in furthest  # what was there once is there
        if there:
            assert there[0].name == LAST  # at every moment
            run = noisy()
            run.resume(folder)
            assert run.round >= furthest.get(folder, 0)
            while len(known) <= run.round:  # the same run without a kill
                known.append(values(whole))
                whole.step()
            assert torch.equal(values(run), known[run.round])
            furthest[folder] = run.round
    assert "continues from" not in caplog.text  # no checkpoint was ever damaged
    assert max(furthest.values()) > 2  # and the kills did not all come before the first one


def test_a_resumed_rounding_baseline_draws_the_noise_of_an_uninterrupted_one(tmp_path):
    """The noise of one unit in the last place changes most of the 46 numbers, so they are not equal by chance."""
    run, again = make(defence=Plain(rounding=1)), make(defence=Plain(rounding=1))
    run.fit(rounds=3, folder=tmp_path)
    again.resume(tmp_path)
    mine, others = run.step().gradients, again.step().gradients
    assert all(torch.equal(gradient, others[name]) for name, gradient in mine.items())


def test_a_model_in_another_memory_layout_is_saved_and_continues(tmp_path):
    def convolutions():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Flatten(), torch.nn.Linear(12, 2))
        records = torch.randn(8, 2, 4, 4), torch.randn(8, 2)
        return Federation(net.to(memory_format=torch.channels_last), [records], "plain", batch_size=4)

    run, again = convolutions(), convolutions()
    run.fit(2, folder=tmp_path / "whole")
    convolutions().fit(1, folder=tmp_path / "half")
    again.fit(2, folder=tmp_path / "half", resume=True)
    assert equal(again, run)
    assert not again.model[0].weight.is_contiguous()
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in run.model.state_dict().items())
