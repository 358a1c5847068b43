"""A run that is killed at every tenth of its rounds, and resumed each time, over any engine."""

import json

import torch
from safetensors.torch import load_file

from fedveil.federation import checkpoint

ROUNDS, EVERY = 20, 7
HOW = {
    "rounds": ROUNDS,
    "evaluate_every": EVERY,
    "defence": "plain",
    "net": "mlp32",
    "wait_for": 2,
    "min_answers": 2,
}
TENTHS = range(2, ROUNDS + 1, 2)  # one of them, and the last, are evaluations


def saved_in(folder):
    return checkpoint.load(folder / "checkpoint.pt")["round"] if (folder / "checkpoint.pt").exists() else 0


def check_kill(folder, kill_at, every=EVERY):
    """The checkpoint is behind by an interval at most."""
    assert kill_at - every <= saved_in(folder) <= kill_at


def check_end(folder, whole, rounds=ROUNDS, every=EVERY):
    """Every round is there once, evaluated where it should be, and the model is that of an uninterrupted run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, rounds + 1))
    evaluated = [line["round"] for line in lines if line.get("evaluated")]
    assert evaluated == sorted({*range(every, rounds + 1, every), rounds})
    one, two = load_file(folder / "model.safetensors"), load_file(whole / "model.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
