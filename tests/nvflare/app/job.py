"""Submits the test app to a deployment, or runs it in the simulator: job.py WHERE CONFIG, a kit or a workspace."""

import json
import sys
from pathlib import Path

from tests.nvflare.app.sites import TestClient, TestServer
from tests.nvflare.app.thief import Thief

from fedveil.nvflare import Job, simulate, submit


def client_of(config):
    """An honest client, unless the configuration has a place for what another finds out."""
    if "loot" in config:
        return Thief(config)
    if "told" in config:
        from tests.nvflare.app.telling import Telling

        return Telling(config)
    return TestClient(config)


if __name__ == "__main__":
    where, config = Path(sys.argv[1]), json.loads(sys.argv[2])
    sites = config["wait-for"]
    job = Job("fedveil-test", TestServer(config), client_of(config), sites=sites, installed=True)
    if (where / "startup").exists():
        submit(job, where, where.name, patience=120.0, on_status=lambda text: print(text, flush=True))
    else:
        simulate(job, sites, where)
