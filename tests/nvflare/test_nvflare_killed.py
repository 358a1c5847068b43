"""FLARE: a job whose server is killed at every tenth of its rounds, submitted again each time."""

import pytest

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from tests.deployed.kills import HOW, TENTHS, check_end, check_kill
from tests.nvflare.processes import Flare


@pytest.mark.slow
def test_a_job_that_is_killed_at_every_tenth_is_whole_in_the_end(tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    flare = Flare(tmp_path / "flare", sites=2)
    try:
        flare.run(whole, simulator=True, **HOW)
        for kill_at in TENTHS:
            flare.run(out, wait=False, simulator=True, kill_at=kill_at, **HOW)
            flare.wait(out, file=f"killed-{kill_at}")
            flare.stop()  # the sites of that job
            check_kill(out, kill_at)
        flare.run(out, simulator=True, **HOW)
    finally:
        flare.stop()
    check_end(out, whole)
