"""Fixed point: what goes in comes out, sums are exact, and what does not fit is refused."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import BadArgument, OutOfRange
from fedveil.secagg import bits, decode, encode, exponent
from fedveil.secagg.fixed import limit

CLIENTS = (4, 10, 50, 1000)


@pytest.mark.parametrize(("n", "wanted"), [(4, 52), (10, 50), (50, 48), (1000, 44)])
def test_bits_leave_room_for_every_client_and_one_sign(n, wanted):
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
    assert np.array_equal(decode(encode(values, b, n), b), values)


@given(
    n=st.sampled_from(CLIENTS),
    e=st.integers(-30, 30),
    shares=st.lists(st.lists(st.floats(-1, 1), min_size=3, max_size=3), min_size=1, max_size=4),
)
def test_the_error_of_a_sum_is_below_its_bound(n, e, shares):
    b = bits(n, e)
    rows = [np.ldexp(np.array(row), e) for row in shares]
    total = np.add.reduce([encode(row, b, n) for row in rows])
    for i, found in enumerate(decode(total, b)):
        exact = sum(Fraction(float(row[i])) for row in rows)
        whole = Fraction(int(total.view(np.int64)[i])) / Fraction(2) ** b
        assert abs(whole - exact) <= len(rows) * Fraction(2) ** -(b + 1)  # before the sum is rounded to float64
        assert abs(Fraction(float(found)) - exact) <= len(rows) * Fraction(2) ** -(b + 1) + abs(whole) / 2**53


@pytest.mark.parametrize("n", CLIENTS)
def test_the_largest_integers_of_all_clients_do_not_wrap_around(n):
    most = limit(n)
    assert n * most <= 2**63 - 1 < n * (most + 1)
    largest = np.nextafter(float(most), 0)
    words = encode([largest, -largest], 0, n)
    assert decode(np.add.reduce([words] * n), 0) == pytest.approx([n * largest, -n * largest], rel=2**-52)


@pytest.mark.parametrize("n", CLIENTS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300, "above", "-above", 2.0**63, -(2.0**63)])
def test_what_does_not_fit_is_refused_without_a_word_of_the_value(n, value):
    if isinstance(value, str):
        value = np.nextafter(float(limit(n) + 1), np.inf) * (-1 if value[0] == "-" else 1)
    with pytest.raises(OutOfRange, match="1 of 3 values are not finite or too large") as caught:
        encode([0.0, value, 1.0], 0, n)
    assert f"{value:g}" not in str(caught.value)


def test_each_value_may_have_bits_of_its_own():
    places = np.array([3, 10, 40])
    values = np.array([1.125, -2.5, 2.0**-40])
    assert np.array_equal(decode(encode(values, places, 4), places), values)


def test_only_words_are_decoded():
    with pytest.raises(BadArgument, match="words are uint64"):
        decode(np.zeros(3), 4)
