"""Axes: ticks are round numbers or powers of ten."""

import pytest

from fedveil.report.axes import linear, logarithmic


@pytest.mark.parametrize(
    ("log", "low", "high", "labels"),
    [
        (False, 0.1, 0.97, "0.0 0.2 0.4 0.6 0.8 1.0"),
        (False, 0, 20_000, "0 5,000 10,000 15,000 20,000"),
        (False, -1, 1, "-1.0 -0.5 0.0 0.5 1.0"),
        (False, 0.9, 0.98, "0.90 0.92 0.94 0.96 0.98"),
        (False, 1e-7, 4e-7, "1e-7 2e-7 3e-7 4e-7"),
        (True, 1e-7, 1e-2, "1e-7 1e-6 1e-5 1e-4 1e-3 1e-2"),
        (True, 2e-6, 7e-6, "2e-6 5e-6"),
        (True, 1e-15, 1e-5, "1e-14 1e-12 1e-10 1e-8 1e-6"),
    ],
)
def test_ticks_are_round_numbers_or_powers_of_ten(log, low, high, labels):
    axis = logarithmic(low, high, wanted=6) if log else linear(low, high, wanted=5, outward=True)
    assert [label for _, label in axis.ticks] == labels.split()
