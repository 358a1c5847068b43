"""Noise: its distribution, that it stays on the server, that none is used twice."""

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
from fedveil import Entropy, Veil


@pytest.fixture(scope="module")
def plan():
    net = nn.Sequential(
        nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 300), nn.Tanh(), nn.Linear(300, 200), nn.Linear(200, 12)
    )
    return fedveil.analyse(net, torch.zeros(1, 6))


def draw(plan, entropy=None, **settings):
    """The noise of one round."""
    session = Veil(entropy=entropy, **settings).start(plan)
    return session._draw(session._state)


def by_symmetry(plan, units, symmetry):
    return units.scale[plan.symmetries == symmetry]


def test_factors_follow_their_symmetry_and_are_log_uniform(plan):
    units, _ = draw(plan, Entropy.for_tests(0), multiplicative=5.0)
    positive, signs, both = (by_symmetry(plan, units, kind) for kind in (2, 1, 3))
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
        _, head = draw(plan, groups=groups)
        assert set(head.partition.tolist()) == set(range(groups))
        assert len(head.direction.unique()) == 12
        assert ((head.direction.abs() >= 1 / 6) & (head.direction.abs() <= 6)).all()  # 2 sqrt(8) in a group of three
        for group in range(groups):
            own = head.direction[head.partition == group].double()
            assert len(own) == 1 or abs(own.sum()) < 1e-6 * own.abs().sum()


def test_the_offset_has_the_asked_size_and_either_sign(plan):
    offsets = np.concatenate([draw(plan, groups=12, additive=30.0)[1].offset for _ in range(20)])
    assert (np.abs(offsets) >= 15).all()
    assert (np.abs(offsets) <= 60).all()
    assert 0.3 < (offsets > 0).mean() < 0.7


def test_everything_is_new_in_every_round(plan):
    session = Veil(groups=4).start(plan)
    (first, one), (second, two) = (session._draw(session._state) for _ in range(2))
    moving = plan.symmetries >= 2
    assert (first.scale[moving] != second.scale[moving]).all()
    assert (one.offset != two.offset).all()
    assert (one.direction != two.direction).all()
    assert (first.members != second.members).mean() > 0.9


def test_permutations_of_a_cell_are_uniform():
    plan = fedveil.analyse(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 2))
    entropy = Entropy.for_tests(0)
    seen = [tuple(draw(plan, entropy)[0].members[plan.cells > 0]) for _ in range(1200)]
    counts = [seen.count(order) for order in set(seen)]
    assert len(counts) == 6
    assert sum((c - 200) ** 2 / 200 for c in counts) < 20.5  # chi-squared, 5 degrees, 0.1 %


def test_the_operating_system_is_the_default_source(monkeypatch):
    plan = fedveil.analyse(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 2))
    asked = []
    system = os.urandom
    monkeypatch.setattr("os.urandom", lambda count: asked.append(count) or system(count))
    session = Veil().start(plan)
    for _ in range(40):  # some are drawn ahead
        session._draw(session._state)
    assert sum(asked) >= 40 * 8 * (len(plan.symmetries) + (plan.cells > 0).sum())


def test_noise_drawn_ahead_is_dealt_once_also_to_threads_and_forked_processes():
    plan = fedveil.analyse(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 2))
    session = Veil().start(plan)

    def deal():
        return session._draw(session._current())[0].scale.tobytes()

    deal()
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(lambda _: deal(), range(500)))) == 500
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, deal())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 4096) != deal()
    os.close(reader)
    os.close(writer)


def test_a_seed_repeats(plan):
    (first, _), (second, _) = (draw(plan, Entropy.for_tests(7)) for _ in range(2))
    assert np.array_equal(first.scale, second.scale)


@pytest.fixture
def secrets():
    """A session with one perturbation of its model."""
    net = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 12))
    session = Veil(keep_noise=True).start(fedveil.analyse(net, torch.zeros(1, 6)))
    return session, session.perturb(net)


def test_secrets_show_nothing(secrets, caplog):
    session, perturbation = secrets
    units, head = session._state.kept
    held = (session, perturbation, perturbation.recovery, perturbation.recovery.transform, units, head)
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").warning("%s %r", held, held)
    shown = f"{held} {vars(session)} {vars(perturbation)} {caplog.text}"
    assert "redacted" in shown
    assert not any(f"{number:.6g}" in shown for number in units.scale if abs(number) != 1)


@pytest.mark.parametrize(
    "leak", [pickle.dumps, copy.copy, copy.deepcopy, lambda secret: torch.save(secret, "/dev/null")]
)
def test_secrets_are_neither_pickled_nor_copied(secrets, leak):
    for secret in secrets:
        with pytest.raises(TypeError, match="never leaves the server's memory"):
            leak(secret)


def test_a_forked_process_has_no_noise_of_its_parent():
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    session = Veil().start(fedveil.analyse(net, torch.zeros(1, 2)))
    session.perturb(net)
    assert session._state.ahead
    if not (child := os.fork()):
        os._exit(len(session._state.ahead))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
