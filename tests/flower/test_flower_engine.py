"""Whatever a node sends or fails to send, the round continues with the others and with their weights."""

import gc
import re

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from flwr.app import ConfigRecord, Error, Message, RecordDict
from tests import faults
from tests.flower.grid import LocalGrid, parts
from tests.flower.test_flower_server import adam, app_of, net, values
from tests.oracle import worst

from fedveil.defences import PPDL
from fedveil.errors import BadArgument, Diverged, TooFewAnswers
from fedveil.federation import Federation
from fedveil.federation.protocol import Ask, read
from fedveil.flower import Server, client_app
from fedveil.flower.engine import FlowerTransport
from fedveil.flower.wrapping import COMMON, RECORD, unwrap, wrap
from fedveil.scheme.recover import Recovery

DATA = parts()


def server_of(changes=None, defence="veil", data=DATA, build=net, app=None, **options):
    grid = LocalGrid(app or app_of(data, build), len(data), faults=changes)
    options = {"timeout": 0.3, "pause": 0.0, "attempts": 3, "patience": 1.0, **options}
    return Server(grid, build(), data[0][0][:2], defence, adam, **{"loss": "squared_error", **options})


def engine(clients, rounds=1, build=net):
    run = Federation(build(), [DATA[k] for k in clients], "plain", adam, loss="squared_error", whole_shard=True)
    run.fit(rounds=rounds)
    return values(run.model)


def error(code, node=None):
    def change(reply, message):
        found = Message(Error(code=code, reason="as the SuperLink\nsays"), reply_to=message)
        if node is not None:
            found.metadata.__dict__["_src_node_id"] = node
        return [found]

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
    "nothing in it": (content(lambda _: RecordDict()), "malformed: answer: this message is not from fedveil"),
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


@pytest.mark.parametrize("prefix", ["passes/", "buffer/", "junk/", ""])
@pytest.mark.parametrize("count", [1, 10_000])
def test_tensors_without_numbers_are_counted_before_they_are_read(prefix, count):
    more = {f"{prefix}{k}": torch.zeros(0) for k in range(count)}
    server = server_of({(101, 0): altered(tensors=lambda t: t | more)})
    server.fit(rounds=1)
    (fault,) = server.history.records[0]["faults"]
    assert re.search("was not asked for" if count == 1 else "bytes, too many for|tensors, more than", fault)


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


def test_an_answer_of_the_round_before_is_stale_even_if_it_quotes_this_rounds_message():
    kept = []

    def keep(reply, message):
        kept.append(reply.content)
        return [reply]

    faults = {(101, 0): keep, (101, 1): lambda reply, message: [Message(content=kept[0], reply_to=message)]}
    server = server_of(faults)
    server.fit(rounds=2)
    assert "stale: it belongs to another exchange, in round 0" in server.history.records[1]["faults"][0]


def test_too_few_answers_repeat_the_round_with_a_new_secret():
    tokens = []
    faults = {(node, number): FAULTS["nan"][0] for node in (100, 101) for number in (0, 1)}
    server = server_of(faults, min_answers=2)
    server.fit(rounds=1)
    for message in server.engine.transport.grid.sent:
        found = read(unwrap(message.content, "ask")[0], Ask)
        tokens.append((found.token, found.values["round"], found.round))
    assert len({token for token, _, _ in tokens}) == len({secret for _, secret, _ in tokens}) == 3
    assert {number for _, _, number in tokens} == {0}
    assert server.history.records[0]["attempts"] == 3
    assert len(server.history.records[0]["faults"]) == 4
    assert worst(values(server.model), engine([0, 1, 2])) < 1e-9


def test_nodes_that_vanish_and_come_back_cost_only_the_rounds_they_miss():
    server = server_of()
    server.fit(rounds=1)
    away = server.engine.transport.grid.contexts.pop(100)
    server.fit(rounds=2)
    server.engine.transport.grid.contexts[100] = away
    server.fit(rounds=3)
    assert [record["records"] for record in server.history.records] == [75, 45, 75]


def test_messages_live_as_long_as_their_round():
    server = server_of(timeout=7.0)
    server.fit(rounds=1)
    assert {message.metadata.ttl for message in server.engine.transport.grid.sent} == {7.0}


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
    assert "the ask is for round 0, but it has already answered a later one" in texts[0]
    assert "it has already answered this ask of round 1" in texts[1]


def test_a_new_session_of_the_server_may_begin_again():
    server = server_of()
    server.fit(rounds=3)
    again = Server(server.engine.transport.grid, net(), DATA[0][0][:2], "veil", adam, loss="squared_error", attempts=1)
    again.fit(rounds=1)
    assert again.history.records[0]["answers"] == 3


@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_a_restarted_server_goes_on_from_its_checkpoint_with_the_clients_that_are_there(defence, tmp_path):
    first = server_of(defence=defence)
    first.fit(rounds=2, folder=tmp_path, checkpoint_every=1)
    second = server_of(defence=defence)
    second.resume(tmp_path)
    del second.engine.transport.grid.contexts[101]
    second.fit(rounds=4, folder=tmp_path)
    assert [(r["round"], r["answers"]) for r in second.history.records] == [(1, 3), (2, 3), (3, 2), (4, 2)]
    whole = server_of(defence="plain")
    whole.fit(rounds=2)
    del whole.engine.transport.grid.contexts[101]
    whole.fit(rounds=4)
    assert worst(values(second.model), values(whole.model)) < 1e-9


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"min_answers": 0}, "min_answers must be an integer of at least 1, got 0"),
        ({"timeout": float("inf")}, "(?s)timeout must be a finite number above 0, got inf.*timeout=600, in seconds"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, text):
    with pytest.raises(BadArgument, match=text):
        server_of(**options)


def test_a_message_carries_bytes_for_one_node_beside_those_for_all():
    def echo(message, context):
        return Message(content=wrap(unwrap(message.content, "ask")[1]), reply_to=message)

    found = dict(FlowerTransport(LocalGrid(echo, 2)).ask(b"all", {100: b"a", 101: b""}, label="0", timeout=1.0))
    assert found == {100: b"a", 101: b""}


def test_the_text_of_a_clients_exception_stays_on_its_node(capfd):
    """Flower sends what a ClientApp raises to the server."""

    def load(context):
        raise ValueError("patient 4711, HIV positive")

    server = server_of(app=client_app(lambda _: net(), load), attempts=1)
    with pytest.raises(TooFewAnswers, match="this client cannot answer: ValueError") as caught:
        server.fit(rounds=1)
    assert "4711" not in str(caught.value)
    assert "4711" in capfd.readouterr().err
