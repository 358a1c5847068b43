"""One broadcast is enough if most of the true outputs are close to 0, even if the noise is kept across rounds."""

import dataclasses
import math

import pytest
import torch
from tests.attacks.victims import DIGITS, OUTPUTS, build_victim, chance, observe_broadcasts
from tests.oracle import built
from torch import nn

from fedveil.attacks import likely_outputs, veil
from fedveil.attacks.likely_outputs import (
    fake_inputs,
    fit_fake_inputs,
    fit_one_large_output,
    fit_own_inputs,
    fit_sparse_outputs,
    image_shape,
    weighted_median,
)
from fedveil.attacks.observation import DoesNotApply
from fedveil.defences import Plain, Veil
from fedveil.federation.evaluate import predict
from fedveil.models import mlp
from fedveil.scheme import CrossEntropy, Entropy, SquaredError


def trained(loss=None):
    """An MLP that has learnt digits, and its records."""
    net, rows = built(lambda: mlp(64, 10), dtype=torch.float32), slice(300)
    inputs, labels = DIGITS.train.inputs[rows], DIGITS.train.targets[rows]
    targets, optimizer = nn.functional.one_hot(labels, 10).float(), torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        outputs = net(inputs)
        (loss.values(outputs, targets).mean() if loss else (outputs - targets).square().mean()).backward()
        optimizer.step()
    return net.double(), inputs.double(), targets.double()


def error(observed, model):
    truth = predict(model, observed.inputs)
    return float((predict(observed.model, observed.inputs) - truth).norm() / truth.norm())


def agreement(observed, model):
    inputs = DIGITS.test.inputs.double()
    return float((predict(observed.model, inputs).argmax(1) == predict(model, inputs).argmax(1)).double().mean())


def test_the_weighted_median_minimises_the_weighted_distances():
    rng = chance()
    values, weights = torch.randn(101, generator=rng), torch.rand(101, generator=rng)
    cost = (weights * (values[:, None] - values).abs()).sum(1)  # a minimum is at one of the values
    assert float(weighted_median(values, weights)) == float(values[cost.argmin()])


def test_a_large_output_of_every_record_shifts_the_median_and_not_the_mixture():
    """Of 10 outputs with noise of scale 1, one is 8: the median m of all is where 0.9 F(m) = 1 / 2, at 0.118."""
    rng, count, rows = chance(), 20_000, torch.eye(10, dtype=torch.float64)
    uniform = torch.rand(count, 10, generator=rng, dtype=torch.float64) - 0.5
    true = -uniform.sign() * torch.log1p(-2 * uniform.abs()).clamp_min(-100)  # Laplace distribution
    true[torch.arange(count), torch.randint(10, (count,), generator=rng)] += 8
    noise, alpha = torch.linspace(-50, 50, 10, dtype=torch.float64), torch.ones(count, 1, dtype=torch.float64)
    error, shift = 5 / count**0.5, -math.log(2 * (1 - 0.5 / 0.9))  # five standard errors of a median
    assert ((fit_one_large_output(true + noise, alpha, rows) - noise).abs() < error).all()
    assert (fit_sparse_outputs(true + noise, alpha, rows) - noise > shift - error).all()


@pytest.mark.parametrize("groups", [1, OUTPUTS])
def test_outputs_that_are_mostly_zero_reveal_the_noise_exactly_and_others_do_not(groups):
    """The head of `sparse` has one row that is not 0: 4 of 5 outputs are 0 for all inputs."""
    model, inputs, outputs = build_victim("mlp")
    observed = []
    for kept in (1, OUTPUTS):
        with torch.no_grad():
            head = [one for one in model.modules() if isinstance(one, nn.Linear)][-1]
            rows = torch.arange(OUTPUTS) >= (OUTPUTS - kept)
            wanted = head.weight * rows[:, None] if kept == 1 else torch.ones_like(head.weight)
            head.weight.copy_(wanted)
            head.bias.copy_(head.bias * rows if kept == 1 else torch.ones_like(head.bias))
        defence = Veil(groups=groups, additive=100.0, keep_noise=True, entropy=Entropy.for_tests(3))
        seen = observe_broadcasts(defence, model, inputs, outputs, SquaredError())
        observed.append((error(fit_own_inputs(seen), model), error(veil.remove_offset(seen), model)))
    (sparse, before), (dense, _) = observed
    alone = groups == OUTPUTS  # then one group belongs to the output that is not 0, and nothing reveals its noise
    assert (sparse > 1e-3) if alone else (sparse < 1e-9 < before)
    assert dense > 0.1


@pytest.mark.parametrize("groups", [1, 10])
def test_a_trained_classifier_with_kept_noise_is_recovered_from_one_broadcast(groups):
    model, inputs, targets = trained()
    defence = Veil(groups=groups, keep_noise=True, entropy=Entropy.for_tests(1))
    seen = observe_broadcasts(defence, model, inputs, targets, SquaredError())
    one = dataclasses.replace(seen, rounds=seen.rounds[-1:], targets=torch.zeros_like(seen.targets))
    assert agreement(seen, model) < 0.5
    assert agreement(fit_own_inputs(one), model) > 0.95
    assert agreement(fit_fake_inputs(one), model) > 0.8
    blind = dataclasses.replace(one, inputs=torch.rand(2, 64, generator=chance()).double())  # range and shape only
    assert agreement(fit_fake_inputs(blind), model) > 0.8


def test_with_decoys_the_candidate_with_certain_answers_is_the_true_one():
    model, inputs, targets = trained(CrossEntropy())
    for seed in range(3):
        defence = Veil(decoys=3, additive=30.0, entropy=Entropy.for_tests(seed))
        seen = observe_broadcasts(defence, model, inputs, targets, CrossEntropy())
        errors = [
            error(dataclasses.replace(seen, model=one), model)
            for one in veil.candidate_models(seen, seen.rounds[-1].broadcast)
        ]
        assert error(fit_own_inputs(seen), model) == min(errors) < 1e-9
        with pytest.raises(DoesNotApply, match="the attack needs squared error"):
            fit_fake_inputs(seen)


def test_a_head_without_noise_and_a_single_output_are_refused():
    model, inputs, outputs = build_victim("mlp")
    for attack in (fit_own_inputs, fit_fake_inputs):
        with pytest.raises(DoesNotApply, match="not veiled"):
            attack(observe_broadcasts(Plain(), model, inputs, outputs, SquaredError()))
    single = built(lambda: mlp(12, 1, hidden=16))
    seen = observe_broadcasts(Veil(decoys=1), single, inputs, outputs[:, :1], SquaredError())
    with pytest.raises(DoesNotApply, match="one output per class"):
        fit_own_inputs(seen)


def test_made_up_images_have_the_given_range_and_a_spectrum_like_photographs():
    images = fake_inputs(torch.Size((3 * 16 * 16,)), 400, -1.0, 2.0)
    assert images.shape == (400, 768)
    assert torch.allclose(images.amin(1), torch.tensor(-1.0))
    assert torch.allclose(images.amax(1), torch.tensor(2.0))
    power = torch.fft.fft2(images.reshape(400, 3, 16, 16)).abs().square().mean((0, 1))
    assert float(power[0, 1] / power[0, 4]) == pytest.approx(4.0 ** (2 * likely_outputs.DECAY), rel=0.3)
    assert image_shape(torch.Size((64,))) == (1, 8, 8)
    assert image_shape(torch.Size((3, 5, 7))) == (3, 5, 7)
    assert image_shape(torch.Size((10,))) is None
    assert fake_inputs(torch.Size((10,)), 5, 0.0, 1.0).shape == (5, 10)
    assert torch.equal(likely_outputs.fake_inputs(torch.Size((9,)), 3, 0, 1), fake_inputs(torch.Size((9,)), 3, 0, 1))
