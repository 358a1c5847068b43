"""Fixed point: what goes in comes out, sums are functions of the sum alone, and a wrap-around is noticed."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedveil.errors import BadArgument
from fedveil.secagg import bits, decode, encode, exponent
from fedveil.secagg.fixed import (
    CHECKS,
    MAX_EXPONENT,
    MAX_MAGNITUDE,
    MIN_EXPONENT,
    PRIME,
    decode_rows,
    encode_rows,
    scale,
    wrapped_rows,
)


@given(
    n=st.sampled_from((4, 10, 50, 1000)),
    e=st.integers(-30, 30),
    shares=st.lists(st.lists(st.floats(-1, 1), min_size=3, max_size=3), min_size=1, max_size=4),
)
def test_the_error_of_a_sum_is_below_its_bound(n, e, shares):
    b = bits(n, e)
    rows = [np.ldexp(np.array(row), e) for row in shares]
    total = np.add.reduce([encode(row, b) for row in rows])
    for i, found in enumerate(decode(total, b)):
        exact = sum(Fraction(float(row[i])) for row in rows)
        whole = Fraction(int(total.view(np.int64)[i])) / Fraction(2) ** b
        assert abs(whole - exact) <= len(rows) * Fraction(2) ** -(b + 1)  # before the sum is rounded to float64
        assert abs(Fraction(float(found)) - exact) <= len(rows) * Fraction(2) ** -(b + 1) + abs(whole) / 2**53


def reduced(values, b):
    """rint(x 2^b) mod 2^64 in exact arithmetic."""
    return [round(Fraction(float(value)) * Fraction(2) ** b) % 2**64 for value in values]


EDGES = [float(np.nextafter(2.0**power, to)) for power in (62, 63, 64, 65, 80, 100) for to in (0, 2.0**power, np.inf)]


@example(values=[sign * edge for edge in EDGES for sign in (1, -1)], b=0)
@given(values=st.lists(st.floats(-(2.0**100), 2.0**100), min_size=1, max_size=5), b=st.integers(-40, 90))
def test_words_are_the_integers_modulo_2_64_however_large(values, b):
    assert encode(values, b).tolist() == reduced(values, b)


def test_what_is_not_finite_is_refused_without_a_word_of_which_and_so_is_what_makes_no_sense():
    for value in (np.nan, np.inf, -np.inf):
        with pytest.raises(BadArgument, match="a value is not finite") as caught:
            encode([0.0, value, 1.0], 0)
        assert "1.0" not in str(caught.value)
    with pytest.raises(BadArgument, match="words must be uint64"):
        decode(np.zeros(3), 4)
    for largest in (float("nan"), float("inf"), -1.0, "1", True):
        with pytest.raises(BadArgument):
            exponent(largest)


def split_randomly(total, sizes, rng):
    """Integers of clients with these numbers of records, in proportion and with noise, whose sum is `total`."""
    shares = np.array(sizes) / sum(sizes)
    parts = [np.rint(total * share).astype(np.int64) + rng.integers(-(2**20), 2**20, len(total)) for share in shares]
    parts[-1] = total - np.sum(parts[:-1], axis=0)
    return parts


@pytest.mark.parametrize("e", range(MIN_EXPONENT, MAX_EXPONENT + 1))
def test_what_opens_is_a_function_of_the_sum_alone_whatever_the_exponent(e):
    """Two groups of five clients with 40 to 8,000 records and the same sum: the same words, check words included.

    Values are on the grid of the fixed point, from far too large for the exponent (they wrap) to far too small.
    """
    sizes, rng = (40, 4000, 5000, 6000, 8000), np.random.default_rng(e + 1000)
    b = bits(5, e)
    for up in (-b - 20, -b, 0, 40 - b, 90 - b):  # the power of two of one step in the values
        step = max(up, -b)
        total = rng.integers(-(2**50), 2**50, 7)
        opened = []
        for order in (sizes, sizes[::-1]):
            clients = [np.ldexp(part.astype(np.float64), step) for part in split_randomly(total, order, rng)]
            assert len({own.tobytes() for own in clients}) == 5
            summed = np.add.reduce([encode_rows(own, (3, 4), (b, b), 5) for own in clients])
            opened.append((summed[:7].tolist(), [int(word) % PRIME for word in summed[7:]]))
        assert opened[0] == opened[1]


def test_the_quotient_of_check_words_is_hidden_by_random_multiples():
    """Without them, a sum of check words would say how often single clients' hashes exceed p together."""
    values, n = np.array([1.0, -2.0, 3.0]), 5
    drawn = [int(encode_rows(values, (3,), (20,), n)[3]) for _ in range(200)]
    assert len({word % PRIME for word in drawn}) == 1
    quotients = [word // PRIME for word in drawn]
    assert len(set(quotients)) > 190  # of 2^29: 200 draws have an equal pair with probability 4e-5, ten never
    assert n * max(PRIME * (2 ** (32 - 3) - 1) + PRIME - 1, max(drawn)) < 2**64


def saturated(values, b, n):
    """What an encoding that saturates would send."""
    most = (2**63 - 1) // n
    return np.array([min(max(int(v), -most), most) for v in scale(values, b)])


def test_with_saturation_the_smallest_client_would_open_and_with_reduction_it_does_not():
    """The server chooses an exponent that only the smallest client's values fit."""
    n, sizes, rng = 5, (40, 4000, 5000, 6000, 8000), np.random.default_rng(0)
    x = [size * rng.normal(0.2, 0.3, 500) for size in sizes]
    b = bits(n, 6)
    most = (2**63 - 1) // n
    total = np.sum([saturated(own, b, n).astype(object) for own in x], axis=0)
    smallest = np.array([float(t - 2 * most * round(t / (2 * most))) for t in total]) / 2.0**b
    read = np.isclose(smallest, x[0], rtol=1e-9)
    assert read.mean() > 0.5  # the attack works where values are saturated
    opened = decode_rows(np.add.reduce([encode_rows(own, (500,), (b,), n) for own in x]), (500,), (b,))
    assert not np.isclose(opened, x[0], rtol=1e-9).any()
    others = [sum(x) / n] * n  # other clients, the same sum but for rounding: the same words, to n units
    again = np.add.reduce([encode_rows(own, (500,), (b,), n) for own in others])[:500]
    apart = (np.add.reduce([encode_rows(own, (500,), (b,), n) for own in x])[:500] - again).view(np.int64)
    assert np.abs(apart).max() <= 2**20  # of 2^64: float64 has 53 bits, and these integers up to 73


@given(
    e=st.integers(-5, 5),
    size=st.integers(1, 40),
    up=st.floats(-4, 200),
    seed=st.integers(0, 2**32),
    n=st.sampled_from((3, 5, 50)),
)
def test_rows_that_wrapped_are_those_that_exact_arithmetic_finds(e, size, up, seed, n):
    rng, b = np.random.default_rng(seed), bits(n, e)
    values = [rng.standard_normal(size) * 2.0 ** (e - 2 + up) for _ in range(n)]
    total = np.add.reduce([encode_rows(np.concatenate([own, own * 0]), (size, size), (b, b), n) for own in values])
    exact = [sum(int(v) for v in column) for column in zip(*[scale(own, b) for own in values], strict=True)]
    assert wrapped_rows(total, (size, size)) == ([0] if any(not -(2**63) <= v < 2**63 for v in exact) else [])


@pytest.mark.parametrize("changed", range(1, 6))
def test_a_few_elements_that_wrap_in_opposite_directions_are_noticed(changed):
    """Signs alone would cancel in half of the cases with two elements."""
    n, b = 4, bits(4, 0)
    for trial in range(50):
        rng = np.random.default_rng(trial)
        values = rng.uniform(-0.5, 0.5, (n, 1000))
        at = rng.choice(1000, 2 * changed, replace=False)
        values[0, at[:changed]] += 2.0 ** (64 - b)
        values[1, at[changed:]] -= 2.0 ** (64 - b)
        total = np.add.reduce([encode_rows(own, (1000,), (b,), n) for own in values])
        assert wrapped_rows(total, (1000,)) == [0]


def test_the_largest_update_of_a_client_is_still_finite_when_it_is_scaled_and_noticed():
    for power in (63, 64, 80, 100, 144, 200, 400):  # of 2^64 and more nothing is left in the words: a sum of zero
        assert wrapped_rows(encode_rows(np.array([2.0**power, 0.0]), (2,), (0,), 3), (2,)) == [0]
    values = np.array([np.nextafter(MAX_MAGNITUDE, 0) * 2.0**53])
    assert np.isfinite(scale(values, bits(3, MIN_EXPONENT))).all()
    assert wrapped_rows(encode_rows(values, (1,), (bits(3, MIN_EXPONENT),), 3), (1,)) == [0]


def test_honest_sums_at_the_edge_of_the_range_are_not_called_wrapped():
    for n in (3, 4, 5, 50):
        b, rng = bits(n, 0), np.random.default_rng(n)
        values = rng.choice([-1.0, 1.0], (n, 40_000)) * (1 - rng.integers(0, 3, (n, 40_000)) * 2.0**-40)
        total = np.add.reduce([encode_rows(own, (1000, 39_000), (b, b), n) for own in values])
        assert wrapped_rows(total, (1000, 39_000)) == []


def test_rows_have_bits_and_check_words_of_their_own():
    values, sizes, places = np.array([1.125, -2.5, 2.0**-40]), (1, 1, 1), (3, 10, 40)
    words = encode_rows(values, sizes, places, 3)
    assert len(words) == 3 + 3 * CHECKS
    assert np.array_equal(decode_rows(words, sizes, places), values)
    assert len(encode_rows(values, sizes, places, 3, checks=False)) == 3
