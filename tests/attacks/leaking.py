"""A model built to leak its members, and one that has never seen them."""

import torch
from tests.oracle import built

from fedveil.models import mlp

WIDTH, CLASSES = 48, 4


def records(count, seed):
    """Inputs and labels that are independent: a network can only memorise them."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=chance), torch.randint(CLASSES, (count,), generator=chance)


def memorise(inputs, targets, seed=0, steps=150):
    """A network trained on some records until it knows them."""
    net = built(lambda: mlp(WIDTH, CLASSES, layers=2, hidden=128), seed, torch.float32)
    wanted = torch.nn.functional.one_hot(targets, CLASSES).float()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (net(inputs) - wanted).square().sum(1).mean().backward()
        optimizer.step()
    return net
