"""Nothing in the scheme is there for show: leave a term out and recovery breaks."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.oracle import batch, built, perturb, plain, worst
from tests.zoo import ZOO
from torch.nn import functional as F

import fedveil
from fedveil.scheme import client as client_module

BROKEN = 1e-3  # a million times the promise of 1e-9


@pytest.fixture
def round_():
    build, shape = ZOO["CNN"]
    model = built(build)
    inputs, targets = batch(shape)
    secret = perturb(model, fedveil.analyse(model, inputs), groups=3, entropy=fedveil.Entropy.for_tests(1))
    update = fedveil.client_step(model, secret.broadcast, inputs, targets)
    return secret, update, plain(model, inputs, targets)[0]


def dropped(update, number):
    passes = {name: stack.clone() for name, stack in update.passes.items()}
    for stack in passes.values():
        stack[number] = 0
    return dataclasses.replace(update, passes=passes)


def test_with_all_terms_the_round_is_exact(round_):
    secret, update, truth = round_
    assert worst(secret.recover([update]).gradients, truth) < 1e-9


@pytest.mark.parametrize("number", [1, 2, 3, 4], ids=["sigma 1", "sigma 2", "sigma 3", "beta"])
def test_recovery_breaks_without(round_, number):
    secret, update, truth = round_
    assert worst(secret.recover([dropped(update, number)]).gradients, truth) > BROKEN


@pytest.mark.parametrize("number", [1, 2, 3, 4], ids=["sigma 1", "sigma 2", "sigma 3", "beta"])
def test_recovery_breaks_with_the_wrong_sign_of(round_, number):
    secret, update, truth = round_
    secret.recovery.coefficients[number] *= -1
    assert worst(secret.recover([update]).gradients, truth) > BROKEN


def test_recovery_breaks_without_the_factors(round_):
    secret, update, truth = round_
    secret.recovery.transform.factors.fill_(1.0)
    assert worst(secret.recover([update]).gradients, truth) > BROKEN


def test_recovery_breaks_without_a_single_axis_factor(round_):
    secret, update, truth = round_
    entry = secret.recovery.plan.layout.trainable[2]
    secret.recovery.transform.factors[entry.start : entry.stop] = 1.0
    assert worst(secret.recover([update]).gradients, truth) > BROKEN


def test_recovery_breaks_without_the_permutation(round_):
    secret, update, truth = round_
    secret.recovery.transform.sources.copy_(torch.arange(len(secret.recovery.transform.sources)))
    assert worst(secret.recover([update]).gradients, truth) > BROKEN


def test_recovery_breaks_without_the_signs_before_batch_norm():
    model = built(ZOO["Bottleneck ResNet"][0])
    inputs, targets = batch((3, 8, 8))
    secret = perturb(model, fedveil.analyse(model, inputs), permute=False)
    update = fedveil.client_step(model, secret.broadcast, inputs, targets)
    secret.recovery.transform.factors.abs_()
    truth = plain(model, inputs, targets)[0]
    assert worst(secret.recover([update]).gradients, truth) > BROKEN


def test_scaling_before_batch_norm_in_training_mode_would_not_be_lossless():
    model = built(ZOO["Bottleneck ResNet"][0])
    inputs, targets = batch((3, 8, 8))
    plan = fedveil.analyse(model, inputs)
    plan.symmetries[plan.symmetries == 1] = 3  # let factors through where only signs may pass
    secret = perturb(model, plan, multiplicative=10.0)
    update = fedveil.client_step(model, secret.broadcast, inputs, targets)
    truth = plain(model, inputs, targets)[0]
    assert worst(secret.recover([update]).gradients, truth) > BROKEN


def float32_error(model, seed):
    inputs, targets = batch((12,), seed=seed, dtype=torch.float32)
    secret = perturb(model, fedveil.analyse(model, inputs), additive=1e3)
    update = fedveil.client_step(model, secret.broadcast, inputs, targets)
    truth = plain(built(lambda: model), inputs.double(), targets.double())[0]
    model.float()
    return worst(secret.recover([update]).gradients, truth)


def test_float32_breaks_without_the_anchor_at_large_additive_noise(monkeypatch):
    model = built(ZOO["MLP L=3"][0], dtype=torch.float32)
    assert max(float32_error(model, seed) for seed in range(5)) < 1e-4

    def literal(head, direction, partition, groups):
        return np.full(groups, -1e3)  # d = 1e3: the head goes out with its noise added, as in the paper

    monkeypatch.setattr("fedveil.scheme.perturbation.anchor", literal)
    assert min(float32_error(model, seed) for seed in range(5)) > 1e-2


def test_recovery_with_decoys_breaks_without_the_term_of_alpha(monkeypatch):
    own = client_module.cotangents

    def cut(*args):
        found = own(*args).clone()
        found[..., -1] = 0
        return found

    model, (inputs, _) = built(ZOO["MLP L=3"][0]), batch((12,))
    truth = plain(model, inputs, torch.arange(6), F.cross_entropy)[0]
    secret = perturb(model, fedveil.analyse(model, inputs), "cross_entropy")
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(client_module, "cotangents", cut)
        update = fedveil.client_step(model, secret.broadcast, inputs, torch.arange(6))
        wrong = worst(secret.recover([update]).gradients, truth)
        assert wrong > BROKEN if broken else wrong < 1e-9
