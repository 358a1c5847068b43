"""The paper's theorems, on what a client computes."""

import math

import numpy as np
import pytest
import torch
from tests.oracle import batch, built, perturb, perturb_known, plain
from torch import nn

import fedveil
from fedveil.models import mlp


def units(known, name):
    """Factor and source of each row of a weight."""
    plan = known.perturbation.recovery.plan
    entry = next(entry for entry in plan.layout.entries if entry.name == name)
    rows, columns = entry.shape
    scale, order = (side[0, entry.start : entry.stop : columns].numpy() for side in (plan.pool.scale, plan.pool.order))
    moved = plan.slots.shifts(known.units.members)[order] // columns
    return torch.from_numpy(known.units.scale[plan.slots.unit[scale]]), torch.arange(rows) + torch.from_numpy(moved)


def hidden_outputs(model, inputs):
    seen = []
    for module in model:
        inputs = module(inputs)
        if isinstance(module, nn.ReLU):
            seen.append(inputs)
    return seen, inputs


@pytest.mark.parametrize("permute", [True, False])
def test_theorem_1_hidden_outputs_are_scaled_and_final_ones_shifted_by_alpha_r(permute):
    model = built(lambda: mlp(7, 5, layers=3, hidden=9))
    inputs, _ = batch((7,))
    known = perturb_known(model, fedveil.analyse(model, inputs), groups=3, multiplicative=10.0, permute=permute)
    broadcast = known.perturbation.broadcast
    view = fedveil.client_view(model, broadcast)
    true_hidden, true = hidden_outputs(model, inputs)
    veiled_hidden, veiled = hidden_outputs(view, inputs)
    for layer, (y, y_veiled) in enumerate(zip(true_hidden, veiled_hidden, strict=True)):
        r, source = units(known, f"{2 * layer}.weight")
        assert permute == (not torch.equal(source, torch.arange(9)))
        torch.testing.assert_close(y_veiled, r * y[:, source])
    alpha = float(broadcast.head.noisy_bias) + veiled_hidden[-1].sum(1, keepdim=True)
    r = known.gamma * known.head.direction
    torch.testing.assert_close(veiled, true + alpha * r)


def test_theorem_2_the_perturbed_gradient_is_the_true_one_scaled_plus_r_sigma_minus_v_beta():
    model = built(lambda: mlp(4, 3, layers=2, hidden=5, bias=False))
    inputs, targets = batch((4,), 3, samples=1)
    known = perturb_known(model, fedveil.analyse(model, inputs), groups=2, permute=False)
    recovery = known.perturbation.recovery
    view = fedveil.client_view(model, known.perturbation.broadcast)
    weights = list(view.parameters())
    hidden, y = hidden_outputs(view, inputs)
    alpha = hidden[-1].sum()
    delta = (y - targets)[0]
    gradient = torch.autograd.grad(0.5 * (y - targets).pow(2).sum(), weights, retain_graph=True)
    dalpha = torch.autograd.grad(alpha, weights, retain_graph=True, materialize_grads=True)
    dy = [torch.autograd.grad(out, weights, retain_graph=True) for out in y[0]]  # d y_i / d parameter
    r = known.gamma * known.head.direction
    R = [recovery.transform.factors[e.start : e.stop].view(e.shape) for e in recovery.plan.layout.trainable]
    truth = plain(model, inputs, targets)[0].values()
    for layer, true in enumerate(truth):
        sigma = [alpha * dy[i][layer] + delta[i] * dalpha[layer] for i in range(3)]
        beta = alpha * dalpha[layer]
        expected = true / R[layer] + sum(r[i] * sigma[i] for i in range(3)) - r.dot(r) * beta
        torch.testing.assert_close(gradient[layer], expected)


@pytest.mark.parametrize("groups", [1, 2, 5, 10])
def test_theorem_4_with_large_noise_predictions_agree_as_often_as_chance(groups):
    """1/n_L on average over secrets, for every m, and so on at most 1/m.

    One secret gives one constant class (but where two outputs' noise nearly ties), right for all samples of that
    class: any share of the classes, 0 to 1.
    """
    model = built(lambda: mlp(12, 10, layers=2, hidden=32))
    inputs, _ = batch((12,), samples=300)
    plan = fedveil.analyse(model, inputs)
    truth = model(inputs).argmax(1)
    shares, constant = [], []
    for seed in range(400):
        entropy = fedveil.Entropy.for_tests(1000 * groups + seed)
        secret = perturb(model, plan, groups=groups, additive=100.0, entropy=entropy)
        view = fedveil.client_view(model, secret.broadcast)
        answers = view(inputs).argmax(1)
        constant.append(len(answers.unique()) == 1)
        shares.append(float((answers == truth).double().mean()))
    mean, spread = np.mean(shares), 3 * np.std(shares, ddof=1) / math.sqrt(len(shares))
    assert np.mean(constant) > 0.9
    assert abs(mean - 1 / 10) < spread
    assert mean < 1 / groups + spread
