"""A federation so small that what surrounds the matrices decides its speed: MLP 48-50-50-50-1, ten clients."""

from functools import lru_cache

import torch
from torch import Tensor, nn

from fedveil.models import mlp

CLIENTS, BATCH, RECORDS = 10, 32, 3200


def clients_data() -> list[tuple[Tensor, Tensor]]:
    """Ten clients with 320 records each."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(RECORDS, 48, generator=generator)
    targets = torch.randint(0, 2, (RECORDS, 1), generator=generator).float()
    return [(inputs[k::CLIENTS], targets[k::CLIENTS]) for k in range(CLIENTS)]


def new_model() -> nn.Sequential:
    """MLP 48-50-50-50-1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return mlp(48, 1, layers=3, hidden=50)


@lru_cache(maxsize=1)
def prepared() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Model and data, once a process of many."""
    torch.set_num_threads(1)
    return new_model(), clients_data()
