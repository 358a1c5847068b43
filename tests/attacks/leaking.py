"""A model built to leak its members, and one that has never seen them."""

import torch

from fedveil.models import mlp

WIDTH, CLASSES = 48, 4


def records(count, seed):
    """Inputs and labels that have nothing to do with one another: what is learnt of them is learnt by heart."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=chance), torch.randint(CLASSES, (count,), generator=chance)


def learnt_by_heart(inputs, targets, seed=0, steps=150):
    """A network trained on some records until it knows them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = mlp(WIDTH, CLASSES, layers=2, hidden=128)
    wanted = torch.nn.functional.one_hot(targets, CLASSES).float()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (net(inputs) - wanted).square().sum(1).mean().backward()
        optimizer.step()
    return net
