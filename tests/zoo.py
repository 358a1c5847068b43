"""Networks on which exactness is shown, in tests and in benchmarks: name -> (build, shape of one input)."""

from collections.abc import Callable

import torch
from benchmarks.networks.mobile import densenet
from tests.oracle import Network
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.models import cnn, mlp, resnet


def bottleneck_block(channels: int, inner: int) -> nn.Module:
    """A residual block of 1x1, 3x3 and 1x1 convolutions."""
    relu = nn.ReLU(inplace=True)
    squeeze = nn.Sequential(nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), relu)
    conv = nn.Sequential(nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), relu)
    expand = nn.Sequential(nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def run(model: nn.Module, x: Tensor) -> Tensor:
        out = model.body(x)
        out += x
        return relu(out)

    return Network(run, body=nn.Sequential(squeeze, conv, expand))


def bottleneck() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(
        stem, bottleneck_block(16, 4), bottleneck_block(16, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )


def depthwise() -> nn.Module:
    """Depthwise and pointwise convolutions, with a channel multiplier, without and with norm."""
    spread = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.ReLU()]
    normed = [nn.Conv2d(16, 12, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU()]
    strided = [nn.Conv2d(12, 12, 3, stride=2, padding=1, groups=12, bias=False), nn.BatchNorm2d(12), nn.ReLU()]
    grouped = [nn.Conv2d(12, 12, 1, groups=3), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(12 * 16, 10)]
    return nn.Sequential(*spread, *normed, *strided, *grouped)


def fire_module(before: int, inner: int, after: int) -> nn.Module:
    """SqueezeNet's module: one convolution in, two side by side out."""
    return Network(
        lambda m, x: torch.cat([m.left(u := F.relu(m.squeeze(x))).relu(), torch.relu(m.right(u))], dim=1),
        squeeze=nn.Conv2d(before, inner, 1),
        left=nn.Conv2d(inner, after, 1),
        right=nn.Conv2d(inner, after, 3, padding=1),
    )


def fire() -> nn.Module:
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), fire_module(8, 4, 6), nn.MaxPool2d(2), fire_module(12, 6, 8)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def shuffle_unit(channels: int) -> nn.Module:
    """ShuffleNet's unit: half of the channels pass, the others are convolved, then both halves are interleaved."""
    half = channels // 2
    grouped, depthwise = nn.Conv2d(half, half, 1, groups=2), nn.Conv2d(half, half, 3, padding=1, groups=half)

    def run(model: nn.Module, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, dim=1)
        x = torch.cat((kept, model.inner(changed)), 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)

    return Network(run, inner=nn.Sequential(grouped, nn.ReLU(), depthwise, nn.Conv2d(half, half, 1), nn.ReLU()))


def shuffle() -> nn.Module:
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), shuffle_unit(8), shuffle_unit(8), nn.AvgPool2d(2)]
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
