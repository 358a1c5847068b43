"""Rounds over FLARE's own proxies in this process: equality, faults, what leaves a site."""

import sys
import threading
import time

import pytest

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from nvflare.collab.api.exceptions import RunAborted
from tests.engines import LoopbackServer
from tests.faults import FAULTS
from tests.federation import secured
from tests.federation.test_remote import SITES, adam, engine, net, parts
from tests.nvflare.sites import SIMULATED, Own, sites
from tests.oracle import worst
from tests.test_house import SOURCE

from fedveil.defences import PPDL, SPN, Plain, Veil
from fedveil.errors import BadArgument, TooFewAnswers
from fedveil.nvflare import engine as flare
from fedveil.nvflare.engine import FlareTransport

SECRET = "record 17 is 4.25"
MAX_FILES = 30  # of a round: lower it when modules are merged; it must not grow


def clients_of(kind=Own, names=SITES):
    return {name: kind(net, own, k) for k, (name, own) in enumerate(zip(names, parts(), strict=True))}


def server_of(faults=None, defence="veil", clients=None, turn=None, how=SIMULATED, **options):
    clients = clients or clients_of()
    proxies, cells, signal = sites(clients, faults, turn, how)
    options = {"timeout": 60.0, "pause": 0.0, "attempts": 3, "patience": 0.2, "batch_size": 8, **options}
    server = LoopbackServer(
        FlareTransport(proxies), net(), parts()[0][0][:2], defence, adam, **{"loss": "squared_error", **options}
    )
    server.proxies, server.cells, server.signal = proxies, cells, signal
    return server


@pytest.fixture(autouse=True)
def _quick_probes(monkeypatch):
    monkeypatch.setattr(flare, "PROBE_PAUSE", 0.05)
    monkeypatch.setattr(flare, "PROBE_TIMEOUT", 0.2)


@pytest.mark.parametrize("make", [Plain, Veil, lambda: PPDL(0.3), lambda: Plain(local_epochs=2, local_batch=5)])
def test_rounds_over_sites_are_those_of_one_process(make):
    server = server_of(defence=make())
    server.fit(rounds=4)
    assert worst(server.model.state_dict(), engine(range(3), make(), 4)) < 1e-9


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_its_site_the_round_and_nobody_else(name):
    change, text = FAULTS[name]
    server = server_of({("site-2", 0): change})
    server.fit(rounds=2)
    first, second = server.history.records
    assert (first["asked"], first["answers"], first["records"]) == (3, 2, 55)
    assert [found.startswith(f"client site-2: {text}") for found in first["faults"]] == [True]
    assert (second["answers"], "faults" in second) == (3, False)


@pytest.mark.parametrize("result", [None, 3, {"answer": b""}, [b""]])
def test_what_is_no_bytes_is_malformed(result):
    server = server_of({("site-2", 0): lambda _: result})
    server.fit(rounds=1)
    assert server.history.records[0]["faults"][0].startswith("client site-2: malformed: expected bytes from the site")


def test_a_straggler_costs_one_timeout_is_left_out_and_comes_back():
    late = threading.Event()
    server = server_of({("site-2", 1): lambda result: late.wait(30) and result}, timeout=3.0)
    server.fit(rounds=3)
    assert [record["asked"] for record in server.history.records] == [3, 3, 2]
    assert server.history.records[1]["faults"] == ["client site-2: silent: no answer within 3 s"]
    late.set()
    wait_for_all(server)
    server.fit(rounds=4)
    assert server.history.records[-1]["answers"] == 3


def wait_for_all(server):
    deadline = time.monotonic() + 30
    while len(server.engine.members()) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_site_out_of_reach_is_left_out_until_it_is_back_and_a_closed_engine_no_longer_looks_for_it():
    server = server_of()
    server.cells["site-2"].down = True
    server.fit(rounds=2)
    assert [record["asked"] for record in server.history.records] == [3, 2]
    assert server.history.records[0]["faults"][0].startswith("client site-2: unreachable: ")
    server.cells["site-2"].down = False
    wait_for_all(server)
    server.cells["site-2"].down = True
    server.fit(rounds=3)
    server.close()
    server.cells["site-2"].down = False
    time.sleep(0.3)
    assert server.engine.members() == ["site-1", "site-3"]


def test_a_job_that_is_aborted_ends_the_run_and_is_no_sites_fault():
    server = server_of()
    server.signal.trigger("killed")
    server.cells["site-2"].faults = {0: lambda result: time.sleep(3)}
    rounds, start = [], server.defence_server.start_round
    server.defence_server.start_round = lambda *given: rounds.append(start(*given)) or rounds[-1]
    with pytest.raises(RunAborted):
        server.fit(rounds=1)
    with pytest.raises(BadArgument, match="has been released"):
        rounds[0].recover([], [])


def failing(error):
    def load():
        raise error

    return load


def test_what_a_client_raises_stays_on_its_site(capsys, caplog):
    caplog.set_level("DEBUG")
    errors = {"site-2": ValueError(SECRET), "site-3": BadArgument("bank.csv", "line 3 is empty", "mend it")}
    broken = {name: Own(net, failing(error), k) for k, (name, error) in enumerate(errors.items(), 1)}
    server = server_of(clients=clients_of() | broken)
    server.fit(rounds=1)
    texts = sorted(server.history.records[0]["faults"])
    assert texts[0] == "client site-2: raised: ValueError on the site; the traceback is in its stderr"
    assert texts[1].startswith("client site-3: raised: BadArgument: bank.csv: line 3 is empty")
    assert SECRET in capsys.readouterr().err
    assert SECRET not in caplog.text
    assert SECRET.encode() not in b"".join(server.cells["site-2"].traffic)


def ask_of(server):
    """What a round sends."""
    sent = []
    server.engine.transport.ask = lambda common, own, **_: sent.append(common) or iter(())
    with pytest.raises(TooFewAnswers):
        server.exchange()
    return sent[0]


def test_private_state_outlives_the_job_in_a_file_of_the_site(tmp_path):
    class Keeping(Own):
        folder = tmp_path / "node"

    def server():
        return server_of(defence=SPN(), clients=clients_of(Keeping), turn=threading.Lock())

    server().fit(rounds=1)
    files = sorted((tmp_path / "node").iterdir())
    assert [file.name for file in files] == [f"fedveil-{name}.pt" for name in SITES]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    states = [file.read_bytes() for file in files]
    second = server()
    second.fit(rounds=1)
    assert all(cell.app.obj._session.state.private for cell in second.cells.values())
    assert [file.read_bytes() for file in files] != states
    files[0].write_bytes(b"damaged")
    third = server()
    third.fit(rounds=1)
    assert "it is damaged (its checksum is wrong)" in third.history.records[0]["faults"][0]


def test_sites_are_asked_in_the_order_of_their_names():
    server = server_of(clients=dict(reversed(clients_of().items())))
    assert server.engine.members() == list(SITES)


def test_a_veiled_round_under_secure_aggregation_passes_through_few_files():
    known, seen = secured.parties(), set()
    clients = {name: Own(net, own, k) for k, (name, own) in enumerate(zip(secured.NAMES, secured.parts(), strict=True))}
    for name, party in known.items():
        clients[name].party = party

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(home):
            seen.add(frame.f_code.co_filename.removeprefix(home))

    home = f"{SOURCE}/"
    server = server_of(clients=clients, secure_aggregation=secured.roster_of(known), identity=secured.SERVER)
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
