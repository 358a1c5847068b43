"""How many modules one round over FLARE with secure aggregation passes through, server and clients together."""

import sys
import threading

import pytest

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from tests.federation.secured import NAMES, SERVER, net, parties, parts, roster_of
from tests.nvflare.sites import Own
from tests.nvflare.test_nvflare_rounds import server_of
from tests.test_house import SOURCE

MAX_FILES = 30  # lower it when modules are merged; it must not grow


def test_a_veiled_round_under_secure_aggregation_passes_through_few_files():
    known, seen = parties(), set()
    clients = {name: Own(net, own, k) for k, (name, own) in enumerate(zip(NAMES, parts(), strict=True))}
    for name, party in known.items():
        clients[name].party = party

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(home):
            seen.add(frame.f_code.co_filename.removeprefix(home))

    home = f"{SOURCE}/"
    server = server_of(clients=clients, secure_aggregation=roster_of(known), identity=SERVER)
    try:
        threading.setprofile(note)  # for threads that the first round starts and later ones use again
        server.step()  # keys, and what is made once
        seen.clear()
        sys.setprofile(note)
        server.step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert {"nvflare/client.py", "nvflare/engine.py", "secagg/party.py", "secagg/tally.py"} <= seen
    assert {"federation/client.py", "federation/secure_round.py", "scheme/recover.py"} <= seen
    assert len(seen) <= MAX_FILES, " ".join(sorted(seen))
