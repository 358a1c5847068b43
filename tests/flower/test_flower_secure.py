"""Secure aggregation over Flower's messages: nodes with parties of their own, and with files of their own."""

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from tests.flower.grid import parts
from tests.flower.test_flower_server import in_engine, net, on_flower, values
from tests.oracle import worst

from fedveil.errors import BadArgument
from fedveil.flower import answer, client_app
from fedveil.secagg import Identity, Memory, Party, Policy, Roster, environment

DATA = parts((30, 20, 25, 15))
SERVER = Identity.new("server")
POLICY = Policy(server=SERVER.public(), min_records=10)


def data_of(context):
    return DATA[int(context.node_config["partition-id"])]


def identities():
    found = [Identity.new(f"node-{k}") for k in range(4)]
    return found, Roster({own.name: own.public() for own in found})


@pytest.mark.parametrize("stay", [True, False])
def test_nodes_keep_their_party_or_go_on_from_its_file(stay, tmp_path):
    """Stock SuperNodes do not stay: nothing but files is left from one message to the next."""
    found, roster = identities()

    def party(context, memory=None):
        return Party(found[int(context.node_config["partition-id"])], roster, memory, policy=POLICY)

    def app(message, context):
        own = party(context, Memory(tmp_path / f"{context.node_id}.memory"))
        return answer(message, context, net(), data_of(context), party=own)

    app = client_app(lambda _: net(), data_of, party=party) if stay else app
    options = {"secure_aggregation": roster, "identity": SERVER, "batch_size": 8, "timeout": 5.0}
    server = on_flower("veil", DATA, app=app, rounds=3, **options)
    assert [record["answers"] for record in server.history.records] == [4] * 3
    assert worst(values(server.model), values(in_engine("plain", DATA, rounds=3, batch_size=8).model)) < 1e-6


def test_the_environment_names_a_nodes_files_and_no_job_does(tmp_path, monkeypatch):
    found, roster = identities()
    monkeypatch.setenv(environment.IDENTITY, str(found[0].save(tmp_path / "node-0.key")))
    with pytest.raises(BadArgument, match="FEDVEIL_ROSTER"):
        environment.own_party()
    monkeypatch.setenv(environment.ROSTER, str(roster.write(tmp_path / "roster")))
    with pytest.raises(BadArgument, match=r"node-0.policy: there is no policy"):
        environment.own_party()
    Policy(server=SERVER.public()).write(tmp_path / "node-0.policy")
    party = environment.own_party()
    assert (party.name, party.policy.server) == ("node-0", SERVER.public())
    party.hello("run")
    assert (tmp_path / "node-0.memory").stat().st_mode & 0o777 == 0o600
    monkeypatch.delenv(environment.IDENTITY)
    assert environment.own_party() is None
