"""A site answers the server of its job and nobody else, whoever else FLARE lets through to it."""

import threading
import time

import pytest

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessageType
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message
from tests.deployed import task
from tests.deployed.results import MLP, records
from tests.deployed.serving import DEFAULTS
from tests.federation.test_remote import engine, net, parts
from tests.nvflare.processes import Flare
from tests.nvflare.sites import CERTIFIED, Own
from tests.nvflare.test_nvflare_rounds import ask_of, clients_of, server_of
from tests.nvflare.theft import crafted, holds, stolen
from tests.oracle import worst

from fedveil.federation.client import ClientSession

REFUSAL = "refused: only the server of this job may call this site"
QUOTED = repr(REFUSAL)  # as a thief of real processes writes it to a file


class Watched(Own):
    """Counts what it is made to do."""

    def __init__(self, build, data, number):
        super().__init__(build, data, number)
        self.done = []

    def make_model(self):
        self.done.append("model")
        return super().make_model()

    def load_data(self, site):
        self.done.append("data")
        return super().load_data(site)


def peer(server, caller, target):
    """The proxy of a site that another site of the job has."""
    (found,) = (proxy for proxy in server.cells[caller].app.client_proxies if proxy.name == target)
    return found


@pytest.mark.parametrize("caller", ["site-1", "site-2", "site-2\n\x1b[31mall is well"])
def test_a_site_reads_no_record_of_another(caller, caplog):
    bare = ClientSession(net(), parts()[0], client=0).reply(crafted(net()))
    assert holds(parts()[0], stolen(bare, net()))  # what the attack reads where it gets an answer
    clients = clients_of(Watched, ("site-1", caller if caller != "site-1" else "site-2", "site-3"))
    server = server_of(clients=clients)
    assert peer(server, caller, "site-1").answer(crafted(net()), b"") == REFUSAL
    assert peer(server, caller, "site-1").ready() == REFUSAL  # nor does it learn whether another works
    assert server.proxies[0].ready() is True
    assert clients["site-1"].done == []
    shown = caller.replace("\n\x1b", "  ")  # a name cannot write lines of its own to the log
    assert f"refused a call from {shown}: the caller is not the server of this job" in caplog.text


def test_rounds_are_as_if_a_hostile_site_had_said_nothing():
    def disturbed(result):
        for ask in (crafted(net()), b"garbage"):
            assert peer(server, "site-2", "site-1").answer(ask, b"") == REFUSAL
        return result

    server = server_of({("site-2", n): disturbed for n in range(3)}, defence="plain")
    server.fit(rounds=3)
    assert [record["answers"] for record in server.history.records] == [3, 3, 3]
    assert worst(server.model.state_dict(), engine(range(3), rounds=3)) < 1e-9


def test_calls_wait_for_one_another_only_the_last_is_worked_on_and_refused_ones_have_no_effect():
    begun, finish = threading.Event(), threading.Event()

    class Slow(Own):
        def load_data(self, site):
            begun.set()
            assert finish.wait(30)
            return parts()[0]

    server = server_of(clients={"site-1": Slow(net, None, 0), "site-2": Own(net, parts()[1], 1)})
    site, client, found = server.proxies[0](timeout=60.0), server.cells["site-1"].app.obj, {}
    asks = [ask_of(server), b"garbage", b"garbage"]
    calls = [threading.Thread(target=lambda n=n: found.update({n: site.answer(asks[n], b"")})) for n in range(3)]
    calls[0].start()
    assert begun.wait(30)
    assert site.ready() is False
    for number in (1, 2):
        calls[number].start()
        while client._num_arrivals <= number:
            time.sleep(0.01)
    assert peer(server, "site-2", "site-1")(timeout=20.0).answer(asks[0], b"") == REFUSAL
    finish.set()
    [call.join(30) for call in calls]
    assert isinstance(found[0], bytes)
    assert found[1] == "a newer message arrived before this message was processed"
    assert found[2].startswith("BadArgument: request: the message cannot be read")
    assert site.ready() is True


@pytest.mark.parametrize("method", ["answer", "ready"])
def test_a_site_that_bears_the_servers_name_is_not_taken_for_it(method, caplog):
    clients = clients_of(Watched, ("site-1", "server", "site-3"))
    server = server_of(clients=clients)
    found = getattr(peer(server, "server", "site-1"), method)(*([crafted(net()), b""] if method == "answer" else []))
    assert found == REFUSAL
    assert clients["site-1"].done == []
    assert "refused a call from server: a site of this job has the same name" in caplog.text


def test_a_connection_that_goes_past_the_server_makes_nobody_the_server(caplog):
    clients = clients_of(Watched)
    server = server_of(clients=clients, how=CERTIFIED)
    server.cells["site-1"].process.core_cell._add_adhoc_connector("site-2.job", "tcp://localhost:1")
    assert server.proxies[0].answer(crafted(net()), b"") == REFUSAL
    assert clients["site-1"].done == []
    assert "this site has or allows connections that bypass the server" in caplog.text


def test_a_site_declines_invitations_to_connect_to_another():
    server = server_of(how=CERTIFIED)
    cell = server.cells["site-1"].process.core_cell
    headers = {
        MessageHeaderKey.ORIGIN: "site-2.job",
        MessageHeaderKey.FROM_CELL: "server",
        MessageHeaderKey.DESTINATION: cell.get_fqcn(),
        MessageHeaderKey.MSG_TYPE: MessageType.REQ,
        MessageHeaderKey.CONN_URL: "tcp://localhost:1",
    }
    cell.process_message(Endpoint("server"), None, cell.APP_ID, Message(headers))
    assert cell.adhoc_connectors == {}
    assert server.proxies[0].ready() is True


def rob(flare, home, attack):
    """Let the second of two sites attack the first in round 0; returns what it got, by names of files."""
    out, loot = home / "out", home / "loot"
    loot.mkdir()
    out.mkdir()
    config = DEFAULTS | {"out": str(out), "wait-for": 2, "loot": str(loot), "attack": attack}
    process = flare.submit("tests.nvflare.app.job", config)
    flare.wait(out)
    assert process.wait(120) == 0, flare.logs()
    assert [(record["answers"], "faults" in record) for record in records(out)] == [(2, False)] * 2
    return {file.stem: gain(file.read_bytes()) for file in loot.glob("*.reply")}


def gain(found):
    """What a reply is worth to the thief."""
    if found.startswith(b"'"):
        return found.decode()
    return "a record" if holds(task.parts()[0], stolen(found, task.make_model(MLP))) else "an update"


@pytest.mark.slow
def test_a_site_asks_another_in_the_simulator(tmp_path):
    with Flare(tmp_path / "flare", sites=2, simulator=True) as flare:
        found = rob(flare, tmp_path, "ask")
    assert found == {"answer": QUOTED, "ready": QUOTED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "gains"),
    [("ask", {"answer": QUOTED, "ready": QUOTED}), ("pose", {"answer": "'it did not connect'"})],
)
def test_a_site_asks_another_over_mtls_in_its_own_name_and_in_the_servers(attack, gains, tmp_path):
    with Flare(tmp_path / "flare", sites=2) as flare:
        found = rob(flare, tmp_path, attack)
        log = (tmp_path / "flare" / "site-1.log").read_text()
    assert found == gains
    assert ("refused a call from site-2: the caller is not the server of this job" in log) == (attack == "ask")
