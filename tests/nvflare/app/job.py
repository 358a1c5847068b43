"""Submits the test app to a deployment, or runs it in the simulator: job.py WHERE CONFIG, a kit or a workspace."""

import json
import sys
from pathlib import Path

from tests.nvflare.app.sites import TestClient, TestServer

from fedveil.nvflare import Job, simulate, submit

if __name__ == "__main__":
    where, config = Path(sys.argv[1]), json.loads(sys.argv[2])
    sites = config["wait-for"]
    job = Job("fedveil-test", TestServer(config), TestClient(config), sites=sites, installed=True)
    if (where / "startup").exists():
        submit(job, where, where.name, patience=120.0, on_status=lambda text: print(text, flush=True))
    else:
        simulate(job, sites, where)
