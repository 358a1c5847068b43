"""Flower: a run whose server is killed at every tenth of its rounds, started again each time."""

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from tests.deployed.kills import HOW, TENTHS, check_end, check_kill
from tests.flower.processes import Deployment


@pytest.mark.slow
def test_a_run_that_is_killed_at_every_tenth_is_whole_in_the_end(tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    with Deployment(tmp_path / "flwr") as deployment:
        for part in range(2):
            deployment.start_resident(part, parts=2)
        deployment.run(whole, **HOW)
        for kill_at in TENTHS:
            deployment.run(out, wait=False, kill_at=kill_at, **HOW)
            deployment.wait(out, file=f"killed-{kill_at}")
            check_kill(out, kill_at)
        deployment.run(out, **HOW)
    check_end(out, whole)
