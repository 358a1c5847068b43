"""What a client refuses, with its reason, and that every reason is written down."""

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.secagg.group import DIGEST, Attempt, Group, upload
from tests.secagg.hostile import refuses

from fedveil.errors import Aborted, BadArgument
from fedveil.secagg import Hello, Opening, Party, Roster, Tally, rules
from fedveil.secagg.messages import Reveal, Settle, SettleReply


def openings(group):
    """Openings that a client refuses, with the reason."""
    told = group.opening(attempt=5, round=5)
    hello, stranger = group.hellos["c1"], Group(4).hellos["c1"]
    yield "another run", replace(told, run="b"), "run"
    yield "another run's key", replace(told, roster=(*told.roster[:3], group.parties["c3"].hello("b"))), "run"
    yield "without the client", replace(told, roster=(*told.roster[1:], group.hellos["c4"])), "roster"
    yield "two members", replace(told, roster=told.roster[:2]), "few"
    yield "twice", replace(told, roster=(*told.roster[:4], told.roster[3])), "roster"
    yield "a stranger", replace(told, roster=(told.roster[0], stranger, *told.roster[2:])), "roster"
    other = Hello(group.run, "c1", group.hellos["c2"].key, hello.signature)
    yield "a foreign key", replace(told, roster=(told.roster[0], other, *told.roster[3:])), "roster"
    name = Hello(group.run, "zoe", hello.key, hello.signature)
    yield "an unknown name", replace(told, roster=(told.roster[0], name, *told.roster[2:])), "roster"


def test_openings_that_a_client_refuses():
    group = Group(5)
    for case, opening, reason in openings(group):
        assert refuses(upload, group.parties["c0"], opening, DIGEST, group.vectors()["c0"]) == reason, case
    fine = group.opening(attempt=5, round=5)
    upload(group.parties["c0"], fine, DIGEST, group.vectors()["c0"])
    for attempt, round, reason in ((5, 5, "attempt"), (4, 6, "attempt"), (6, 4, "round")):
        again = replace(fine, attempt=attempt, round=round)
        assert refuses(upload, group.parties["c0"], again, DIGEST, group.vectors()["c0"]) == reason


def test_the_clients_own_key_must_be_its_present_one():
    group = Group(4)
    old = group.opening()
    party = Party(group.identities["c0"], group.roster)
    party.hello(group.run)
    assert refuses(upload, party, old, DIGEST, group.vectors()["c0"]) == "roster"


def test_steps_and_members_that_a_client_refuses():
    a = Attempt(5)  # t = 4
    bound, party, names = a.tally._context, a.group.parties["c0"], tuple(a.group.names)
    dealt = a.tally.settle()[1]["c0"]
    for step, members, reason in (
        (1, names, "step"),
        (0, names[1:], "members"),
        (0, names[:3], "few"),
        (0, (*names[:4], "c9"), "members"),
    ):
        assert refuses(party.settle, Settle(bound, step, members).to_bytes(), dealt) == reason
    assert refuses(party.settle, Settle(bytes(32), 0, names).to_bytes(), dealt) == "attempt"
    assert refuses(party.settle, Settle(bound, 0, names).to_bytes(), b"") == "argument"
    party.settle(Settle(bound, 0, names).to_bytes(), dealt)
    assert refuses(party.settle, Settle(bound, 0, names).to_bytes(), dealt) == "step"
    assert refuses(party.settle, Settle(bound, 1, names).to_bytes()) == "members"
    party.settle(Settle(bound, 1, names[:4]).to_bytes())
    assert refuses(party.settle, Settle(bound, 2, (*names[:3], "c4")).to_bytes()) == "members"


def test_signatures_count_once_for_members_and_for_the_same_list_only():
    a = Attempt(5)  # t = 4
    common, own = a.tally.settle()
    settle = Settle.from_bytes(common)
    answers = {n: SettleReply.from_bytes(a.group.parties[n].settle(common, own[n]), 0).signature for n in a.group.names}
    party = a.group.parties["c0"]
    three = dict(list(answers.items())[:3])
    another = a.group.identities["c3"].sign(replace(settle, step=1).signed_bytes())
    elsewhere = a.group.identities["c3"].sign(replace(settle, context=bytes(32)).signed_bytes())
    for signatures in (
        three,
        {},
        {name: signature for name, signature in answers.items() if name in ("c0", "c1", "c2")},
        three | {"c3": answers["c2"]},
        three | {"c3": another},
        three | {"c3": elsewhere},
        three | {"zoe": answers["c3"]},
        three | {"c3": bytes(64)},
    ):
        assert refuses(party.reveal, Reveal(settle, signatures).to_bytes()) == "signatures"
    party.reveal(Reveal(settle, three | {"c4": answers["c4"]}).to_bytes())
    assert refuses(party.reveal, Reveal(settle, answers).to_bytes()) == "attempt"


def test_reasons_are_those_written_down():
    source = Path(rules.__file__).parents[1]
    files = [*source.glob("secagg/*.py"), source / "privacy" / "ledger.py"]
    calls = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    named = [n.args[0] for n in calls if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "Aborted"]
    assert {reason.value for reason in named} == set(rules.REASONS)


def test_arguments_that_make_no_sense_are_refused_and_leave_nothing_in_memory():
    group = Group(4)
    party, vector, before = group.parties["c0"], group.vectors()["c0"], group.memories["c0"].to_bytes()
    for run in ("", "x" * 201, "a\nb", None, 3):
        with pytest.raises(BadArgument, match="run must be printable text"):
            party.hello(run)
    with pytest.raises(BadArgument, match="SHA-256 digest of 32 bytes"):
        upload(party, group.opening(), b"short", vector)
    assert group.memories["c0"].to_bytes() == before
    for words in (np.ones(3), np.ones((1, 3), np.uint64), 0 * vector, vector[:0], [1, 2], None):
        with pytest.raises(BadArgument, match=r"words must be|first word must be"):
            upload(party, group.opening(), DIGEST, words)
    two = Opening(group.run, 0, 0, tuple(group.hellos.values())[:2], (), ())
    with pytest.raises(Aborted, match="2 members are too few: at least 3") as caught:
        Tally(two, DIGEST, group.roster)
    assert caught.value.reason == "few"
    with pytest.raises(BadArgument, match="at least 3"):
        rules.threshold(2)
    with pytest.raises(BadArgument, match="is not in the roster"):
        Party(group.identities["c0"], Roster({"c1": group.identities["c1"].public()}))
