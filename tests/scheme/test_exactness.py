"""Recovered gradients equal plain autograd on the true model."""

import itertools
import statistics

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.networks import networks
from tests.oracle import (
    Network,
    assert_close,
    batch,
    built,
    contrastive,
    perturb,
    plain,
    squared_error,
    veiled_round,
    worst,
)
from tests.zoo import ZOO
from torch import nn
from torch.nn import functional as F

import fedveil

FLOAT64 = 1e-9  # the project's promise, with room for the 1e-6 floor of a parameter whose true gradient is 0
TIMES_PLAIN = 10  # float32: recovered against plain float32 autograd, both measured from float64
NOISES = list(itertools.product((1e-3, 1.0, 1e3, 1e6), (2.0, 10.0, 100.0)))


@pytest.mark.parametrize("name", ZOO)
def test_float64_gradients_and_buffers_are_the_plain_ones_at_every_noise(name):
    build, shape = ZOO[name]
    model = built(build)
    inputs, targets = batch(shape)
    gradients, buffers = plain(model, inputs, targets)
    for groups, (additive, multiplicative) in itertools.product((1, 3, 10), NOISES):
        noise = {"groups": groups, "additive": additive, "multiplicative": multiplicative}
        recovered = veiled_round(model, inputs, targets, seed=0, **noise)
        assert worst(recovered.gradients, gradients) <= FLOAT64, noise
        assert set(recovered.buffers) == set(buffers)
        for key, value in buffers.items():
            torch.testing.assert_close(recovered.buffers[key], value, rtol=1e-12, atol=1e-12)


def float32_ratio(build, shape, seed, **noise):
    """Error of the veiled round over that of plain autograd, both in float32 against float64."""
    model = built(build, seed, torch.float32)
    inputs, targets = batch(shape, seed=seed, dtype=torch.float32)
    truth, _ = plain(built(lambda: model, dtype=torch.float64), inputs.double(), targets.double())
    model = model.float()
    own, _ = plain(model, inputs, targets)
    return worst(veiled_round(model, inputs, targets, seed=seed, **noise).gradients, truth) / worst(own, truth)


HARD = [(3, 1e6, 100.0)]
OTHERS = [[(1, 1.0, 10.0)], [(10, 1e3, 2.0)], *[[(groups, *sizes) for sizes in NOISES] for groups in (1, 10)]]


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("noises", [HARD, *[pytest.param(noises, marks=pytest.mark.slow) for noises in OTHERS]])
def test_float32_is_as_exact_as_plain_autograd(name, noises):
    for groups, additive, multiplicative in noises:
        noise = {"groups": groups, "additive": additive, "multiplicative": multiplicative}
        ratios = [float32_ratio(*ZOO[name], seed, **noise) for seed in range(5)]
        assert statistics.median(ratios) <= TIMES_PLAIN, (noise, ratios)


LOSSES = {
    "squared_error": (squared_error, "squared_error"),
    "cross_entropy": (F.cross_entropy, "cross_entropy"),
    "hinge": (lambda y, t: y.shape[1] * F.multi_margin_loss(y, t), "hinge"),
    "contrastive": (contrastive, fedveil.BatchLoss(contrastive)),
}


@settings(max_examples=2 * settings().max_examples)
@given(
    network=networks(),
    loss=st.sampled_from(["squared_error", *LOSSES]),  # the paper's terms twice as often
    groups=st.integers(1, 4),
    decoys=st.integers(1, 4),
    additive=st.sampled_from([1e-3, 1.0, 1e3, 1e6]),
    multiplicative=st.sampled_from([1.0, 2.0, 10.0, 100.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_network_and_loss_recover_the_plain_gradient(network, loss, groups, decoys, additive, multiplicative, seed):
    (model, shape), (value, asked) = network, LOSSES[loss]
    inputs, targets = batch(shape, outputs=4, samples=5, seed=seed % 2**32)
    noise = {"groups": groups, "additive": additive, "multiplicative": multiplicative, "loss": asked}
    if loss != "squared_error":
        targets, noise["decoys"] = torch.arange(5) % 4, decoys
    gradients, buffers = plain(model, inputs, targets, value)
    assume(max(float(g.norm()) for g in gradients.values()) > 1e-14)  # else it is rounding errors: outputs are constant
    recovered = veiled_round(model, inputs, targets, seed=seed, **noise)
    assert_close(recovered.gradients, gradients)
    for key, value in buffers.items():
        torch.testing.assert_close(recovered.buffers[key], value, rtol=1e-9, atol=1e-12)


def test_clients_are_weighted_by_their_samples_or_by_given_weights():
    model = built(ZOO["CNN"][0])
    data = [batch(ZOO["CNN"][1], samples=n, seed=n) for n in (3, 7, 13)]
    secret = perturb(model, fedveil.analyse(model, data[0][0]), groups=2)
    updates = [fedveil.client_step(model, secret.broadcast, *part) for part in data]
    together = tuple(torch.cat(parts) for parts in zip(*data, strict=True))
    assert worst(secret.recover(updates).gradients, plain(model, *together)[0]) < FLOAT64
    parts = [plain(model, *part)[0] for part in data]
    mean = {name: (parts[0][name] + 5 * parts[1][name]) / 6 for name in parts[0]}
    assert worst(secret.recover(updates, weights=[10, 50, 0]).gradients, mean) < FLOAT64


@pytest.mark.parametrize("name", ["MLP L=3", "CNN", "tanh"])
def test_batches_of_several_clients_go_through_one_weighted_step(name):
    build, shape = ZOO[name]
    model = built(build)
    data = [batch(shape, samples=n, seed=n) for n in (3, 7)]
    secret = perturb(model, fedveil.analyse(model, data[0][0]), groups=2, entropy=fedveil.Entropy.for_tests(0))
    apart = secret.recover([fedveil.client_step(model, secret.broadcast, *part) for part in data], weights=[10, 30])
    weights = torch.tensor([0.25 / 3] * 3 + [0.75 / 7] * 7, dtype=torch.float64)
    together = (torch.cat(parts) for parts in zip(*data, strict=True))
    fused = secret.recover([fedveil.client_step(model, secret.broadcast, *together, weights=weights)])
    assert worst(fused.gradients, apart.gradients) < FLOAT64


def test_batch_norm_statistics_are_averaged_over_clients_as_plain_fedavg_does():
    model = built(ZOO["Bottleneck ResNet"][0])
    data = [batch((3, 8, 8), samples=n, seed=n) for n in (4, 8)]
    secret = perturb(model, fedveil.analyse(model, data[0][0]))
    recovered = secret.recover([fedveil.client_step(model, secret.broadcast, *part) for part in data])
    first, second = (plain(model, *part)[1] for part in data)
    for name, value in recovered.buffers.items():
        if name.endswith("num_batches_tracked"):
            assert value == first[name] == second[name]
        else:
            torch.testing.assert_close(value, (first[name] + 2 * second[name]) / 3)


def test_eval_mode_uses_and_keeps_the_stored_statistics():
    model = built(ZOO["ResNet20, BatchNorm"][0])
    inputs, targets = batch((3, 8, 8))
    for _ in range(3):
        model(inputs)
    model.eval()
    assert {axis.symmetry.words for axis in fedveil.analyse(model, inputs).axes} == {"any", "positive"}
    gradients, buffers = plain(model, inputs, targets)
    recovered = veiled_round(model, inputs, targets, seed=0, multiplicative=100.0)
    assert worst(recovered.gradients, gradients) < FLOAT64
    for name, value in buffers.items():
        torch.testing.assert_close(recovered.buffers[name], value)


@pytest.mark.parametrize("trained", [{"0.weight"}, {"11.weight"}, {"3.weight", "3.bias", "11.bias"}], ids=str)
def test_frozen_parameters_are_veiled_but_get_no_gradient(trained):
    model = built(ZOO["CNN"][0])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    inputs, targets = batch((3, 8, 8))
    secret = perturb(model, fedveil.analyse(model, inputs), groups=3)
    sent = secret.broadcast.parameters.items()
    assert not any(torch.allclose(value, model.get_parameter(name)) for name, value in sent)
    recovered = secret.recover([fedveil.client_step(model, secret.broadcast, inputs, targets)])
    assert set(recovered.gradients) == trained
    assert worst(recovered.gradients, plain(model, inputs, targets)[0]) < FLOAT64


def squeezed():
    return Network(lambda m, x: m.head(m.body(x).relu()).squeeze(1), body=nn.Linear(5, 8), head=nn.Linear(8, 1))


def two_inputs():
    layers = {"left": nn.Linear(5, 8), "right": nn.Linear(3, 8), "head": nn.Linear(8, 4)}
    return Network(lambda m, x, other: m.head((m.left(x) + m.right(other)).relu()), **layers)


def tokens():
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def sigmoid():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3), nn.Sigmoid())


X, OTHER = batch((5,), 4)[0], batch((3,), 4, seed=1)[0]
IDS = torch.randint(0, 11, (6, 7), generator=torch.Generator().manual_seed(0))
FORMS = {
    "one output that is squeezed": (squeezed, X, (6,), {}),
    "a head on every token": (tokens, IDS, (6, 7, 4), {}),
    "two arguments": (two_inputs, (X, OTHER), (6, 4), {}),
    "an exposed head": (sigmoid, X, (6, 3), {"head": "exposed"}),
}


@pytest.mark.parametrize("name", FORMS)
def test_other_forms_of_inputs_and_outputs_are_exact(name):
    build, inputs, shape, options = FORMS[name]
    model, squeezed, groups = built(build), shape == (6,), 1 if shape == (6,) or options else 2
    targets = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    secret = perturb(model, fedveil.analyse(model, inputs, **options), groups=groups)
    for own in (targets, targets.unsqueeze(1)) if squeezed else (targets,):
        update = fedveil.client_step(model, secret.broadcast, inputs, own)
        assert all(len(stack) == (1 if options else groups + 2) for stack in update.passes.values())
        assert worst(secret.recover([update]).gradients, plain(model, inputs, targets)[0]) < FLOAT64


def test_the_callers_models_are_left_as_they_were():
    model = built(ZOO["Bottleneck ResNet"][0])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    same = {name: id(p) for name, p in model.named_parameters()}
    veiled_round(model, *batch((3, 8, 8)), seed=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name: id(p) for name, p in model.named_parameters()} == same
    assert all(p.grad is None and isinstance(p, nn.Parameter) for p in model.parameters())


def test_the_estimate_of_the_error_is_at_rounding_level():
    for name in ("MLP L=3", "ResNet20, BatchNorm"):
        build, shape = ZOO[name]
        recovered = veiled_round(built(build), *batch(shape), seed=0, groups=3, additive=1e6)
        assert torch.finfo(torch.float64).eps <= recovered.error < 1e-12
