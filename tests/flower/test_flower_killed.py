"""Flower: a run whose server is killed at every tenth of its rounds, started again each time."""

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from tests.deployed.kills import check_killed_runs
from tests.flower.processes import Deployment


@pytest.mark.slow
def test_a_run_that_is_killed_at_every_tenth_is_whole_in_the_end(tmp_path):
    with Deployment(tmp_path / "flwr") as deployment:
        for part in range(2):
            deployment.start_node(part, parts=2)
        check_killed_runs(deployment, tmp_path)
