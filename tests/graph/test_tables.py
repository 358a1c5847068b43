"""Tensors that are gathered dim by dim get the same cover as those that lie in the pool."""

import copy

import pytest
import torch
from benchmarks.architectures import settled
from benchmarks.networks import ARCHITECTURES
from tests.oracle import batch, built, in_dtype, plain, worst
from tests.zoo import ZOO
from torch import nn

import fedveil
from fedveil.graph import plan as plan_module
from fedveil.graph.inputs import call
from fedveil.scheme import cover as cover_module

CHOSEN = ("TransformerEncoder, post-norm ReLU", "Llama, rotary halves", "LSTM, 2 layers, bidirectional", "Swin", "UNet",
          "ResNeXt", "MLP-Mixer", "relative position bias")  # fmt: skip


@pytest.fixture
def large(monkeypatch):
    """Everything counts as large, and is covered a few rows at a time."""
    monkeypatch.setattr(plan_module, "POOLED", 0)
    monkeypatch.setattr(cover_module, "BLOCK", 64)


def exact(model, inputs, targets, groups=2):
    plan = fedveil.analyse(model, inputs)
    assert not plan.pool.entries
    secret = fedveil.draw_secret(plan, groups=groups, multiplicative=10.0, entropy=fedveil.Entropy.for_tests(1))
    update = fedveil.client_step(model, fedveil.perturb(model, secret), inputs, targets)
    recovered = fedveil.recover(secret, [update])
    truth, buffers = plain(model, inputs, targets)
    assert worst(recovered.gradients, truth) < 1e-9
    for name, value in buffers.items():
        torch.testing.assert_close(recovered.buffers[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["MLP L=3", "ResNet20, BatchNorm", "Depthwise", "Channel shuffle", "PReLU"])
def test_networks_of_the_zoo_are_exact(large, name):
    build, shape = ZOO[name]
    exact(built(build), *batch(shape))


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_architectures_are_exact(large, name):
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    model = settled(architecture)
    inputs = in_dtype(architecture.inputs(4, torch.Generator().manual_seed(0)), torch.float64)
    with torch.no_grad():
        targets = torch.randn_like(call(copy.deepcopy(model), inputs))
    exact(model, inputs, targets, groups=1)


def test_both_ways_send_the_same_values(monkeypatch):
    model = built(ZOO["ResNet20, BatchNorm"][0])
    inputs, _ = batch(ZOO["ResNet20, BatchNorm"][1])
    sent = []
    for pooled in (0, 2**30):
        monkeypatch.setattr(plan_module, "POOLED", pooled)
        plan = fedveil.analyse(model, inputs)
        secret = fedveil.draw_secret(plan, entropy=fedveil.Entropy.for_tests(5))
        sent.append(fedveil.perturb(model, secret))
    for name, value in sent[0].parameters.items():
        torch.testing.assert_close(value, sent[1].parameters[name], rtol=1e-12, atol=0)


def test_memory_is_used_again_only_when_nobody_holds_it(large):
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    plan = fedveil.analyse(model, torch.zeros(2, 5))
    broadcasts = [fedveil.perturb(model, fedveil.draw_secret(plan)) for _ in range(4)]
    copies = [{k: v.clone() for k, v in b.parameters.items()} for b in broadcasts]
    kept = broadcasts[1].parameters["0.weight"][2:4]  # a view is enough to hold it
    before = kept.clone()
    places = {b.parameters["0.weight"].data_ptr() for b in broadcasts}
    assert len(places) == 4
    for broadcast, known in zip(broadcasts, copies, strict=True):
        assert all(torch.equal(broadcast.parameters[name], value) for name, value in known.items())
    del broadcasts, broadcast
    again = [fedveil.perturb(model, fedveil.draw_secret(plan)).parameters["0.weight"].data_ptr() for _ in range(4)]
    assert torch.equal(kept, before)
    assert len(set(again)) < 4
