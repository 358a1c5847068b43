"""Real processes: the model of one process, keys, proxies, kills and eavesdropping."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from safetensors.torch import load_file
from tests.deployed.eavesdropping import Ear, listen
from tests.deployed.kills import HOW, check_end, check_kill
from tests.deployed.results import answered, error, kinds, records
from tests.deployed.task import make_model, parts
from tests.flower.processes import LOOP, SCRIPT, Deployment, mentions, wait_until
from tests.oracle import worst

from fedveil.defences import Plain, Veil
from fedveil.federation import Federation

pytestmark = pytest.mark.slow
needs_keys = pytest.mark.skipif(
    not shutil.which("openssl") or not shutil.which("ssh-keygen"), reason="no openssl, ssh-keygen"
)


@pytest.fixture
def keys(tmp_path):
    subprocess.run([SCRIPT, tmp_path / "keys", "4"], check=True, capture_output=True)
    return tmp_path / "keys"


def register(deployment, count):
    for part in range(count):
        deployment.flwr("supernode", "register", deployment.tls / f"node{part}.pub", "lab")


@pytest.mark.parametrize(("where", "defence"), [("simulation", "plain"), ("simulation", "veil"), ("nodes", "veil")])
def test_twenty_rounds_give_the_model_of_one_process(where, defence, tmp_path):
    out = tmp_path / "out"
    with Deployment(tmp_path / "flwr", simulation=where == "simulation") as deployment:
        for part in range(3) if where == "nodes" else ():
            deployment.start_node(part)
        deployment.run(out, rounds=20, defence=defence, within=900)
    assert [record["answers"] for record in records(out)] == [3] * 20
    own = Federation(
        make_model({"net": "mlp"}),
        parts()[:3],
        Plain() if defence == "plain" else Veil(groups=3, additive=100.0),
        lambda p: torch.optim.Adam(p, 1e-2),
        loss="squared_error",
        batch_size=32,
        whole_shard=True,
    )
    own.fit(rounds=20)
    assert worst(load_file(out / "model.safetensors"), own.model.state_dict()) < 1e-6


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
    with Deployment(tmp_path / "flwr") as deployment:
        for part in range(3):
            deployment.start_node(part)
        deployment.run(out, rounds=4, faults="0:0:nan 1:1:stale 2:2:raise", timeout=90.0, within=600)
    assert kinds(out) == [["not finite"], ["stale"], ["engine error"], []]
    assert answered(out) == [(1, 2), (0, 2), (0, 1), (0, 1, 2)]
    assert error(out) < 1e-9


def test_a_run_whose_server_is_killed_twice_ends_as_if_it_had_not_been(tmp_path):
    out, whole, how = tmp_path / "out", tmp_path / "whole", HOW | {"rounds": 6, "evaluate_every": 2}
    with Deployment(tmp_path / "flwr") as deployment:
        for part in range(2):
            deployment.start_node(part, parts=2)
        deployment.run(whole, **how)
        for kill_at in (3, 5):
            deployment.run(out, wait=False, kill_at=kill_at, **how)
            deployment.wait(out, file=f"killed-{kill_at}")
            check_kill(out, kill_at, every=2)
        deployment.run(out, **how)
    check_end(out, whole, rounds=6, every=2)


@needs_keys
def test_tls_and_registered_keys_admit_registered_nodes_only(tmp_path, keys):
    out, trust = tmp_path / "out", ["--root-certificates", f"{keys}/ca.crt"]
    strangers = {
        "wrong-key": ([*trust, "--auth-supernode-private-key", f"{keys}/node3"], "2004"),
        "no-key": (trust, "2001"),
        "no-tls": (["--insecure", "--max-retries", "2"], "305"),
    }
    with Deployment(tmp_path / "flwr", tls=keys) as deployment:
        register(deployment, 2)
        for part in range(2):
            deployment.start_node(part)
        started = [deployment.start_node(2, trust=own, name=name) for name, (own, _) in strangers.items()]
        deployment.run(out, rounds=2, wait_for=2, within=600)
        assert [process.wait(60) for process in started] == [1, 1, 1]
        for name, (_, code) in strangers.items():
            assert code in (deployment.home / f"{name}.log").read_text()
    assert answered(out) == [(0, 1)] * 2
    assert error(out) < 1e-9


@needs_keys
def test_a_node_behind_a_proxy_that_hangs_up_takes_part_again_under_a_loop(tmp_path, keys):
    out = tmp_path / "out"
    with Deployment(tmp_path / "flwr", tls=keys, options=["--database", tmp_path / "link.db"]) as deployment:
        register(deployment, 3)
        deployment.kill("link")
        proxy = Ear(deployment.port)  # accepts, and hangs up while the SuperLink is down
        try:
            nodes = [
                deployment.start_node(part, superlink=f"127.0.0.1:{proxy.port}", loop=LOOP if part < 2 else None)
                for part in range(3)
            ]
            assert nodes[2].wait(120) == 1  # what the loop is for; if this fails, Flower has fixed it
            logs = [deployment.home / f"node{part}.log" for part in range(2)]
            wait_until(lambda: all("Exit Code: 305" in log.read_text() for log in logs), 120, "the nodes' end")
            deployment.start_link()
            deployment.run(out, rounds=2, wait_for=2, within=600)
        finally:
            deployment.__exit__()
            proxy.close()
    assert answered(out) == [(0, 1)] * 2


def test_the_processes_of_these_tests_end_with_them(tmp_path):
    with Deployment(tmp_path / "flwr") as deployment:
        process = deployment.start_node(0)
        assert process.poll() is None
    assert process.poll() is not None
    wanted = f"FLWR_HOME={deployment.home}"
    wait_until(lambda: not any(mentions(p, wanted) for p in Path("/proc").glob("[0-9]*/environ")), 10, "their end")
