"""Fixed point: what goes in comes out, sums are functions of the sum alone, and a wrap-around is noticed."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import BadArgument
from fedveil.secagg import bits, decode, encode, exponent
from fedveil.secagg.fixed import (
    CHECKS,
    HIGHEST,
    LARGEST,
    LOWEST,
    decode_rows,
    encode_rows,
    longest_row,
    scale,
    wrapped_rows,
)

CLIENTS = (4, 10, 50, 1000)


@pytest.mark.parametrize(("n", "wanted"), [(4, 52), (10, 50), (50, 48), (1000, 44)])
def test_bits_leave_headroom_for_every_client_and_one_sign(n, wanted):
    assert bits(n, 8) == wanted
    assert bits(n, -20) == wanted + 28
    assert n * 2 ** (bits(n, 8) + 8) <= 2**62


@pytest.mark.parametrize(("largest", "wanted"), [(1.0, 9), (0.99, 8), (3.0, 10), (1e-3, -1), (0.0, 8), (5e-324, -1065)])
def test_an_exponent_is_that_of_the_largest_magnitude_and_8(largest, wanted):
    assert exponent(largest) == wanted
    assert largest < 2.0 ** (wanted - 8) or largest == 0 or wanted < -1000


@pytest.mark.parametrize("largest", [float("nan"), float("inf"), -1.0, "1", True])
def test_an_exponent_of_no_magnitude_is_refused(largest):
    with pytest.raises(BadArgument):
        exponent(largest)


@pytest.mark.parametrize("n", CLIENTS)
def test_values_that_fixed_point_holds_come_back(n):
    b = bits(n, 0)
    values = np.array([0.0, 1.0, -1.0, 0.5, -0.25, 2.0**-b, -(2.0**-b), 0.75 - 2.0**-b])
    assert np.array_equal(decode(encode(values, b), b), values)


@given(
    n=st.sampled_from(CLIENTS),
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


@given(values=st.lists(st.floats(-(2.0**100), 2.0**100), min_size=1, max_size=5), b=st.integers(-40, 90))
def test_words_are_the_integers_modulo_2_64_however_large(values, b):
    assert encode(values, b).tolist() == reduced(values, b)


@pytest.mark.parametrize("power", [62, 63, 64, 65, 80, 100])
def test_integers_around_powers_of_two_are_reduced_exactly(power):
    edge = 2.0**power
    values = np.array([np.nextafter(edge, 0), edge, np.nextafter(edge, np.inf)])
    values = np.concatenate([values, -values])
    assert encode(values, 0).tolist() == reduced(values, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_without_a_word_of_which(value):
    with pytest.raises(BadArgument, match="a value is not finite") as caught:
        encode([0.0, value, 1.0], 0)
    assert "1.0" not in str(caught.value)


def test_only_words_are_decoded():
    with pytest.raises(BadArgument, match="words are uint64"):
        decode(np.zeros(3), 4)


def split_evenly(total, n, rng):
    """n vectors of integers whose sum is `total`."""
    parts = [rng.integers(-(2**40), 2**40, len(total)) for _ in range(n - 1)]
    return [*parts, total - np.sum(parts, axis=0)]


@pytest.mark.parametrize("e", range(LOWEST, HIGHEST + 1, 8))
def test_what_opens_is_a_function_of_the_sum_alone_whatever_the_exponent(e):
    """Two groups of clients with the same sum, on the grid of the fixed point: the same words, check words included.

    The exponent may be far too small for the values. Saturated values fail this test.
    """
    n, rng = 5, np.random.default_rng(e + 1000)
    total = rng.integers(-(2**45), 2**45, 7)
    b = bits(n, e)
    unit = 2.0 ** max(0, -b) * 2.0**16  # a multiple of what check words leave out, in integers of the fixed point
    opened = []
    for _ in range(2):
        clients = [part * unit * 2.0 ** -min(b, 0) for part in split_evenly(total, n, rng)]
        words = [encode_rows(own, (3, 4), (b, b)) for own in clients]
        opened.append(np.add.reduce(words)[:7])
    assert np.array_equal(*opened)


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
    opened = decode_rows(np.add.reduce([encode_rows(own, (500,), (b,)) for own in x]), (500,), (b,))
    assert not np.isclose(opened, x[0], rtol=1e-9).any()
    others = [sum(x) / n] * n  # other clients, the same sum but for rounding: the same words, to n units
    again = np.add.reduce([encode_rows(own, (500,), (b,)) for own in others])[:500]
    apart = (np.add.reduce([encode_rows(own, (500,), (b,)) for own in x])[:500] - again).view(np.int64)
    assert np.abs(apart).max() <= 2**20  # of 2^64: float64 has 53 bits, and these integers up to 73


@given(
    e=st.integers(-5, 5),
    size=st.integers(1, 40),
    up=st.floats(-4, 130),
    seed=st.integers(0, 2**32),
    n=st.sampled_from((3, 5, 50)),
)
def test_rows_that_wrapped_are_those_that_exact_arithmetic_finds(e, size, up, seed, n):
    rng, b = np.random.default_rng(seed), bits(n, e)
    values = [rng.standard_normal(size) * 2.0 ** (e - 2 + up) for _ in range(n)]
    total = np.add.reduce([encode_rows(np.concatenate([own, own * 0]), (size, size), (b, b)) for own in values])
    exact = [sum(int(v) for v in column) for column in zip(*[scale(own, b) for own in values], strict=True)]
    assert wrapped_rows(total, (size, size), n) == ([0] if any(not -(2**63) <= v < 2**63 for v in exact) else [])


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
        total = np.add.reduce([encode_rows(own, (1000,), (b,)) for own in values])
        assert wrapped_rows(total, (1000,), n) == [0]


def test_the_largest_update_of_a_client_is_noticed_when_it_wraps():
    """`LARGEST`, times 2^22 records, at the smallest exponent: the far check word has bits of it left."""
    b = bits(3, LOWEST)
    for factor in (1.0, 3.0, 2.0**22):
        total = encode_rows(np.array([LARGEST * factor, 0.0]), (2,), (b,))
        assert wrapped_rows(total, (2,), 3) == [0]


def test_honest_sums_at_the_edge_of_the_range_are_not_called_wrapped():
    for n in (3, 4, 5, 50):
        b, rng = bits(n, 0), np.random.default_rng(n)
        values = rng.choice([-1.0, 1.0], (n, 3000)) * (1 - rng.integers(0, 3, (n, 3000)) * 2.0**-40)
        total = np.add.reduce([encode_rows(own, (1000, 2000), (b, b)) for own in values])
        assert wrapped_rows(total, (1000, 2000), n) == []


def test_rows_have_bits_and_check_words_of_their_own():
    values, sizes, places = np.array([1.125, -2.5, 2.0**-40]), (1, 1, 1), (3, 10, 40)
    words = encode_rows(values, sizes, places)
    assert len(words) == 3 + 3 * CHECKS
    assert np.array_equal(decode_rows(words, sizes, places), values)
    assert len(encode_rows(values, sizes, places, checks=False)) == 3


def test_rows_are_short_enough_for_check_words_to_be_certain():
    for n in (3, 50, 10_000):
        assert n * longest_row(n) * 2**16 <= 2**46 < 2**48
