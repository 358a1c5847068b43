"""A wrong share or seed, at any place, never gives a wrong sum: it is noticed, and the reason is named."""

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.secagg.group import DIGEST, Group, reveal_all, settle_all, summed
from tests.secagg.hostile import refuses

from fedveil.errors import Aborted, BadArgument
from fedveil.secagg import Hello, Opening, Party, Roster, Tally, masks, rules
from fedveil.secagg.messages import Reveal, Revealed, Settle, Settled, Upload, sealed_bytes, sealed_from
from fedveil.secagg.shares import PRIME, WIDTH

SIZE = 3


def off_by_one(share):
    return ((int.from_bytes(share, "big") + 1) % PRIME).to_bytes(WIDTH, "big")


def flipped(data, at=0):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


class Attempt:
    """An attempt of n clients that have uploaded."""

    def __init__(self, n, change=None):
        self.group = Group(n)
        self.opening, self.vectors = self.group.opening(), self.group.vectors(SIZE)
        self.sent = self.group.uploads(self.opening, self.vectors)
        self.tally = Tally(self.opening, DIGEST, SIZE)
        for name, data in self.sent.items():
            upload = Upload.from_bytes(data, n, SIZE)
            self.tally.take_upload(name, (change(name, upload) if change else upload).to_bytes())

    def revealed(self, gone=()):
        """M6 by name."""
        message = self.tally.reveal()
        return {name: self.group.parties[name].reveal(message) for name in self.tally.survivors if name not in gone}

    def exact(self):
        return np.array_equal(self.tally.total(), summed(self.vectors, self.tally.survivors))


@pytest.mark.parametrize("dealer", range(4))
@pytest.mark.parametrize("holder", range(4))
def test_a_wrong_share_is_noticed_and_made_up_for_if_there_are_more(dealer, holder):
    for others in (3, 2):  # holders besides: t = 3, so that one can be spared, or none
        a = Attempt(4)
        settle_all(a.group, a.tally)
        answers = a.revealed()
        if others == 2:
            del answers[f"c{(holder + 1) % 4}"]
        wrong = Revealed.from_bytes(answers[f"c{holder}"])
        shares = dict(wrong.shares) | {f"c{dealer}": off_by_one(wrong.shares[f"c{dealer}"])}
        answers[f"c{holder}"] = Revealed(wrong.context, shares).to_bytes()
        for name, data in answers.items():
            a.tally.take_revealed(name, data)
        if others == 3:
            assert a.exact()
        else:
            with pytest.raises(Aborted, match=f"shares of the seed of c{dealer} do not give it") as caught:
                a.tally.total()
            assert caught.value.reason == "share"


def test_without_commitments_a_wrong_share_would_be_taken_for_the_seed(monkeypatch):
    a = Attempt(4)
    settle_all(a.group, a.tally)
    answers = a.revealed()
    wrong = Revealed.from_bytes(answers["c0"])
    shares = dict(wrong.shares) | {"c1": off_by_one(wrong.shares["c1"])}
    answers["c0"] = Revealed(wrong.context, shares).to_bytes()
    for name, data in answers.items():
        a.tally.take_revealed(name, data)
    monkeypatch.setattr(masks, "commitment", lambda seed, context: a.tally._uploads["c1"].commitments[1])
    for upload in a.tally._uploads.values():
        object.__setattr__(upload, "commitments", (a.tally._uploads["c1"].commitments[1],) * 4)
    with pytest.raises(Aborted) as caught:
        a.tally.total()
    assert caught.value.reason == "sum"  # the first word is the last line of defence


@pytest.mark.parametrize("place", range(3))
def test_a_wrong_pair_seed_counts_as_no_answer_and_the_members_shrink(place):
    """c9, c8 and c7 did not upload; one client opens a wrong seed with one of them."""
    group = Group(10)
    opening, vectors = group.opening(), group.vectors(SIZE)
    sent = group.uploads(opening, vectors)
    for liar in ("c0", "c4", "c6"):
        group.restore(kept := group.snapshot())
        tally = Tally(opening, DIGEST, SIZE)
        for name in group.names[: 10 - 3 + (place < 2)]:
            tally.take_upload(name, sent[name])
        common, own = tally.settle()
        outside = 10 - len(own)
        for name in own:
            data = group.parties[name].settle(common, own[name])
            if name == liar:
                answer = Settled.from_bytes(data, outside)
                seeds = list(answer.seeds)
                seeds[place % outside] = flipped(seeds[place % outside], 31)
                data = replace(answer, seeds=tuple(seeds)).to_bytes()
                with pytest.raises(BadArgument, match=f"a pair seed of {liar} does not fit"):
                    tally.take_settled(name, data)
            else:
                tally.take_settled(name, data)
        assert not tally.settled()
        if outside == 3:
            with pytest.raises(Aborted, match="6 of 10 clients are left: at least 7"):
                tally.settle()
        else:
            settle_all(group, tally)
            reveal_all(group, tally)
            assert liar not in tally.survivors
            assert np.array_equal(tally.total(), summed(vectors, tally.survivors))
        group.restore(kept)


@pytest.mark.parametrize("other", [1, 2, 3, 4])
def test_both_ends_of_a_pair_whose_commitments_differ_are_left_out(other):
    def change(name, upload):
        if name != "c0":
            return upload
        found = list(upload.commitments)
        found[other] = flipped(found[other])
        return replace(upload, commitments=tuple(found))

    a = Attempt(7, change)  # t = 5
    settle_all(a.group, a.tally)
    reveal_all(a.group, a.tally)
    assert a.tally.survivors == tuple(name for name in a.group.names if name not in ("c0", f"c{other}"))
    assert a.exact()


def test_a_client_whose_commitments_differ_from_all_others_is_left_out_alone():
    def change(name, upload):
        found = tuple(flipped(c) for c in upload.commitments) if name == "c2" else upload.commitments
        return replace(upload, commitments=found)

    a = Attempt(4, change)
    settle_all(a.group, a.tally)
    reveal_all(a.group, a.tally)
    assert a.tally.survivors == ("c0", "c1", "c3")
    assert a.exact()


def test_a_pair_that_is_not_compared_gives_no_wrong_sum_either(monkeypatch):
    """A client that masks with a seed of its own: commitments tell, and without them the first word does."""
    group = Group(4)
    opening, vectors = group.opening(), group.vectors(SIZE)
    honest, seeds = masks.pair_seed, masks.pair_seed
    sent = {}
    for name in group.names:
        if name == "c3":
            monkeypatch.setattr(masks, "pair_seed", lambda pair, context, *names: honest(pair, bytes(32), *names))
        sent[name] = group.parties[name].upload(opening, DIGEST, vectors[name])
    monkeypatch.setattr(masks, "pair_seed", seeds)
    kept = group.snapshot()
    for compared in (True, False):
        group.restore(kept)
        if not compared:
            monkeypatch.setattr(Tally, "_differs", lambda self, one, other: False)
        tally = Tally(opening, DIGEST, SIZE)
        for name, data in sent.items():
            tally.take_upload(name, data)
        settle_all(group, tally)
        reveal_all(group, tally)
        if compared:
            assert tally.survivors == ("c0", "c1", "c2")
            assert np.array_equal(tally.total(), summed(vectors, tally.survivors))
        else:
            with pytest.raises(Aborted, match="the masks of 4 clients do not cancel"):
                tally.total()


@pytest.mark.parametrize("dealer", range(1, 7))
def test_a_share_that_cannot_be_decrypted_is_named_and_its_dealer_left_out(dealer):
    def change(name, upload):
        sealed = (flipped(upload.sealed[0], 40), *upload.sealed[1:]) if name == f"c{dealer}" else upload.sealed
        return replace(upload, sealed=sealed)

    a = Attempt(7, change)
    assert settle_all(a.group, a.tally) == 2
    reveal_all(a.group, a.tally)
    assert f"c{dealer}" not in a.tally.survivors
    assert a.exact()


def test_words_that_were_changed_on_the_way_are_noticed():
    def change(name, upload):
        words = upload.words.copy()
        words[0] += name == "c1"
        return replace(upload, words=words)

    a = Attempt(4, change)
    settle_all(a.group, a.tally)
    reveal_all(a.group, a.tally)
    with pytest.raises(Aborted, match="do not cancel"):
        a.tally.total()


def test_answers_for_other_attempts_and_strangers_do_not_count():
    a, b = Attempt(4), Attempt(4)
    with pytest.raises(BadArgument, match="answers another opening"):
        Tally(a.opening, DIGEST, SIZE).take_upload("c0", b.sent["c0"])
    fresh = Tally(a.opening, DIGEST, SIZE)
    for name in ("c9", "", None):
        with pytest.raises(BadArgument, match="late, early, or from a stranger"):
            fresh.take_upload(name, a.sent["c0"])
    common, own = a.tally.settle()
    answer = a.group.parties["c0"].settle(common, own["c0"])
    a.tally.take_settled("c0", answer)
    with pytest.raises(BadArgument, match="another step, or twice"):
        a.tally.take_settled("c0", answer)
    with pytest.raises(BadArgument, match="from a stranger"):
        a.tally.take_revealed("c0", answer)
    with pytest.raises(BadArgument, match="from a stranger"):
        a.tally.take_upload("c0", a.sent["c0"])
    complaint = replace(Settled.from_bytes(answer, 0), failed=("c9",)).to_bytes()
    with pytest.raises(BadArgument, match="complains about strangers"):
        a.tally.take_settled("c1", complaint)


def test_a_late_answer_of_a_dropped_client_does_not_count():
    group = Group(4)
    opening, vectors = group.opening(), group.vectors(SIZE)
    sent = group.uploads(opening, vectors)
    tally = Tally(opening, DIGEST, SIZE)
    for name, data in sent.items():
        tally.take_upload(name, data)
    common, own = tally.settle()
    late = group.parties["c3"].settle(common, own["c3"])
    for name in ("c0", "c1", "c2"):
        tally.take_settled(name, group.parties[name].settle(common, own[name]))
    settle_all(group, tally)
    with pytest.raises(BadArgument, match="from a stranger"):
        tally.take_settled("c3", late)
    message = tally.reveal()
    with pytest.raises(Aborted, match="not about the members that this client agreed to last"):
        group.parties["c3"].reveal(message)
    for name in tally.survivors:
        tally.take_revealed(name, group.parties[name].reveal(message))
    assert tally.survivors == ("c0", "c1", "c2")
    assert np.array_equal(tally.total(), summed(vectors, tally.survivors))


def openings(group):
    """Openings that a client refuses, with the reason."""
    told = group.opening(attempt=5, round=5)
    hello, stranger = group.hellos["c1"], Group(4).hellos["c1"]
    yield "another run", replace(told, run="b"), "run"
    yield "another run's key", replace(told, roster=(*told.roster[:3], group.parties["c3"].hello("b"))), "run"
    yield "without the client", replace(told, roster=(*told.roster[1:], group.hellos["c4"])), "roster"
    yield "three members", replace(told, roster=told.roster[:3]), "few"
    yield "twice", replace(told, roster=(*told.roster[:4], told.roster[3])), "roster"
    yield "a stranger", replace(told, roster=(told.roster[0], stranger, *told.roster[2:])), "roster"
    other = Hello(group.run, "c1", group.hellos["c2"].key, hello.signature)
    yield "a foreign key", replace(told, roster=(told.roster[0], other, *told.roster[3:])), "roster"
    name = Hello(group.run, "zoe", hello.key, hello.signature)
    yield "an unknown name", replace(told, roster=(told.roster[0], name, *told.roster[2:])), "roster"


def test_openings_that_a_client_refuses():
    group = Group(5)
    for case, opening, reason in openings(group):
        assert refuses(group.parties["c0"].upload, opening, DIGEST, group.vectors()["c0"]) == reason, case
    fine = group.opening(attempt=5, round=5)
    group.parties["c0"].upload(fine, DIGEST, group.vectors()["c0"])
    for attempt, round, reason in ((5, 5, "attempt"), (4, 6, "attempt"), (6, 4, "round")):
        again = replace(fine, attempt=attempt, round=round)
        assert refuses(group.parties["c0"].upload, again, DIGEST, group.vectors()["c0"]) == reason


def test_the_clients_own_key_must_be_its_present_one():
    group = Group(4)
    old = group.opening()
    party = Party(group.identities["c0"], group.roster)
    party.hello(group.run)
    assert refuses(party.upload, old, DIGEST, group.vectors()["c0"]) == "roster"


@pytest.mark.parametrize(
    "words",
    [np.ones(3), np.ones((1, 3), np.uint64), np.zeros(3, np.uint64), np.ones(0, np.uint64), [1, 2], None],
    ids=["floats", "matrix", "zeros", "empty", "list", "none"],
)
def test_words_that_are_none_are_refused(words):
    group = Group(4)
    with pytest.raises(BadArgument):
        group.parties["c0"].upload(group.opening(), DIGEST, words)


def test_a_digest_has_32_bytes():
    group = Group(4)
    with pytest.raises(BadArgument, match="32 bytes of SHA-256"):
        group.parties["c0"].upload(group.opening(), b"short", group.vectors()["c0"])


def test_steps_and_members_that_a_client_refuses():
    a = Attempt(5)  # t = 4
    bound, party, names = a.tally._context, a.group.parties["c0"], tuple(a.group.names)
    dealt = sealed_bytes(sealed_from(a.tally.settle()[1]["c0"], 4))
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
    answers = {n: Settled.from_bytes(a.group.parties[n].settle(common, own[n]), 0).signature for n in a.group.names}
    party = a.group.parties["c0"]
    three = dict(list(answers.items())[:3])
    another = a.group.identities["c3"].sign(replace(settle, step=1).signed())
    elsewhere = a.group.identities["c3"].sign(replace(settle, context=bytes(32)).signed())
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
    source = Path(rules.__file__).parent
    calls = [node for path in source.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    named = [n.args[0] for n in calls if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "Aborted"]
    assert {reason.value for reason in named} == set(rules.REASONS)


def test_few_clients_are_refused_where_a_run_starts():
    group = Group(4)
    three = Opening(group.run, 0, 0, tuple(group.hellos.values())[:3], ())
    with pytest.raises(Aborted, match="3 members are too few: at least 4") as caught:
        Tally(three, DIGEST, SIZE)
    assert caught.value.reason == "few"
    with pytest.raises(BadArgument, match="at least 4"):
        rules.threshold(3)
    with pytest.raises(BadArgument, match="is not in the roster"):
        Party(group.identities["c0"], Roster({"c1": group.identities["c1"].public()}))


@pytest.mark.parametrize("known", [True, False])
def test_a_wrong_signature_counts_as_no_answer_if_the_server_has_the_roster(known):
    """c2 signs wrongly. Without the roster it stays, and the other four signatures, t of them, are enough."""
    group = Group(5)  # t = 4
    opening, vectors = group.opening(), group.vectors(SIZE)
    tally = Tally(opening, DIGEST, SIZE, group.roster if known else None)
    for name, data in group.uploads(opening, vectors).items():
        tally.take_upload(name, data)
    while not tally.settled():
        common, own = tally.settle()
        for name in own:
            data = group.parties[name].settle(common, own[name])
            if name == "c2":
                data = replace(Settled.from_bytes(data, 5 - len(own)), signature=bytes(64)).to_bytes()
                if known:
                    with pytest.raises(BadArgument, match="the signature of c2 is wrong"):
                        tally.take_settled(name, data)
                    continue
            tally.take_settled(name, data)
    reveal_all(group, tally)
    assert tally.survivors == tuple(name for name in group.names if not known or name != "c2")
    assert np.array_equal(tally.total(), summed(vectors, tally.survivors))


def test_without_the_check_of_the_first_word_a_wrong_sum_would_come_out(monkeypatch):
    def change(name, upload):
        return replace(upload, words=upload.words + np.uint64(name == "c1"))

    a = Attempt(4, change)
    settle_all(a.group, a.tally)
    reveal_all(a.group, a.tally)
    with pytest.raises(Aborted, match="do not cancel"):
        a.tally.total()
    monkeypatch.setattr("fedveil.secagg.tally.counted", lambda total, members: None)
    assert not a.exact()


def test_a_run_without_a_proper_name_leaves_nothing_in_memory():
    group = Group(4)
    before = group.memories["c0"].packed()
    for run in ("", "x" * 201, "a\nb", None, 3):
        with pytest.raises(BadArgument, match="run must be a printable text"):
            group.parties["c0"].hello(run)
    assert group.memories["c0"].packed() == before


def test_an_answer_to_an_earlier_step_does_not_count():
    group = Group(5)  # t = 4
    opening, vectors = group.opening(), group.vectors(SIZE)
    tally = Tally(opening, DIGEST, SIZE)
    for name, data in group.uploads(opening, vectors).items():
        tally.take_upload(name, data)
    common, own = tally.settle()
    first = {name: group.parties[name].settle(common, own[name]) for name in own if name != "c4"}
    for name, data in first.items():
        tally.take_settled(name, data)
    common, own = tally.settle()
    second = Settled.from_bytes(group.parties["c0"].settle(common), 1)
    with pytest.raises(BadArgument, match="bytes behind its head"):
        tally.take_settled("c0", first["c0"])
    with pytest.raises(BadArgument, match="c0 answers another step, or twice"):
        tally.take_settled("c0", replace(second, step=0).to_bytes())
    tally.take_settled("c0", second.to_bytes())


def test_a_stranger_in_the_opening_is_named():
    group = Group(5)
    told = group.opening()
    zoe = Hello(group.run, "zoe", bytes(32), bytes(64))
    with pytest.raises(Aborted, match="zoe is not in this client's roster"):
        group.parties["c0"].upload(replace(told, roster=(*told.roster, zoe)), DIGEST, group.vectors()["c0"])
