"""A client that answers, or misbehaves as the run's config says; and a server that writes what the tests compare."""

from pathlib import Path

import torch
from nvflare.collab import collab
from tests.deployed.misbehaving import after, before
from tests.deployed.serving import serve
from tests.deployed.task import make_model, parts

from fedveil.nvflare import Client, Server
from fedveil.secagg.environment import load_party
from fedveil.wire import read_kind


class TestClient(Client):
    """site-1 has the first part."""

    __test__ = False

    def __init__(self, config):
        self.config = config

    def make_model(self):
        torch.set_num_threads(1)
        return make_model(self.config)

    def load_data(self, site):
        return parts()[self.number(site)]

    def number(self, site):
        return int(site.rpartition("-")[2]) - 1

    def _answer(self, common, own=b""):
        if self.config["keys"]:
            keys = Path(self.config["keys"])
            self.party = load_party(keys / f"{self._site}.key", keys / "roster")
        if read_kind(common) != "request":
            return super()._answer(common, own)
        kind = before(self.config, self.number(self._site), common)
        return after(kind, super()._answer(common, own))


class TestServer:
    __test__ = False

    def __init__(self, config):
        self.config = config

    @collab.main
    def run(self):
        torch.set_num_threads(1)
        serve(lambda *given, **named: Server(collab.clients, *given, **named), self.config)
