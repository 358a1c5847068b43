"""A hostile disk: damaged checkpoints, and kills at any instant. No run is lost, and none goes on with other values."""

import errno
import json
import os
import random
import signal
import time

import pytest
import torch
from tests.configs import config_of
from tests.small import SMALL, federation

from fedveil.defences import PPDL, Plain, Private
from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.runs.folder import is_finished, train

LAST, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"


def values(run):
    return torch.nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()


def damaged(content, chance):
    """Content with one bit flipped, cut, or with a run of zeros: never the same."""
    kind = chance.choice(["bit", "bit", "cut", "zeros"])
    place = chance.randrange(len(content))
    if kind == "cut":
        return content[:place]
    if kind == "zeros":
        size = chance.randint(1, 512)
        found = content[:place] + bytes(len(content[place : place + size])) + content[place + size :]
        return found if found != content else damaged(content, chance)
    return content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_no_damage_loads_with_other_values_and_no_run_is_lost(tmp_path, count, caplog):
    run, chance, seen = federation(), random.Random(count), {}
    for rounds in (2, 4):
        run.fit(rounds=rounds, folder=tmp_path, test=(torch.ones(4, 3), torch.ones(4, 2)), evaluate_every=2)
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
        with pytest.raises(checkpoint.Damaged):
            checkpoint.load(tmp_path / LAST)


def test_with_two_damaged_checkpoints_the_run_is_refused_by_name(tmp_path):
    run = federation()
    run.fit(rounds=1, folder=tmp_path)
    run.fit(rounds=2, folder=tmp_path)
    for name in (LAST, PREVIOUS):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
    with pytest.raises(BadArgument, match=r"checkpoint.pt: .*damaged.*; so is .*checkpoint.previous.pt"):
        federation().resume(tmp_path)


def test_going_back_is_in_the_metrics_and_ends_as_if_nothing_had_happened(tmp_path, capfd):
    whole = train(config_of(**SMALL, epochs=4), tmp_path / "whole")
    config, folder = config_of(**SMALL, epochs=2), tmp_path / "run"
    train(config, folder)
    assert is_finished(config, folder)
    content = (folder / LAST).read_bytes()
    (folder / LAST).write_bytes(content[:99] + bytes(40) + content[139:])
    assert not is_finished(config, folder)
    summary = train(config_of(**SMALL, epochs=4), folder, resume=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, whole.rounds + 1))
    assert [line["round"] for line in lines if "went_back" in line] == [whole.rounds // 4]
    assert summary.rounds == whole.rounds
    assert checkpoint.load(folder / PREVIOUS)["round"] == 3 * whole.rounds // 4


def test_a_plain_run_that_went_back_ends_bit_for_bit_the_same(tmp_path):
    whole = federation()
    whole.fit(rounds=6)
    federation().fit(rounds=4, folder=tmp_path, evaluate_every=2)
    (tmp_path / LAST).write_bytes(b"")
    again = federation()
    again.resume(tmp_path)
    again.fit(rounds=6, folder=tmp_path)
    assert torch.equal(values(again), values(whole))


def test_private_states_of_both_rounds_are_kept_and_belong_to_their_checkpoint(tmp_path):
    def make():
        return federation(PPDL(0.5, sigma=0.1))

    whole = make()
    whole.fit(rounds=6, folder=tmp_path, checkpoint_every=2)
    assert sorted(path.name for path in (tmp_path / "clients" / "0").iterdir()) == ["4.pt", "6.pt"]
    (tmp_path / "clients" / "1" / "6.pt").write_bytes(b"garbage")  # the checkpoint of round 6 is good, and no use
    again = make()
    again.resume(tmp_path)
    assert again.round == 4
    again.fit(rounds=6)
    assert torch.equal(values(again), values(whole))
    other = tmp_path / "other"
    make().fit(rounds=6, folder=other, checkpoint_every=2)
    for number in (4, 6):
        content = (other / "clients" / "1" / f"{number}.pt").read_bytes()
        (tmp_path / "clients" / "1" / f"{number}.pt").write_bytes(content)
    with pytest.raises(BadArgument, match="it belongs to another run or round"):
        make().resume(tmp_path)


def test_the_one_before_is_never_another_run_s(tmp_path):
    federation().fit(rounds=4, folder=tmp_path, evaluate_every=2)
    new = federation()
    new.fit(rounds=1)
    new.save(tmp_path)
    assert not (tmp_path / PREVIOUS).exists()
    new.fit(rounds=2, folder=tmp_path)
    assert checkpoint.load(tmp_path / PREVIOUS)["round"] == 1


def test_a_damaged_one_never_takes_the_place_of_the_good_one(tmp_path, monkeypatch):
    federation().fit(rounds=4, folder=tmp_path, evaluate_every=2)
    (tmp_path / LAST).write_bytes(b"garbage")
    again = federation()
    again.resume(tmp_path)
    seen = []
    monkeypatch.setattr(checkpoint, "save", lambda *words: seen.append(checkpoint.load(tmp_path / PREVIOUS)["round"]))
    again.save(tmp_path)
    assert seen == [2]  # while the new one is being written, too


def test_a_full_disk_costs_neither_checkpoint(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = federation()
    run.fit(rounds=4, folder=tmp_path, evaluate_every=2)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadArgument, match="cannot be written: No space left on device"):
        run.fit(rounds=6, folder=tmp_path)
    again = federation()
    again.resume(tmp_path)
    assert again.round == 4


def test_where_there_are_no_links_the_one_before_is_a_copy(tmp_path, monkeypatch):
    def refuse(*names):
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    federation().fit(rounds=4, folder=tmp_path, evaluate_every=2)
    assert checkpoint.load(tmp_path / PREVIOUS)["round"] == 2


def test_a_round_that_is_lost_counts_for_privacy_however_often_that_happens(tmp_path):
    def make():
        return federation(Private(Plain(), 1.0, 1.0))

    make().fit(rounds=4, folder=tmp_path)
    for lost in (1, 2):  # rounds 4, and 4 again, were seen by clients
        (tmp_path / LAST).write_bytes(b"garbage")
        again = make()
        again.resume(tmp_path)
        assert (again.round, again.defence_server.accountant.rounds) == (3, 3 + lost)
        again.fit(rounds=4, folder=tmp_path)


def test_a_study_s_state_that_is_damaged_is_made_anew(tmp_path, caplog):
    path = tmp_path / "gan.pt"
    checkpoint.save_for(path, "this", {"epoch": 3})
    assert checkpoint.load_for(path, "this", checkpoint.CPU)["epoch"] == 3
    assert checkpoint.load_for(path, "that", checkpoint.CPU) is None
    path.write_bytes(path.read_bytes()[:-9])
    assert checkpoint.load_for(path, "this", checkpoint.CPU) is None
    assert "it is computed again" in caplog.text


MOMENTS = ("open", "fdopen", "fsync", "replace", "link", "unlink")


class Whole:
    """The same run without a kill, as far as it is asked for."""

    def __init__(self):
        self.run, self.known = noisy(), {}

    def after(self, rounds):
        while self.run.round <= rounds:
            self.known[self.run.round] = values(self.run)
            self.run.step()
        return self.known[rounds]


def noisy():
    return federation(PPDL(0.5, sigma=0.1, seed=1))  # clients have a private state


def go_on(folder, on_round=None):
    """A child's work, until it is killed."""
    try:
        run = noisy()
        if checkpoint.found_in(folder):
            run.resume(folder)
        run.fit(rounds=2000, folder=folder, checkpoint_every=1, on_round=on_round)
    finally:
        os._exit(1)


def killed_at(folder, moment, number, after):
    """A child that trains, and kills itself before or after its n-th call of a function that writes."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    count, real = [0], getattr(os, moment)

    def deadly(*words, **named):
        count[0] += 1
        if count[0] == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return real(*words, **named)
        finally:  # it may raise
            if count[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, moment, deadly)
    go_on(folder)


def killed_after(folder, rounds, seconds):
    """A child that trains, and is killed from outside, so many seconds after its n-th round."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        go_on(folder, lambda record: os.write(writer, b"x"))
    for _ in range(rounds):
        os.read(reader, 1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.close(reader)
    os.close(writer)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_at_any_moment_lose_no_run(tmp_path, kills, caplog):
    chance, whole, furthest = random.Random(kills), Whole(), {}
    for number in range(kills):
        folder = tmp_path / str(number % max(1, kills // 10))  # each run is killed ten times
        if number // max(1, kills // 10) % 2:
            assert killed_at(folder, chance.choice(MOMENTS), chance.randint(1, 9), chance.random() < 0.5)
        else:
            assert killed_after(folder, chance.randint(2, 5), chance.uniform(0.0, 0.01))
        there = checkpoint.found_in(folder)
        assert there or folder not in furthest  # what was there once is there
        if there:
            assert there[0].name == LAST  # at every moment
            run = noisy()
            run.resume(folder)
            assert run.round >= furthest.get(folder, 0)
            assert torch.equal(values(run), whole.after(run.round))
            furthest[folder] = run.round
    assert "continues from" not in caplog.text  # no checkpoint was ever damaged
    assert max(furthest.values()) > 2  # and the kills did not all come before the first one
