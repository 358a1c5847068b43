"""Residual networks in their ImageNet form, and relatives that change the block, the norm or the sum."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from benchmarks.networks.architecture import Architecture, images

Kind = Literal["plain", "D"]


class Basic(nn.Module):
    """Two convolutions of 3 x 3."""

    expansion: ClassVar[int] = 1

    def __init__(self, before: int, planes: int, stride: int, groups: int, base: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 in groups, 1 x 1."""

    expansion: ClassVar[int] = 4

    def __init__(self, before: int, planes: int, stride: int, groups: int, base: int, shortcut: nn.Module) -> None:
        super().__init__()
        inner = planes * base // 64 * groups
        self.conv1 = nn.Conv2d(before, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, 4 * planes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.downsample(x)
        return self.relu(out)


def shortcut(before: int, after: int, stride: int, kind: Kind) -> nn.Module:
    """The identity, or a convolution where shapes differ; D averages before it."""
    if stride == 1 and before == after:
        return nn.Identity()
    if kind == "D" and stride > 1:
        pool = nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False)
        return nn.Sequential(pool, nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after))
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))


def stem(width: int, kind: Kind) -> nn.Sequential:
    """One convolution of 7 x 7, or three of 3 x 3."""
    if kind == "plain":
        return nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    layers: list[nn.Module] = []
    for before, after, stride in ((3, width // 2, 2), (width // 2, width // 2, 1), (width // 2, width, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class ResNet(nn.Module):
    """A stem, a stage for each entry of `depths`, global average pooling, a linear head."""

    def __init__(
        self,
        block: type[Basic] | type[Bottleneck],
        depths: Sequence[int],
        *,
        width: int = 64,
        groups: int = 1,
        base: int = 64,
        kind: Kind = "plain",
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.stem = stem(width, kind)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        before, stages = width, []
        for stage, depth in enumerate(depths):
            planes, blocks = width * 2**stage, []
            for number in range(depth):
                stride = 2 if stage and not number else 1
                way = shortcut(before, planes * block.expansion, stride, kind)
                blocks.append(block(before, planes, stride, groups, base, way))
                before = planes * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.maxpool(self.stem(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class RegNetBlock(nn.Module):
    """Groups of a fixed width, no bottleneck, squeeze and excitation."""

    def __init__(self, before: int, after: int, stride: int, group: int = 8) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(before, after, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, stride, 1, groups=after // group, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )
        self.squeeze = nn.Conv2d(after, before // 4, 1)
        self.excite = nn.Conv2d(before // 4, after, 1)
        self.last = nn.Sequential(nn.Conv2d(after, after, 1, bias=False), nn.BatchNorm2d(after))
        self.proj = shortcut(before, after, stride, "plain")

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return F.relu(self.proj(x) + self.last(y))


def regnet(classes: int = 10) -> nn.Module:
    """Three stages."""
    widths = ((16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2))
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        *(RegNetBlock(before, after, stride) for before, after, stride in widths),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def normed(before: int, after: int, stride: int = 1) -> nn.Module:
    """A convolution whose kernels are a length and a direction."""
    return weight_norm(nn.Conv2d(before, after, 3, stride, 1))


class WeightNormNet(nn.Module):
    """Convolutions with torch's weight_norm parametrisation, and a residual."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.first = normed(3, 16)
        self.second = normed(16, 32, 2)
        self.third = normed(32, 32)
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x))))
        x = x + F.relu(self.third(x))
        return self.head(x.mean((2, 3)))


class StandardisedConv(nn.Conv2d):
    """Each kernel has mean 0 and variance 1."""

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean(dim=(1, 2, 3), keepdim=True)
        variance = self.weight.var(dim=(1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) / torch.sqrt(variance + 1e-10)
        return self._conv_forward(x, weight, self.bias)


class PreActivation(nn.Module):
    """GroupNorm and SiLU before each convolution."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.gn1 = nn.GroupNorm(4, before)
        self.conv1 = StandardisedConv(before, after, 3, stride, 1, bias=False)
        self.gn2 = nn.GroupNorm(4, after)
        self.conv2 = StandardisedConv(after, after, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.gn1(x))
        return self.conv2(F.silu(self.gn2(self.conv1(y)))) + self.shortcut(y)


def big_transfer(classes: int = 10) -> nn.Module:
    """Weight standardisation and GroupNorm in place of BatchNorm."""
    return nn.Sequential(
        StandardisedConv(3, 16, 3, padding=1, bias=False),
        PreActivation(16, 16, 1),
        PreActivation(16, 32, 2),
        nn.GroupNorm(4, 32),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, classes),
    )


class FreeBlock(nn.Module):
    """No norm: the input is divided by its expected size, the branch multiplied by a learned scalar (NFNet)."""

    def __init__(self, channels: int, alpha: float, beta: float) -> None:
        super().__init__()
        self.alpha, self.beta = alpha, beta
        self.conv1 = nn.Conv2d(channels, channels // 2, 1)
        self.conv2 = nn.Conv2d(channels // 2, channels // 2, 3, padding=1)
        self.conv3 = nn.Conv2d(channels // 2, channels, 1)
        self.skip_gain = nn.Parameter(torch.full((), 0.2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(x) * 1.7139588594436646 * self.beta)
        y = self.conv2(F.relu(y) * 1.7139588594436646)
        y = self.conv3(F.relu(y) * 1.7139588594436646)
        return y * self.skip_gain * self.alpha + x


def norm_free(classes: int = 10) -> nn.Module:
    """Three scaled blocks."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        *(FreeBlock(32, 0.2, (1 + 0.04 * number) ** -0.5) for number in range(3)),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, classes),
    )


RESIDUAL = (
    Architecture(
        "ResNet, bottlenecks", "convolution", partial(ResNet, Bottleneck, (2, 1, 1), width=12, classes=10), images(32)
    ),
    Architecture(
        "ResNeXt",
        "convolution",
        partial(ResNet, Bottleneck, (1, 1), width=16, groups=4, base=16, classes=10),
        images(32),
    ),
    Architecture(
        "ResNet-D", "convolution", partial(ResNet, Basic, (1, 1, 1), width=16, kind="D", classes=10), images(32)
    ),
    Architecture("RegNet", "convolution", regnet, images(32)),
    Architecture("weight_norm", "convolution", WeightNormNet, images(12)),
    Architecture("GroupNorm, SiLU, standardised weights", "convolution", big_transfer, images(12)),
    Architecture("NFNet", "convolution", norm_free, images(16)),
)
