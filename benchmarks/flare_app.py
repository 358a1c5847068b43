"""The same rounds over FLARE: a server, a client, and the script that submits them to a kit or a simulator.

python -m benchmarks.flare_app WHERE CONFIG
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from nvflare.collab import collab
from torch import Tensor, nn

from benchmarks.in_turn import CLIENTS, make_model, records, rounds_in_turn
from fedveil.nvflare import Client, Job, Server, simulate, submit


class TurnClient(Client):
    """Answers whichever defence asks."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def make_model(self) -> nn.Module:
        """The case's network."""
        torch.set_num_threads(1)
        return make_model(self.config["net"])

    def load_data(self, site: str) -> tuple[Tensor, Tensor]:
        """The case's records."""
        return records(self.config["net"], self.number(site))

    def number(self, site: str) -> int:
        """site-1 has the first part."""
        return int(site.rpartition("-")[2]) - 1


class TurnServer:
    """Servers in one job take rounds in turn."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    @collab.main
    def run(self) -> None:
        """Write what each round took."""
        torch.set_num_threads(1)
        rounds_in_turn(lambda *given, **named: Server(collab.clients, *given, **named), self.config)


if __name__ == "__main__":
    where, config = Path(sys.argv[1]), json.loads(sys.argv[2])
    job = Job("rounds", TurnServer(config), TurnClient(config), sites=CLIENTS, installed=True)
    if (where / "startup").exists():
        submit(job, where, where.name, attempts=1)
    else:
        simulate(job, CLIENTS, where)
