"""Divisions among clients: complete, disjoint, never empty; subsets of some classes; and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.data.making import refused

from fedveil.data import Data, DataPart, keep_labels, load, other_labels, parse_labels, split
from fedveil.errors import BadArgument


def classified(targets, columns=None):
    targets = torch.tensor(targets)
    part = DataPart(torch.arange(float(len(targets))).view(-1, 1), targets)
    classes = tuple("abcdefg"[: int(targets.max()) + 1])
    return Data("made", part, part, part, classes=classes, columns=columns or {})


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
        shares, again = split(data, clients, **options), split(data, clients, **options)
    except BadArgument:
        assume(False)
    assert len(shares) == clients
    assert all(share.dtype == torch.int64 and len(share) for share in shares)
    assert torch.cat(shares).sort().values.tolist() == list(range(len(data.train.targets)))
    assert all(torch.equal(a, b) for a, b in zip(shares, again, strict=True))  # the seed decides
    if options["how"] == "iid":
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1


def test_records_with_one_value_stay_with_one_client_and_a_smaller_alpha_makes_clients_differ():
    site = np.array(["a"] * 30 + ["b"] * 20 + ["c"] * 5 + ["d"] * 5)
    shares = split(classified([0, 1] * 30, {"site": site}), 2, how="column", column="site")
    held = [set(site[share.numpy()]) for share in shares]
    assert held[0].isdisjoint(held[1])
    assert sorted(len(share) for share in shares) == [30, 30]
    data = classified(list(range(5)) * 200)

    def skew(alpha):
        shares = split(data, 5, how="dirichlet", alpha=alpha)
        return np.mean([data.train.targets[share].bincount().max() / len(share) for share in shares])

    assert skew(0.1) > skew(1.0) + 0.1 > skew(1000.0) + 0.2


@pytest.mark.parametrize("how", ["iid", "dirichlet", "column"])
def test_records_of_a_client_are_mixed(how):
    data = classified([0] * 100 + [1] * 100, {"site": np.array(["a"] * 200)})
    share = split(data, 1, how=how, column="site" if how == "column" else None)[0]
    assert 20 < data.train.targets[share][:100].sum() < 80
    assert not torch.equal(share, split(data, 1, how=how, seed=1, column="site" if how == "column" else None)[0])


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"clients": 0}, ["split: clients must be", "at least 1, got 0"]),
        ({"clients": 7}, ["7 clients cannot share 6 records", "at most 6 clients"]),
        ({"seed": -1}, ["seed must be", "at least 0, got -1"]),
        ({"how": "idd"}, ["there is no split 'idd'", "use 'iid'"]),
        (
            {"how": "dirichlet", "alpha": 0},
            ["alpha must be a finite number above 0, got 0", "use 0.5, a common choice"],
        ),
        ({"how": "dirichlet", "clients": 6, "alpha": 1e-3}, ["in each of 100 draws", "got no records", "larger alpha"]),
        ({"how": "column"}, ["needs a column", "column= to one of 'site'"]),
        ({"how": "column", "column": "sites"}, ["there is no column 'sites'", "use 'site'"]),
        ({"how": "column", "column": "site", "clients": 4}, ["has only 2 values", "--clients 2"]),
        ({"column": "site"}, ["column='site' does not apply to how=\"iid\"", 'how="column"']),
    ],
)
def test_a_division_that_does_not_exist_is_refused(options, texts):
    data = classified([0, 1, 2] * 2, {"site": np.array(["a", "b"] * 3)})
    with refused(*texts):
        split(data, **({"clients": 2} | options))


def test_only_one_class_per_record_can_be_divided_by_class():
    with refused("a Dirichlet split needs one class per record, but 'diabetes' is for regression", 'how="iid"'):
        split(load("diabetes"), 2, how="dirichlet")
    with refused("is a regression data set without classes"):
        keep_labels(load("diabetes"), (0,))
    part = DataPart(torch.zeros(4, 3), torch.tensor([[0, 1, 0]] * 4))
    each = Data("mine", part, part, classes=("a", "b"))
    with refused("a Dirichlet split needs one class per record, but 'mine' has one at each position"):
        split(each, 2, how="dirichlet")
    with refused("records of 'mine' have a class at each position"):
        keep_labels(each, [1])


def test_kept_records_keep_their_input_their_name_and_their_columns():
    data = classified([3, 0, 1, 2, 3, 0, 1, 2], {"number": np.arange(8)})
    found = keep_labels(data, (1, 3))
    assert found.classes == ("b", "d")
    for part in (found.train, found.test, found.validation):
        for record, target in zip(part.inputs, part.targets, strict=True):
            assert data.classes[data.train.targets[int(record)]] == found.classes[target]
        assert len(part.inputs) == 4
    assert found.columns["number"].tolist() == found.train.inputs.flatten().tolist()
    data = dataclasses.replace(data, test=DataPart(data.test.inputs[:1], data.test.targets[:1]))
    with refused("has no records of a"):
        keep_labels(data, (0,))


def test_labels_are_read_or_refused():
    texts = {"0-2,7": (0, 1, 2, 7), "5, 1": (1, 5), "first-half": (0, 1, 2, 3), "second-half": (4, 5, 6, 7, 8)}
    assert {text: parse_labels(text, 9) for text in texts} == texts
    assert other_labels(texts["0-2,7"], 9) == (3, 4, 5, 6, 8)
    for text, why in {
        "": "not a class index",
        "a-b": "not a class index",
        "4-2": "not a class",
        "0-9": "from 0 to 8",
    }.items():
        with refused(why):
            parse_labels(text, 9)
