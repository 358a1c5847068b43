"""A federation that trains in a blink, and the configuration of a small run."""

import torch

from fedveil.defences import Plain
from fedveil.federation import Federation
from fedveil.models import mlp

SMALL = {"defence": "plain", "clients": 2, "hidden": 4, "layers": 2, "train_size": 60, "batch_size": 15}


def federation(defence=None):
    """Two clients, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator)) for n in (12, 8)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mlp(3, 2, hidden=4, layers=2)
    return Federation(model, data, defence or Plain(), lambda p: torch.optim.Adam(p, 1e-2), batch_size=4)
