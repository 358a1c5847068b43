"""`fedveil flower-node` with real processes: the engine's model, no foreign code, connections that are lost."""

import shutil
import subprocess

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from safetensors.torch import load_file
from tests.deployed.results import answered, error, records
from tests.flower.processes import APP, SCRIPT, Deployment, wait_until
from tests.flower.test_flower_deployment import engine
from tests.flower.test_flower_proxy import proxy
from tests.oracle import worst

from fedveil.defences import Plain, Veil

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("openssl") or not shutil.which("ssh-keygen"), reason="no openssl, ssh-keygen"),
]
SPY = "from pathlib import Path\nPath({path!r}).write_text('code of the FAB ran')\n"


@pytest.fixture
def keys(tmp_path):
    subprocess.run([SCRIPT, tmp_path / "keys", "3"], check=True, capture_output=True)
    return tmp_path / "keys"


def register(deployment, parts=3):
    for part in range(parts):
        deployment.flwr("supernode", "register", deployment.tls / f"node{part}.pub", "lab")


def said(deployment, part):
    return (deployment.home / f"node{part}.log").read_text()


@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_fifty_rounds_over_tls_are_those_of_the_engine(defence, tmp_path, keys):
    out = tmp_path / "out"
    with Deployment(tmp_path / "flwr", tls=keys) as deployment:
        register(deployment)
        nodes = [deployment.start_resident(part) for part in range(3)]
        deployment.run(out, rounds=50, defence=defence, within=900)
        assert [node.poll() for node in nodes] == [None] * 3
        assert said(deployment, 0).count("answered after") == 50
        assert "Traceback" not in said(deployment, 0)
        nodes[0].terminate()
        assert nodes[0].wait(30) == 0
        assert "Deactivated" in (deployment.home / "link.log").read_text()
    assert answered(out) == [(0, 1, 2)] * 50
    own = engine(Plain() if defence == "plain" else Veil(groups=3, additive=100.0), 50)
    assert worst(load_file(out / "model.safetensors"), own) < 1e-6


def test_a_node_never_runs_the_code_of_the_fab(tmp_path):
    out, spied, foreign = tmp_path / "out", tmp_path / "spied", tmp_path / "foreign"
    shutil.copytree(APP, foreign, ignore=shutil.ignore_patterns("__pycache__"))
    client = foreign / "veiltest" / "client_app.py"
    client.write_text(SPY.format(path=str(spied)) + client.read_text())
    with Deployment(tmp_path / "flwr") as deployment:
        for part in range(3):
            deployment.start_resident(part)
        deployment.run(out, app=foreign, rounds=2, within=300)
        assert answered(out) == [(0, 1, 2)] * 2
        assert not spied.exists()
        deployment.kill("node0")
        deployment.start_node(0, name="stock")  # which does run it, so that the file could have been there
        again = tmp_path / "again"
        deployment.run(again, app=foreign, rounds=1, within=300)
    assert answered(again) == [(0, 1, 2)]  # both kinds of node in one run
    assert spied.read_text() == "code of the FAB ran"


def test_a_node_outlives_the_superlink(tmp_path, keys):
    with Deployment(tmp_path / "flwr", tls=keys, options=["--database", tmp_path / "link.db"]) as deployment:
        register(deployment)
        nodes = [deployment.start_resident(part) for part in range(3)]
        deployment.run(tmp_path / "one", rounds=2, within=300)
        deployment.kill("link")
        wait_until(lambda: "no connection to" in said(deployment, 0), 60, "the node's word")
        deployment.start_link()
        deployment.run(tmp_path / "two", rounds=2, within=300)
        assert [node.poll() for node in nodes] == [None] * 3
        text = said(deployment, 0)
    assert answered(tmp_path / "two") == [(0, 1, 2)] * 2
    assert error(tmp_path / "two") < 1e-6
    assert text.count("no connection to") == text.count("is back after") == 1
    assert "Traceback" not in text


def test_a_node_goes_on_behind_a_proxy_that_accepts_and_closes(tmp_path, keys):
    out = tmp_path / "out"
    options = ["--database", tmp_path / "link.db"]
    with Deployment(tmp_path / "flwr", tls=keys, options=options) as deployment, proxy(deployment.port) as port:
        register(deployment)
        deployment.kill("link")
        nodes = [deployment.start_resident(part, superlink=f"127.0.0.1:{port}") for part in range(3)]
        wait_until(lambda: all("no connection to" in said(deployment, k) for k in range(3)), 60, "the nodes' word")
        deployment.start_link()
        deployment.run(out, rounds=2, within=300)
        assert [node.poll() for node in nodes] == [None] * 3
        assert said(deployment, 0).count("no connection to") == 1
    assert answered(out) == [(0, 1, 2)] * 2


def test_a_superlink_without_memory_gets_its_nodes_back(tmp_path):
    with Deployment(tmp_path / "flwr") as deployment:
        nodes = [deployment.start_resident(part) for part in range(3)]
        deployment.run(tmp_path / "one", rounds=1, within=300)
        deployment.kill("link")
        deployment.start_link()  # it has forgotten who registered
        deployment.run(tmp_path / "two", rounds=2, within=300)
        assert [node.poll() for node in nodes] == [None] * 3
    assert answered(tmp_path / "two") == [(0, 1, 2)] * 2


def test_what_an_app_raises_is_named_and_no_more(tmp_path):
    out = tmp_path / "out"
    with Deployment(tmp_path / "flwr") as deployment:
        nodes = [deployment.start_resident(part) for part in range(3)]
        deployment.run(out, rounds=2, faults="1:0:raise", within=300)
        assert [node.poll() for node in nodes] == [None] * 3
        assert "RuntimeError: this client fails" in said(deployment, 1)  # the node's own log has all of it
        assert "this client fails" not in (deployment.home / "link.log").read_text()
    (text,) = records(out)[0]["faults"]
    assert text.endswith(": error 2: RuntimeError")
    assert answered(out) == [(0, 2), (0, 1, 2)]


def test_a_node_that_is_refused_says_why_and_ends(tmp_path, keys):
    others = tmp_path / "others"
    subprocess.run([SCRIPT, others, "1"], check=True, capture_output=True)
    known = ["--root-certificates", keys / "ca.crt"]
    cases = {
        "certificate": (["--root-certificates", others / "ca.crt"], "its certificate is not to be trusted"),
        "keyless": (known, "lets in registered keys only"),
        "stranger": ([*known, "--auth-supernode-private-key", others / "node0"], "it is not registered, or another"),
    }
    with Deployment(tmp_path / "flwr", tls=keys) as deployment:
        register(deployment)
        nodes = {name: deployment.start_resident(0, trust=trust, name=name) for name, (trust, _) in cases.items()}
        assert [node.wait(150) for node in nodes.values()] == [2, 2, 2]
        for name, (_, what) in cases.items():
            text = (deployment.home / f"{name}.log").read_text()
            assert what in text
            assert "Traceback" not in text
