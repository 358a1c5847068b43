"""The same deployment on every engine, so that one table of faults is tested on all of them."""

import os
import signal
import subprocess

from tests.flower.processes import LOOP, SCRIPT, Deployment, wait_until
from tests.nvflare.processes import Flare


class Deployed:
    """Three clients that know one another, and their server, beside the processes of an engine."""

    timeout: float  # seconds after which a round goes on without a silent client; several times what one takes
    patience = 300.0  # seconds in which a site that was started again is known again
    strangers_end = True  # whether a site with a wrong certificate gives up

    def __init__(self, home, folder, **options):
        self.marks = home / "marks"
        self.marks.mkdir(parents=True)
        super().__init__(home / folder, **options)

    def run(self, out, *, wait=True, **config):
        """Submit the test app with other values than `DEFAULTS` of serving.py; resume what is in `out`."""
        super().run(out, wait=False, marks=str(self.marks), **config)
        if wait:
            self.wait(out)

    def wait(self, out):
        """Wait until the run has written done.json."""
        super().wait(out, 600)

    def await_work(self, part, number):
        """Wait until a client has begun to work on a round."""
        try:
            wait_until((self.marks / f"{part}-{number}").exists, 300, f"client {part} in round {number}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def kill_work(self, part):
        """Kill the process that computes for a client."""
        last = max(self.marks.glob(f"{part}-*"), key=lambda mark: mark.stat().st_mtime)
        os.kill(int(last.read_text()), signal.SIGKILL)


class Flower(Deployed, Deployment):
    """A SuperLink with registered keys, and stock SuperNodes in the loop that docs/flower.md recommends."""

    timeout = 90.0  # every message starts a process that imports torch: a round took 55 s on two very busy cores

    def __init__(self, home):
        for folder in ("keys", "strangers"):
            subprocess.run([SCRIPT, home / folder, "3"], check=True, capture_output=True)
        super().__init__(home, "flwr", tls=home / "keys", options=["--database", home / "link.db"])

    def __enter__(self):
        super().__enter__()
        for part in range(3):
            self.flwr("supernode", "register", self.tls / f"node{part}.pub", "lab")
        return self

    def start_client(self, part):
        self.start_node(part, loop=LOOP)

    def kill_client(self, part):
        self.kill(f"node{part}")

    def client_with_wrong_certificate(self, part):
        keys = self.tls.with_name("strangers")
        trust = ["--root-certificates", keys / "ca.crt", "--auth-supernode-private-key", keys / f"node{part}"]
        return self.start_node(part, trust=trust)

    def kill_server(self):
        self.kill("link")

    def restart_server(self):
        self.start_link()


class Nvflare(Deployed, Flare):
    """FLARE's server and sites with mTLS, which run no code that a job brings."""

    timeout = 10.0
    patience = 10.0  # a site that was started again takes part in the next job only, and this one should end
    strangers_end = False

    def __init__(self, home):
        super().__init__(home, "flare", started=())

    def restart_server(self):
        self.start_server()


ENGINES = {"flower": Flower, "nvflare": Nvflare}
