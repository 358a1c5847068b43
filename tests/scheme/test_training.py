"""Two hundred steps of Adam on recovered gradients and on plain ones."""

import copy

import pytest
import torch
from sklearn.datasets import load_digits
from tests.oracle import built, perturb, squared_error
from torch import nn
from torch.nn import functional as F

import fedveil
from fedveil.models import mlp

STEPS = 200


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
    )


MODELS = {"mlp": (lambda: mlp(64, 10, hidden=32), (64,)), "cnn": (small_cnn, (1, 8, 8))}


def digits(shape, dtype):
    data = load_digits()
    images = torch.from_numpy(data.images / 16).to(dtype).reshape(-1, *shape)
    return images, F.one_hot(torch.from_numpy(data.target).long(), 10).to(dtype)


def plain_gradients(model, inputs, targets):
    return torch.autograd.grad(squared_error(model(inputs), targets), list(model.parameters()))


def veiled_gradients(model, inputs, targets, plan, seed):
    """Three clients of different size."""
    secret = perturb(model, plan, groups=3, multiplicative=4.0, entropy=fedveil.Entropy.for_tests(seed))
    broadcast = secret.broadcast
    parts = [slice(None)] if any(True for _ in model.buffers()) else [slice(0, 5), slice(5, 20), slice(20, None)]
    updates = [fedveil.client_step(model, broadcast, inputs[part], targets[part]) for part in parts]
    recovered = secret.recover(updates)
    for name, buffer in model.named_buffers():
        buffer.copy_(recovered.buffers[name])
    return [recovered.gradients[name] for name, _ in model.named_parameters()]


def train(name, dtype, *, veiled=False, rounding=None):
    """Parameters after training; `rounding` seeds noise of one unit in the last place on every gradient."""
    build, shape = MODELS[name]
    model = copy.deepcopy(built(build, dtype=dtype))
    images, targets = digits(shape, dtype)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    plan = fedveil.analyse(model, images[:2])
    order = torch.Generator().manual_seed(0)
    noise = torch.Generator().manual_seed(rounding or 0)
    for step in range(STEPS):
        chosen = torch.randint(0, len(images), (32,), generator=order)
        batch = images[chosen], targets[chosen]
        gradients = veiled_gradients(model, *batch, plan, step) if veiled else plain_gradients(model, *batch)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            if rounding is not None:
                rms = gradient.pow(2).mean().sqrt()
                draw = torch.randn(gradient.shape, generator=noise, dtype=dtype)
                gradient = gradient + torch.finfo(dtype).eps * rms * draw
            parameter.grad = gradient.detach().clone()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def apart(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", MODELS)
def test_float64_parameters_agree_after_200_steps(name):
    assert apart(train(name, torch.float64, veiled=True), train(name, torch.float64)) < 1e-8


@pytest.mark.parametrize("name", MODELS)
def test_float32_parts_from_plain_no_more_than_rounding_does(name):
    plain = train(name, torch.float32)
    controls = [apart(train(name, torch.float32, rounding=seed), plain) for seed in (1, 2, 3)]
    veiled = apart(train(name, torch.float32, veiled=True), plain)
    assert veiled <= 3 * max(*controls, 1e-6), controls
