"""Under secure aggregation only masked words depend on a client's records, and its own policy binds the server."""

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.federation.secured import NAMES, POLICY, SERVER, floats, net, parties, parts, plain_of, server_of
from tests.oracle import worst
from torch import nn

from fedveil.errors import FedveilError
from fedveil.federation.client import ClientSession
from fedveil.federation.protocol import Request, Step, read, write
from fedveil.secagg import Identity, Opening, Party, Policy, Roster
from fedveil.secagg.identity import sign_message
from fedveil.secagg.memory import State, short_digest
from fedveil.wire import as_tensor, read_kind

PIXELS = 16


def linear():
    return nn.Linear(PIXELS, 2, dtype=torch.float64)


def record():
    """One record of digits' kind: grey values from 0 to 16."""
    return torch.arange(PIXELS).double().reshape(1, PIXELS), torch.tensor([1])


def ask_of(model, opening=None, batch_size=1, number=None, token="t", session=None):
    """A plain ask for a client's update on a model that the asker chose."""
    tensors = {f"parameter/{name}": p.detach() for name, p in model.named_parameters()}
    tensors |= {f"buffer/{name}": own for name, own in model.named_buffers()}
    trained, modules = ([name for name, _ in own] for own in (model.named_parameters(), model.named_modules()))
    values = {"trainable": trained, "training": modules}
    secure = {} if opening is None else opening.values()
    number = (opening.round if opening else 0) if number is None else number
    session = session or (opening.run if opening else "s")
    about = "plain", {}, "squared_error", {}, False, batch_size
    return write(Request(session, number, token, *about, 0, {}, secure, values, tensors))


def opening_for(hellos, exponent=0, attempt=1, number=0, run="a run", rows=(2, 2 * PIXELS)):
    return Opening(run, number, attempt, tuple(hellos), (exponent,) * len(rows), rows, checks=True)


def heard(message, party, data, model=None, own=None, signer=SERVER):
    """What a client answers, or the error that it raises."""
    own = sign_message(signer, message) if own is None else own
    try:
        return ClientSession(model or linear(), data, client=0, party=party).reply(message, own)
    except FedveilError as error:
        return error


def pixel_model(pixel):
    """A model whose error, and so the gradient of its bias, is one pixel of the record."""
    model = linear()
    with torch.no_grad():
        model.weight.zero_()
        model.weight[:, pixel] = 1.0
        model.bias.zero_()
    return model


def read_record(observe):
    """The attack: find each grey value by halving, from whatever the client's answers differ in.

    `observe(model, exponent)` is what the asker sees when the bias's gradient has that exponent. Without a bit that
    depends on the record, every pixel comes out alike.
    """
    found, usual = [], observe(pixel_model(0), 90)
    for pixel in range(PIXELS):
        low, high = 0, 5  # bits of a grey value from 0 to 16
        while low < high:
            middle = (low + high) // 2
            if observe(pixel_model(pixel), middle) == usual:
                high = middle
            else:
                low = middle + 1
        found.append(low)
    return found


def magnitude(values):
    """Bits of the largest gradient of the bias for each pixel: what the attack finds if there is something to find."""
    return [int(max(float(v), abs(float(v) - 1))).bit_length() for v in values]


def test_the_attack_reads_a_record_where_a_client_says_whether_its_values_fit():
    inputs, _ = record()
    error = lambda model: (model(inputs) - torch.tensor([[0.0, 1.0]])).abs().max()  # noqa: E731
    assert read_record(lambda model, exponent: bool(error(model) < 2.0**exponent)) == magnitude(inputs[0])


@pytest.mark.parametrize("members", ["forged", "valid"])
def test_the_attack_gets_nothing_from_a_client_under_secure_aggregation(members):
    """By the real server, with its key: with a roster of one, and with a valid one, in as many runs as it likes."""
    known = parties()
    victim, runs, seen = known["site-0"], iter(range(10**6)), set()

    def observe(model, exponent):
        run = f"run {next(runs)}"
        hellos = [party.hello(run) for party in known.values()]
        opening = opening_for(hellos[:1] if members == "forged" else hellos, run=run)
        answer = heard(ask_of(model, replace(opening, exponents=(exponent, 90))), victim, record())
        said = str(answer) if isinstance(answer, FedveilError) else (read_kind(answer), len(answer) // 64)
        seen.add(said)
        return said

    assert set(read_record(observe)) == {0}
    assert len(seen) == 1  # one answer to all questions


def secured(names=NAMES, policy=POLICY):
    known = parties(names, policy=policy)
    return known, [known[name].hello("a run") for name in names]


def test_nothing_is_computed_before_it_is_stored_that_the_attempt_was_admitted(monkeypatch):
    known, hellos = secured()
    victim, seen = known["site-0"], []

    def data():
        seen.append(json.loads(victim._memory.to_bytes())["runs"]["a run"]["attempt"])
        return record()

    heard(ask_of(linear(), opening_for(hellos, attempt=7)), victim, data)
    assert seen == [7]


def test_batches_and_records_below_the_clients_policy_are_refused():
    """The server chooses the batch; the client's policy has a minimum."""
    known, hellos = secured(policy=replace(POLICY, min_records=20))
    victim, data, wide = known["site-0"], parts((30,))[0], nn.Linear(6, 4, dtype=torch.float64)
    opening = opening_for(hellos, rows=(4, 24))
    assert heard(ask_of(wide, opening, batch_size=19), victim, data, wide).reason == "policy"
    assert read_kind(heard(ask_of(wide, opening, batch_size=20), victim, data, wide)) == "maskedanswer"
    greeting = write(Step("another run", "hello", {"body": as_tensor(bytes(16) + b"k" * 32)}))
    few = heard(greeting, victim, parts((19,))[0], wide)
    assert few.reason == "policy"
    assert "19" not in str(few)
    assert read_kind(heard(greeting, victim, data, wide)) == "step"


@pytest.mark.parametrize("options", [{}, {"whole_shard": False, "batch_size": 1024}], ids=["shards", "batches"])
def test_two_rounds_on_the_same_model_with_one_member_fewer_open_nothing(options):
    """The difference would be the missing client's gradient; a batch may be all of its records, in any round."""
    server = server_of("plain", **options)
    server.optimizer = torch.optim.SGD(server.model.parameters(), lr=0.0)  # the server sends the same model again
    server.fit(rounds=1)
    assert "skipped" not in server.history.records[0]
    server.engine.transport.down = {"site-2"}
    server.fit(rounds=2)
    record = server.history.records[1]
    assert "have revealed: at least" in record["skipped"]
    assert any("opened a sum on the same broadcast over other members" in text for text in record["faults"])
    server.engine.transport.down = set()
    server.fit(rounds=3)
    assert server.history.records[2]["records"] == server.history.records[0]["records"]  # the same members may


def test_a_server_that_changes_the_model_a_little_still_isolates_a_client_over_two_rounds():
    """Not promised, and documented beside the promise: two sums that differ by one member, on models that differ."""
    server = server_of("plain")
    sums = []
    for down in (set(), {"site-2"}):
        server.engine.transport.down = down
        result = server.exchange()
        records = result.figures["records"]
        sums.append({name: g.double() * records for name, g in result.gradients.items()})
        sums[-1]["records"] = torch.tensor([float(records)])
        server.round += 1
        with torch.no_grad():
            next(server.model.parameters())[0, 0] += 1e-9
    difference = {name: sums[0][name] - sums[1][name] for name in sums[0]}
    assert difference.pop("records") == 25  # how many records it has
    model, (inputs, targets) = net(), parts()[2]
    loss = ((model(inputs) - nn.functional.one_hot(targets, 4)) ** 2).sum()
    true = dict(zip(difference, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    scale = max(float(own.abs().max() / true[name].abs().max()) for name, own in difference.items())
    error = max(float((own / scale - true[name]).norm() / true[name].norm()) for name, own in difference.items())
    assert error < 1e-6


def test_a_sum_is_remembered_over_a_thousand_others():
    state, members = State(), short_digest(b"members")
    for number in range(1001):
        state.remember_sum(short_digest(b"%d" % number), members)
    assert [state.opened_members(short_digest(b"%d" % number)) for number in (0, 1, 1000)] == [[], [members], [members]]


def test_no_batch_has_fewer_records_than_the_policy_says():
    """100 records in batches of 98 would leave a batch of 2 in every other round."""
    known, hellos = secured(policy=replace(POLICY, min_records=32))
    seen, model = [], nn.Linear(6, 4, dtype=torch.float64)
    model.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    for number in range(3):
        opening = opening_for(hellos, rows=(4, 24), attempt=number + 1, number=number)
        message = ask_of(model, opening, batch_size=98, token=str(number))
        assert read_kind(heard(message, known["site-0"], parts((100,))[0], model)) == "maskedanswer"
    assert [count for count in seen if count > 2] == [100] * 3  # and not 98 and 2; others are looks at shapes


def test_an_ask_is_of_the_run_and_round_of_its_opening():
    known, hellos = secured()
    for changes in ({"number": 1}, {"session": "another run"}):
        found = heard(ask_of(linear(), opening_for(hellos), **changes), known["site-0"], record())
        assert "the run and round differ from those in the opening" in str(found)


class Caching(nn.Module):
    """Keeps something of the last record that it saw outside of training."""

    def __init__(self):
        super().__init__()
        self.head = linear()
        self.register_buffer("active", torch.zeros(2, dtype=torch.int64))

    def forward(self, inputs):
        if not self.training:
            self.active = (inputs[0] > 4).nonzero()[:, 0]
        return self.head(inputs)


def test_what_a_forward_pass_leaves_in_the_clients_model_does_not_show():
    said = set()
    for large in (1, 5):
        known, hellos = secured()
        values, model = torch.zeros(4, PIXELS).double(), Caching()
        values[:, :large] = 9.0
        for number in range(3):
            opening = opening_for(hellos, attempt=number + 1, number=number, rows=(2, 2, 2 * PIXELS))
            message = ask_of(Caching(), opening, batch_size=4, token=str(number))
            answer = heard(message, known["site-0"], (values, torch.tensor([0, 1, 0, 1])), model)
            said.add(str(answer) if isinstance(answer, FedveilError) else read_kind(answer))
    assert said == {"maskedanswer"}


def test_an_stderr_that_cannot_be_written_shows_nothing(monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        flush = write

    known, hellos = secured()
    monkeypatch.setattr("sys.stderr", Full())
    for attempt, data in enumerate((record, lambda: 1 / 0), 1):
        message = ask_of(linear(), opening_for(hellos, attempt=attempt), token=str(attempt))
        assert read_kind(heard(message, known["site-0"], data)) == "maskedanswer"


def test_a_plain_client_may_pin_its_server_too():
    message, session = ask_of(linear()), ClientSession(linear(), record(), client=0, policy=POLICY)
    for own in (b"", sign_message(Identity.new("server"), message), sign_message(SERVER, message + b" ")):
        with pytest.raises(FedveilError, match="is not signed by the server"):
            session.reply(message, own)
    assert read_kind(session.reply(message, sign_message(SERVER, message))) == "answer"


def test_a_server_without_roster_or_key_is_refused_where_it_starts():
    for options in ({"secure_aggregation": True}, {"identity": None}):
        with pytest.raises(FedveilError, match="needs the roster of members and this server's signing key"):
            server_of("veil", **options)


def test_a_hello_that_is_copied_from_another_member_is_refused():
    """Everyone gets everyone's hellos with M1; the server's challenge tells who says hello now."""
    known = parties()
    server = server_of("veil", known=known)
    server.fit(rounds=1)

    def copy(data):
        step = read(data, Step)
        hello = server.rounds._greetings["site-0"].hello  # which M1 has shown to everyone
        body = json.dumps(hello.values() | {"proof": "ab" * 64}).encode()
        return write(replace(step, tensors={"body": as_tensor(body)}))

    server.engine.transport.faults = {("site-1", 4): copy}
    server.rounds._to_greet_again.add("site-1")
    server.fit(rounds=2)
    record = server.history.records[1]
    assert record["excluded"] == {"site-1": "its greeting is not signed by site-0"}
    assert record["answers"] == 4


def test_the_clients_policy_decides_how_many_colluders_a_roster_withstands():
    """Five members withstand two colluders, whatever the server says."""
    for colluders, expected in ((2, contextlib.nullcontext()), (3, pytest.raises(FedveilError))):
        with expected:
            server_of("veil", known=parties(policy=replace(POLICY, colluders=colluders)), attempts=1).fit(rounds=1)


def test_keys_are_replaced_every_fifty_rounds_and_training_goes_on():
    known, keys = parties(), []
    server = server_of("veil", known=known)
    for rounds in (1, 50, 51, 101):
        server.fit(rounds=rounds)
        keys.append(json.loads(known["site-0"]._memory.to_bytes())["runs"][server.engine.session]["key"])
    assert keys[0] == keys[1] != keys[2] != keys[3]
    assert not any("faults" in record for record in server.history.records)
    assert [record["round"] for record in server.history.records if record["exchanges"] == 4] == [1, 51, 101]
    assert worst(floats(server.model), plain_of(101)) < 1e-6


def test_neither_server_nor_clients_show_the_keys_of_tags():
    known = parties()
    server = server_of("veil", known=known)
    server.fit(rounds=1)
    keys = [greeted.channel for greeted in server.rounds._greetings.values()]
    assert len(set(keys)) == 5
    for thing in (server, server.rounds, server.rounds._greetings, *server.rounds._greetings.values(), *known.values()):
        assert not any(repr(key)[2:-1] in repr(thing) or key.hex() in repr(thing) for key in keys)


def test_a_run_that_has_ended_leaves_a_tombstone_and_no_key():
    known = parties()
    server = server_of("veil", known=known)
    server.fit(rounds=2)
    text = known["site-0"]._memory.to_bytes().decode()
    key = json.loads(text)["runs"][server.engine.session]["key"]
    server.close()
    for party in known.values():
        found = json.loads(party._memory.to_bytes())
        assert (found["runs"], len(found["ended"])) == ({}, 1)
        assert key not in party._memory.to_bytes().decode()
        with pytest.raises(FedveilError, match="this run has ended"):
            party.hello(server.engine.session)


def test_keys_die_by_the_clients_own_clock():
    clock, identity = SimpleNamespace(now=1_800_000_000.0), Identity.new("a")
    roster = Roster({"a": identity.public()})
    party = Party(identity, roster, policy=Policy(key_hours=1.0), clock=lambda: clock.now)
    first = party.hello("a run")
    for seconds, same in ((3599, True), (1, False)):
        clock.now += seconds
        assert (party.hello("a run").key == first.key) == same
    clock.now += 3600
    party.hello("b run")
    assert keys_in(party) == ["b run"]
    clock.now += 3600
    party.sweep()
    assert keys_in(party) == []
    assert party.hello("a run").key != first.key  # the run may continue, with a new key


def keys_in(party):
    return [run for run, kept in json.loads(party._memory.to_bytes())["runs"].items() if kept["key"]]


def test_a_full_memory_refuses_new_runs_and_forgets_none(monkeypatch):
    monkeypatch.setattr("fedveil.secagg.memory.MAX_RUNS", 3)
    identity = Identity.new("a")
    party = Party(identity, Roster({"a": identity.public()}))
    for run in ("1", "2"):
        party.hello(run)
        party.end(run)
    party.hello("3")
    with pytest.raises(FedveilError, match="memory is full") as caught:
        party.hello("4")
    assert caught.value.reason == "full"
    party.hello("3")
    for run in ("1", "2"):
        with pytest.raises(FedveilError, match="has ended"):
            party.hello(run)
