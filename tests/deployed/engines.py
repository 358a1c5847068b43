"""Deployments of real processes behind one interface: a server, three clients, and how to do them harm."""

import os
import signal
import subprocess

from tests.flower.processes import LOOP, SCRIPT, Deployment, wait_until
from tests.nvflare.processes import Flare


class Deployed:
    """A server and its clients 0, 1 and 2 on this machine, over TLS. As a context it starts the server.

    What is not here is that of `deployment`, whose processes they are.
    """

    timeout: float  # seconds after which a round goes on without a client; several times what one takes
    patience = 300.0  # seconds in which a site that was started again is known again
    strangers_end = True  # whether a site with a wrong certificate gives up
    deployment = None

    def __init__(self, home):
        self.home, self.marks = home, home / "marks"
        self.marks.mkdir(parents=True)

    def __getattr__(self, name):
        return getattr(self.deployment, name)

    def __enter__(self):
        self.deployment = self.make()
        self.deployment.__enter__()
        return self

    def __exit__(self, *_):
        self.deployment.__exit__()

    def run(self, out, *, wait=True, **config):
        """Submit the test app with other values than `DEFAULTS` of serving.py; resume what is in `out`."""
        self.deployment.run(out, wait=False, marks=str(self.marks), **config)
        if wait:
            self.wait(out)

    def wait(self, out):
        """Wait until the run has written done.json."""
        self.deployment.wait(out, 600)

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


class Flower(Deployed):
    """A SuperLink with registered keys, and stock SuperNodes in the loop that docs/flower.md recommends."""

    timeout = 45.0

    def make(self):
        for folder in ("keys", "strangers"):
            subprocess.run([SCRIPT, self.home / folder, "3"], check=True, capture_output=True)
        options = ["--database", self.home / "link.db"]
        return Deployment(self.home / "flwr", tls=self.home / "keys", options=options)

    def __enter__(self):
        super().__enter__()
        for part in range(3):
            self.flwr("supernode", "register", self.home / "keys" / f"node{part}.pub", "lab")
        return self

    def start_client(self, part):
        self.start_node(part, loop=LOOP)

    def kill_client(self, part):
        self.kill(f"node{part}")

    def client_with_wrong_certificate(self, part):
        keys = self.home / "strangers"
        trust = ["--root-certificates", keys / "ca.crt", "--auth-supernode-private-key", keys / f"node{part}"]
        return self.start_node(part, trust=trust)

    def kill_server(self):
        self.kill("link")

    def restart_server(self):
        self.start_link()


class Nvflare(Deployed):
    """FLARE's server and sites with mTLS, which run no code that a job brings."""

    timeout = 10.0
    patience = 10.0  # a site that was started again takes part in the next job only, and this one should end
    strangers_end = False

    def make(self):
        return Flare(self.home / "flare", started=())

    def restart_server(self):
        self.start_server()


ENGINES = {"flower": Flower, "nvflare": Nvflare}
