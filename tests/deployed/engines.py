"""Deployments of real processes behind one interface: a server, three clients, and how to do them harm."""

import os
import signal
import subprocess
from abc import ABC, abstractmethod

from tests.flower.processes import LOOP, SCRIPT, Deployment, wait_until
from tests.nvflare.processes import Flare


class Deployed(ABC):
    """A server and its clients 0, 1 and 2 on this machine, over TLS. As a context it starts the server."""

    timeout: float  # seconds after which a round goes on without a client; several times what one takes
    patience = 300.0  # seconds in which a site that was started again is known again
    strangers_end = True  # whether a site with a wrong certificate gives up

    def __init__(self, home):
        self.home, self.marks = home, home / "marks"
        self.marks.mkdir(parents=True)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    @abstractmethod
    def start(self):
        """Start the server, which knows three clients."""

    @abstractmethod
    def stop(self):
        """End every process."""

    @abstractmethod
    def start_client(self, part):
        """Start a client's site, also one that was killed."""

    @abstractmethod
    def kill_client(self, part):
        """Kill a client's site, with all its processes."""

    @abstractmethod
    def client_with_wrong_certificate(self, part):
        """Start a site with certificates of another federation; returns its process."""

    @abstractmethod
    def run(self, out, *, wait=True, **config):
        """Submit the test app with other values than `DEFAULTS` of serving.py; resume what is in `out`."""

    @abstractmethod
    def wait(self, out):
        """Wait until the run has written done.json."""

    @abstractmethod
    def kill_server(self):
        """Kill the server with all its processes."""

    @abstractmethod
    def restart_server(self):
        """Start it again, with what it kept on disk."""

    @abstractmethod
    def logs(self):
        """The end of every process's log."""

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

    def start(self):
        keys, strangers = self.home / "keys", self.home / "strangers"
        for folder in (keys, strangers):
            subprocess.run([SCRIPT, folder, "3"], check=True, capture_output=True)
        options = ["--database", self.home / "link.db"]
        self.deployment = Deployment(self.home / "flwr", tls=keys, options=options)
        self.deployment.__enter__()
        for part in range(3):
            self.deployment.flwr("supernode", "register", keys / f"node{part}.pub", "lab")

    def stop(self):
        self.deployment.__exit__()

    def start_client(self, part):
        self.deployment.start_node(part, loop=LOOP)

    def kill_client(self, part):
        self.deployment.kill(f"node{part}")

    def client_with_wrong_certificate(self, part):
        keys = self.home / "strangers"
        trust = ["--root-certificates", keys / "ca.crt", "--auth-supernode-private-key", keys / f"node{part}"]
        return self.deployment.start_node(part, trust=trust)

    def run(self, out, *, wait=True, **config):
        self.deployment.run(out, wait=False, marks=str(self.marks), **config)
        if wait:
            self.wait(out)

    def wait(self, out):
        self.deployment.wait(out, 600)

    def kill_server(self):
        self.deployment.kill("link")

    def restart_server(self):
        self.deployment.start_link()

    def logs(self):
        return self.deployment.logs()


class Nvflare(Deployed):
    """FLARE's server and sites with mTLS, which run no code that a job brings."""

    timeout = 10.0
    patience = 10.0  # a site that was started again takes part in the next job only, and this one should end
    strangers_end = False

    def start(self):
        self.deployment = Flare(self.home / "flare")
        self.deployment.start_server()

    def stop(self):
        self.deployment.stop()

    def start_client(self, part):
        self.deployment.start_client(part)

    def kill_client(self, part):
        self.deployment.kill_client(part)

    def client_with_wrong_certificate(self, part):
        return self.deployment.client_with_wrong_certificate(part)

    def run(self, out, *, wait=True, **config):
        self.deployment.run(out, wait=wait, marks=str(self.marks), **config)

    def wait(self, out):
        self.deployment.wait(out)

    def kill_server(self):
        self.deployment.kill_server()

    def restart_server(self):
        self.deployment.start_server()

    def logs(self):
        return self.deployment.logs()


ENGINES = {"flower": Flower, "nvflare": Nvflare}
