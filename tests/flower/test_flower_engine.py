"""Whatever a node sends or fails to send, the round continues with the others and with their weights."""

import gc

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from flwr.app import ConfigRecord, Error, Message, RecordDict
from tests import faults
from tests.flower.grid import LocalGrid, parts
from tests.flower.test_flower_server import adam, app_of, in_engine, net, values
from tests.oracle import worst

from fedveil import Entropy
from fedveil.defences import PPDL, Plain, Private
from fedveil.errors import BadArgument, Diverged, TooFewAnswers
from fedveil.federation.protocol import Request, read
from fedveil.flower import Server, client_app
from fedveil.flower.wrapping import COMMON, RECORD, unwrap, wrap
from fedveil.scheme.recover import Recovery

DATA = parts()


def server_of(changes=None, defence="veil", app=None, **options):
    grid = LocalGrid(app or app_of(DATA), len(DATA), faults=changes)
    options = {"timeout": 0.3, "pause": 0.0, "attempts": 3, "patience": 1.0, **options}
    return Server(grid, net(), DATA[0][0][:2], defence, adam, loss="squared_error", **options)


def engine(clients):
    return values(in_engine("plain", [DATA[k] for k in clients], rounds=1, schedule=None).model)


def error(code, node=None):
    def change(reply, message):
        found = Message(Error(code=code, reason="as the SuperLink\nsays"), reply_to=message)
        return [found if node is None else _from(found, node)]

    return change


def content(make):
    return lambda reply, message: [Message(content=make(reply.content), reply_to=message)]


def sent(change):
    """A fault of the answer's bytes as one of the message."""
    return content(lambda old: wrap(change(unwrap(old, "answer")[0])))


def altered(**changes):
    return sent(faults.altered(**changes))


FLOWERS_OWN = {
    "client raised": (error(2), "engine error: 2: as the SuperLink says"),
    "expired": (error(3, node=1), "engine error: 3"),
    "unavailable": (error(5, node=1), "engine error: 5"),
    "crashed": (error(8), "engine error: 8"),
    "silence": (lambda reply, message: [], "silent: no answer within 0.3 s"),
    "cannot be inflated": (lambda reply, message: [ValueError("bad object")], "unreadable: ValueError: bad object"),
    "nothing in it": (content(lambda _: RecordDict()), "malformed: answer: this message is not from Fedveil"),
    "not an array": (content(lambda _: RecordDict({RECORD: ConfigRecord({COMMON: b""})})), "malformed: answer: this"),
    "another node's": (lambda r, m: [_from(r, 102)], "foreign: the answer comes from node 102"),
}
FAULTS = FLOWERS_OWN | {name: (sent(change), text) for name, (change, text) in faults.FAULTS.items()}


def _from(reply, node):
    reply.metadata.__dict__["_src_node_id"] = node
    return reply


@pytest.mark.parametrize("name", [*FLOWERS_OWN, "garbage", "nan", "other token"])  # all: tests/federation
@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_a_fault_costs_its_node_the_round_and_nobody_else(name, defence):
    change, text = FAULTS[name]
    server = server_of({(101, 0): change}, defence)
    server.fit(rounds=1)
    (record,) = server.history.records
    assert (record["asked"], record["answers"], record["records"]) == (3, 2, 55)
    assert len(record["faults"]) == 1
    assert record["faults"][0].startswith(f"client 101: {text}")
    assert worst(values(server.model), engine([0, 2])) < 1e-9
    server.fit(rounds=2)
    assert server.history.records[-1]["answers"] == 3


@pytest.mark.parametrize("places", [[10**6], [-1], [0, 0], [[0]]])
def test_numbers_selected_at_impossible_places_are_refused(places):
    new = {"selected": torch.zeros(1).double(), "indices": torch.tensor(places, dtype=torch.int32)}
    change = altered(tensors=lambda t: t | new)
    server = server_of({(101, 0): change}, PPDL(0.01))
    server.fit(rounds=1)
    assert server.history.records[0]["answers"] == 2


def test_only_the_first_of_two_answers_counts():
    server = server_of({(101, 0): lambda r, m: [r, *altered(records=10**6)(r, m)]})
    server.fit(rounds=1)
    record = server.history.records[0]
    assert (record["answers"], record["records"]) == (3, 75)
    assert record["faults"] == ["client 101: twice: only its first answer counts"]
    assert worst(values(server.model), engine([0, 1, 2])) < 1e-9


def test_too_few_answers_repeat_the_round_with_a_new_secret():
    faults = {(node, number): FAULTS["nan"][0] for node in (100, 101) for number in (0, 1)}
    server = server_of(faults, min_answers=2)
    server.fit(rounds=1)
    asks = [read(unwrap(message.content, "request")[0], Request) for message in server.engine.transport.grid.sent]
    assert len({ask.token for ask in asks}) == len({ask.values["round"] for ask in asks}) == 3
    assert {ask.round for ask in asks} == {0}
    assert server.history.records[0]["attempts"] == 3
    assert len(server.history.records[0]["faults"]) == 4
    assert worst(values(server.model), engine([0, 1, 2])) < 1e-9


def test_nodes_that_vanish_cost_only_the_rounds_they_miss_and_messages_live_as_long_as_their_round():
    server = server_of(timeout=7.0)
    grid = server.engine.transport.grid
    server.fit(rounds=1)
    away = grid.contexts.pop(100)
    server.fit(rounds=2)
    grid.contexts[100] = away
    server.fit(rounds=3)
    assert [record["records"] for record in server.history.records] == [75, 45, 75]
    assert {message.metadata.ttl for message in grid.sent} == {7.0}


def secrets_alive():
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is Recovery]


@pytest.mark.parametrize("name", ["client raised", "nan", "silence", "nothing in it"])
def test_no_secret_outlives_its_round(name):
    server = server_of({(101, 0): FAULTS[name][0]})
    server.fit(rounds=2)
    assert not secrets_alive()
    server = server_of({(node, n): FAULTS[name][0] for node in (100, 101, 102) for n in range(3)})
    with pytest.raises((TooFewAnswers, Diverged)):
        server.fit(rounds=1)
    assert not secrets_alive()
    assert worst(values(server.model), values(net())) == 0


def test_a_client_refuses_what_is_old_and_what_it_has_answered():
    server = server_of()
    server.fit(rounds=2)
    old, new = (next(m for m in server.engine.transport.grid.sent if m.metadata.group_id == str(n)) for n in (0, 1))
    texts = [server.engine.transport.grid._handle(message)[0].error.reason for message in (old, new)]
    assert "the request is for round 0, but this client has already answered a later one" in texts[0]
    assert "the request of round 1 has already been answered" in texts[1]
    again = Server(server.engine.transport.grid, net(), DATA[0][0][:2], "veil", adam, loss="squared_error", attempts=1)
    again.fit(rounds=1)  # a new session may begin again
    assert again.history.records[0]["answers"] == 3


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(BadArgument, match=r"min_answers must be an integer of at least 1, got 0"):
        server_of(min_answers=0)
    with pytest.raises(BadArgument, match=r"timeout must be a finite number above 0, got inf(?s:.*)timeout=600"):
        server_of(timeout=float("inf"))
    with pytest.raises(BadArgument, match="draws from a test seed"):
        server_of(defence=Private(Plain(), 0.1, 0.0, entropy=Entropy.for_tests(1)))


def test_the_text_of_a_clients_exception_stays_on_its_node(capfd):
    """Flower sends what a ClientApp raises to the server."""

    def load(context):
        raise ValueError("patient 4711, HIV positive")

    server = server_of(app=client_app(lambda _: net(), load), attempts=1)
    with pytest.raises(TooFewAnswers, match="this client cannot answer: ValueError") as caught:
        server.fit(rounds=1)
    assert "4711" not in str(caught.value)
    assert "4711" in capfd.readouterr().err
