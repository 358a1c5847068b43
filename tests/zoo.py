"""Networks on which exactness is shown, in tests and in benchmarks: name -> (build, shape of one input)."""

from collections.abc import Callable

import torch
from benchmarks.networks.mobile import densenet
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.models import cnn, mlp, resnet


class Bottleneck(nn.Module):
    """A residual block of 1x1, 3x3 and 1x1 convolutions."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.expand = nn.Conv2d(inner, channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.squeeze(x)))
        out = self.relu(self.norm2(self.conv(out)))
        out = self.norm3(self.expand(out))
        out += x
        return self.relu(out)


def bottleneck() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(
        stem, Bottleneck(16, 4), Bottleneck(16, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )


def depthwise() -> nn.Module:
    """Depthwise and pointwise convolutions, with a channel multiplier, without and with norm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, groups=8),
        nn.ReLU(),
        nn.Conv2d(16, 12, 1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, stride=2, padding=1, groups=12, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 1, groups=3),
        nn.LeakyReLU(0.1),
        nn.Flatten(),
        nn.Linear(12 * 16, 10),
    )


class Fire(nn.Module):
    """SqueezeNet's module: one convolution in, two side by side out."""

    def __init__(self, before: int, inner: int, after: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(before, inner, 1)
        self.left = nn.Conv2d(inner, after, 1)
        self.right = nn.Conv2d(inner, after, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([self.left(x).relu(), torch.relu(self.right(x))], dim=1)


def fire() -> nn.Module:
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Fire(8, 4, 6), nn.MaxPool2d(2), Fire(12, 6, 8)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


class Shuffle(nn.Module):
    """ShuffleNet's unit: half of the channels pass, the others are convolved, then both halves are interleaved."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.inner = nn.Sequential(
            nn.Conv2d(half, half, 1, groups=2),
            nn.ReLU(),
            nn.Conv2d(half, half, 3, padding=1, groups=half),
            nn.Conv2d(half, half, 1),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, dim=1)
        x = torch.cat((kept, self.inner(changed)), 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def shuffle() -> nn.Module:
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Shuffle(8), Shuffle(8), nn.AvgPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(8 * 16, 10))


def activation(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A perceptron with another activation."""
    return lambda: nn.Sequential(
        nn.Linear(12, 16), build(), nn.Linear(16, 16), build(), nn.Linear(16, 16), build(), nn.Linear(16, 10)
    )


IMAGE = (3, 8, 8)
ZOO: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP L=3": (lambda: mlp(12, 10, layers=3, hidden=24), (12,)),
    "MLP L=5": (lambda: mlp(12, 10, layers=5, hidden=24), (12,)),
    "MLP L=7, no bias": (lambda: mlp(12, 10, layers=7, hidden=24, bias=False), (12,)),
    "CNN": (lambda: cnn(width=4, size=8), IMAGE),
    "ResNet20, BatchNorm": (lambda: resnet(20, width=8), IMAGE),
    "ResNet20, BatchNorm, B": (lambda: resnet(20, width=8, shortcut="B"), IMAGE),
    "ResNet20, no norm": (lambda: resnet(20, width=8, norm="none"), IMAGE),
    "DenseNet": (densenet, IMAGE),
    "Bottleneck ResNet": (bottleneck, IMAGE),
    "Depthwise": (depthwise, IMAGE),
    "Fire modules": (fire, IMAGE),
    "Channel shuffle": (shuffle, IMAGE),
    "LeakyReLU": (activation(lambda: nn.LeakyReLU(0.2)), (12,)),
    "PReLU": (activation(lambda: nn.PReLU(16)), (12,)),
    "tanh": (activation(nn.Tanh), (12,)),
}
