"""Federations over NVIDIA FLARE: `Server` in a job's main, a `Client` on each site, and `Job` to submit both.

Clients stay alive for the whole job: a site loads torch and its records only once, so a round takes milliseconds.
"""

from typing import TYPE_CHECKING

from fedveil.lookup import lazy_getattr

if TYPE_CHECKING:
    from fedveil.nvflare.client import Client
    from fedveil.nvflare.jobs import Job, read_progress, simulate, submit
    from fedveil.nvflare.kits import configure
    from fedveil.nvflare.server import Server
else:
    _MODULES = {"Client": "client", "Server": "server", "configure": "kits"}
    _MODULES |= dict.fromkeys(("Job", "read_progress", "simulate", "submit"), "jobs")
    __getattr__ = lazy_getattr(__name__, _MODULES, dependency="nvflare")

__all__ = ["Client", "Job", "Server", "configure", "read_progress", "simulate", "submit"]
