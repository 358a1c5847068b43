"""A node behind a proxy that accepts connections while the SuperLink is down."""

import contextlib
import shutil
import socket
import subprocess
import threading

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from tests.deployed.results import answered
from tests.flower.processes import BIN, SCRIPT, Deployment, free_port, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("openssl") or not shutil.which("ssh-keygen"), reason="no openssl, ssh-keygen"),
]
LOOP = 'while true; do "$@"; sleep 2; done'  # as in docs/flower.md


def pass_on(source, target):
    with contextlib.suppress(OSError):
        while block := source.recv(1 << 16):
            target.sendall(block)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def carry(client, to):
    """Both ways, until one side ends; at once if nobody listens."""
    with client, contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", to)) as server:
        other = threading.Thread(target=pass_on, args=(server, client))
        other.start()
        pass_on(client, server)
        other.join()


@contextlib.contextmanager
def proxy(to):
    """A port that accepts every connection, and closes it at once if nobody listens at `to`."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    client, _ = door.accept()
                    threading.Thread(target=carry, args=(client, to), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield door.getsockname()[1]
        door.shutdown(socket.SHUT_RDWR)


def test_a_node_that_ended_for_it_takes_part_again_under_a_loop(tmp_path):
    out, keys = tmp_path / "out", tmp_path / "keys"
    subprocess.run([SCRIPT, keys, "3"], check=True, capture_output=True)
    options = ["--database", tmp_path / "link.db"]
    with Deployment(tmp_path / "flwr", tls=keys, options=options) as deployment, proxy(deployment.port) as port:
        for part in range(3):
            deployment.flwr("supernode", "register", keys / f"node{part}.pub", "lab")
        deployment.kill("link")
        alone = deployment.start_node(2, superlink=f"127.0.0.1:{port}")
        for part in range(2):
            trust = ["--root-certificates", keys / "ca.crt", "--auth-supernode-private-key", keys / f"node{part}"]
            place = ["--superlink", f"127.0.0.1:{port}", "--port", free_port()]
            place += ["--node-config", f"partition-id={part} num-partitions=3"]
            deployment.start(f"node{part}", "/bin/bash", "-c", LOOP, "loop", BIN / "flower-supernode", *trust, *place)
        assert alone.wait(120) == 1  # what the loop is for; if this fails, Flower has mended it
        logs = [deployment.home / f"node{part}.log" for part in range(2)]
        wait_until(lambda: all("Exit Code: 305" in log.read_text() for log in logs), 120, "the nodes' end")
        deployment.start_link()
        deployment.run(out, rounds=2, wait_for=2, within=600)
    assert answered(out) == [(0, 1)] * 2
