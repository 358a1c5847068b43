"""Nothing in the scheme is there for show: leave a term out and recovery breaks."""

import numpy as np
import pytest
import torch
from tests.oracle import answered, batch, built, perturb, plain, worst
from tests.zoo import ZOO
from torch.nn import functional as F

import fedveil
from fedveil.scheme import client as client_module

BROKEN = 1e-3  # a million times the promise of 1e-9


def error_after(name, change=lambda secret, update: None, tamper=lambda plan: None, **settings):
    """The worst error of a parameter after a change of the secret or the update, or under another plan."""
    secret, update, truth = answered(built(ZOO[name][0]), *batch(ZOO[name][1]), tamper, **settings)
    change(secret, update)
    return worst(secret.recover([update]).gradients, truth)


def drop_pass(number):
    return lambda secret, update: [stack[number].zero_() for stack in update.passes.values()]


def flip_coefficient(number):
    def flip(secret, update):
        secret.recovery.coefficients[number] *= -1

    return flip


def drop_factors(secret, update, entry=None):
    start, stop = (entry.start, entry.stop) if entry else (0, None)
    secret.recovery.transform.factors[start:stop] = 1.0


def drop_permutation(secret, update):
    sources = secret.recovery.transform.sources
    sources.copy_(torch.arange(len(sources)))


NAMES = ("sigma 1", "sigma 2", "sigma 3", "beta")
CHANGES = {
    **{name: drop_pass(number) for number, name in enumerate(NAMES, 1)},
    **{f"the sign of {name}": flip_coefficient(number) for number, name in enumerate(NAMES, 1)},
    "the factors": drop_factors,
    "a single axis factor": lambda secret, u: drop_factors(secret, u, secret.recovery.plan.layout.trainable[2]),
    "the permutation": drop_permutation,
}


@pytest.mark.parametrize("name", CHANGES)
def test_recovery_breaks_without(name):
    assert error_after("CNN", groups=3) < 1e-9
    assert error_after("CNN", CHANGES[name], groups=3) > BROKEN


def test_recovery_breaks_without_the_signs_before_batch_norm():
    def drop_signs(secret, update):
        secret.recovery.transform.factors.abs_()

    assert error_after("Bottleneck ResNet", drop_signs, permute=False) > BROKEN


def test_scaling_before_batch_norm_in_training_mode_would_not_be_lossless():
    def let_factors_through(plan):
        plan.symmetries[plan.symmetries == 1] = 3  # where only signs may pass

    assert error_after("Bottleneck ResNet", tamper=let_factors_through, multiplicative=10.0) > BROKEN


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
