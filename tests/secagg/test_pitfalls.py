"""Attacks that open one client. Each fails, and succeeds once the safeguard against it is taken out."""

import hashlib

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from tests.secagg.group import DIGEST, Group, attempt, words
from tests.secagg.hostile import Hostile

from fedveil.errors import Aborted
from fedveil.secagg import Hello, Opening, masks, messages, party, rules
from fedveil.secagg.memory import RunMemory

OTHER = hashlib.sha256(b"a model on which updates are zero").digest()
SECRET = words(11, 22)
KNOWN = words(0, 0)
ALL, REST = ("c0", "c1", "c2", "c3"), ("c1", "c2", "c3")  # c0 is the victim


def uploaded(server, others=DIGEST):
    """All have uploaded, the victim for `DIGEST` and the rest for the digest `others`."""
    for name in server.names:
        server.upload(name, *((DIGEST, SECRET) if name == "c0" else (others, KNOWN)))
    return server


def show(server, step, members, to=None):
    for name in to or members:
        server.settle(name, step, members)


def opened(group, opening, others=DIGEST):
    """A server that has followed the protocol to its end, with everyone."""
    server = uploaded(Hostile(group, opening), others)
    show(server, 0, ALL)
    for name in ALL:
        server.reveal(name, 0, ALL)
    return server


def different_models():
    """Only the victim gets the real model; the others' updates are known, so the sum is the victim's."""
    group = Group(4)
    server = opened(group, group.opening(), OTHER)
    own = [server.own_seed(name) for name in ALL]
    if None in own:
        return None, server.refused
    return masks.unmask([server.sent[name].words for name in ALL], own, {}) - 3 * KNOWN, server.refused


def same_attempt_twice():
    """The first time all are left, and self seeds open; the second time the victim is not, and pair seeds open."""
    group = Group(4)
    opening = group.opening()
    first = opened(group, opening)
    second = uploaded(Hostile(group, opening))
    if "c0" in second.sent:
        show(second, 0, REST)
    return first.peel("c0", seeds=second.seeds or {"none": None}), second.refused


def old_share_in_a_later_attempt():
    """In attempt 0 the victim is dropped; in attempt 1 the others get, and reveal, its shares of attempt 0."""
    group = Group(4)
    first = uploaded(Hostile(group, group.opening(round=0)))
    show(first, 0, REST)
    second = uploaded(Hostile(group, group.opening(round=0)))
    for name in ALL:
        old = {} if name == "c0" else {"c0": first.sealed("c0", name)}
        second.settle(name, 0, ALL, old)
    for name in ALL:
        second.reveal(name, 0, ALL)
    second.shares["c0"].pop(1, None)  # the victim's own share is of attempt 1
    return first.peel("c0", own=second.own_seed("c0") or b""), second.refused


def different_members_to_different_clients():
    """c3 colludes. c0 drops c1, c2 drops c0, and c1 keeps c0: with c3 that is a share of t clients, and every pair."""
    group = Group(4)
    server = uploaded(Hostile(group, group.opening(), colluders=["c3"]))
    lists = {"c0": ("c0", "c2", "c3"), "c1": ("c0", "c1", "c3"), "c2": ("c1", "c2", "c3")}
    for name, members in lists.items():
        server.settle(name, 0, members)
    for name, members in lists.items():
        server.reveal(name, 0, members)
    server.buy("c0")
    return server.peel("c0"), server.refused


def dropped_and_back():
    """The victim is dropped, and pair seeds open; then it is back, and its self seed opens."""
    group = Group(4)
    server = uploaded(Hostile(group, group.opening()))
    show(server, 0, ALL)
    show(server, 1, REST)
    show(server, 2, ALL, REST)
    for name in REST:
        server.reveal(name, 2, ALL)
    return server.peel("c0"), server.refused


def dropped_after_the_reveal():
    """Self seeds open; after that the victim is dropped, and pair seeds open."""
    group = Group(4)
    server = opened(group, group.opening())
    show(server, 1, REST)
    return server.peel("c0"), server.refused


def two_sums(subject=None, run="a run", number=None, vanish=None):
    """The difference of a sum over everyone and a later one over the same updates without the victim."""
    group = Group(5)
    vectors, opening = group.vectors() | {"c0": SECRET}, group.opening(round=number)
    everyone = attempt(group, opening, group.uploads(opening, vectors, subject=subject)).total()
    group.run, group.hellos = run, {name: own.hello(run) for name, own in group.parties.items()}
    later = group.opening(round=number, names=None if vanish else group.names[1:])
    try:
        rest = attempt(group, later, group.uploads(later, vectors, subject=subject), vanish).total()
    except Aborted as error:
        return None, [error.reason]
    return everyone - rest, []


def revealed_round_again():
    return two_sums(number=3, vanish={"c0": "upload"})


def next_round_without_the_victim():
    return two_sums(DIGEST)


def another_run_without_the_victim():
    """Also a server that was started again from its checkpoint."""
    return two_sums(DIGEST, "another run", 0)


def small_roster():
    """Two colluders among four members are one too many: with the victim they are t."""
    group = Group(7, colluders=2)
    server = uploaded(Hostile(group, group.opening(names=ALL), colluders=["c2", "c3"]))
    if not server.sent:
        return None, server.refused
    left = ("c0", "c2", "c3")
    server.settle("c0", 0, left)
    server.reveal("c0", 0, left)
    server.buy("c0")
    return server.peel("c0"), server.refused


def keys_of_the_servers_own():
    """The server shows the victim keys of its own in place of the others'."""
    group = Group(4)
    private = {name: X25519PrivateKey.generate() for name in REST}
    public = {name: key.public_key().public_bytes_raw() for name, key in private.items()}
    fake = {name: Hello(group.run, name, key, bytes(64)) for name, key in public.items()}
    opening = Opening(group.run, 0, 0, (group.hellos["c0"], *fake.values()), (8,), (1,), checks=False)
    server = Hostile(group, opening)
    server.upload("c0", DIGEST, SECRET)
    if not server.sent:
        return None, server.refused
    for name, key in private.items():
        pair = masks.agree(key, group.hellos["c0"].key)
        server.seeds["c0", name] = masks.pair_seed(pair, server.contexts["c0"], "c0", name)
        share = masks.unseal(server.sealed("c0", name), pair, server.contexts["c0"], "c0", name)
        server.shares["c0"][server.names.index(name) + 1] = share
    return server.peel("c0"), server.refused


def without_digest(patch):
    bound = messages.context
    for module in (messages, party):
        patch.setattr(module, "context", lambda opening, digest: bound(opening, bytes(32)))
    patch.setattr("tests.secagg.hostile.context", lambda opening, digest: bound(opening, bytes(32)))


def without_counters(patch):
    for rule in ("check_attempt", "check_round"):
        patch.setattr(rules, rule, lambda kept, opening: None)


def without_context_in_shares(patch):
    key, label = masks.share_key, masks.share_label
    patch.setattr(masks, "share_key", lambda pair, context, *names: key(pair, bytes(32), *names))
    patch.setattr(masks, "share_label", lambda context, *names: label(bytes(32), *names))
    patch.setattr(masks, "share_hash", lambda *parts: bytes(32))


def without(module, name, instead):
    return lambda patch: patch.setattr(module, name, instead)


def nothing(*arguments):
    return None


ATTACKS = [
    (different_models, without_digest, "signatures"),
    (same_attempt_twice, without_counters, "attempt"),
    (old_share_in_a_later_attempt, without_context_in_shares, None),
    (different_members_to_different_clients, without(rules, "check_agreement", nothing), "signatures"),
    (dropped_and_back, without(rules, "check_members", nothing), "members"),
    (dropped_after_the_reveal, without(RunMemory, "forget_attempt", nothing), "attempt"),
    (revealed_round_again, without(rules, "check_round", nothing), "round"),
    (next_round_without_the_victim, without(rules, "check_same_members", nothing), "repeat"),
    (another_run_without_the_victim, without(rules, "check_same_members", nothing), "repeat"),
    (small_roster, without(rules, "check_roster_size", nothing), "few"),
    (keys_of_the_servers_own, without(rules, "check_roster", nothing), "roster"),
]


@pytest.mark.parametrize(("attack", "remove", "reason"), ATTACKS, ids=[attack.__name__ for attack, _, _ in ATTACKS])
def test_an_attack_fails_and_succeeds_without_its_safeguard(monkeypatch, attack, remove, reason):
    found, refused = attack()
    assert found is None or not np.array_equal(found, SECRET)
    assert reason in refused if reason else not refused
    remove(monkeypatch)
    found, refused = attack()
    assert np.array_equal(found, SECRET)
    assert reason not in refused
