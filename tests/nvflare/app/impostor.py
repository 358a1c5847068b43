"""A process that calls itself the server of a job, and asks a site that connects: impostor.py NAME PORT SITE LOOT."""

import sys
import time
from pathlib import Path

from nvflare.collab.runtime.defs import (
    CALL_PROTOCOL_VERSION,
    MSG_CHANNEL,
    MSG_TOPIC,
    CallHeaderKey,
    CallReplyKey,
    ObjectCallKey,
)
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from tests.nvflare.app.thief import keep

PATIENCE = 15.0  # seconds; a site that accepts an invitation is there after one or two


def main(name, port, victim, loot):
    url = f"tcp://127.0.0.1:{port}"
    cell = Cell(name, url, False, {}, create_internal_listener=False)
    cell.core_cell._create_external_listener(url)
    cell.start()
    deadline = time.monotonic() + PATIENCE
    while victim not in cell.core_cell.agents and time.monotonic() < deadline:
        time.sleep(0.1)
    connected = victim in cell.core_cell.agents
    found = call(cell, victim, (Path(loot) / "ask").read_bytes()) if connected else "it did not connect"
    keep(Path(loot) / "answer.reply", found)
    cell.stop()


def call(cell, victim, message):
    """As FLARE's dispatcher does it."""
    headers = {
        CallHeaderKey.PROTOCOL_VERSION: CALL_PROTOCOL_VERSION,
        CallHeaderKey.TARGET_NAME: f"{FQCN.get_root(victim)}.client",
        CallHeaderKey.METHOD_NAME: "answer",
    }
    request = new_cell_message(headers, {ObjectCallKey.KWARGS: {"common": message, "own": b""}})
    reply = cell.send_request(channel=MSG_CHANNEL, target=victim, topic=MSG_TOPIC, request=request, timeout=30.0)
    return reply.payload[CallReplyKey.RESULT] if isinstance(reply.payload, dict) else reply.headers


if __name__ == "__main__":
    main(*sys.argv[1:])
