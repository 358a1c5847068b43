"""Any t shares give the seed back; t - 1 say nothing about it; a wrong one is noticed."""

import itertools
import random
import secrets
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedveil.errors import Aborted, BadArgument
from fedveil.secagg.masks import PRIME, WIDTH, join, join_seed, split, split_seed


@example(seed=bytes(32), t=3, more=1, rng=random.Random(0))
@example(seed=b"\xff" * 32, t=7, more=3, rng=random.Random(0))
@given(seed=st.binary(min_size=32, max_size=32), t=st.integers(1, 12), more=st.integers(0, 5), rng=st.randoms())
def test_any_t_of_n_shares_give_any_seed(seed, t, more, rng):
    shares = split_seed(seed, t, t + more)
    assert all(len(share) == WIDTH for share in shares)
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


def test_without_random_coefficients_one_share_is_the_secret():
    shares = split(42, 3, 4, draw=lambda prime: 0)
    assert shares == [42] * 4


def test_coefficients_come_from_the_operating_system():
    assert split.__kwdefaults__["draw"] is secrets.randbelow
    first, second = (split(1, 3, 4) for _ in range(2))
    assert first != second
    assert join(dict(enumerate(first[:3], 1))) == join(dict(enumerate(second[1:], 2))) == 1


@pytest.mark.parametrize("place", range(1, 8))
def test_a_wrong_share_at_any_place_does_not_give_the_seed(place):
    seed = b"\x7f" * 32
    shares = dict(enumerate(split_seed(seed, 7, 10)[:7], 1))
    shares[place] = ((int.from_bytes(shares[place], "big") + 1) % PRIME).to_bytes(WIDTH, "big")
    assert join_seed(shares) != seed  # which only a commitment tells: weights of neighbouring places are small


def test_shares_of_no_seed_are_an_abort():
    shares = dict(enumerate((share.to_bytes(WIDTH, "big") for share in split(2**256, 3, 4)[:3]), 1))
    with pytest.raises(Aborted, match="do not belong to one seed") as caught:
        join_seed(shares)
    assert caught.value.reason == "share"


@pytest.mark.parametrize("share", [b"", bytes(65), bytes(67), PRIME.to_bytes(WIDTH, "big"), b"\xff" * WIDTH])
def test_what_is_no_element_of_the_field_is_refused(share):
    shares = dict(enumerate(split_seed(bytes(32), 3, 4)[:3], 1))
    with pytest.raises(Aborted, match="not an element of the field"):
        join_seed(shares | {2: share})


@pytest.mark.parametrize(("t", "n"), [(0, 3), (4, 3), (3, PRIME)])
def test_thresholds_and_seeds_that_make_no_sense_are_refused(t, n):
    with pytest.raises(BadArgument, match="t must be between"):
        split(1, t, n)
    with pytest.raises(BadArgument, match="32 bytes, got 31"):
        split_seed(bytes(31), 3, 4)
