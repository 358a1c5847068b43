"""FLARE: a job whose server is killed at every tenth of its rounds, submitted again each time."""

import json

import pytest
import torch

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from safetensors.torch import load_file
from tests.nvflare.processes import Flare

from fedveil.federation import checkpoint

ROUNDS, EVERY = 20, 7
HOW = {"rounds": ROUNDS, "evaluate_every": EVERY, "defence": "plain", "net": "mlp32", "wait_for": 2, "min_answers": 2}
TENTHS = range(2, ROUNDS + 1, 2)  # one of them, and the last, are evaluations


@pytest.mark.slow
def test_a_job_that_is_killed_at_every_tenth_is_whole_in_the_end(tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    with Flare(tmp_path / "flare", sites=2, simulator=True) as flare:
        flare.run(whole, **HOW)
        for kill_at in TENTHS:
            flare.run(out, wait=False, kill_at=kill_at, **HOW)
            flare.wait(out, file=f"killed-{kill_at}")
            flare.stop()  # the sites of that job
            saved = checkpoint.load(out / "checkpoint.pt")["round"] if (out / "checkpoint.pt").exists() else 0
            assert kill_at - EVERY <= saved <= kill_at  # behind by an interval at most
        flare.run(out, **HOW)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, ROUNDS + 1))
    evaluated = [line["round"] for line in lines if line.get("evaluated")]
    assert evaluated == sorted({*range(EVERY, ROUNDS + 1, EVERY), ROUNDS})
    one, two = (load_file(folder / "model.safetensors") for folder in (out, whole))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
