"""Kept vectors for every input of KDF and PRG, shares of a seed, and what the server sees over all masks."""

import hashlib
import itertools
import json
import random
import secrets
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import example, given
from hypothesis import strategies as st

from fedveil.errors import Aborted, BadArgument
from fedveil.secagg import Hello, Opening, masks
from fedveil.secagg.masks import PRIME, SHARE_SIZE, join, join_seed, split, split_seed
from fedveil.secagg.messages import Settle, context

VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text())
GIVEN = {name: bytes.fromhex(value) for name, value in VECTORS["inputs"].items()}
LENGTH = 2**16 + 2  # words; its end is behind the end of a piece
SEED, SALT, PAIR = GIVEN["seed"], GIVEN["context"], GIVEN["pair"]


def opening():
    hellos = tuple(Hello("a run", name, name.encode() * 16, b"s" * 64) for name in ("c0", "c1"))
    return Opening("a run", 3, 7, hellos, (9, -4), (5, 6))


def found():
    """Every value that must not change, by name."""
    stream = masks.add_streams(np.zeros(LENGTH, np.uint64), [SEED])
    return {
        "pair seed": masks.pair_seed(PAIR, SALT, "c1", "c0"),
        "share key": masks.share_key(PAIR, SALT, "c0", "c1"),
        "share label": masks.share_label(SALT, "c0", "c1"),
        "commitment": masks.commitment(SEED, SALT),
        "share hash": masks.share_hash(SALT, "c0", 1, SEED),
        "stream, first words": stream[:4].astype("<u8").tobytes(),
        "stream, across pieces": stream[-4:].astype("<u8").tobytes(),
        "hello, signed": Hello.signed_bytes("a run", "c0", b"k" * 32),
        "settle, signed": Settle(SALT, 2, ("c0", "c1")).signed_bytes(),
        "context": context(opening(), SEED),
    }


def test_kept_vectors_are_still_what_comes_out():
    assert {name: value.hex() for name, value in found().items()} == VECTORS["outputs"]


def prefixed(*parts):
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def hkdf(secret, salt, *info):
    return HKDF(SHA256(), 32, salt, prefixed(b"fedveil secagg 1", *info)).derive(secret)


def test_seeds_keys_streams_and_sealed_shares_are_those_of_the_primitives_package():
    kept = VECTORS["outputs"]
    assert hkdf(PAIR, SALT, b"mask", b"c0", b"c1").hex() == kept["pair seed"]
    assert hkdf(PAIR, SALT, b"share", b"c0", b"c1").hex() == kept["share key"]
    assert hashlib.sha256(prefixed(b"fedveil secagg 1", b"commitment", SALT, SEED)).hexdigest() == kept["commitment"]
    cipher = Cipher(algorithms.AES(hkdf(SEED, b"", b"stream")), modes.CTR(bytes(16))).encryptor()
    raw = cipher.update(bytes(8 * LENGTH))
    assert raw[:32].hex() == kept["stream, first words"]
    assert raw[-32:].hex() == kept["stream, across pieces"]
    sealed = masks.seal(b"x" * 66, PAIR, SALT, "c0", "c1")
    label = prefixed(b"fedveil secagg 1", b"share", SALT, b"c0", b"c1")
    assert AESGCM(hkdf(PAIR, SALT, b"share", b"c0", b"c1")).decrypt(sealed[:12], sealed[12:], label) == b"x" * 66
    assert len(sealed) == masks.SEALED_SIZE


def test_a_share_opens_for_its_own_attempt_and_members_only():
    sealed = masks.seal(b"x" * 66, PAIR, SALT, "c0", "c1")
    right = {"sealed": sealed, "pair": PAIR, "context": SALT, "sender": "c0", "receiver": "c1"}
    assert masks.unseal(**right) == b"x" * 66
    for change in (
        {"pair": bytes(32)},
        {"context": bytes(32)},
        {"sender": "c2"},
        {"receiver": "c2"},
        {"sender": "c1", "receiver": "c0"},
        {"sealed": sealed[:-1] + bytes([sealed[-1] ^ 1])},
        {"sealed": sealed[:-1]},
    ):
        assert masks.unseal(**right | change) is None, change


def test_both_ends_derive_the_same_seed_and_nobody_else_does():
    a, b, c = (X25519PrivateKey.generate() for _ in range(3))
    public = [key.public_key().public_bytes_raw() for key in (a, b, c)]
    one, other = masks.agree(a, public[1]), masks.agree(b, public[0])
    assert masks.pair_seed(one, SALT, "a", "b") == masks.pair_seed(other, SALT, "b", "a")
    assert masks.pair_seed(one, SALT, "a", "b") != masks.pair_seed(masks.agree(c, public[0]), SALT, "a", "b")
    assert masks.pair_seed(one, SALT, "a", "b") != masks.pair_seed(one, SALT, "a", "c")  # a key that c copied from b
    with pytest.raises(Aborted, match="of small order"):
        masks.agree(a, bytes(32))


def test_everything_that_clients_must_have_in_common_is_in_the_context():
    told = opening()
    one, other = told.roster
    rosters = (one,), (replace(one, key=b"f" * 32), other), (other, one)
    changes = [{"run": "b"}, {"round": 4}, {"attempt": 8}, {"exponents": (9, -3)}, {"rows": (6, 5)}, {"checks": False}]
    assert {name for change in changes for name in change} | {"roster"} == {field.name for field in fields(told)}
    for change in [*changes, *[{"roster": roster} for roster in rosters]]:
        assert context(replace(told, **change), SEED) != context(told, SEED), change
    assert context(told, bytes(32)) != context(told, SEED)


@example(seed=bytes(32), t=3, more=1, rng=random.Random(0))
@example(seed=b"\xff" * 32, t=7, more=3, rng=random.Random(0))
@given(seed=st.binary(min_size=32, max_size=32), t=st.integers(1, 12), more=st.integers(0, 5), rng=st.randoms())
def test_any_t_of_n_shares_give_any_seed(seed, t, more, rng):
    shares = split_seed(seed, t, t + more)
    assert all(len(share) == SHARE_SIZE for share in shares)
    chosen = rng.sample(range(1, t + more + 1), t)
    assert join_seed({place: shares[place - 1] for place in chosen}) == seed


@pytest.mark.parametrize(("t", "n", "prime"), [(2, 3, 5), (3, 4, 7), (4, 5, 7)])
def test_colluders_below_t_and_the_server_learn_nothing(t, n, prime):
    """Over all polynomials, t - 1 shares are distributed alike whatever the secret; t shares are not."""
    for size, alike in ((t - 1, True), (t, False)):
        for colluders in itertools.combinations(range(n), size):
            seen = []
            for secret in range(prime):
                found = Counter()
                for rest in itertools.product(range(prime), repeat=t - 1):
                    draws = iter(rest)
                    shares = split(secret, t, n, prime=prime, draw=lambda _, draws=draws: next(draws))
                    found[tuple(shares[i] for i in colluders)] += 1
                seen.append(found)
            assert all(found == seen[0] for found in seen) == alike


def test_coefficients_come_from_the_operating_system():
    assert split.__kwdefaults__["draw"] is secrets.randbelow
    first, second = (split(1, 3, 4) for _ in range(2))
    assert first != second
    assert join(dict(enumerate(first[:3], 1))) == join(dict(enumerate(second[1:], 2))) == 1


def test_wrong_shares_do_not_give_the_seed_and_what_is_no_share_is_refused():
    seed = b"\x7f" * 32
    shares = dict(enumerate(split_seed(seed, 7, 10)[:7], 1))
    for place, share in shares.items():
        wrong = ((int.from_bytes(share, "big") + 1) % PRIME).to_bytes(SHARE_SIZE, "big")
        assert join_seed(shares | {place: wrong}) != seed  # only a commitment tells: weights of neighbours are small
    for wrong in (b"", bytes(65), bytes(67), PRIME.to_bytes(SHARE_SIZE, "big"), b"\xff" * SHARE_SIZE):
        with pytest.raises(Aborted, match="not an element of the field"):
            join_seed(shares | {2: wrong})
    larger = dict(enumerate((share.to_bytes(SHARE_SIZE, "big") for share in split(2**256, 3, 4)[:3]), 1))
    with pytest.raises(Aborted, match="do not belong to one seed"):
        join_seed(larger)
    for t, n in ((0, 3), (4, 3), (3, PRIME)):
        with pytest.raises(BadArgument, match="t must be from 1 to n"):
            split(1, t, n)


@pytest.mark.parametrize(
    "size", [1, 2, masks.PIECE_SIZE - 1, masks.PIECE_SIZE, masks.PIECE_SIZE + 1, 3 * masks.PIECE_SIZE + 5]
)
def test_streams_cancel_whatever_the_length(size):
    start = np.arange(size, dtype=np.uint64)
    seeds = [bytes([i]) * 32 for i in range(3)]
    total = masks.add_streams(start, seeds)
    assert not np.array_equal(total, start)
    assert np.array_equal(masks.add_streams(total, (), reversed(seeds)), start)
    assert np.array_equal(masks.add_streams(start, seeds, seeds, [start, start]), 3 * start)
    assert np.array_equal(start, np.arange(size))  # the caller's words are left alone


# What the server sees, over all masks in Z_4. 4 divides 2^64, so the real code runs, its words are taken modulo 4, and
# the streams are replaced by all combinations of values: position i of the vectors is the i-th combination.
NAMES = ("b0", "b1", "b2", "s01", "s02", "s12")
EVERY = np.array(list(itertools.product(range(4), repeat=len(NAMES))), np.uint64).T
STREAMS = {name.ljust(32).encode(): values for name, values in zip(NAMES, EVERY, strict=True)}
SEEDS = dict(zip(NAMES, STREAMS, strict=True))
OWN = [SEEDS["b0"], SEEDS["b1"], SEEDS["b2"]]
PAIRS = [{1: SEEDS["s01"], 2: SEEDS["s02"]}, {0: SEEDS["s01"], 2: SEEDS["s12"]}, {0: SEEDS["s02"], 1: SEEDS["s12"]}]


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(masks, "PIECE_SIZE", EVERY.shape[1])
    monkeypatch.setattr(masks, "keystream", lambda seed, buffer: lambda count: STREAMS[seed])


def view(inputs, opened):
    """How often each view occurs: all uploads (a late one too), and the seeds that were opened."""
    size = EVERY.shape[1]
    sent = [masks.mask(np.full(size, x, np.uint64), OWN[k], k, PAIRS[k]) % 4 for k, x in enumerate(inputs)]
    rows = np.stack([*sent, *[EVERY[NAMES.index(name)] for name in opened]])
    return np.bincount(4 ** np.arange(len(rows)) @ rows.astype(np.int64), minlength=4 ** len(rows)).tolist()


ALL = ("b0", "b1", "b2")
WITHOUT_2 = ("b0", "b1", "s02", "s12")  # client 2 was dropped, and its upload came late


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(("opened", "over"), [(ALL, 3), (WITHOUT_2, 2)], ids=["all", "late"])
def test_views_are_distributed_alike_exactly_if_the_sums_are_equal(opened, over):
    base = (1, 2, 3)
    known = view(base, opened)
    for inputs in itertools.product(range(4), repeat=3):
        same = sum(inputs[:over]) % 4 == sum(base[:over]) % 4
        assert (view(inputs, opened) == known) == same, inputs


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("lost", ["pair", "self"])
@pytest.mark.parametrize("opened", [ALL, WITHOUT_2], ids=["all", "late"])
def test_without_one_kind_of_mask_views_tell_more_than_the_sum(monkeypatch, lost, opened):
    """Pair masks hide clients in the sum; the self mask hides a client that was dropped and came late."""
    for name in NAMES:
        if name.startswith({"pair": "s", "self": "b"}[lost]):
            monkeypatch.setitem(STREAMS, SEEDS[name], np.zeros(EVERY.shape[1], np.uint64))
    differ = view((1, 2, 3), opened) != view((2, 1, 0 if opened == WITHOUT_2 else 3), opened)
    assert differ == (lost == "pair" or opened == WITHOUT_2)


@pytest.mark.usefixtures("toy")
def test_the_sum_comes_out_for_every_mask():
    sent = [masks.mask(np.full(EVERY.shape[1], x, np.uint64), OWN[k], k, PAIRS[k]) for k, x in enumerate((1, 2, 3))]
    assert set((masks.unmask(sent, OWN, {}) % 4).tolist()) == {6 % 4}
    pairs = {(0, 2): SEEDS["s02"], (1, 2): SEEDS["s12"]}
    assert set((masks.unmask(sent[:2], OWN[:2], pairs) % 4).tolist()) == {3}
