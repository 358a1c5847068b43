"""Noise: its distribution and source, new in every round; the anchor, and decoys among which no simple rule tells."""

import itertools
import math
import os

import numpy as np
import pytest
import torch
from tests.oracle import batch, built, perturb, plain, planned, squared_error, worst
from torch import nn
from torch.nn import functional as F

import fedveil
from fedveil import Entropy, Veil
from fedveil.models import mlp
from fedveil.scheme.noise import anchor


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


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("zeros", [False, True])
def test_few_outputs_and_a_bias_without_noise_are_exact(outputs, zeros):
    model = built(lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, outputs)))
    if zeros:
        torch.nn.init.zeros_(model[-1].bias)
    inputs, targets = batch((5,), outputs)[0], (torch.arange(6 * outputs).view(6, outputs) % 2).double()
    losses = {
        "binary_cross_entropy": lambda y, t: F.binary_cross_entropy_with_logits(y, t, reduction="sum") / 6,
        "squared_error": squared_error,
    }
    for groups, (loss, value) in itertools.product(range(1, outputs + 1), losses.items()):
        secret = perturb(model, planned(model, inputs), loss, groups=groups, additive=1e5)
        update = fedveil.client_step(model, secret.broadcast, inputs, targets)
        if zeros:  # noise on it would be the noise itself
            assert not secret.broadcast.head.noisy_bias
            assert not secret.broadcast.parameters["2.bias"].any()
        assert worst(secret.recover([update]).gradients, plain(model, inputs, targets, value)[0]) < 1e-9


@pytest.fixture
def case():
    model = built(lambda: mlp(5, 4, layers=2, hidden=16))
    inputs, _ = batch((5,), 4)
    return model, inputs, torch.arange(6) % 4


def test_another_candidates_pass_is_not_the_gradient(case):
    model, inputs, labels = case
    secret = perturb(model, planned(model, inputs), "cross_entropy", decoys=3, entropy=Entropy.for_tests(0))
    update, truth = fedveil.client_step(model, secret.broadcast, inputs, labels), plain(*case, F.cross_entropy)[0]
    true = secret.recovery.coefficients.index(1.0)
    for place in range(4):
        secret.recovery.coefficients[:] = [float(number == place) for number in range(4)]
        off = worst(secret.recover([update]).gradients, truth)
        assert off < 1e-9 if place == true else off > 1e-3


def test_the_true_one_has_any_place_and_is_not_named(case):
    plan = planned(case[0], case[1])
    places = []
    for _ in range(300):
        secret = perturb(case[0], plan, "cross_entropy", decoys=2)
        broadcast = secret.broadcast
        assert broadcast.head.candidates.shape == (3, 1)
        assert len(broadcast.head.candidates.unique()) == 3
        places.append(secret.recovery.coefficients.index(1.0))
    counts = np.bincount(places, minlength=3)
    assert ((counts - 100) ** 2 / 100).sum() < 18.4  # chi square with two degrees of freedom at 0.01 %


def implied(broadcast):
    """The heads that candidates imply, a bias as last column; in float64."""
    head = broadcast.head
    base = broadcast.parameters[head.weight]
    if head.noisy_bias:
        base = torch.cat([base, broadcast.parameters[head.bias].unsqueeze(1)], 1)
    noise = head.candidates[:, head.partition] * head.direction.double()
    return base.double().numpy(), (base.double() - noise.unsqueeze(2)).numpy()


def on_the_grid(base, heads):
    """How far from float32's grid the implied numbers are, where base has finer digits."""
    fine = np.abs(base) < np.abs(heads) / 8
    digits = np.spacing(np.abs(heads).astype(np.float32)).astype(np.float64)
    off = np.abs(heads / digits - np.round(heads / digits))
    return np.where(fine, off, 0.0).sum((1, 2)) / np.maximum(1, fine.sum((1, 2)))


RULES = {
    "nearest to zero": lambda c, base, heads: (c * c).sum(1),
    "smallest norm": lambda c, base, heads: (heads**2).sum((1, 2)),
    "smallest column sums": lambda c, base, heads: (heads.sum(1) ** 2).sum(1),
    "largest column sums": lambda c, base, heads: -(heads.sum(1) ** 2).sum(1),
    "rounding": lambda c, base, heads: on_the_grid(base, heads),
}


def trained(steps, seed=0):
    """A head that cross-entropy trained by Adam, whose columns then lean to one side."""
    model = built(lambda: mlp(20, 10, layers=2, hidden=48), seed, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(400, 20, generator=generator)
    labels = (inputs[:, :10] + 0.5 * torch.randn(400, 10, generator=generator)).argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


SECRETS = 500


@pytest.mark.parametrize("steps", [0, 150], ids=["new", "trained"])
@pytest.mark.parametrize("groups", [1, 10])
def test_simple_rules_pick_the_true_offset_hardly_more_often_than_chance(steps, groups):
    hits = dict.fromkeys(RULES, 0)
    random = np.random.default_rng(0)
    for seed in range(2):
        model = trained(steps, seed)
        plan = planned(model, torch.zeros(2, 20))
        for _ in range(SECRETS // 2):
            secret = perturb(model, plan, "cross_entropy", groups=groups, decoys=1)
            broadcast = secret.broadcast
            base, heads = implied(broadcast)
            place = secret.recovery.coefficients.index(1.0)
            for name, rule in RULES.items():
                score = rule(broadcast.head.candidates.numpy(), base, heads)
                found = score.argmin() if abs(score[0] - score[1]) > 1e-6 * abs(score).max() else random.integers(2)
                hits[name] += int(found) == place
    for name, count in hits.items():  # 0.06 above chance, and 3.3 standard deviations of 500 draws
        assert count / SECRETS < 0.56 + 3.3 * 0.5 / math.sqrt(SECRETS), (name, count / SECRETS)


def test_the_rule_of_rounding_would_tell_without_the_blur(monkeypatch):
    """A planted signal: where numbers are not blurred, the rule finds the true offset."""
    monkeypatch.setattr("fedveil.scheme.perturbation._blur", lambda base, V, dtype, entropy: base)
    model = trained(0)
    hits = 0
    for _ in range(200):
        secret = perturb(model, planned(model, torch.zeros(2, 20)), "cross_entropy", decoys=1)
        base, heads = implied(secret.broadcast)
        hits += int(on_the_grid(base, heads).argmin()) == secret.recovery.coefficients.index(1.0)
    assert hits > 100 + 3.3 * 0.5 * math.sqrt(200)  # 3.3 standard deviations above chance; about 149 are expected


def test_decoys_of_more_groups_differ_in_one_direction_in_which_column_sums_stay():
    model = built(lambda: mlp(20, 10, layers=2, hidden=48))
    secret = perturb(model, planned(model, torch.zeros(2, 20).double()), "cross_entropy", groups=4, decoys=5)
    head = secret.broadcast.head
    apart = head.candidates[1:] - head.candidates[0]
    values = torch.linalg.svdvals(apart)
    assert values[1] < 1e-5 * values[0]  # candidates are rounded to 24 digits behind their standard error's
    moved = (apart[:, head.partition] * head.direction).sum(1)
    assert moved.abs().max() < 1e-5 * apart.abs().max()


@pytest.mark.parametrize("value", [0.0, 1e30, math.inf, math.nan])
def test_a_head_of_zeros_or_a_model_that_diverged_leaves_nothing_behind(case, value):
    model, inputs, labels = case
    plan = planned(model, inputs)
    broken = built(lambda: mlp(5, 4, layers=2, hidden=16))
    with torch.no_grad():
        broken[-1].weight.mul_(value)
    session = fedveil.Veil(decoys=40).start(plan, "cross_entropy")
    session.perturb(broken)
    secret = session.perturb(model)
    update = fedveil.client_step(model, secret.broadcast, inputs, labels)
    truth = plain(model, inputs, labels, F.cross_entropy)[0]
    assert worst(secret.recover([update]).gradients, truth) < 1e-9


def test_the_anchor_follows_what_is_added_along_the_direction():
    rng = np.random.default_rng(0)
    head, direction = rng.normal(size=(6, 20)), rng.uniform(0.5, 2, 6)
    partition, added = np.array([0, 1, 2, 0, 1, 2]), np.array([3.0, -7.0, 1e3])
    before = anchor(head, direction, partition, 3)
    after = anchor(head + (added[partition] * direction)[:, None], direction, partition, 3)
    np.testing.assert_allclose(after - before, added, rtol=1e-10)
