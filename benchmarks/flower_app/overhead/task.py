"""Networks and records of the two cases."""

import torch
from torch import Tensor, nn

from fedveil.models import mlp, resnet

CLIENTS = 3


def make_model(net: str) -> nn.Module:
    """MLP 63-50-50-50-1 as for bank ("mlp", "mlp-512" with batches of 512), or ResNet20 for CIFAR-10."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return mlp(63, 1, bias=False) if net.startswith("mlp") else resnet(20, 3, 10)


def records(net: str, part: int) -> tuple[Tensor, Tensor]:
    """A client's: 6,590 rows, a fifth of bank's; or 256 images."""
    chance = torch.Generator().manual_seed(part)
    if net.startswith("mlp"):
        return torch.randn(6590, 63, generator=chance), torch.rand(6590, 1, generator=chance)
    return torch.randn(256, 3, 32, 32, generator=chance), torch.randint(0, 10, (256,), generator=chance)
