"""Real Flower processes on loopback, each in a process group of its own, all ended when the test ends."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
APP = Path(__file__).parent / "app"
SCRIPT = ROOT / "examples" / "flower_app" / "make_certificates.sh"
needs_keys = pytest.mark.skipif(
    not shutil.which("openssl") or not shutil.which("ssh-keygen"), reason="no openssl, ssh-keygen"
)
LOOP = 'while true; do "$@"; sleep 2; done'  # as docs/flower.md has it


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listening(port):
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(true, seconds, what):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.1)


def commands(page):
    """The shell blocks of the first section of a page, step by step."""
    section = (ROOT / "docs" / page).read_text().split("## From scratch")[1].split("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


class Processes:
    """Processes by name, each in a process group of its own; `home` holds their logs."""

    cwd = None

    def start(self, name, *command, environment=None):
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / command[0]), *map(str, command[1:])], cwd=self.cwd, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment | (environment or {}),
            )  # fmt: skip
        return self.processes[name]

    def wait(self, out, within=300.0, file="done.json"):
        try:
            wait_until((out / file).exists, within, f"{file} in {out}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def logs(self):
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.home.glob("*.log")))


class Deployment(Processes):
    """A SuperLink and its SuperNodes; `home` is Flower's and holds logs."""

    def __init__(self, home, *, simulation=False, tls=None, options=()):
        self.home, self.port, self.tls, self.simulation = Path(home), free_port(), tls, simulation
        self.options, self.processes = list(options), {}
        self.home.mkdir(parents=True, exist_ok=True)
        trust = f'root-certificates = "{tls}/ca.crt"' if tls else "insecure = true"
        text = f'[superlink]\ndefault = "lab"\n[superlink.lab]\naddress = "127.0.0.1:{self.port}"\n{trust}\n'
        (self.home / "config.toml").write_text(text)

    @property
    def environment(self):
        return {
            **os.environ,
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),  # the app's tests.*
            "PYTHONWARNINGS": "ignore",
            "RAY_DEDUP_LOGS": "0",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }

    def start_link(self):
        trust = ["--insecure"]
        if self.tls:
            files = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
            trust = [word for option, file in files.items() for word in (f"--ssl-{option}", f"{self.tls}/{file}")]
            trust += ["--enable-supernode-auth"]
        extra = [*self.options, *(["--simulation"] if self.simulation else [])]
        self.start(
            "link", "flower-superlink", *trust, "--host", "127.0.0.1", "--port", self.port,
            "--disable-runtime-dependency-installation", *extra,
        )  # fmt: skip
        wait_until(lambda: listening(self.port), 60, "the SuperLink")

    def start_node(self, part, *, parts=3, superlink=None, trust=None, name=None, loop=None, more=""):
        if trust is None and self.tls:
            trust = ["--root-certificates", f"{self.tls}/ca.crt"]
            trust += ["--auth-supernode-private-key", f"{self.tls}/node{part}"]
        before = ["/bin/bash", "-c", loop, "loop", BIN / "flower-supernode"] if loop else ["flower-supernode"]
        return self.start(
            name or f"node{part}", *before, *(trust or ["--insecure"]), "--superlink",
            superlink or f"127.0.0.1:{self.port}", "--port", free_port(),
            "--node-config", f"partition-id={part} num-partitions={parts} {more}".strip(),
        )  # fmt: skip

    def flwr(self, *words, timeout=120.0, check=True):
        done = subprocess.run(
            [str(BIN / "flwr"), *map(str, words)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, env=self.environment,
            check=False,
        )  # fmt: skip
        assert not check or not done.returncode, done.stdout + done.stderr + self.logs()
        return done.stdout + done.stderr

    def run(self, out, *, app=APP, within=300.0, wait=True, **config):
        """`flwr run`; waits for done.json, which the app writes at its end."""
        out.mkdir(parents=True, exist_ok=True)
        values = {"out": str(out), **{key.replace("_", "-"): value for key, value in config.items()}}
        words = " ".join(f"{key}={toml(value)}" for key, value in values.items())
        more = ["--federation-config", "num-supernodes=3 client-resources-num-cpus=1"] if self.simulation else []
        self.flwr("run", app, "lab", "-c", words, *more)
        if wait:
            self.wait(out, within)

    def kill(self, name):
        process = self.processes.pop(name)
        signal_group(process, signal.SIGKILL)
        process.wait(30)

    def __enter__(self):
        self.start_link()
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            signal_group(process, signal.SIGTERM)
        end = time.monotonic() + 5.0
        while any(process.poll() is None for process in self.processes.values()) and time.monotonic() < end:
            time.sleep(0.1)
        for process in self.processes.values():
            signal_group(process, signal.SIGKILL)
            process.wait(10)
        for left in naming(f"FLWR_HOME={self.home}\0", "environ"):  # those that left their group, such as Ray's workers
            os.kill(left, signal.SIGKILL)


def signal_group(process, number):
    """Signal a process and all that it started, as far as they live."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def naming(text, file="cmdline"):
    """Other processes whose command, or environment, holds a text."""
    found = []
    for path in Path("/proc").glob(f"[0-9]*/{file}"):
        with contextlib.suppress(OSError):
            if path.parent.name != str(os.getpid()) and text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else f"'{value}'"
