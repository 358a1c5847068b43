"""A client's policy and the life of its keys: what it refuses, and what its memory holds when."""

import json
from dataclasses import replace

import pytest
from tests.federation.secured import POLICY, floats, parties, plain_of, server_of
from tests.federation.test_oracle import ask_of, heard, linear, opening_for, record
from tests.oracle import worst

from fedveil.errors import FedveilError
from fedveil.secagg import Identity, Party, Policy, Roster
from fedveil.wire import read_kind


def test_policies_bound_the_sums_of_a_run_and_of_a_day():
    for policy, text in (
        (replace(POLICY, max_sums_per_run=2), "at most 2 sums per run"),
        (replace(POLICY, max_sums_per_day=3), "at most 3 sums per day"),
    ):
        server = server_of("veil", known=parties(policy=policy), attempts=1)
        with pytest.raises(FedveilError, match=text):
            server.fit(rounds=5)
        assert len(server.history.records) == max(policy.max_sums_per_run % 10_000, policy.max_sums_per_day % 20_000)


def test_the_budget_of_a_day_is_that_of_all_runs():
    known = parties(policy=replace(POLICY, max_sums_per_day=2))
    for rounds in (1, 1):
        server_of("veil", known=known).fit(rounds=rounds)
    with pytest.raises(FedveilError):
        server_of("veil", known=known, attempts=1).fit(rounds=1)


def test_the_clients_policy_decides_how_many_colluders_a_roster_withstands():
    """Finding 6: five members withstand two colluders, four withstand one, whatever the server says."""
    for colluders, rounds in ((2, 1), (3, 0)):
        server = server_of("veil", known=parties(policy=replace(POLICY, colluders=colluders)), attempts=1)
        if rounds:
            server.fit(rounds=1)
        else:
            with pytest.raises(FedveilError):
                server.fit(rounds=1)


class Clock:
    def __init__(self):
        self.now = 1_800_000_000.0

    def __call__(self):
        return self.now


def test_keys_are_replaced_every_fifty_rounds_and_training_goes_on():
    """Finding 5: the memory kept each run's key for ever."""
    known = parties()
    server = server_of("veil", known=known)
    keys = []
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
        assert found["runs"] == {}
        assert len(found["ended"]) == 1
        assert key not in party._memory.to_bytes().decode()
        with pytest.raises(FedveilError, match="this run has ended"):
            party.hello(server.engine.session)


def test_keys_die_by_the_clients_own_clock():
    clock, identity = Clock(), Identity.new("a")
    roster = Roster({"a": identity.public()})
    party = Party(identity, roster, policy=Policy(key_hours=1.0), clock=clock)
    first = party.hello("a run")
    clock.now += 3599
    assert party.hello("a run").key == first.key
    clock.now += 1
    assert party.hello("a run").key != first.key
    clock.now += 3600
    party.hello("b run")
    assert keys_in(party) == ["b run"]
    clock.now += 3600
    party.sweep()
    assert keys_in(party) == []
    assert party.hello("a run").key != first.key  # the run may continue, with a new key


def keys_in(party):
    return [run for run, kept in json.loads(party._memory.to_bytes())["runs"].items() if kept["key"]]


def test_a_client_that_restarts_after_its_key_died_continues_with_its_counters():
    clock, known = Clock(), parties()
    hellos = [party.hello("a run") for party in known.values()]
    first = known["site-0"]
    late = Party(first._identity, first._roster, first._memory, policy=POLICY, clock=clock)
    clock.now = 4e9
    heard(ask_of(linear(), opening_for(hellos, attempt=7)), first, record())
    late.sweep()
    again = late.hello("a run")
    assert again.key != hellos[0].key
    found = heard(ask_of(linear(), opening_for([again, *hellos[1:]], attempt=7)), late, record())
    assert found.reason == "attempt"
    assert (
        read_kind(heard(ask_of(linear(), opening_for([again, *hellos[1:]], attempt=8)), late, record()))
        == "maskedanswer"
    )


def test_a_full_memory_refuses_new_runs_and_forgets_none(monkeypatch):
    monkeypatch.setattr("fedveil.secagg.memory.MOST_RUNS", 3)
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
