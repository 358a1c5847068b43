"""Real processes: the model of one process, keys and eavesdropping."""

import subprocess

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from safetensors.torch import load_file
from tests.deployed.eavesdropping import Ear, listen
from tests.deployed.results import answered, error, one_process, records
from tests.flower.processes import SCRIPT, Deployment, needs_keys
from tests.oracle import worst

pytestmark = pytest.mark.slow


@pytest.fixture
def keys(tmp_path):
    subprocess.run([SCRIPT, tmp_path / "keys", "4"], check=True, capture_output=True)
    return tmp_path / "keys"


@pytest.mark.parametrize(("where", "defence"), [("simulation", "plain"), ("simulation", "veil"), ("nodes", "veil")])
def test_twenty_rounds_give_the_model_of_one_process(where, defence, tmp_path):
    out = tmp_path / "out"
    with Deployment(tmp_path / "flwr", simulation=where == "simulation") as deployment:
        for part in range(3) if where == "nodes" else ():
            deployment.start_node(part)
        deployment.run(out, rounds=20, defence=defence, within=900)
    assert [record["answers"] for record in records(out)] == [3] * 20
    assert worst(load_file(out / "model.safetensors"), one_process(defence, 20)) < 1e-6


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


@needs_keys
def test_tls_and_registered_keys_admit_registered_nodes_only(tmp_path, keys):
    out, trust = tmp_path / "out", ["--root-certificates", f"{keys}/ca.crt"]
    strangers = {
        "wrong-key": ([*trust, "--auth-supernode-private-key", f"{keys}/node3"], "2004"),
        "no-key": (trust, "2001"),
        "no-tls": (["--insecure", "--max-retries", "2"], "305"),
    }
    with Deployment(tmp_path / "flwr", tls=keys) as deployment:
        for part in range(2):
            deployment.flwr("supernode", "register", keys / f"node{part}.pub", "lab")
            deployment.start_node(part)
        started = [deployment.start_node(2, trust=own, name=name) for name, (own, _) in strangers.items()]
        deployment.run(out, rounds=2, wait_for=2, within=600)
        assert [process.wait(60) for process in started] == [1, 1, 1]
        for name, (_, code) in strangers.items():
            assert code in (deployment.home / f"{name}.log").read_text()
    assert answered(out) == [(0, 1)] * 2
    assert error(out) < 1e-9
