"""Bank in the paper's setting over FLARE with mTLS: the example, end to end, against the one-process federation."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from tests.nvflare.processes import ADMIN, Flare

from fedveil.data import load, split
from fedveil.federation import Federation
from fedveil.models import mlp

EXAMPLE = Path(__file__).parents[2] / "examples" / "nvflare_app" / "job.py"
HOME = Path(os.environ.get("FEDVEIL_DATA", Path(__file__).parents[3] / "shared" / "data"))
SITES, BATCH, ROUNDS, PER_EPOCH = 5, 512, 260, 13


def one_process():
    data = load("bank", path=HOME / "bank")
    torch.manual_seed(0)
    run = Federation(
        mlp(63, 1, layers=3, hidden=50, bias=False),
        [(data.train.inputs[rows], data.train.targets[rows]) for rows in split(data, SITES, seed=0)],
        "plain",
        lambda p: torch.optim.Adam(p, 1e-3, betas=(0.9, 0.99), weight_decay=5e-4),
        batch_size=BATCH,
        loss="squared_error",
    )
    run.fit(rounds=ROUNDS, test=(data.test.inputs, data.test.targets))
    return run.history.last["mse"]


@pytest.mark.slow
@pytest.mark.skipif(not (HOME / "bank").exists(), reason="no bank data: set FEDVEIL_DATA")
def test_bank_deployed_learns_what_one_process_learns(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_DATA", str(HOME.resolve()))
    out = tmp_path / "out"
    words = f"--sites {SITES} --min-answers {SITES} --no-whole-shard --batch-size {BATCH} --rounds {ROUNDS}"
    words += f" --rounds-per-epoch {PER_EPOCH} --lr 1e-3 --schedule constant --out {out}"
    with Flare(tmp_path / "flare", sites=SITES) as flare:
        for part in range(SITES):
            flare.start_client(part)
        began = time.monotonic()
        job = flare.start("job", sys.executable, EXAMPLE, *words.split(), "--kit", flare.kits / ADMIN)
        assert job.wait(600) == 0, flare.logs()
        seconds = time.monotonic() - began
    summary = json.loads((out / "summary.json").read_text())
    expected = one_process()
    print(f"{seconds:.0f} s with the start of the job, {summary['seconds']:.0f} s of rounds; {summary['mse']:.5f}, "
          f"one process {expected:.5f}")  # fmt: skip
    assert summary["rounds"] == ROUNDS
    assert abs(summary["mse"] - expected) < 1e-3
