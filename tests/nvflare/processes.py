"""Real FLARE processes on loopback with mTLS, each in a process group of its own, all ended when the test ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.deployed.serving import DEFAULTS
from tests.flower.processes import BIN, ROOT, Processes, free_port, listening, naming, signal_group, wait_until

from fedveil.nvflare import configure

ADMIN = "admin@lab.org"
PROJECT = """
api_version: 3
name: lab
description: test
participants:
  - {{name: localhost, type: server, org: lab, fed_learn_port: {port}}}
{sites}
  - {{name: {admin}, type: admin, org: lab, role: lead}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
    args: {{template_file: [master_template.yml]}}
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {{config_folder: config}}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""


class Flare(Processes):
    """A server and its sites, site-1 for the first part; no code travels. `home` holds kits and logs.

    `proxies` are called with the server's port, one for each site; they return the port to connect to, without TLS.
    As a context it starts the server and the sites in `started`, all of them by default; in the simulator neither.
    """

    def __init__(
        self, home, *, sites=3, started=None, simulator=False, packages=("tests",), proxies=(), server_environment=None
    ):
        self.to_start, self.simulator = range(sites) if started is None else started, simulator
        self.home, self.port, self.sites = Path(home), free_port(), sites
        self.processes, self.started, self.server_environment = {}, [], server_environment
        self.home.mkdir(parents=True, exist_ok=True)
        self.kits = provisioned(self.home, self.port, sites, [proxy(self.port) for proxy in proxies])
        for kit in self.kits.iterdir():
            if kit.name != ADMIN:
                configure(kit, *packages)
        resources = self.kits / "localhost" / "local" / "resources.json"  # by default servers share a folder in /tmp
        resources.write_text(resources.read_text().replace("/tmp/nvflare/", f"{self.home}/store/"))

    @property
    def environment(self):
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
        return {**os.environ, **quiet, "PYTHONPATH": path, "PATH": f"{BIN}:{os.environ['PATH']}"}

    @property
    def cwd(self):
        return self.home

    def start(self, name, *command, environment=None):
        self.started.append(super().start(name, *command, environment=environment))
        return self.started[-1]

    def start_server(self):
        command = self.kits / "localhost" / "startup" / "sub_start.sh", "--once"
        self.start("localhost", *command, environment=self.server_environment)
        wait_until(lambda: listening(self.port), 60, "FLARE's server")

    def start_client(self, part, **environment):
        name = f"site-{part + 1}"
        (self.kits / name / "daemon_pid.fl").unlink(missing_ok=True)
        return self.start(name, self.kits / name / "startup" / "sub_start.sh", "--once", environment=environment)

    def client_with_wrong_certificate(self, part):
        """A site of the same name whose kit another authority has signed."""
        other = provisioned(self.home / "other", self.port, self.sites) / f"site-{part + 1}"
        configure(other, "tests")
        return self.start(f"wrong-{part}", other / "startup" / "sub_start.sh", "--once")

    def kill_client(self, part):
        self._kill(f"site-{part + 1}")

    def kill_server(self):
        self._kill("localhost")

    def kill_work(self, part):
        """The process that computes, which the site started for the job."""
        ours = set(self._of(f"site-{part + 1}")) & set(naming("worker_process"))
        assert ours, "no job runs on this site"
        for pid in ours:
            os.kill(pid, signal.SIGKILL)

    def run(self, out, *, wait=True, within=300.0, **config):
        """Submit the test app; waits for done.json, which it writes at its end."""
        out.mkdir(parents=True, exist_ok=True)
        values = {"out": str(out), **{key.replace("_", "-"): value for key, value in config.items()}}
        assert set(values) <= set(DEFAULTS)
        process = self.submit("tests.nvflare.app.job", DEFAULTS | values)
        if wait:
            self.wait(out, within)
            assert process.wait(120) == 0, self.logs()
        return process

    def submit(self, module, config):
        """Run a module that takes a kit, or a folder for the simulator, and a configuration."""
        where = self.home / "simulator" if self.simulator else self.kits / ADMIN
        return self.start("job", sys.executable, "-m", module, where, json.dumps(config))

    def _of(self, name):
        """Processes whose command names a kit."""
        return naming(f"{self.kits / name}/") + naming(f"{self.kits / name}\0")

    def _kill(self, name):
        """Kill the process and all that it started, at once: none of them lives to report that another has died."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self._of(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.processes.pop(name).wait(30)

    def __enter__(self):
        if not self.simulator:
            self.start_server()
            for part in self.to_start:
                self.start_client(part)
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        for process in self.started:
            signal_group(process, signal.SIGKILL)
        end = time.monotonic() + 20
        while (left := naming(f"{self.home}/")) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            [process.poll() for process in self.started]
            time.sleep(0.1)
        [process.wait(10) for process in self.started]


def provisioned(home, port, sites, through=()):
    """The folder of kits that `nvflare provision` makes; without TLS if sites connect through other ports."""
    home.mkdir(parents=True, exist_ok=True)
    lines = []
    for k in range(sites):
        more = f", connect_to: {{host: localhost, port: {through[k]}}}" if through else ""
        lines.append(f"  - {{name: site-{k + 1}, type: client, org: lab{more}}}")
    text = PROJECT.format(port=port, sites="\n".join(lines), admin=ADMIN)
    (home / "project.yml").write_text(text + ("connection_security: clear\n" if through else ""))
    command = [BIN / "nvflare", "provision", "-p", home / "project.yml", "-w", home / "kits"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=home)
    assert not done.returncode, done.stdout + done.stderr
    return home / "kits" / "lab" / "prod_00"
