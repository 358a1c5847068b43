"""Networks with the dimensions of public ones, for images of 224 x 224: what analysis and server must cope with."""

from collections.abc import Callable

from torch import nn

from benchmarks.networks.residual import Basic, Bottleneck, ResNet
from benchmarks.networks.swin import Swin
from benchmarks.networks.vit import VisionTransformer

IMAGE = 224


def swin_t() -> nn.Module:
    """Swin-T: 28 million parameters."""
    return Swin(IMAGE, 4, 96, (2, 2, 6, 2), (3, 6, 12, 24), 7, 1000)


def vit_b() -> nn.Module:
    """ViT-B/16: 86 million parameters."""
    return VisionTransformer(image=IMAGE, patch=16, width=768, heads=12, layers=12, classes=1000)


def resnet18() -> nn.Module:
    """ResNet18: 11.7 million parameters."""
    return ResNet(Basic, (2, 2, 2, 2))


def resnet50() -> nn.Module:
    """ResNet50: 25.6 million parameters."""
    return ResNet(Bottleneck, (3, 4, 6, 3))


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "swin_t": swin_t,
    "vit_b": vit_b,
    "resnet18": resnet18,
    "resnet50": resnet50,
}
