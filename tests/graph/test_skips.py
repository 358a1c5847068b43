"""Forward methods that skip layers at random: the plan holds for every draw, and gradients are exact in each."""

import importlib

import pytest
import torch
from tests.oracle import Network, batch, built, perturb
from torch import nn
from torch.nn import functional as F

import fedveil
from fedveil.errors import HeadNotLinear
from fedveil.graph.export import combinations

LAYERS, SEEDS = 5, range(6)


def skipping(step):
    """A network whose layers are skipped with probability 1/2, as in Wav2Vec2."""

    def run(m, x):
        x = m.first(x).relu()
        for layer, norm in zip(m.layers, m.norms, strict=True):
            skip = torch.rand([]) < 0.5
            if not skip:
                x = step(layer, norm, x)
        return m.head(x)

    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(LAYERS))
    norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(LAYERS))
    return Network(run, first=nn.Linear(4, 6), layers=layers, norms=norms, head=nn.Linear(6, 3))


STEPS = {
    "one after another": lambda layer, norm, x: layer(x).relu(),
    "before a norm": lambda layer, norm, x: norm(x + layer(x).relu()),
    "behind a norm": lambda layer, norm, x: x + layer(norm(x)).relu(),
}


def errors(model, plan):
    """The error of the recovered gradient for each of several draws."""
    inputs, targets = batch((4,), 3)
    for seed in SEEDS:
        secret = perturb(model, plan, multiplicative=10.0)
        torch.manual_seed(seed)
        update = fedveil.client_step(model, secret.broadcast, inputs, targets)
        torch.manual_seed(seed)
        names = [name for name, _ in model.named_parameters() if name in secret.broadcast.trainable]
        value = F.mse_loss(model(inputs), targets, reduction="sum") / (2 * len(inputs))
        true = torch.autograd.grad(value, list(map(model.get_parameter, names)), materialize_grads=True)
        found = secret.recover([update]).gradients
        yield max(float((found[name] - own).abs().max()) for name, own in zip(names, true, strict=True))


@pytest.mark.parametrize("name", STEPS)
def test_whatever_layers_are_skipped_the_gradient_is_exact(name):
    model = built(lambda: skipping(STEPS[name]))
    assert len({tuple((torch.manual_seed(seed), torch.rand(LAYERS) < 0.5)[1].tolist()) for seed in SEEDS}) > 3
    plan = fedveil.analyse(model, batch((4,), 3)[0])
    assert plan.shares["bare"] < 0.1
    assert max(errors(model, plan)) < 1e-9


def test_a_plan_that_follows_no_skipped_layer_would_be_wrong(monkeypatch):
    monkeypatch.setattr(importlib.import_module("fedveil.graph.analyse"), "combinations", lambda decisions: [])
    model = built(lambda: skipping(STEPS["one after another"]))
    assert max(errors(model, fedveil.analyse(model, batch((4,), 3)[0]))) > 1e-3


def test_up_to_three_decisions_are_combined_and_more_are_taken_one_by_one_and_together():
    assert combinations(0) == []
    assert combinations(2) == [(0,), (1,), (0, 1)]
    assert len(combinations(3)) == 7
    assert combinations(5) == [(0,), (1,), (2,), (3,), (4,), (0, 1, 2, 3, 4)]


def test_a_layer_that_may_be_skipped_takes_no_additive_noise():
    def run(m, x):
        x = m.table[x]
        skip = torch.rand([]) < 0.5
        if not skip:
            x = m.layer(x)
        return F.linear(x.relu().mean(1), m.table)

    parts = {"table": nn.Parameter(torch.randn(9, 6)), "layer": nn.Linear(6, 6)}
    with pytest.raises(HeadNotLinear, match=r"layer \(Linear\): forward may skip it at random"):
        fedveil.analyse(built(lambda: Network(run, **parts)), torch.zeros(2, 3).long())
