"""A run that is killed at every tenth of its rounds and resumed each time, in Python and from the command line."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.configs import config_of
from tests.federation.killing import Deadly
from tests.small import federation

from fedveil.data import from_records
from fedveil.federation import checkpoint
from fedveil.runs.choices import format_command
from fedveil.runs.folder import record_run, train

TENTHS = range(1, 11)


def same(folder, other):
    one, two = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def saved_in(folder):
    return checkpoint.load(folder / "checkpoint.pt")["round"] if (folder / "checkpoint.pt").exists() else 0


def check_metrics(folder, whole, rounds):
    """Every round once, evaluated as the run that nothing happened to."""
    mine, others = [
        [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()] for home in (folder, whole)
    ]
    assert [line["round"] for line in mine] == list(range(1, rounds + 1))
    for one, other in zip(mine, others, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


ROUNDS, EVERY = 100, 11  # no tenth is an evaluation but the last


def recorded(folder, kill_at=0):
    def end(record):
        if record["round"] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    generator = torch.Generator().manual_seed(5)
    test = torch.randn(6, 3, generator=generator), torch.randn(6, 2, generator=generator)
    about, how = {"clients": 2, "model": "mlp"}, {"rounds": ROUNDS, "evaluate_every": EVERY, "resume": True}
    data = from_records("numbers", test, test)
    return record_run(federation(), folder, data, about, "again", on_round=end, **how).to_dict()


def test_a_run_in_python_that_is_killed_at_every_tenth_is_whole_in_the_end(tmp_path):
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    summary = recorded(whole)
    for kill_at in (tenth * ROUNDS // 10 for tenth in TENTHS):
        child = os.fork()
        if not child:
            try:
                recorded(folder, kill_at)
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert kill_at - EVERY <= saved_in(folder) <= kill_at
    found = recorded(folder)
    assert {name: found[name] for name in ("rounds", "mse", "best")} == {
        name: summary[name] for name in ("rounds", "mse", "best")
    }
    check_metrics(folder, whole, ROUNDS)
    assert same(folder, whole)


FLAGS = {"clients": 2, "hidden": 4, "layers": 2, "train_size": 66, "batch_size": 3, "epochs": 10}
PER_EPOCH = 11


@pytest.mark.slow
def test_the_command_that_is_killed_at_every_tenth_is_whole_in_the_end(tmp_path):
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    named = f"{Deadly.__module__}:{Deadly.__name__}"
    config = config_of(**FLAGS, defence=named)
    summary = train(config, whole).to_dict()
    assert summary["rounds"] == 10 * PER_EPOCH
    first = [*format_command(config).split(), "--defence", named]
    for kill_at in (tenth * PER_EPOCH - 1 for tenth in TENTHS):
        again = ["--resume", "--trust-code"] if (folder / "checkpoint.pt").exists() else first
        words = [sys.executable, "-m", "fedveil", "train", *again, "--out", str(folder)]
        environment = {**os.environ, "KILL_AFTER": str(kill_at - saved_in(folder)), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert kill_at - 1 - PER_EPOCH <= saved_in(folder) < kill_at
    words = [sys.executable, "-m", "fedveil", "train", "--resume", "--trust-code", "--out", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check_metrics(folder, whole, 10 * PER_EPOCH)
    assert same(folder, whole)
