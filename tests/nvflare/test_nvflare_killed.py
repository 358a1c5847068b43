"""FLARE: a job whose server is killed at every tenth of its rounds, submitted again each time."""

import pytest

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from tests.deployed.kills import check_killed_runs
from tests.nvflare.processes import Flare


@pytest.mark.slow
def test_a_job_that_is_killed_at_every_tenth_is_whole_in_the_end(tmp_path):
    with Flare(tmp_path / "flare", sites=2, simulator=True) as flare:
        check_killed_runs(flare, tmp_path, after_kill=flare.stop)  # the sites of that job
