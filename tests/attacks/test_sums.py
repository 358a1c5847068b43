"""Sums as secure aggregation opens them are exact up to fixed point; their difference is one client's update."""

from fractions import Fraction

import pytest
import torch
from tests.attacks.victims import chance

from fedveil.attacks.sums import Sum, fraction_bits, secure_sum
from fedveil.errors import BadArgument

HALF_ULP = 2.0**-53  # of a float64
RECORDS = (3, 1, 7, 2, 5)


def updates(clients=5, scale=1.0):
    random, shapes = chance(), {"weight": (4, 3), "bias": (4,)}
    return [{name: scale * torch.randn(s, generator=random) for name, s in shapes.items()} for _ in range(clients)]


def exact(own, name, records=RECORDS):
    """sum_k n_k g_k in rational numbers."""
    pairs = zip(own, records, strict=True)
    rows = [[count * Fraction(value) for value in one[name].flatten().tolist()] for one, count in pairs]
    return [sum(column) for column in zip(*rows, strict=True)]


def bound(own, name, records=RECORDS):
    """n 2^-(b + 1), as the docstring has it."""
    weighted = torch.stack([count * one[name].double() for one, count in zip(own, records, strict=True)])
    return len(weighted) * 2.0 ** -(fraction_bits(weighted) + 1)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e6])
def test_the_error_of_a_sum_is_that_of_its_fixed_point(scale):
    own = updates(scale=scale)
    found = secure_sum(own, RECORDS)
    assert found.records == sum(RECORDS)
    for name in own[0]:
        for value, wanted in zip(found.values[name].flatten().tolist(), exact(own, name), strict=True):
            assert abs(Fraction(value) - wanted) <= bound(own, name) + HALF_ULP * abs(value)


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 5, 100])
def test_fraction_bits_leave_headroom_for_the_sum_of_all_clients(clients):
    weighted = torch.full((clients, 2), 1.75, dtype=torch.float64)
    total = clients * 1.75 * 2.0 ** fraction_bits(weighted)
    assert 2.0 ** (63 - 8 - 3) < total < 2.0 ** (63 - 8)  # all is used but the sign, spare bits and powers of two


def test_the_difference_of_two_sums_is_the_update_of_the_client_that_is_in_one_of_them():
    own = updates()
    found = secure_sum(own, RECORDS) - secure_sum(own[1:], RECORDS[1:])
    assert found.records == RECORDS[0]
    for name, wanted in own[0].items():
        wrong = bound(own, name) + bound(own[1:], name, RECORDS[1:])
        sizes = [count * one[name].abs().max() for one, count in zip(own, RECORDS, strict=True)]
        rounded = 4 * HALF_ULP * sum(sizes)
        gap = (found.mean()[name] - wanted.double()).abs().max()
        assert gap <= (wrong + rounded) / RECORDS[0]
        assert (secure_sum(own, RECORDS).mean()[name] - wanted).abs().max() > 1e6 * wrong  # the sum itself is far away


def test_a_sum_over_one_client_is_its_update():
    own = updates(1)
    for gradient in own[0].values():
        assert gradient.abs().min() > 2.0**-30 * gradient.abs().max()  # then all 24 bits of a float32 are on the grid
    found = secure_sum(own, [6]).mean()
    assert all(torch.equal(found[name].float(), gradient) for name, gradient in own[0].items())


def test_a_difference_the_wrong_way_round_is_refused():
    own = updates()
    with pytest.raises(BadArgument, match="it is over -3 records"):
        (secure_sum(own[1:], RECORDS[1:]) - secure_sum(own, RECORDS)).mean()
    with pytest.raises(BadArgument, match="it is over 0 records"):
        Sum({}, 0).mean()
