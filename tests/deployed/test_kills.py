"""A run whose server is killed at every tenth of its rounds and started again each time, on every engine."""

import json

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")
pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from tests.flower.processes import Deployment
from tests.nvflare.processes import Flare

from fedveil.federation import checkpoint

ROUNDS, EVERY = 10, 3
HOW = {"rounds": ROUNDS, "evaluate_every": EVERY, "defence": "plain", "net": "mlp32", "wait_for": 2, "min_answers": 2}


@pytest.mark.slow
def test_a_run_on_flower_that_is_killed_at_every_tenth_is_whole_in_the_end(tmp_path):
    with Deployment(tmp_path / "flwr") as deployment:
        for part in range(2):
            deployment.start_node(part, parts=2)
        check_killed_runs(deployment, tmp_path)


@pytest.mark.slow
def test_a_job_on_flare_that_is_killed_at_every_tenth_is_whole_in_the_end(tmp_path):
    with Flare(tmp_path / "flare", sites=2, simulator=True) as flare:
        check_killed_runs(flare, tmp_path, after_kill=flare.stop)  # the sites of that job


def check_killed_runs(deployment, tmp_path, after_kill=lambda: None):
    out, whole = tmp_path / "out", tmp_path / "whole"
    deployment.run(whole, **HOW)
    for kill_at in range(1, ROUNDS + 1):
        deployment.run(out, wait=False, kill_at=kill_at, **HOW)
        deployment.wait(out, file=f"killed-{kill_at}")
        after_kill()
        saved = checkpoint.load(out / "checkpoint.pt")["round"] if (out / "checkpoint.pt").exists() else 0
        assert kill_at - EVERY <= saved <= kill_at  # behind by an interval at most
    deployment.run(out, **HOW)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, ROUNDS + 1))
    evaluated = [line["round"] for line in lines if line.get("evaluated")]
    assert evaluated == sorted({*range(EVERY, ROUNDS + 1, EVERY), ROUNDS})
    one, two = (load_file(folder / "model.safetensors") for folder in (out, whole))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
