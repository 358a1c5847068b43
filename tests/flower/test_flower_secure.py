"""Secure aggregation over Flower's messages: nodes with parties of their own, and with files of their own."""

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from tests.flower.grid import LocalGrid, parts
from tests.flower.test_flower_server import adam, net, values
from tests.oracle import worst

from fedveil.errors import BadArgument
from fedveil.federation import Federation
from fedveil.flower import Server, answer, client_app
from fedveil.secagg import Identity, Memory, Party, Policy, Roster, environment

DATA = parts((30, 20, 25, 15))
SERVER = Identity.new("server")
POLICY = Policy(server=SERVER.public(), min_records=10)


def data_of(context):
    return DATA[int(context.node_config["partition-id"])]


def identities():
    found = [Identity.new(f"node-{k}") for k in range(4)]
    return found, Roster({own.name: own.public() for own in found})


def trained(app, roster, rounds=3):
    server = Server(
        LocalGrid(app, 4),
        net(),
        DATA[0][0][:2],
        "veil",
        adam,
        loss="squared_error",
        secure_aggregation=roster,
        identity=SERVER,
        batch_size=8,
        timeout=5.0,
    )
    server.fit(rounds=rounds)
    return server


def plain(rounds=3):
    run = Federation(net(), DATA, "plain", adam, loss="squared_error", batch_size=8, whole_shard=True)
    run.fit(rounds=rounds)
    return values(run.model)


def test_nodes_that_stay_keep_a_party():
    found, roster = identities()

    def party(context):
        return Party(found[int(context.node_config["partition-id"])], roster, policy=POLICY)

    server = trained(client_app(lambda _: net(), data_of, party=party), roster)
    assert [record["answers"] for record in server.history.records] == [4] * 3
    assert worst(values(server.model), plain()) < 1e-6


def test_a_process_for_every_message_goes_on_from_its_file(tmp_path):
    """As stock SuperNodes do it: nothing but files is left from one message to the next."""
    found, roster = identities()

    def app(message, context):
        part = int(context.node_config["partition-id"])
        party = Party(found[part], roster, Memory(tmp_path / f"{part}.memory"), policy=POLICY)
        return answer(message, context, net(), DATA[part], party=party)

    server = trained(app, roster)
    assert [record["answers"] for record in server.history.records] == [4] * 3
    assert worst(values(server.model), plain()) < 1e-6


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
