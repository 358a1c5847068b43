"""The server's side of rounds with clients elsewhere, over an engine in this process."""

from functools import partial

import pytest
from tests.engines import Loopback, LoopbackServer, member
from tests.faults import FAULTS, altered
from tests.federation import secured
from tests.federation.secured import adam, net
from tests.oracle import worst

from fedveil import Federation, Limits
from fedveil.defences import DBCL, PPDL, SPN, Plain, Private, Veil
from fedveil.errors import BadArgument, TooFewAnswers
from fedveil.federation.protocol import Fault, FaultKind

SITES = ("site-1", "site-2", "site-3")
parts = partial(secured.parts, (30, 20, 25))


def server_of(faults=None, defence="veil", **options):
    members = {name: member(net, own, k) for k, (name, own) in enumerate(zip(SITES, parts(), strict=True))}
    options = {"timeout": 0.3, "pause": 0.0, "attempts": 3, "patience": 0.2, "batch_size": 8, **options}
    return LoopbackServer(
        Loopback(members, faults), net(), parts()[0][0][:2], defence, adam, loss="squared_error", **options
    )


def engine(clients, defence="plain", rounds=1):
    how, data = {"loss": "squared_error", "whole_shard": True, "batch_size": 8}, parts()
    run = Federation(net(), [data[k] for k in clients], defence, adam, **how)
    run.fit(rounds=rounds)
    return run.model.state_dict()


@pytest.mark.parametrize("make", [Plain, Veil, lambda: PPDL(0.3), lambda: Private(Veil(), 1.0, 0.0), DBCL, SPN])
def test_rounds_over_an_engine_are_those_of_one_process(make):
    server = server_of(defence=make())
    server.fit(rounds=4)
    assert [record["answers"] for record in server.history.records] == [3] * 4
    random = make in (DBCL, SPN)  # their clients draw their own numbers
    assert random or worst(server.model.state_dict(), engine(range(3), make(), 4)) < 1e-9


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_a_fault_costs_its_member_the_round_and_nobody_else(name, defence):
    change, text = FAULTS[name]
    server = server_of({("site-2", 0): change}, defence)
    server.fit(rounds=2)
    first, second = server.history.records
    assert (first["asked"], first["answers"], first["records"]) == (3, 2, 55)
    assert [found.startswith(f"client site-2: {text}") for found in first["faults"]] == [True]
    assert (second["answers"], "faults" in second) == (3, False)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: None, "silent: "),
        (lambda data: Fault("site-2", FaultKind.UNREACHABLE, "its process ended"), "unreachable: its process ended"),
    ],
)
def test_the_engines_own_faults_are_recorded(change, text):
    server = server_of({("site-2", 0): change})
    server.fit(rounds=1)
    assert server.history.records[0]["faults"][0].startswith(f"client site-2: {text}")
    assert worst(server.model.state_dict(), engine([0, 2])) < 1e-9


def test_a_round_is_repeated_with_a_new_secret_and_without_the_guilty():
    server = server_of({("site-1", 0): lambda data: None, ("site-2", 0): lambda data: b"garbage"}, min_answers=2)
    server.fit(rounds=1)
    assert server.engine.transport.asked == ["site-1", "site-2", "site-3", "site-1", "site-3"]
    assert server.history.records[0]["attempts"] == 2


def test_records_tell_where_the_time_went():
    server = server_of()
    server.fit(rounds=1)
    (record,) = server.history.records
    assert 0 < record["seconds_work"] <= record["seconds_waiting"] < record["seconds"]
    assert 0 < record["seconds_recovery"] < record["seconds"]
    up = record["bytes_total"] - 3 * record["bytes_down"]
    assert record["bytes_up"] == round(up / 3)  # answers differ by a digit of their seconds


def test_a_claim_of_records_is_capped_by_name():
    server = server_of({("site-2", 0): altered(records=10**12)}, "plain", limits=Limits(max_records={"site-2": 20}))
    server.fit(rounds=1)
    assert server.history.records[0]["capped"] == ["site-2"]
    assert worst(server.model.state_dict(), engine(range(3))) < 1e-9


def test_members_that_are_gone_are_waited_for_and_not_for_ever():
    server = server_of(min_answers=3)
    server.engine.transport.down.add("site-1")
    with pytest.raises(TooFewAnswers, match=r"only 2 of 3 clients are present after 0.2 s"):
        server.fit(rounds=1)
    server.engine.transport.down.clear()
    server.fit(rounds=1)
    assert server.round == 1


def test_a_server_on_a_network_refuses_seeds():
    with pytest.raises(BadArgument, match="draws from a test seed"):
        server_of(defence=PPDL(0.3, seed=1))


def test_a_rule_waits_for_the_members_that_it_needs():
    server = server_of(limits=Limits("krum"))
    with pytest.raises(TooFewAnswers, match=r"only 3 of 5 clients are present"):
        server.fit(rounds=1)
    server = server_of({("site-2", 0): lambda data: None}, limits=Limits("median"), attempts=1)
    with pytest.raises(
        TooFewAnswers, match=r"fewer than 3 valid replies .required by median. after 1 attempt: client site-2: silent"
    ):
        server.fit(rounds=1)
