"""FLARE: a job whose server is killed at every tenth of its rounds, submitted again each time."""

import pytest

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from tests.deployed.kills import EVERY, ROUNDS, TENTHS, check_end, check_kill
from tests.nvflare.processes import Flare


@pytest.mark.slow
def test_a_job_that_is_killed_at_every_tenth_is_whole_in_the_end(tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    flare = Flare(tmp_path / "flare", sites=2)
    how = {
        "rounds": ROUNDS,
        "evaluate_every": EVERY,
        "defence": "plain",
        "net": "mlp32",
        "wait_for": 2,
        "min_answers": 2,
    }
    try:
        flare.run(whole, simulator=True, **how)
        for kill_at in TENTHS:
            flare.run(out, wait=False, simulator=True, kill_at=kill_at, **how)
            flare.wait(out, file=f"killed-{kill_at}")
            flare.stop()  # the sites of that job
            check_kill(out, kill_at)
        flare.run(out, simulator=True, **how)
    finally:
        flare.stop()
    check_end(out, whole)
