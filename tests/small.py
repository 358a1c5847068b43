"""A federation that trains in a blink, the configuration of a small run, and a small Dataset."""

import torch
from torch.utils.data import Dataset

from fedveil.defences import Plain
from fedveil.federation import Federation
from fedveil.models import mlp

SMALL = {"defence": "plain", "clients": 2, "hidden": 4, "layers": 2, "train_size": 60, "batch_size": 15}


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def pairs(*sizes, seed=0):
    """Records of clients: three inputs and two targets each."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator)) for n in sizes]


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(3, 2, hidden=4, layers=2)


def federation(defence=None, optimizer=adam, *, size=1.0, **options):
    """Two clients, the same at every call; `size` scales their targets."""
    clients = [(inputs, size * targets) for inputs, targets in pairs(12, 8)]
    return Federation(net(), clients, defence or Plain(), optimizer, batch_size=4, **options)


class Records(Dataset):
    """A Dataset that is read record by record, and counts the reads."""

    def __init__(self, *columns, items=None):
        self.items = list(zip(*columns, strict=True)) if items is None else items
        self.read = 0

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        self.read += 1
        return self.items[row]
