"""A wrong share or seed, at any place, never gives a wrong sum: it is noticed, and the reason is named."""

from dataclasses import replace

import numpy as np
import pytest
from tests.secagg.group import DIGEST, SIZE, Attempt, Group, reveal_all, settle_all, summed

from fedveil.errors import Aborted, BadArgument
from fedveil.secagg import Tally, masks
from fedveil.secagg.messages import Revealed, Settled
from fedveil.secagg.shares import PRIME, WIDTH


def off_by_one(share):
    return ((int.from_bytes(share, "big") + 1) % PRIME).to_bytes(WIDTH, "big")


def flipped(data, at=0):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


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
