"""Faults, restarts and eavesdropping with real processes."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from tests.deployed.eavesdropping import Ear, listen
from tests.deployed.results import answered, error, kinds, records
from tests.flower.processes import SCRIPT, Deployment, mentions, wait_until

pytestmark = pytest.mark.slow


def marked(marks, part, number):
    return (marks / f"{part}-{number}").exists


@pytest.fixture
def marks(tmp_path):
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks"


def test_nothing_that_supernodes_receive_holds_a_secret_or_predicts(tmp_path):
    with Deployment(tmp_path / "flwr") as deployment:
        ears = [Ear(deployment.port) for _ in range(3)]
        for part, ear in enumerate(ears):
            deployment.start_node(part, superlink=f"127.0.0.1:{ear.port}")
        try:
            listen(lambda out, **config: deployment.run(out, within=600, **config), tmp_path, ears)
        finally:
            deployment.__exit__()
            [ear.close() for ear in ears]


def test_bad_updates_cost_their_client_the_round(tmp_path):
    out = tmp_path / "out"
    faults = "0:0:nan 1:1:stale 2:2:raise"
    with Deployment(tmp_path / "flwr") as deployment:
        for part in range(3):
            deployment.start_node(part)
        deployment.run(out, rounds=4, faults=faults, timeout=90.0, within=600)
    found = [kind for several in kinds(out) for kind in several]
    assert found == ["not finite", "stale", "error 2"]
    assert answered(out) == [(1, 2), (0, 2), (0, 1), (0, 1, 2)]
    assert error(out) < 1e-9


def test_a_supernode_killed_in_mid_round_and_then_all_of_them_of_which_two_come_back(tmp_path, marks):
    out = tmp_path / "out"
    with Deployment(tmp_path / "flwr") as deployment:
        for part in range(3):
            deployment.start_node(part)
        options = {"marks": str(marks), "work": 2.0, "timeout": 45.0, "min_answers": 2, "attempts": 20}
        deployment.run(out, rounds=6, wait=False, patience=300.0, **options)
        wait_until(marked(marks, 1, 1), 240, "client 1 in round 1")
        deployment.kill("node1")
        wait_until(marked(marks, 0, 3), 240, "client 0 in round 3")
        deployment.kill("node0")
        deployment.kill("node2")
        for part in (0, 2):
            deployment.start_node(part, name=f"again{part}")
        deployment.wait(out, 900)
    assert answered(out) == [(0, 1, 2), *[(0, 2)] * 5]
    assert error(out) < 1e-9
    assert all(record["seconds"] < 900 for record in records(out))


@pytest.mark.skipif(not shutil.which("openssl") or not shutil.which("ssh-keygen"), reason="no openssl or ssh-keygen")
def test_tls_and_registered_keys_let_in_whom_they_should_and_nobody_else(tmp_path):
    out, keys = tmp_path / "out", tmp_path / "keys"
    subprocess.run([SCRIPT, keys, "4"], check=True, capture_output=True)
    with Deployment(tmp_path / "flwr", tls=keys) as deployment:
        for part in range(2):
            deployment.flwr("supernode", "register", keys / f"node{part}.pub", "lab")
            deployment.start_node(part)
        stranger = ["--root-certificates", f"{keys}/ca.crt", "--auth-supernode-private-key", f"{keys}/node3"]
        wrong_key = deployment.start_node(2, trust=stranger, name="wrong-key")
        no_key = deployment.start_node(2, trust=["--root-certificates", f"{keys}/ca.crt"], name="no-key")
        no_tls = deployment.start_node(2, trust=["--insecure", "--max-retries", "2"], name="no-tls")
        deployment.run(out, rounds=2, wait_for=2, within=600)
        assert [process.wait(60) for process in (wrong_key, no_key, no_tls)] == [1, 1, 1]
        logs = {name: (deployment.home / f"{name}.log").read_text() for name in ("wrong-key", "no-key", "no-tls")}
    assert "2004" in logs["wrong-key"]
    assert "2001" in logs["no-key"]
    assert "305" in logs["no-tls"]
    assert answered(out) == [(0, 1)] * 2
    assert error(out) < 1e-9


def test_the_processes_of_these_tests_end_with_them(tmp_path):
    with Deployment(tmp_path / "flwr") as deployment:
        process = deployment.start_node(0)
        assert process.poll() is None
    assert process.poll() is not None
    wanted = f"FLWR_HOME={deployment.home}"
    wait_until(lambda: not any(mentions(p, wanted) for p in Path("/proc").glob("[0-9]*/environ")), 10, "their end")
