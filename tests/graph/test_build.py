"""Tensors that are gathered dim by dim get the same noise as those in the pool."""

import copy

import pytest
import torch
from benchmarks.architectures import settled
from benchmarks.networks import ARCHITECTURES
from tests.oracle import batch, built, in_dtype, perturb, plain, worst
from tests.zoo import ZOO
from torch import nn

import fedveil
from fedveil.graph import build as build_module
from fedveil.graph.inputs import call
from fedveil.scheme import transform as transform_module

ZOO_NAMES = ("MLP L=3", "ResNet20, BatchNorm", "Depthwise", "Channel shuffle", "PReLU")
NAMES = ("TransformerEncoder, post-norm ReLU", "Llama, rotary halves", "LSTM, 2 layers, bidirectional", "Swin", "UNet",
         "ResNeXt", "MLP-Mixer", "relative position bias")  # fmt: skip


@pytest.fixture
def large(monkeypatch):
    """Every tensor counts as large, and is perturbed a few rows at a time."""
    monkeypatch.setattr(build_module, "MAX_POOLED", 0)
    monkeypatch.setattr(transform_module, "BLOCK", 64)


@pytest.mark.parametrize("name", [*ZOO_NAMES, *NAMES])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_networks_of_large_tensors_are_exact(large, name):
    if name in ZOO:
        model, (inputs, targets), groups = built(ZOO[name][0]), batch(ZOO[name][1]), 2
    else:
        architecture = next(a for a in ARCHITECTURES if a.name == name)
        model, groups = settled(architecture), 1
        inputs = in_dtype(architecture.inputs(4, torch.Generator().manual_seed(0)), torch.float64)
        targets = torch.randn_like(call(copy.deepcopy(model), inputs).detach())
    plan = fedveil.analyse(model, inputs)
    assert not plan.pool.entries
    secret = perturb(model, plan, groups=groups, multiplicative=10.0, entropy=fedveil.Entropy.for_tests(1))
    recovered = secret.recover([fedveil.client_step(model, secret.broadcast, inputs, targets)])
    truth, buffers = plain(model, inputs, targets)
    assert worst(recovered.gradients, truth) < 1e-9
    for key, value in buffers.items():
        torch.testing.assert_close(recovered.buffers[key], value, rtol=1e-9, atol=1e-12)


def test_both_ways_send_the_same_values(monkeypatch):
    model = built(ZOO["ResNet20, BatchNorm"][0])
    inputs, _ = batch(ZOO["ResNet20, BatchNorm"][1])
    sent = []
    for pooled in (0, 2**30):
        monkeypatch.setattr(build_module, "MAX_POOLED", pooled)
        plan = fedveil.analyse(model, inputs)
        sent.append(perturb(model, plan, entropy=fedveil.Entropy.for_tests(5)).broadcast.parameters)
    for name, value in sent[0].items():
        torch.testing.assert_close(value, sent[1][name], rtol=1e-12, atol=0)


def test_memory_is_reused_only_once_it_is_given_back(large):
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
