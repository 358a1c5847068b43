"""How a site is connected to its server, and that secure aggregation needs mTLS outside of the simulator."""

import pytest

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from tests.deployed.results import records
from tests.deployed.serving import DEFAULTS
from tests.federation.secured import NAMES, SERVER, net, parties, parts, roster_of
from tests.flower.processes import wait_until
from tests.nvflare.processes import Flare
from tests.nvflare.sites import CERTIFIED, SIMULATED, Own
from tests.nvflare.test_nvflare_rounds import server_of
from tests.nvflare.test_nvflare_secure import make_keys

from fedveil.errors import TooFewAnswers

KINDS = {
    "simulator": [SIMULATED],
    "mTLS": [CERTIFIED, CERTIFIED | {"security": "mtls"}],
    "insecure": [
        CERTIFIED | {"security": "clear"},
        CERTIFIED | {"security": "tls"},
        CERTIFIED | {"server": None},
        {"secure": False},
    ],
}
CASES = [(kind, how) for kind, cases in KINDS.items() for how in cases]
REFUSAL = "InsecureTransport: FLARE: this client takes part in secure aggregation, but its connection to the server is"


class Telling(Own):
    """Says how it is connected, as soon as it is made to work."""

    told = None

    def make_model(self):
        from fedveil.nvflare.client import transport

        self.told = transport()
        return super().make_model()


def telling(known=None):
    clients = {name: Telling(net, own, k) for k, (name, own) in enumerate(zip(NAMES, parts(), strict=True))}
    for name, party in (known or {}).items():
        clients[name].party = party
    return clients


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_secure_aggregation_is_refused_over_an_insecure_transport(kind, how, caplog):
    clients = telling()
    server_of(clients=clients, how=how).fit(rounds=1)
    assert {client.told for client in clients.values()} == {kind}
    known = parties()
    clients = telling(known)
    server = server_of(clients=clients, how=how, secure_aggregation=roster_of(known), identity=SERVER)
    if kind == "insecure":
        with pytest.raises(TooFewAnswers):
            server.fit(rounds=1)
        assert REFUSAL in caplog.text
    else:
        server.fit(rounds=1)
        assert server.history.records[0]["answers"] == len(NAMES)
    assert {client.told for client in clients.values()} == {None if kind == "insecure" else kind}


def test_a_site_that_allows_connections_to_others_answers_nobody(caplog):
    clients = telling()
    server = server_of(clients=clients, how=CERTIFIED)
    for cell in server.cells.values():
        cell.process.core_cell.connector_manager.adhoc_allowed = True  # comm_config.json: allow_adhoc_conns
    with pytest.raises(TooFewAnswers):
        server.fit(rounds=1)
    assert "raised: refused: only the server of this job may call this site" in caplog.text
    assert {client.told for client in clients.values()} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_deployment_takes_part_in_secure_aggregation_as_its_transport_allows(kind, tmp_path):
    make_keys(tmp_path / "keys")
    out, told = tmp_path / "out", tmp_path / "told"
    out.mkdir()
    told.mkdir()
    proxies = [lambda port: port] * 4 if kind == "insecure" else []  # provisions without TLS
    config = DEFAULTS | {"out": str(out), "wait-for": 4, "keys": str(tmp_path / "keys"), "told": str(told)}
    with Flare(tmp_path / "flare", sites=4, simulator=kind == "simulator", proxies=proxies) as flare:
        flare.submit("tests.nvflare.app.job", config)
        if kind == "insecure":
            log = tmp_path / "flare" / "localhost.log"
            wait_until(lambda: log.exists() and REFUSAL in log.read_text(), 200, "the refusal")
        else:
            flare.wait(out)
            assert [record["answers"] for record in records(out)] == [4, 4]
    expected = {} if kind == "insecure" else dict.fromkeys([f"site-{part + 1}" for part in range(4)], kind)
    assert {file.name: file.read_text() for file in told.iterdir()} == expected
