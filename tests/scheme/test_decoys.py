"""The true offset among decoys: exact for any loss, nothing else recovers, and no simple rule tells which it is."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.networks import networks
from tests.oracle import batch, built, perturb, planned, worst
from torch import nn
from torch.nn import functional as F

import fedveil
from fedveil import BatchLoss, errors
from fedveil.models import mlp
from fedveil.scheme import client as client_module
from fedveil.scheme.decoys import draw_candidates


def contrastive(outputs, targets):
    """Neighbours in the batch together, all others apart."""
    near = (outputs.unsqueeze(0) - outputs.unsqueeze(1)).square().sum(2)
    same = (targets.unsqueeze(0) == targets.unsqueeze(1)).to(outputs.dtype)
    return (same * near + (1 - same) * (1 - near).relu()).mean()


LOSSES = {
    "cross_entropy": lambda y, t: F.cross_entropy(y, t),
    "hinge": lambda y, t: y.shape[1] * F.multi_margin_loss(y, t),
    "contrastive": contrastive,
}


def plain(model, loss, inputs, labels):
    wanted = dict(model.named_parameters())
    state = {name: b.clone() for name, b in model.named_buffers()}
    found = torch.autograd.grad(LOSSES[loss](model(inputs), labels), list(wanted.values()))
    model.load_state_dict(state, strict=False)
    return dict(zip(wanted, found, strict=True))


def round_of(model, loss, inputs, labels, seed=0, **noise):
    asked = BatchLoss(contrastive) if loss == "contrastive" else loss
    secret = perturb(model, planned(model, inputs), asked, entropy=fedveil.Entropy.for_tests(seed), **noise)
    return secret, fedveil.client_step(model, secret.broadcast, inputs, labels)


@given(
    network=networks(),
    loss=st.sampled_from(sorted(LOSSES)),
    groups=st.integers(1, 4),
    decoys=st.integers(1, 4),
    additive=st.sampled_from([1e-3, 1.0, 1e6]),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_network_and_loss_recover_the_plain_gradient(network, loss, groups, decoys, additive, seed):
    model, shape = network
    inputs, _ = batch(shape, outputs=4, samples=5, seed=seed % 2**32)
    labels = torch.arange(5) % 4
    truth = plain(model, loss, inputs, labels)
    secret, update = round_of(model, loss, inputs, labels, seed, groups=groups, decoys=decoys, additive=additive)
    found = secret.recover([update]).gradients
    total = torch.stack([g.norm() for g in truth.values()]).norm()
    for key, g in truth.items():
        assert (found[key] - g).norm() <= 1e-9 * g.norm() + 1e-12 * total, (key, model)


@pytest.fixture
def case():
    model = built(lambda: mlp(5, 4, layers=2, hidden=16))
    inputs, _ = batch((5,), 4)
    return model, inputs, torch.arange(6) % 4


@pytest.mark.parametrize("loss", LOSSES)
def test_another_candidates_pass_is_not_the_gradient(case, loss):
    secret, update = round_of(*case[:1], loss, *case[1:], decoys=3)
    truth = plain(case[0], loss, *case[1:])
    true = secret.recovery.coefficients.index(1.0)
    for place in range(4):
        secret.recovery.coefficients[:] = [float(number == place) for number in range(4)]
        off = worst(secret.recover([update]).gradients, truth)
        assert off < 1e-9 if place == true else off > 1e-3


def test_without_the_term_of_alpha_recovery_breaks(case, monkeypatch):
    own = client_module.cotangents

    def cut(*args):
        found = own(*args).clone()
        found[..., -1] = 0
        return found

    monkeypatch.setattr(client_module, "cotangents", cut)
    secret, update = round_of(case[0], "cross_entropy", *case[1:])
    assert worst(secret.recover([update]).gradients, plain(case[0], "cross_entropy", *case[1:])) > 1e-3


def test_a_bias_of_zeros_is_sent_without_noise_and_recovered(case):
    model, inputs, labels = case
    with torch.no_grad():
        model[-1].bias.zero_()
    truth = plain(model, "cross_entropy", inputs, labels)
    for settings in ({}, {"groups": 3}):
        secret = perturb(model, planned(model, inputs), "cross_entropy", additive=1e4, **settings)
        broadcast = secret.broadcast
        assert not broadcast.head.masked_bias
        assert not broadcast.parameters[broadcast.head.bias].any()
        found = secret.recover([fedveil.client_step(model, broadcast, inputs, labels)]).gradients
        assert worst(found, truth) < 1e-6
    targets = batch((5,), 4)[1]
    secret = perturb(model, planned(model, inputs), groups=2)
    found = secret.recover([fedveil.client_step(model, secret.broadcast, inputs, targets)])
    residual = 0.5 * (model(inputs) - targets).square().sum(1).mean()
    expected = torch.autograd.grad(residual, list(model.parameters()))
    assert worst(found.gradients, dict(zip(dict(model.named_parameters()), expected, strict=True))) < 1e-9


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


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_pass_that_is_not_finite_is_refused_whether_it_counts_or_not(case, place, value):
    secret, update = round_of(case[0], "cross_entropy", *case[1:], decoys=2)
    passes = {name: stack.clone() for name, stack in update.passes.items()}
    passes["0.weight"][place, 0, 0] = value
    with pytest.raises(errors.NonFiniteUpdate, match=r"client 0: 0\.weight holds NaN or infinity"):
        secret.recover([dataclasses.replace(update, passes=passes)])


def implied(broadcast):
    """The heads that candidates imply, a bias as last column; in float64."""
    head = broadcast.head
    base = broadcast.parameters[head.weight]
    if head.masked_bias:
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
    monkeypatch.setattr("fedveil.scheme.perturb._blur", lambda base, V, dtype, entropy: base)
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


def test_a_head_of_zeros_and_one_column_have_decoys_too():
    entropy = fedveil.Entropy.for_tests(0)
    rows = np.array([[0.5, -0.5, 1.0, -1.0]])
    for covered in (np.zeros((4, 6)), np.ones((4, 1))):
        columns = covered.shape[1]
        found = draw_candidates([], covered, np.ones(columns), rows, np.zeros(1), 3, False, entropy)
        assert found.shape == (4, 1)
        assert np.isfinite(found).all()


@pytest.mark.parametrize("outputs", [1, 2])
def test_few_outputs_are_exact(outputs):
    model = built(lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, outputs, bias=outputs == 1)))
    inputs, _ = batch((5,), outputs)
    targets = (torch.arange(6 * outputs).view(6, outputs) % 2).double()
    value = F.binary_cross_entropy_with_logits(model(inputs), targets, reduction="sum") / 6
    truth = dict(zip(dict(model.named_parameters()), torch.autograd.grad(value, list(model.parameters())), strict=True))
    for groups in range(1, outputs + 1):
        secret = perturb(model, planned(model, inputs), "binary_cross_entropy", groups=groups, additive=1e5)
        update = fedveil.client_step(model, secret.broadcast, inputs, targets)
        assert worst(secret.recover([update]).gradients, truth) < 1e-9


@pytest.mark.parametrize("value", [1e30, math.inf, math.nan])
def test_a_model_that_diverged_leaves_nothing_behind(case, value):
    model, inputs, labels = case
    plan = planned(model, inputs)
    broken = built(lambda: mlp(5, 4, layers=2, hidden=16))
    with torch.no_grad():
        broken[-1].weight.mul_(value)
    session = fedveil.Veil(decoys=40).start(plan, "cross_entropy")
    session.perturb(broken)
    secret = session.perturb(model)
    update = fedveil.client_step(model, secret.broadcast, inputs, labels)
    truth = plain(model, "cross_entropy", inputs, labels)
    assert worst(secret.recover([update]).gradients, truth) < 1e-9


def test_nothing_that_says_which_one_is_true_prints(case):
    secret, _ = round_of(case[0], "cross_entropy", *case[1:])
    for thing in (secret, secret.recovery):
        assert "1.0" not in repr(thing)
        assert "coefficients" not in repr(thing)
