"""A run whose server is killed at every tenth of its rounds and started again each time, whatever engine it runs on."""

import json

import torch
from safetensors.torch import load_file

from fedveil.federation import checkpoint

ROUNDS, EVERY = 10, 3
HOW = {"rounds": ROUNDS, "evaluate_every": EVERY, "defence": "plain", "net": "mlp32", "wait_for": 2, "min_answers": 2}


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
