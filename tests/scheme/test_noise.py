"""Noise: its distribution, its source, and that everything is new in every round."""

import os

import numpy as np
import pytest
import torch
from torch import nn

import fedveil
from fedveil import Entropy, Veil


@pytest.fixture(scope="module")
def plan():
    net = nn.Sequential(
        nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 300), nn.Tanh(), nn.Linear(300, 200), nn.Linear(200, 12)
    )
    return fedveil.analyse(net, torch.zeros(1, 6))


@pytest.fixture(scope="module")
def small_plan():
    return fedveil.analyse(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 2))


def draw(plan, entropy=None, rounds=1, **settings):
    """The noise of some rounds."""
    session = Veil(entropy=entropy, **settings).start(plan)
    return [session._draw(session._reserve) for _ in range(rounds)]


def test_factors_follow_their_symmetry_and_are_log_uniform(plan):
    [(units, _)] = draw(plan, Entropy.for_tests(0), multiplicative=5.0)
    positive, signs, both = (units.scale[plan.symmetries == kind] for kind in (2, 1, 3))
    assert len(positive) == 400
    assert set(signs) == {1.0, -1.0}
    assert (positive > 0).all()
    assert (both < 0).any()
    assert (both > 0).any()
    places = np.sort(np.log(np.abs(np.concatenate([positive, both]))) / np.log(5.0))
    assert np.abs(places).max() <= 1
    steps = np.linspace(-1, 1, len(places))
    assert np.abs(places - steps).max() < 2 * 1.95 / np.sqrt(len(places))  # Kolmogorov-Smirnov at 0.1 %


@pytest.mark.parametrize("groups", [1, 5, 12])
def test_the_partition_has_no_empty_group_and_the_direction_differs_everywhere(plan, groups):
    [(_, head)] = draw(plan, groups=groups)
    assert set(head.partition.tolist()) == set(range(groups))
    assert len(head.direction.unique()) == 12
    assert ((head.direction.abs() >= 1 / 6) & (head.direction.abs() <= 6)).all()  # 2 sqrt(8) in a group of three
    for group in range(groups):
        own = head.direction[head.partition == group].double()
        assert len(own) == 1 or abs(own.sum()) < 1e-6 * own.abs().sum()


@pytest.mark.parametrize("keep_noise", [False, True], ids=["new noise", "kept noise"])
def test_the_offset_is_new_log_uniform_around_the_asked_size_and_of_either_sign(plan, keep_noise):
    rounds = draw(plan, rounds=40, groups=12, additive=30.0, keep_noise=keep_noise)
    offsets = np.concatenate([head.offset for _, head in rounds])
    assert len(set(offsets)) == len(offsets) == 480
    assert 0.4 < (offsets > 0).mean() < 0.6  # 4 deviations of 480 fair coins
    logs = np.sort(np.log2(np.abs(offsets) / 30))
    assert np.abs(logs).max() <= 1
    assert np.abs(logs - np.linspace(-1, 1, 480)).max() < 2 * 1.95 / np.sqrt(480)  # Kolmogorov-Smirnov at 0.1 %


def test_everything_is_new_in_every_round(plan):
    (first, one), (second, two) = draw(plan, rounds=2, groups=4)
    moving = plan.symmetries >= 2
    assert (first.scale[moving] != second.scale[moving]).all()
    assert (one.offset != two.offset).all()
    assert (one.direction != two.direction).all()
    assert (first.members != second.members).mean() > 0.9


def test_permutations_of_a_cell_are_uniform(small_plan):
    rounds = draw(small_plan, Entropy.for_tests(0), rounds=1200)
    seen = [tuple(units.members[small_plan.cells > 0]) for units, _ in rounds]
    counts = [seen.count(order) for order in set(seen)]
    assert len(counts) == 6
    assert sum((c - 200) ** 2 / 200 for c in counts) < 20.5  # chi-squared, 5 degrees, 0.1 %


def test_the_operating_system_is_the_default_source(small_plan, monkeypatch):
    asked, system = [], os.urandom
    monkeypatch.setattr("os.urandom", lambda count: asked.append(count) or system(count))
    draw(small_plan, rounds=40)  # some are drawn ahead
    assert sum(asked) >= 40 * 8 * (len(small_plan.symmetries) + (small_plan.cells > 0).sum())


def test_a_seed_repeats(plan):
    [(first, _)], [(second, _)] = (draw(plan, Entropy.for_tests(7)) for _ in range(2))
    assert np.array_equal(first.scale, second.scale)
