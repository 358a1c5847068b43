"""Federations over NVIDIA FLARE: `Server` in a job's main, a `Client` on each site, and `Job` to submit both.

Clients exist for the whole job: a site loads torch and its records once, and a round takes milliseconds.
"""

from typing import TYPE_CHECKING

from fedveil.lookup import lazy_getattr

if TYPE_CHECKING:
    from fedveil.nvflare.client import Client
    from fedveil.nvflare.jobs import Job, simulate, submit
    from fedveil.nvflare.kits import configure
    from fedveil.nvflare.server import Server
else:
    _HOMES = {"Client": "client", "Server": "server", "configure": "kits"}
    __getattr__ = lazy_getattr(__name__, _HOMES | dict.fromkeys(("Job", "simulate", "submit"), "jobs"), needs="nvflare")

__all__ = ["Client", "Job", "Server", "configure", "simulate", "submit"]
