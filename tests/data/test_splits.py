"""Divisions among clients: complete, disjoint, never empty, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.data.making import refused

from fedveil.data import Data, Part, split
from fedveil.errors import BadArgument


def classified(targets, columns=None):
    targets = torch.tensor(targets)
    part = Part(torch.zeros(len(targets), 2), targets)
    classes = tuple(str(label) for label in range(int(targets.max()) + 1))
    return Data("made", part, part, classes=classes, columns=columns or {})


@st.composite
def requests(draw):
    """Data, and a way to split it."""
    targets = draw(st.lists(st.integers(0, 4), min_size=1, max_size=120))
    data = classified(targets, {"site": np.array([f"s{(3 * target) % 7}" for target in targets])})
    how = draw(st.sampled_from(["iid", "dirichlet", "column"]))
    options = {"how": how, "seed": draw(st.integers(0, 2**64)), "column": "site" if how == "column" else None}
    return data, draw(st.integers(1, 12)), options | {"alpha": draw(st.floats(1e-3, 1e3))}


@given(requests())
def test_every_record_belongs_to_one_client_and_no_client_is_empty(request):
    data, clients, options = request
    try:
        shares = split(data, clients, **options)
    except BadArgument:
        assume(False)
    assert len(shares) == clients
    assert all(share.dtype == torch.int64 and len(share) for share in shares)
    assert torch.cat(shares).sort().values.tolist() == list(range(len(data.train.targets)))


@given(requests())
def test_the_same_seed_gives_the_same_division(request):
    data, clients, options = request
    try:
        first, second = split(data, clients, **options), split(data, clients, **options)
    except BadArgument:
        assume(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 9))
def test_iid_shares_differ_by_one_record_at_most(records, clients, seed):
    assume(clients <= records)
    sizes = [len(share) for share in split(classified([0] * records), clients, seed=seed)]
    assert max(sizes) - min(sizes) <= 1


def test_another_seed_gives_another_division():
    data = classified([0, 1] * 50)
    assert not torch.equal(split(data, 2, seed=1)[0], split(data, 2, seed=2)[0])


def share_of_commonest_class(data, shares):
    return np.mean([data.train.targets[share].bincount().max() / len(share) for share in shares])


def test_the_smaller_alpha_the_less_alike_the_clients():
    data = classified(list(range(5)) * 200)
    skew = [share_of_commonest_class(data, split(data, 5, how="dirichlet", alpha=a)) for a in (0.1, 1.0, 1000.0)]
    assert skew[0] > skew[1] + 0.1 > skew[2] + 0.2


def test_records_with_one_value_stay_with_one_client():
    site = np.array(["a"] * 30 + ["b"] * 20 + ["c"] * 5 + ["d"] * 5)
    shares = split(classified([0, 1] * 30, {"site": site}), 2, how="column", column="site")
    held = [set(site[share.numpy()]) for share in shares]
    assert held[0].isdisjoint(held[1])
    assert sorted(len(share) for share in shares) == [30, 30]


@pytest.mark.parametrize("how", ["iid", "dirichlet", "column"])
def test_records_of_a_client_are_mixed(how):
    data = classified([0] * 100 + [1] * 100, {"site": np.array(["a"] * 200)})
    share = split(data, 1, how=how, column="site" if how == "column" else None)[0]
    assert 20 < data.train.targets[share][:100].sum() < 80


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"clients": 0}, ["split: clients must be a whole number of at least 1, got 0"]),
        ({"clients": True}, ["split: clients must be a whole number", "got True"]),
        ({"clients": 7}, ["7 clients for 6 records", "at most 6 clients"]),
        ({"seed": -1}, ["seed must be a whole number of at least 0, got -1"]),
        ({"how": "idd"}, ["there is no way to split, how = 'idd'", "'iid' is the nearest"]),
        ({"how": "dirichlet", "alpha": 0}, ["alpha must be a finite number above 0, got 0", "use 0.5, which is usual"]),
        ({"how": "dirichlet", "alpha": float("inf")}, ["alpha must be a finite number above 0, got inf"]),
        ({"how": "dirichlet", "clients": 6, "alpha": 1e-3}, ["in 100 draws", "got no record", "larger alpha"]),
        ({"how": "column"}, ["needs a column", "column= to one of 'site'"]),
        ({"how": "column", "column": "sites"}, ["there is no column 'sites'", "'site' is the nearest"]),
        ({"how": "column", "column": "site", "clients": 4}, ["has 2 values", "--clients 2"]),
        ({"column": "site"}, ["column='site' means nothing to how=\"iid\"", 'how="column"']),
    ],
)
def test_a_division_that_does_not_exist_is_refused(options, texts):
    data = classified([0, 1, 2] * 2, {"site": np.array(["a", "b"] * 3)})
    with refused(*texts):
        split(data, **({"clients": 2} | options))


def test_a_regression_has_no_dirichlet_division():
    part = Part(torch.zeros(9, 2), torch.zeros(9, 1))
    with refused("a Dirichlet split needs one class per record, and 'plain' is a regression", 'how="iid"'):
        split(Data("plain", part, part), 2, how="dirichlet")
