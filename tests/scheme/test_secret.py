"""Secrets: what they are drawn from, that they stay where they are, that none is used twice."""

import copy
import logging
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import fedveil
from fedveil import Entropy, draw_secret


@pytest.fixture(scope="module")
def plan():
    net = nn.Sequential(
        nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 300), nn.Tanh(), nn.Linear(300, 200), nn.Linear(200, 12)
    )
    return fedveil.analyse(net, torch.zeros(1, 6))


def by_symmetry(plan, secret, symmetry):
    return secret._noise.scale[plan.symmetries == symmetry]


def test_factors_follow_their_symmetry_and_are_log_uniform(plan):
    secret = draw_secret(plan, multiplicative=5.0, entropy=Entropy.for_tests(0))
    positive, signs, both = (by_symmetry(plan, secret, kind) for kind in (2, 1, 3))
    assert len(positive) == 400
    assert set(signs) == {1.0, -1.0}
    assert (positive > 0).all()
    assert (both < 0).any()
    assert (both > 0).any()
    places = np.sort(np.log(np.abs(np.concatenate([positive, both]))) / np.log(5.0))
    assert np.abs(places).max() <= 1
    steps = np.linspace(-1, 1, len(places))
    assert np.abs(places - steps).max() < 2 * 1.95 / np.sqrt(len(places))  # Kolmogorov-Smirnov at 0.1 %


def test_the_partition_has_no_empty_group_and_the_direction_differs_everywhere(plan):
    for groups in (1, 5, 12):
        head = draw_secret(plan, groups=groups)._head
        assert set(head.partition.tolist()) == set(range(groups))
        assert len(head.direction.unique()) == 12
        assert ((head.direction.abs() >= 1 / 6) & (head.direction.abs() <= 6)).all()  # 2 sqrt(8) in a group of three
        for group in range(groups):
            own = head.direction[head.partition == group].double()
            assert len(own) == 1 or abs(own.sum()) < 1e-6 * own.abs().sum()


def test_the_offset_has_the_asked_size_and_either_sign(plan):
    offsets = np.concatenate([draw_secret(plan, groups=12, additive=30.0)._head.offset for _ in range(20)])
    assert (np.abs(offsets) >= 15).all()
    assert (np.abs(offsets) <= 60).all()
    assert 0.3 < (offsets > 0).mean() < 0.7


def test_everything_is_new_in_every_secret(plan):
    first, second = draw_secret(plan, groups=4), draw_secret(plan, groups=4)
    assert first.round != second.round
    moving = plan.symmetries >= 2
    assert (first._noise.scale[moving] != second._noise.scale[moving]).all()
    assert (first._head.offset != second._head.offset).all()
    assert (first._head.direction != second._head.direction).all()
    assert (first._noise.members != second._noise.members).mean() > 0.9


def test_permutations_of_a_cell_are_uniform():
    plan = fedveil.analyse(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 2))
    entropy = Entropy.for_tests(0)
    seen = [tuple(draw_secret(plan, entropy=entropy)._noise.members[plan.cells > 0]) for _ in range(1200)]
    counts = [seen.count(order) for order in set(seen)]
    assert len(counts) == 6
    assert sum((c - 200) ** 2 / 200 for c in counts) < 20.5  # chi-squared, 5 degrees, 0.1 %


def test_the_operating_system_is_the_default_source(monkeypatch):
    plan = fedveil.analyse(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 2))
    asked = []
    system = os.urandom
    monkeypatch.setattr("os.urandom", lambda count: asked.append(count) or system(count))
    for _ in range(40):  # some are drawn ahead
        draw_secret(plan)
    assert sum(asked) >= 40 * 8 * (len(plan.symmetries) + (plan.cells > 0).sum())


def test_noise_drawn_ahead_is_dealt_once_also_to_threads_and_forked_processes():
    plan = fedveil.analyse(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 2))
    draw_secret(plan)
    with ThreadPoolExecutor(8) as threads:
        dealt = list(threads.map(lambda _: tuple(draw_secret(plan)._noise.scale), range(500)))
    assert len(set(dealt)) == 500
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, draw_secret(plan)._noise.scale.tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 4096) != draw_secret(plan)._noise.scale.tobytes()
    os.close(reader)
    os.close(writer)


def test_a_seed_repeats_and_is_marked_as_a_test(plan):
    first, second = (draw_secret(plan, entropy=Entropy.for_tests(7)) for _ in range(2))
    assert np.array_equal(first._noise.scale, second._noise.scale)
    assert first.round == second.round
    assert first.for_tests_only
    assert not draw_secret(plan).for_tests_only


def test_a_secret_shows_nothing(plan, caplog):
    secret = draw_secret(plan)
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").warning("%s %r", secret, secret)
    shown = f"{secret} {secret!r} {secret:} {caplog.text}"
    assert "redacted" in shown
    assert not any(f"{number:.12g}" in shown for number in secret._noise.scale if abs(number) != 1)
    assert not hasattr(secret, "__dict__")


@pytest.mark.parametrize(
    "leak", [pickle.dumps, copy.copy, copy.deepcopy, lambda secret: torch.save(secret, "/dev/null")]
)
def test_a_secret_is_neither_pickled_nor_copied(plan, leak):
    with pytest.raises(TypeError, match="never leaves the server's memory"):
        leak(draw_secret(plan))
