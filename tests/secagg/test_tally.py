"""A wrong share or seed, at any place, never gives a wrong sum: it is noticed, and the reason is named."""

from dataclasses import replace

import numpy as np
import pytest
from tests.secagg.group import DIGEST, Attempt, Group, reveal_all, settle_all

from fedveil.errors import Aborted, BadArgument
from fedveil.secagg import Conduct, Tally, masks, threshold
from fedveil.secagg.masks import PRIME, SHARE_SIZE, split_seed
from fedveil.secagg.messages import Reveal, RevealReply, SettleReply


def off_by_one(share):
    return ((int.from_bytes(share, "big") + 1) % PRIME).to_bytes(SHARE_SIZE, "big")


def flipped(data, at=0):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def settle_with(a, name, change):
    """All settle; one of them answers with another M4."""
    while not a.tally.has_agreement():
        common, own = a.tally.settle()
        for member, data in a.answers(common, own).items():
            if member == name:
                data = change(SettleReply.from_bytes(data, len(a.group.names) - len(own))).to_bytes()
            a.tally.take_settle_reply(member, data)


def reveal_with(a, liars, change, gone=()):
    """All reveal; liars do it with other shares, which excludes them."""
    for name, data in a.revealed(gone).items():
        if name in liars:
            found = RevealReply.from_bytes(data)
            data = replace(found, shares=change(dict(found.shares))).to_bytes()
            with pytest.raises(BadArgument, match=f"{name} is excluded: it did not reveal exactly the shares"):
                a.tally.take_reveal_reply(name, data)
        else:
            a.tally.take_reveal_reply(name, data)
    assert set(a.tally.conduct.excluded) == set(liars)


@pytest.mark.parametrize("lie", ["wrong", "missing"])
@pytest.mark.parametrize("dealer", range(4))
@pytest.mark.parametrize("holder", range(4))
def test_a_wrong_or_missing_share_is_left_out_and_its_holder_excluded(dealer, holder, lie):
    def change(shares):
        share = shares.pop(f"c{dealer}")
        return shares if lie == "missing" else shares | {f"c{dealer}": off_by_one(share)}

    for gone in ((), (f"c{(holder + 1) % 4}",)):  # t = 3, so that one holder can be spared, or none
        a = Attempt(4)
        settle_all(a.group, a.tally)
        reveal_with(a, [f"c{holder}"], change, gone)
        if not gone:
            assert a.exact()
        else:
            with pytest.raises(Aborted, match="1 of 4 self seeds are lost") as caught:
                a.tally.total()
            assert caught.value.reason == "share"


def test_two_wrong_revealers_of_ten_are_named_and_the_sum_opens():
    """Any choice of shares by trial would need one without both of them; their hashes tell at once."""
    a = Attempt(10)
    settle_all(a.group, a.tally)
    reveal_with(a, ["c0", "c1"], lambda shares: {dealer: off_by_one(share) for dealer, share in shares.items()})
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


def another_polynomial(sent, group, dealer):
    """Shares of another seed, with their right hashes and proper encryption; the commitment stays."""
    names, party = group.names, group.parties[dealer]
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
    a = Attempt(group, lambda name, sent: another_polynomial(sent, group, name) if name == "c1" else sent)
    settle_all(a.group, a.tally)
    reveal_with(a, ["c1"], lambda shares: shares)  # it has kept its share of the seed that it committed to
    with pytest.raises(Aborted, match=r"1 of \d+ self seeds are lost; c1 lied"):
        a.tally.total()
    assert set(a.tally.conduct.excluded) == {"c1"}


@pytest.mark.parametrize("liar", ["c0", "c4", "c6"])
@pytest.mark.parametrize(("absent", "place"), [(2, 0), (2, 1), (3, 2)])
def test_a_wrong_pair_seed_counts_as_no_answer_and_the_members_shrink(liar, absent, place):
    """c9, c8 and perhaps c7 did not upload; one client opens a wrong seed with one of them."""
    a = Attempt(10, absent=absent)
    common, own = a.tally.settle()
    for name, data in a.answers(common, own).items():
        if name == liar:
            answer = SettleReply.from_bytes(data, absent)
            seeds = list(answer.seeds)
            seeds[place] = flipped(seeds[place], 31)
            with pytest.raises(BadArgument, match=f"{liar} is excluded: a pair seed that it opened"):
                a.tally.take_settle_reply(name, replace(answer, seeds=tuple(seeds)).to_bytes())
        else:
            a.tally.take_settle_reply(name, data)
    assert not a.tally.has_agreement()
    if absent == 3:
        with pytest.raises(Aborted, match="6 of 10 clients remain: at least 7"):
            a.tally.settle()
    else:
        a.finish()
        assert liar not in a.tally.survivors
        assert a.exact()


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
    def change(name, upload):
        lies = range(1, partners + 1) if name == "c0" else ()
        found = [flipped(own) if k in lies else own for k, own in enumerate(upload.commitments)]
        return replace(upload, commitments=tuple(found))

    a = Attempt(n, change)
    a.finish()
    assert a.tally.survivors == tuple(a.group.names[1:])
    assert list(a.tally.conduct.excluded) == ["c0"]
    assert a.exact()


def test_disputes_with_other_partners_in_later_rounds_count_together():
    conduct = Conduct()
    conduct.settle_disputes([("c0", "c1")], 4)
    assert not conduct.excluded
    conduct.settle_disputes([("c0", "c2")], 4)
    assert list(conduct.excluded) == ["c0"]


def test_a_pair_that_is_not_compared_gives_no_wrong_sum_either(monkeypatch):
    """Commitments tell that two members mask with different seeds; without them the first word does."""
    disagree(monkeypatch, "c0", "c1")
    monkeypatch.setattr(Tally, "_differs", lambda self, one, other: False)
    a = Attempt(4)
    a.finish()
    with pytest.raises(Aborted, match="the masks of 4 clients do not cancel"):
        a.tally.total()


def with_bad_shares_for(dealer, receivers):
    """A dealer whose shares for these places cannot be decrypted."""

    def change(name, upload):
        sealed, own = list(upload.sealed), int(dealer[1:])
        for place in receivers if name == dealer else ():
            sealed[place - (place > own)] = flipped(sealed[place - (place > own)], 40)
        return replace(upload, sealed=tuple(sealed))

    return change


@pytest.mark.parametrize(
    ("n", "dealer", "receivers", "excluded"),
    [
        *[(7, f"c{k}", (0,), False) for k in range(1, 7)],
        *[(4, "c2", (0, 1), True), (5, "c2", (0, 1), True), (7, "c2", (0, 1, 3), True), (10, "c2", (0, 1, 3, 4), True)],
    ],
)
def test_a_dealer_about_whom_more_complain_than_may_lie_is_excluded(n, dealer, receivers, excluded):
    """Otherwise a complaint costs a share, and nobody its place."""
    a = Attempt(n, with_bad_shares_for(dealer, receivers))
    assert a.finish() == 1 + excluded
    assert a.tally.survivors == tuple(name for name in a.group.names if name != dealer or not excluded)
    assert list(a.tally.conduct.excluded) == [dealer] * excluded
    assert a.exact()


@pytest.mark.parametrize(
    ("n", "accused", "excluded"),
    [
        *[(4, 1, False), (5, 1, False), (10, 3, False)],
        *[(4, 2, True), (4, 3, True), (5, 2, True), (5, 4, True), (10, 4, True), (10, 9, True)],
    ],
)
def test_an_accuser_of_more_than_may_lie_is_excluded_and_the_accused_stay(n, accused, excluded):
    a = Attempt(n)
    lost = a.group.names[1 : accused + 1]
    settle_with(a, "c0", lambda answer: replace(answer, failed=tuple(lost)) if answer.step == 0 else answer)
    for name, data in a.revealed().items():
        found = RevealReply.from_bytes(data)
        shares = {d: share for d, share in found.shares.items() if name != "c0" or d not in lost}
        a.tally.take_reveal_reply(name, replace(found, shares=shares).to_bytes())
    assert a.tally.survivors == tuple(a.group.names[excluded:])
    assert list(a.tally.conduct.excluded) == ["c0"] * excluded
    assert a.exact()


def test_a_wrong_signature_excludes_its_member():
    a = Attempt(5)  # t = 4
    settle_with(a, "c2", lambda answer: replace(answer, signature=bytes(64)))
    reveal_all(a.group, a.tally)
    assert len(Reveal.from_bytes(a.tally.reveal()).signatures) == 4
    assert a.tally.conduct.excluded == {"c2": "its signature of the list of members is invalid"}
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


def test_answers_of_strangers_for_other_attempts_or_steps_do_not_count():
    a = Attempt(5)  # t = 4
    group, tally, fresh = a.group, a.tally, Tally(a.opening, DIGEST, a.group.roster)

    def refused(text, take, *given):
        with pytest.raises(BadArgument, match=text):
            take(*given)

    refused("replied to a different opening", fresh.take_upload, "c0", Attempt(5).sent["c0"])
    for name in ("c9", "", None):
        refused("late, early, or from a stranger", fresh.take_upload, name, a.sent["c0"])
    first = a.answers(*tally.settle())
    complaint = replace(SettleReply.from_bytes(first["c0"], 0), failed=("c9",)).to_bytes()
    for name in group.names[:4]:
        tally.take_settle_reply(name, first[name])
    refused("another step, or twice", tally.take_settle_reply, "c0", first["c0"])
    refused("from a stranger", tally.take_reveal_reply, "c0", first["c0"])
    refused("from a stranger", tally.take_upload, "c0", a.sent["c0"])
    refused("c4 is excluded: it complained about strangers", tally.take_settle_reply, "c4", complaint)
    common, _ = tally.settle()  # without c4
    second = SettleReply.from_bytes(group.parties["c0"].settle(common), 1)
    refused("from a stranger", tally.take_settle_reply, "c4", first["c4"])
    refused("bytes after its head", tally.take_settle_reply, "c0", first["c0"])
    refused("c0 replied to another step", tally.take_settle_reply, "c0", replace(second, step=0).to_bytes())
    tally.take_settle_reply("c0", second.to_bytes())
    for name in group.names[1:4]:
        tally.take_settle_reply(name, group.parties[name].settle(common))
    message = tally.reveal()
    with pytest.raises(Aborted, match="not those that this client last agreed to"):
        group.parties["c4"].reveal(message)
    for name in tally.survivors:
        tally.take_reveal_reply(name, group.parties[name].reveal(message))
    assert tally.survivors == tuple(group.names[:4])
    assert a.exact()
