"""A run that is killed loses at most the rounds since its last checkpoint, and ends as if nothing had happened."""

import itertools
import json
import os
import random
import signal
import time

import pytest
import torch
from tests.configs import config_of
from tests.oracle import built, worst
from tests.sessions import watch

from fedveil.defences import Plain, Veil
from fedveil.errors import BadArgument
from fedveil.federation import Federation, checkpoint
from fedveil.models import mlp
from fedveil.runs.folder import train

ROUNDS = 300


def federation(defence):
    generator = torch.Generator().manual_seed(0)
    data = [
        (
            torch.randn(n, 6, generator=generator, dtype=torch.float64),
            torch.randn(n, 4, generator=generator, dtype=torch.float64),
        )
        for n in (40, 25)
    ]
    model = built(lambda: mlp(6, 4, hidden=16))
    return Federation(
        model,
        data,
        defence,
        lambda p: torch.optim.Adam(p, 1e-2),
        batch_size=8,
        schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30),
    )


def work(folder, make, on_round=lambda record: None):
    run = federation(make())
    if (folder / "checkpoint.pt").exists():
        run.resume(folder)
    run.fit(rounds=ROUNDS, folder=folder, checkpoint_every=3, on_round=on_round)
    return run.model.state_dict()


@pytest.mark.parametrize("make", [Plain, lambda: Veil(groups=2)], ids=["plain", "veil"])
def test_killed_twenty_times_at_random_moments_a_run_ends_the_same(tmp_path, make):
    expected = work(tmp_path / "whole", make)
    folder, chance, kills, reached = tmp_path / "killed", random.Random(0), 0, []
    for _ in range(20):
        reader, writer = os.pipe()
        least, child = chance.randint(1, 12), os.fork()
        if not child:
            done = itertools.count(1)

            def tell(record, end=writer, most=least + 3, done=done):
                os.write(end, b"x")
                time.sleep(0.002)
                while next(done) > most:  # the parent is late: the run must not end before the kill
                    signal.pause()

            work(folder, make, tell)
            os._exit(0)
        for _ in range(least):
            os.read(reader, 1)  # a round, however long a busy machine takes for it
        time.sleep(chance.uniform(0.0, 0.004))
        os.kill(child, signal.SIGKILL)
        kills += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        os.close(reader), os.close(writer)
        if (folder / "checkpoint.pt").exists():
            again = federation(make())
            again.resume(folder)  # readable whenever it is there
            reached.append(again.round)
    assert kills == 20
    assert reached == sorted(reached)
    assert len(set(reached)) > 3  # the kills fell into the run, not before or behind it
    found = work(folder, make)
    if make is Plain:
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    else:
        assert worst(found, expected) < 1e-6


def test_a_resumed_veil_draws_new_secrets(tmp_path):
    seen = []

    def listening():
        return watch(Veil(), on_broadcast=lambda own: seen.append(own.broadcast.round))

    federation(listening()).fit(rounds=4, folder=tmp_path)
    again = federation(listening())
    again.resume(tmp_path)
    again.fit(rounds=8)
    assert len(set(seen)) == 8


def test_no_secret_is_in_a_checkpoint(tmp_path):
    secrets = []

    def leak(own):
        secrets.extend(own.perturbation.recovery.transform.scale.tolist())

    federation(watch(Veil(), on_recover=leak)).fit(rounds=3, folder=tmp_path)
    state = checkpoint.load(tmp_path / "checkpoint.pt")
    numbers = set()

    def collect(value):
        if isinstance(value, torch.Tensor):
            numbers.update(value.double().flatten().tolist())
        elif isinstance(value, dict):
            [collect(v) for v in value.values()]
        elif isinstance(value, list | tuple):
            [collect(v) for v in value]
        elif isinstance(value, float):
            numbers.add(value)

    collect(state)
    assert not numbers & {s for s in secrets if abs(s) != 1}


@pytest.mark.parametrize("broken", [b"", b"garbage", b"PK\x03\x04 half a file"])
def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path, broken):
    (tmp_path / "checkpoint.pt").write_bytes(broken)
    with pytest.raises(BadArgument, match=r"checkpoint.pt: the checkpoint cannot be read"):
        federation(Plain()).resume(tmp_path)


def test_a_missing_checkpoint_and_one_of_another_model_are_refused(tmp_path):
    with pytest.raises(BadArgument, match="there is no checkpoint here"):
        federation(Plain()).resume(tmp_path)
    federation(Plain()).fit(rounds=1, folder=tmp_path)
    other = Federation(mlp(6, 4, hidden=3), [(torch.zeros(4, 6), torch.zeros(4, 4))], "plain")
    with pytest.raises(BadArgument, match="of another model or optimizer"):
        other.resume(tmp_path)


def test_a_run_folder_goes_on_where_it_stopped(tmp_path):
    config = config_of(epochs=2, clients=3, hidden=8)
    train(config, tmp_path / "a")
    with pytest.raises(BadArgument, match="there is a run in this folder"):
        train(config, tmp_path / "a")
    with pytest.raises(BadArgument, match="the run here has hidden = 8, not 9"):
        train(config_of(epochs=2, clients=3, hidden=9), tmp_path / "a", resume=True)
    with (tmp_path / "a" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"round": 99, "half a li')  # as a kill may leave it
    summary = train(config_of(epochs=4, clients=3, hidden=8), tmp_path / "a", resume=True)
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, summary.rounds + 1))
    clock = [line["seconds"] for line in lines]
    assert clock == sorted(clock)  # of both parts together
    assert {p.name for p in (tmp_path / "a").iterdir()} == {
        "config.json", "metrics.jsonl", "model.safetensors", "best.safetensors", "model.json", "checkpoint.pt",
        "checkpoint.previous.pt", "summary.json",
        "report.html", ".lock",
    }  # fmt: skip
