"""Convolutional classifiers other than residual ones: small, dense, straight."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.architecture import Architecture, images, normal


class SqueezeExcite(nn.Module):
    """Channels are multiplied by a gate that sees the means of all."""

    def __init__(self, channels: int, inner: int, gate: type[nn.Module], act: type[nn.Module]) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, inner, 1)
        self.act = act()
        self.fc2 = nn.Conv2d(inner, channels, 1)
        self.gate = gate()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.fc2(self.act(self.fc1(self.avgpool(x)))))


def conv_norm(before: int, after: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution without bias, and BatchNorm."""
    return [nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(after)]


class InvertedResidual(nn.Module):
    """Wide inside, depthwise there; narrow and linear at the ends."""

    def __init__(
        self, before: int, inner: int, after: int, stride: int, act: type[nn.Module], squeeze: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            *conv_norm(before, inner, 1),
            act(),
            *conv_norm(inner, inner, 3, stride, inner),
            act(),
            *([SqueezeExcite(inner, inner // 4, nn.Hardsigmoid, nn.ReLU)] if squeeze else []),
            *conv_norm(inner, after, 1),
        )
        self.residual = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


def mobilenet_v2(classes: int = 10) -> nn.Module:
    """ReLU6 between layers."""
    return nn.Sequential(
        *conv_norm(3, 16, 3, 2),
        nn.ReLU6(inplace=True),
        InvertedResidual(16, 48, 16, 1, nn.ReLU6),
        InvertedResidual(16, 48, 24, 2, nn.ReLU6),
        InvertedResidual(24, 96, 24, 1, nn.ReLU6),
        *conv_norm(24, 96, 1),
        nn.ReLU6(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, classes),
    )


def mobilenet_v3(classes: int = 10) -> nn.Module:
    """ReLU and hardswish, squeeze and excitation."""
    return nn.Sequential(
        *conv_norm(3, 16, 3, 2),
        nn.Hardswish(),
        InvertedResidual(16, 32, 16, 1, nn.ReLU, squeeze=True),
        InvertedResidual(16, 64, 24, 2, nn.Hardswish, squeeze=True),
        InvertedResidual(24, 72, 24, 1, nn.Hardswish, squeeze=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 64),
        nn.Hardswish(),
        nn.Linear(64, classes),
    )


class BatchNormAct2d(nn.BatchNorm2d):
    """BatchNorm and an activation in one module, with its own forward."""

    def __init__(self, channels: int, act: bool = True) -> None:
        super().__init__(channels)
        self.act = nn.SiLU(inplace=True) if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            self.momentum or 0.0,
            self.eps,
        )
        return self.act(x)


class EfficientBlock(nn.Module):
    """An inverted residual with SiLU and a sigmoid gate."""

    def __init__(self, before: int, after: int, stride: int, expand: int = 4) -> None:
        super().__init__()
        inner = before * expand
        self.conv_pw = nn.Conv2d(before, inner, 1, bias=False)
        self.bn1 = BatchNormAct2d(inner)
        self.conv_dw = nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)
        self.bn2 = BatchNormAct2d(inner)
        self.se = SqueezeExcite(inner, before // 4, nn.Sigmoid, nn.SiLU)
        self.conv_pwl = nn.Conv2d(inner, after, 1, bias=False)
        self.bn3 = BatchNormAct2d(after, act=False)
        self.skip = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        y = self.se(self.bn2(self.conv_dw(self.bn1(self.conv_pw(x)))))
        y = self.bn3(self.conv_pwl(y))
        return y + x if self.skip else y


def efficientnet(classes: int = 10) -> nn.Module:
    """Three blocks."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        BatchNormAct2d(16),
        EfficientBlock(16, 16, 1),
        EfficientBlock(16, 24, 2),
        EfficientBlock(24, 24, 1),
        nn.Conv2d(24, 64, 1, bias=False),
        BatchNormAct2d(64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


class ShuffleUnit(nn.Module):
    """Half of the channels pass, the others are convolved, then both are interleaved."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            *conv_norm(half, half, 1),
            nn.ReLU(),
            *conv_norm(half, half, 3, 1, half),
            *conv_norm(half, half, 1),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=1)
        out = torch.cat((x1, self.branch(x2)), dim=1)
        batch, channels, height, width = out.size()
        out = out.view(batch, 2, channels // 2, height, width)
        return torch.transpose(out, 1, 2).contiguous().view(batch, channels, height, width)


def shufflenet(classes: int = 10) -> nn.Module:
    """Units between two strided convolutions."""
    return nn.Sequential(
        *conv_norm(3, 24, 3, 2),
        nn.ReLU(),
        ShuffleUnit(24),
        ShuffleUnit(24),
        *conv_norm(24, 48, 3, 2),
        nn.ReLU(),
        ShuffleUnit(48),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, classes),
    )


class DenseLayer(nn.Module):
    """Norm, ReLU and convolution twice; its output is concatenated with its input."""

    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return torch.cat([x, y], 1)


def densenet(classes: int = 10) -> nn.Module:
    """Two dense blocks and a transition."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        *(DenseLayer(16 + 8 * number, 8) for number in range(3)),
        nn.BatchNorm2d(40),
        nn.ReLU(),
        nn.Conv2d(40, 20, 1, bias=False),
        nn.AvgPool2d(2),
        *(DenseLayer(20 + 8 * number, 8) for number in range(3)),
        nn.BatchNorm2d(44),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(44, classes),
    )


class Vgg(nn.Module):
    """Straight convolutions with biases, BatchNorm and pooling; a perceptron on all pixels."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width in (16, 0, 32, 32, 0, 48, 0):
            if not width:
                layers.append(nn.MaxPool2d(2, 2))
                continue
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            before = width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(192, 64), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(64, 64), nn.ReLU(True), nn.Linear(64, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


class VideoNet(nn.Module):
    """Convolutions over time and space."""

    def __init__(self, classes: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv3d(8, 16, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm3d(16)
        self.conv3 = nn.Conv3d(16, 24, (3, 1, 1), padding=(1, 0, 0))
        self.pool = nn.MaxPool3d((1, 2, 2))
        self.fc = nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.bn2(self.conv2(x))))
        return self.fc(F.leaky_relu(self.conv3(x), 0.1).mean(dim=[2, 3, 4]))


MOBILE = (
    Architecture("MobileNetV2", "convolution", mobilenet_v2, images(32)),
    Architecture("MobileNetV3", "convolution", mobilenet_v3, images(32)),
    Architecture("EfficientNet, BatchNormAct2d", "convolution", efficientnet, images(32), quick=True),
    Architecture("ShuffleNet", "convolution", shufflenet, images(32)),
    Architecture("DenseNet", "convolution", densenet, images(12)),
    Architecture("VGG, BatchNorm", "convolution", Vgg, images(16)),
    Architecture("Conv3d", "convolution", VideoNet, normal(3, 4, 12, 12)),
)
