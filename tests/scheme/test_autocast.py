"""Under torch.autocast, only forward methods are rounded to bfloat16."""

import pytest
import torch
from tests.oracle import Network, batch, built, flat, perturb, plain
from torch import nn
from torch.nn import functional as F

import fedveil
from fedveil.errors import BadArgument
from fedveil.graph.inputs import call

EPS = torch.finfo(torch.bfloat16).eps


def layers(last):
    return {"first": nn.Linear(5, 8), "second": nn.Linear(8, 8), "head": nn.Linear(8, 3), "last": last}


def run(model, x):
    x = model.second(model.first(x).relu()).relu()
    model.seen.append(x.dtype)
    return model.last(model.head(x))


def reshape_last(x):
    return x.view(-1, 3, 1).flatten(1)


def couple(x):
    return x - 0.1 * x.mean(0, keepdim=True)


TAILS = {
    "alike": nn.Identity(),
    "reshaped": Network(lambda _, x: reshape_last(x)),
    "stacked": nn.Tanh(),
    "repeated": Network(lambda _, x: couple(x)),
}


def network(tail):
    model = built(lambda: Network(run, **layers(TAILS[tail])), dtype=torch.float32)
    model.seen = []
    return model


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype)


def distance(found, true):
    return float((flat(found) - flat(true)).norm() / flat(true).norm())


@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
@pytest.mark.parametrize("tail", TAILS)
def test_a_step_runs_forward_in_bfloat16_and_uploads_float32(tail, loss):
    model, (inputs, targets) = network(tail), batch((5,), 3, dtype=torch.float32)
    targets = targets.argmax(1) if loss == "cross_entropy" else targets
    plan = fedveil.analyse(model, inputs)
    assert plan.head.tail == tail
    perturbation = perturb(model, plan, loss, additive=0.1)
    model.seen.clear()
    with autocast():
        update = fedveil.client_step(model, perturbation.broadcast, inputs, targets)
        result = perturbation.recover([update])
    assert torch.bfloat16 in model.seen
    assert {own.dtype for own in update.passes.values()} == {torch.float32}
    goal = F.cross_entropy if loss == "cross_entropy" else lambda y, t: 0.5 * (y - t).square().sum(1).mean()
    true = plain(model, inputs, targets, goal)[0]
    error = distance(result.gradients, true)
    assert 1e-5 < error < 20 * EPS  # six products and their derivatives, each rounded; in float32, below 1e-5
    with autocast():
        assert call(model, inputs).dtype == torch.bfloat16  # it is on again
    exact = perturbation.recover([fedveil.client_step(model, perturbation.broadcast, inputs, targets)])
    assert distance(exact.gradients, true) < 1e-5


def test_analysis_noise_and_recovery_are_not_rounded():
    model, (inputs, targets) = network("alike"), batch((5,), 3, dtype=torch.float32)
    found = []
    for context in (autocast, torch.enable_grad):
        with context():
            plan = fedveil.analyse(model, inputs)
            perturbation = perturb(model, plan)
        update = fedveil.client_step(model, perturbation.broadcast, inputs, targets)
        with context():
            found.append(perturbation.recover([update, update]).gradients)
        assert plan.coverage == 1
    assert distance(*found) < 1e-5  # noise of two rounds


@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_a_federation_under_autocast_rounds_only_its_clients_passes(defence):
    model, data = network("alike"), [batch((5,), 3, seed=seed, dtype=torch.float32) for seed in range(3)]
    federation = fedveil.Federation(model, data, defence)
    model.seen.clear()
    with autocast():
        gradients = federation.exchange().gradients
    assert torch.bfloat16 in model.seen
    assert 1e-5 < distance(gradients, fedveil.Federation(model, data, "plain").exchange().gradients) < 20 * EPS


def test_gradients_per_record_are_not_rounded():
    model, data = network("alike"), [batch((5,), 3, dtype=torch.float32)]
    privacy = fedveil.Privacy(clip=1.0, noise=1.0)
    federation = fedveil.Federation(model, data, fedveil.Veil(multiplicative=1.0, decoys=2), privacy=privacy)
    model.seen.clear()
    with autocast():
        federation.exchange()
    assert set(model.seen) == {torch.float32}


def test_autocast_to_float16_is_refused():
    with (
        autocast(torch.float16),
        pytest.raises(BadArgument, match=r"(?s)autocast to torch.float16 on cpu.*Fix: pass dtype"),
    ):
        fedveil.analyse(network("alike"), torch.zeros(2, 5))
