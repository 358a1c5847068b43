"""A wrong share or seed, at any place, never gives a wrong sum: it is noticed, and the reason is named."""

from dataclasses import replace

import numpy as np
import pytest
from tests.secagg.group import DIGEST, SIZE, Attempt, Group, reveal_all, settle_all, summed, upload

from fedveil.errors import Aborted, BadArgument
from fedveil.secagg import Conduct, Tally, masks, threshold
from fedveil.secagg.masks import PRIME, WIDTH, split_seed
from fedveil.secagg.messages import Reveal, RevealReply, SettleReply, Upload


def off_by_one(share):
    return ((int.from_bytes(share, "big") + 1) % PRIME).to_bytes(WIDTH, "big")


def flipped(data, at=0):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("dealer", range(4))
@pytest.mark.parametrize("holder", range(4))
def test_a_wrong_share_is_left_out_and_its_holder_excluded(dealer, holder):
    for others in (3, 2):  # holders besides: t = 3, so that one can be spared, or none
        a = Attempt(4)
        settle_all(a.group, a.tally)
        answers = a.revealed()
        if others == 2:
            del answers[f"c{(holder + 1) % 4}"]
        wrong = RevealReply.from_bytes(answers[f"c{holder}"])
        shares = dict(wrong.shares) | {f"c{dealer}": off_by_one(wrong.shares[f"c{dealer}"])}
        answers[f"c{holder}"] = RevealReply(wrong.context, shares).to_bytes()
        for name, data in answers.items():
            if name == f"c{holder}":
                with pytest.raises(BadArgument, match=f"{name} is excluded: it did not reveal the shares"):
                    a.tally.take_reveal_reply(name, data)
            else:
                a.tally.take_reveal_reply(name, data)
        assert list(a.tally.conduct.excluded) == [f"c{holder}"]
        if others == 3:
            assert a.exact()
        else:
            with pytest.raises(Aborted, match="1 of 4 self seeds are lost") as caught:
                a.tally.total()
            assert caught.value.reason == "share"


@pytest.mark.parametrize("left_out", [True, False])
def test_a_share_that_is_not_revealed_excludes_its_holder_unless_it_complained(left_out):
    a = Attempt(4)
    settle_all(a.group, a.tally)
    answers = a.revealed()
    found = RevealReply.from_bytes(answers["c0"])
    shares = {name: share for name, share in found.shares.items() if name != "c1" or not left_out}
    data = RevealReply(found.context, shares).to_bytes()
    if left_out:
        with pytest.raises(BadArgument, match="c0 is excluded"):
            a.tally.take_reveal_reply("c0", data)
    else:
        a.tally.take_reveal_reply("c0", data)
    for name in ("c1", "c2", "c3"):
        a.tally.take_reveal_reply(name, answers[name])
    assert a.exact()
    assert set(a.tally.conduct.excluded) == ({"c0"} if left_out else set())


def test_two_wrong_revealers_of_ten_are_named_and_the_sum_opens():
    """Any choice of shares by trial would need one without both of them; their hashes tell at once."""
    a = Attempt(10)
    settle_all(a.group, a.tally)
    for name, data in a.revealed().items():
        if name in ("c0", "c1"):
            found = RevealReply.from_bytes(data)
            data = RevealReply(found.context, {d: off_by_one(share) for d, share in found.shares.items()}).to_bytes()
            with pytest.raises(BadArgument, match="is excluded"):
                a.tally.take_reveal_reply(name, data)
        else:
            a.tally.take_reveal_reply(name, data)
    assert set(a.tally.conduct.excluded) == {"c0", "c1"}
    assert a.exact()


def test_without_hashes_and_commitments_a_wrong_share_would_be_taken_for_the_seed(monkeypatch):
    a = Attempt(4)
    settle_all(a.group, a.tally)
    answers = a.revealed()
    wrong = RevealReply.from_bytes(answers["c0"])
    shares = dict(wrong.shares) | {"c1": off_by_one(wrong.shares["c1"])}
    answers["c0"] = RevealReply(wrong.context, shares).to_bytes()
    for sent in a.tally._uploads.values():
        object.__setattr__(sent, "commitments", (bytes(32),) * 4)
        object.__setattr__(sent, "hashes", (bytes(32),) * 4)
    monkeypatch.setattr(masks, "commitment", lambda seed, context: bytes(32))
    monkeypatch.setattr(masks, "share_hash", lambda *parts: bytes(32))
    for name, data in answers.items():
        a.tally.take_reveal_reply(name, data)
    with pytest.raises(Aborted) as caught:
        a.tally.total()
    assert caught.value.reason == "sum"  # the first word is the last line of defence


def another_polynomial(sent, group, opening, dealer):
    """Shares of another seed, with their right hashes and proper encryption; the commitment stays."""
    names, party = opening.names, group.parties[dealer]
    shares = split_seed(b"\x01" * 32, threshold(len(names)), len(names))
    with group.memories[dealer].turn() as turn:
        kept = turn.state.runs[group.run]
        pairs = party._pair_secrets(kept, kept.current)
    sealed = [masks.seal(shares[k], pairs[n], sent.context, dealer, n) for k, n in enumerate(names) if n != dealer]
    hashes = [masks.share_hash(sent.context, dealer, k, shares[k]) for k in range(len(names))]
    return replace(sent, sealed=tuple(sealed), hashes=tuple(hashes))


@pytest.mark.parametrize("n", [4, 5, 10])
def test_a_dealer_of_another_polynomial_is_named_and_excluded(n):
    group = Group(n)
    opening, vectors, conduct = group.opening(), group.vectors(SIZE), Conduct()
    tally = Tally(opening, DIGEST, group.roster, conduct)
    for name, data in group.uploads(opening, vectors).items():
        upload = Upload.from_bytes(data, n, SIZE)
        tally.take_upload(
            name, (another_polynomial(upload, group, opening, name) if name == "c1" else upload).to_bytes()
        )
    settle_all(group, tally)
    message = tally.reveal()
    for name in tally.survivors:
        data = group.parties[name].reveal(message)
        if name == "c1":  # it has kept its share of the seed that it committed to
            with pytest.raises(BadArgument, match="is excluded"):
                tally.take_reveal_reply(name, data)
        else:
            tally.take_reveal_reply(name, data)
    with pytest.raises(Aborted, match=r"1 of \d+ self seeds are lost; c1 lied"):
        tally.total()
    assert set(conduct.excluded) == {"c1"}


@pytest.mark.parametrize("place", range(3))
def test_a_wrong_pair_seed_counts_as_no_answer_and_the_members_shrink(place):
    """c9, c8 and c7 did not upload; one client opens a wrong seed with one of them."""
    group = Group(10)
    opening, vectors = group.opening(), group.vectors(SIZE)
    sent = group.uploads(opening, vectors)
    for liar in ("c0", "c4", "c6"):
        group.restore(kept := group.snapshot())
        tally = Tally(opening, DIGEST, group.roster)
        for name in group.names[: 10 - 3 + (place < 2)]:
            tally.take_upload(name, sent[name])
        common, own = tally.settle()
        outside = 10 - len(own)
        for name in own:
            data = group.parties[name].settle(common, own[name])
            if name == liar:
                answer = SettleReply.from_bytes(data, outside)
                seeds = list(answer.seeds)
                seeds[place % outside] = flipped(seeds[place % outside], 31)
                data = replace(answer, seeds=tuple(seeds)).to_bytes()
                with pytest.raises(BadArgument, match=f"{liar} is excluded: a pair seed that it opened"):
                    tally.take_settle_reply(name, data)
            else:
                tally.take_settle_reply(name, data)
        assert not tally.has_agreement()
        if outside == 3:
            with pytest.raises(Aborted, match="6 of 10 clients are left: at least 7"):
                tally.settle()
        else:
            settle_all(group, tally)
            reveal_all(group, tally)
            assert liar not in tally.survivors
            assert np.array_equal(tally.total(), summed(vectors, tally.survivors))
        group.restore(kept)


def with_other_commitments(*partners):
    """c0 commits to other seeds than these partners do."""

    def change(name, upload):
        found = list(upload.commitments)
        for other in partners if name == "c0" else ():
            found[other] = flipped(found[other])
        return replace(upload, commitments=tuple(found))

    return change


def disagree(monkeypatch, one, other):
    """`one` has another seed with `other` than that has with it, and masks, commits and opens accordingly."""
    honest = masks.pair_seed

    def seed(pair, context, own, partner):
        found = honest(pair, context, own, partner)
        return flipped(found) if (own, partner) == (one, other) else found

    monkeypatch.setattr(masks, "pair_seed", seed)


@pytest.mark.parametrize("n", [4, 5, 7, 10])
def test_of_a_disputed_pair_one_is_left_out_in_turn(n, monkeypatch):
    disagree(monkeypatch, "c0", "c1")
    conduct, out = Conduct(), []
    for _ in range(4):
        a = Attempt(n, conduct=conduct)
        a.finish()
        assert a.exact()
        out += [name for name in a.group.names if name not in a.tally.survivors]
    assert out == ["c1", "c0", "c1", "c0"]
    assert not conduct.excluded  # either of them may be lying


@pytest.mark.parametrize(("n", "partners"), [(4, 2), (4, 3), (5, 2), (7, 3), (10, 4)])
def test_a_member_that_disputes_with_more_partners_than_may_lie_is_excluded_alone(n, partners):
    a = Attempt(n, with_other_commitments(*range(1, partners + 1)))
    a.finish()
    assert a.tally.survivors == tuple(a.group.names[1:])
    assert list(a.tally.conduct.excluded) == ["c0"]
    assert a.exact()


def test_disputes_with_other_partners_in_later_rounds_count_together(monkeypatch):
    conduct = Conduct()
    for partner in ("c1", "c2"):
        with monkeypatch.context() as patch:
            disagree(patch, "c0", partner)
            a = Attempt(4, conduct=conduct)
            settle_all(a.group, a.tally)
    assert list(conduct.excluded) == ["c0"]


def test_a_lie_about_a_seed_that_is_opened_later_is_proven():
    """c0 commits to another seed than it masks with; c1 is left out, and c0 has to open that seed."""
    a = Attempt(5, with_other_commitments(1))
    common, own = a.tally.settle()
    assert "c1" not in own
    with pytest.raises(BadArgument, match="c0 is excluded: a pair seed that it opened"):
        a.tally.take_settle_reply("c0", a.group.parties["c0"].settle(common, own["c0"]))


def test_a_pair_that_is_not_compared_gives_no_wrong_sum_either(monkeypatch):
    """A client that masks with a seed of its own: commitments tell, and without them the first word does."""
    group = Group(4)
    opening, vectors = group.opening(), group.vectors(SIZE)
    honest, seeds = masks.pair_seed, masks.pair_seed
    sent = {}
    for name in group.names:
        if name == "c3":
            monkeypatch.setattr(masks, "pair_seed", lambda pair, context, *names: honest(pair, bytes(32), *names))
        sent[name] = upload(group.parties[name], opening, DIGEST, vectors[name])
    monkeypatch.setattr(masks, "pair_seed", seeds)
    kept = group.snapshot()
    for compared in (True, False):
        group.restore(kept)
        if not compared:
            monkeypatch.setattr(Tally, "_differs", lambda self, one, other: False)
        tally = Tally(opening, DIGEST, group.roster)
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


def with_bad_shares_for(dealer, receivers):
    """A dealer whose shares for these places cannot be decrypted."""

    def change(name, upload):
        sealed, own = list(upload.sealed), int(dealer[1:])
        for place in receivers if name == dealer else ():
            sealed[place - (place > own)] = flipped(sealed[place - (place > own)], 40)
        return replace(upload, sealed=tuple(sealed))

    return change


@pytest.mark.parametrize("dealer", range(1, 7))
def test_one_complaint_costs_a_share_and_nobody_its_place(dealer):
    a = Attempt(7, with_bad_shares_for(f"c{dealer}", [0]))
    assert a.finish() == 1
    assert a.tally.survivors == tuple(a.group.names)
    assert not a.tally.conduct.excluded
    assert a.exact()


@pytest.mark.parametrize(("n", "receivers"), [(4, (0, 1)), (5, (0, 1)), (7, (0, 1, 3)), (10, (0, 1, 3, 4))])
def test_a_dealer_about_whom_more_complain_than_may_lie_is_excluded(n, receivers):
    a = Attempt(n, with_bad_shares_for("c2", receivers))
    assert a.finish() == 2
    assert a.tally.survivors == tuple(name for name in a.group.names if name != "c2")
    assert list(a.tally.conduct.excluded) == ["c2"]
    assert a.exact()


def settle_with_complaints(a, accuser, dealers):
    """All settle; one of them says that it cannot use the shares of these dealers."""
    while not a.tally.has_agreement():
        common, own = a.tally.settle()
        for name in own:
            data = a.group.parties[name].settle(common, own[name])
            answer = SettleReply.from_bytes(data, len(a.group.names) - len(own))
            if name == accuser and answer.step == 0:
                data = replace(answer, failed=tuple(dealers)).to_bytes()
            a.tally.take_settle_reply(name, data)


@pytest.mark.parametrize(("n", "accused"), [(4, 1), (5, 1), (10, 3)])
def test_an_accuser_of_no_more_than_may_lie_costs_nobody_the_round(n, accused):
    a = Attempt(n)
    settle_with_complaints(a, "c0", a.group.names[1 : accused + 1])
    message = a.tally.reveal()
    for name in a.tally.survivors:
        found = RevealReply.from_bytes(a.group.parties[name].reveal(message))
        lost = a.group.names[1 : accused + 1] if name == "c0" else ()
        shares = {dealer: share for dealer, share in found.shares.items() if dealer not in lost}
        a.tally.take_reveal_reply(name, RevealReply(found.context, shares).to_bytes())
    assert a.tally.survivors == tuple(a.group.names)
    assert not a.tally.conduct.excluded
    assert a.exact()


@pytest.mark.parametrize(("n", "accused"), [(4, 2), (4, 3), (5, 2), (5, 4), (10, 4), (10, 9)])
def test_an_accuser_of_more_than_may_lie_is_excluded_and_the_accused_stay(n, accused):
    a = Attempt(n)
    settle_with_complaints(a, "c0", a.group.names[1 : accused + 1])
    reveal_all(a.group, a.tally)
    assert a.tally.survivors == tuple(a.group.names[1:])
    assert list(a.tally.conduct.excluded) == ["c0"]
    assert a.exact()


def test_answers_for_other_attempts_and_strangers_do_not_count():
    a, b = Attempt(4), Attempt(4)
    with pytest.raises(BadArgument, match="replied to a different opening"):
        Tally(a.opening, DIGEST, a.group.roster).take_upload("c0", b.sent["c0"])
    fresh = Tally(a.opening, DIGEST, a.group.roster)
    for name in ("c9", "", None):
        with pytest.raises(BadArgument, match="late, early, or from a stranger"):
            fresh.take_upload(name, a.sent["c0"])
    common, own = a.tally.settle()
    answer = a.group.parties["c0"].settle(common, own["c0"])
    a.tally.take_settle_reply("c0", answer)
    with pytest.raises(BadArgument, match="another step, or twice"):
        a.tally.take_settle_reply("c0", answer)
    with pytest.raises(BadArgument, match="from a stranger"):
        a.tally.take_reveal_reply("c0", answer)
    with pytest.raises(BadArgument, match="from a stranger"):
        a.tally.take_upload("c0", a.sent["c0"])
    complaint = replace(SettleReply.from_bytes(answer, 0), failed=("c9",)).to_bytes()
    with pytest.raises(BadArgument, match="it complained about strangers"):
        a.tally.take_settle_reply("c1", complaint)


def test_a_late_answer_of_a_dropped_client_does_not_count():
    a = Attempt(4)
    group, tally = a.group, a.tally
    common, own = tally.settle()
    late = group.parties["c3"].settle(common, own["c3"])
    for name in ("c0", "c1", "c2"):
        tally.take_settle_reply(name, group.parties[name].settle(common, own[name]))
    settle_all(group, tally)
    with pytest.raises(BadArgument, match="from a stranger"):
        tally.take_settle_reply("c3", late)
    message = tally.reveal()
    with pytest.raises(Aborted, match="not about the members that this client agreed to last"):
        group.parties["c3"].reveal(message)
    for name in tally.survivors:
        tally.take_reveal_reply(name, group.parties[name].reveal(message))
    assert tally.survivors == ("c0", "c1", "c2")
    assert a.exact()


def test_a_wrong_signature_excludes_its_member():
    a = Attempt(5)  # t = 4
    while not a.tally.has_agreement():
        common, own = a.tally.settle()
        for name, data in a.answers(common, own).items():
            if name == "c2":
                data = replace(SettleReply.from_bytes(data, 5 - len(own)), signature=bytes(64)).to_bytes()
            a.tally.take_settle_reply(name, data)
    reveal_all(a.group, a.tally)
    assert len(Reveal.from_bytes(a.tally.reveal()).signatures) == 4
    assert a.tally.conduct.excluded == {"c2": "its signature on the members is wrong"}
    assert a.exact()


def test_without_the_check_of_the_first_word_a_wrong_sum_would_come_out(monkeypatch):
    def change(name, upload):
        return replace(upload, words=upload.words + np.uint64(name == "c1"))

    a = Attempt(4, change)
    a.finish()
    with pytest.raises(Aborted, match="do not cancel"):
        a.tally.total()
    monkeypatch.setattr("fedveil.secagg.tally.check_count", lambda total, members: None)
    assert not a.exact()


def test_an_answer_to_an_earlier_step_does_not_count():
    a = Attempt(5)  # t = 4
    group, tally = a.group, a.tally
    common, own = tally.settle()
    first = {name: group.parties[name].settle(common, own[name]) for name in own if name != "c4"}
    for name, data in first.items():
        tally.take_settle_reply(name, data)
    common, own = tally.settle()
    second = SettleReply.from_bytes(group.parties["c0"].settle(common), 1)
    with pytest.raises(BadArgument, match="bytes after its head"):
        tally.take_settle_reply("c0", first["c0"])
    with pytest.raises(BadArgument, match="c0 replied to another step, or twice"):
        tally.take_settle_reply("c0", replace(second, step=0).to_bytes())
    tally.take_settle_reply("c0", second.to_bytes())
