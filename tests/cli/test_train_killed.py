"""`fedveil train`, killed at every tenth of a run and resumed each time."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.configs import config_of

from fedveil.defences import Plain
from fedveil.defences.plain import PlainRound, PlainServer
from fedveil.federation import checkpoint
from fedveil.runs.choices import format_command
from fedveil.runs.folder import train

FLAGS = {"clients": 2, "hidden": 4, "layers": 2, "train_size": 66, "batch_size": 3, "epochs": 10}
PER_EPOCH = 11


class DeadlyRound(PlainRound):
    exchanges = 0

    def recover(self, updates, weights):
        DeadlyRound.exchanges += 1
        if str(DeadlyRound.exchanges) == os.environ.get("KILL_AFTER"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().recover(updates, weights)


class Deadly(Plain):
    """Plain, until the exchange of which KILL_AFTER is the number in this process, from 1 on."""

    def server(self, model, example, loss):
        return PlainServer(model, round_type=DeadlyRound)


def saved_in(folder):
    return checkpoint.load(folder / "checkpoint.pt")["round"] if (folder / "checkpoint.pt").exists() else 0


def run(words, **environment):
    command = [sys.executable, "-m", "fedveil", "train", *words]
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_that_is_killed_at_every_tenth_is_whole_in_the_end(tmp_path):
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    config = config_of(**FLAGS, defence=f"{Deadly.__module__}:{Deadly.__name__}")
    assert train(config, whole).rounds == 10 * PER_EPOCH
    again, out = ["--resume", "--trust-code"], ["--out", str(folder)]
    for kill_at in range(PER_EPOCH - 1, 10 * PER_EPOCH, PER_EPOCH):
        first = [*format_command(config).split(), "--defence", config.defence.name]
        words = again if (folder / "checkpoint.pt").exists() else first
        done = run([*words, *out], KILL_AFTER=str(kill_at - saved_in(folder)))
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert kill_at - 1 - PER_EPOCH <= saved_in(folder) < kill_at
    done = run([*again, *out])
    assert done.returncode == 0, done.stderr
    mine, others = (
        [json.loads(line) | {"seconds": 0} for line in (home / "metrics.jsonl").read_text().splitlines()]
        for home in (folder, whole)
    )
    assert mine == others
    one, two = (load_file(home / checkpoint.MODEL) for home in (folder, whole))
    assert all(torch.equal(one[name], two[name]) for name in one)
