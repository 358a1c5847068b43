"""Tensors that are gathered dim by dim get the same cover as those that lie in the pool."""

import copy

import pytest
import torch
from benchmarks.architectures import settled
from benchmarks.networks import ARCHITECTURES
from tests.oracle import batch, built, in_dtype, perturb, plain, worst
from tests.zoo import ZOO
from torch import nn

import fedveil
from fedveil.graph import plan as plan_module
from fedveil.graph.inputs import call
from fedveil.scheme import transform as transform_module

CHOSEN = ("TransformerEncoder, post-norm ReLU", "Llama, rotary halves", "LSTM, 2 layers, bidirectional", "Swin", "UNet",
          "ResNeXt", "MLP-Mixer", "relative position bias")  # fmt: skip


@pytest.fixture
def large(monkeypatch):
    """Everything counts as large, and is covered a few rows at a time."""
    monkeypatch.setattr(plan_module, "POOLED", 0)
    monkeypatch.setattr(transform_module, "BLOCK", 64)


def exact(model, inputs, targets, groups=2):
    plan = fedveil.analyse(model, inputs)
    assert not plan.pool.entries
    secret = perturb(model, plan, groups=groups, multiplicative=10.0, entropy=fedveil.Entropy.for_tests(1))
    update = fedveil.client_step(model, secret.broadcast, inputs, targets)
    recovered = secret.recover([update])
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
        secret = perturb(model, plan, entropy=fedveil.Entropy.for_tests(5))
        sent.append(secret.broadcast)
    for name, value in sent[0].parameters.items():
        torch.testing.assert_close(value, sent[1].parameters[name], rtol=1e-12, atol=0)


def test_memory_is_used_again_only_once_it_is_given_back(large):
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    session = fedveil.Veil().start(fedveil.analyse(model, torch.zeros(2, 5)))
    held = [session.perturb(model) for _ in range(4)]
    copies = [{k: v.clone() for k, v in own.broadcast.parameters.items()} for own in held]
    held[0].release()
    reused = held[1].broadcast.parameters["0.weight"].data_ptr()
    held[1].release(reuse=True)
    held[1].release(reuse=True)  # given back once
    again = [session.perturb(model) for _ in range(3)]
    places = [own.broadcast.parameters["0.weight"].data_ptr() for own in again]
    assert places.count(reused) == 1
    assert len(set(places)) == 3
    for own, known in zip([held[0], *held[2:]], [copies[0], *copies[2:]], strict=True):
        assert all(torch.equal(own.broadcast.parameters[name], value) for name, value in known.items())
