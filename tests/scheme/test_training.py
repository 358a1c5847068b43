"""Training on recovered gradients parts from plain training no more than rounding does (docs/maths.md, section 6)."""

import pytest
import torch
from tests.oracle import built
from torch import nn

from fedveil import Entropy, Federation, Veil
from fedveil.data import load, split
from fedveil.defences import Plain
from fedveil.models import mlp

ROUNDS = 200


def normed():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10),
    )  # fmt: skip


MODELS = {"mlp": lambda: mlp(64, 10, hidden=32), "cnn": normed}


def train(name, dtype, defence):
    """Parameters after training with Adam on digits, by three clients."""
    data = load("digits")
    clients = [(data.train.inputs[rows], data.train.targets[rows]) for rows in split(data, 3, seed=0)]
    model = built(MODELS[name], dtype=dtype)
    Federation(model, clients, defence, loss="squared_error", batch_size=11, fuse=False).fit(rounds=ROUNDS)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def veil(seed=0):
    return Veil(3, entropy=Entropy.for_tests(seed))


def apart(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", MODELS)
def test_float64_parameters_agree_after_200_rounds(name):
    assert apart(train(name, torch.float64, veil()), train(name, torch.float64, Plain())) < 1e-8


@pytest.mark.parametrize("name", MODELS)
def test_float32_parts_from_plain_no_more_than_rounding_does(name):
    plain = train(name, torch.float32, Plain())
    controls = [apart(train(name, torch.float32, Plain(rounding=seed)), plain) for seed in (1, 2, 3)]
    assert apart(train(name, torch.float32, veil()), plain) <= 3 * max(*controls, 1e-6), controls
