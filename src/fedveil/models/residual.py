"""Residual networks for CIFAR (He et al., 2016, Sec. 4.2)."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.errors import BadArgument

Norm = Literal["batch", "none"]
Shortcut = Literal["A", "B"]
DEPTHS = (8, 20, 32, 44, 56)


def _norm(kind: Norm, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.Identity()


class PadShortcut(nn.Module):
    """Shortcut A: select every second pixel and pad with channels of zeros."""

    def __init__(self, num_extra: int) -> None:
        super().__init__()
        self.before = num_extra // 2
        self.after = num_extra - num_extra // 2

    def forward(self, x: Tensor) -> Tensor:
        """Subsample the input and pad its channels."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.before, self.after))


def _shortcut(in_channels: int, out_channels: int, stride: int, norm: Norm, kind: Shortcut) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    if kind == "A":
        return PadShortcut(out_channels - in_channels)
    conv = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=norm == "none")
    return nn.Sequential(conv, _norm(norm, out_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut around them."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: Norm, shortcut: Shortcut) -> None:
        super().__init__()
        bias = norm == "none"
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=bias)
        self.norm1 = _norm(norm, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=bias)
        self.norm2 = _norm(norm, out_channels)
        self.shortcut = _shortcut(in_channels, out_channels, stride, norm, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """Apply ReLU to the sum of both branches."""
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages of blocks, each twice as wide as the one before, then global average pooling and a linear head."""

    def __init__(self, depth: int, channels: int, outputs: int, width: int, norm: Norm, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=norm == "none")
        self.norm = _norm(norm, width)
        in_channels = width
        stages = []
        for stage in range(3):
            out_channels = width * 2**stage
            blocks = []
            for index in range((depth - 2) // 6):
                stride = 2 if stage and not index else 1
                blocks.append(BasicBlock(in_channels, out_channels, stride, norm, shortcut))
                in_channels = out_channels
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(in_channels, outputs)
        if norm == "none":
            self._shrink_branches()

    def _shrink_branches(self) -> None:
        """Initialise residual branches with small values to preserve the scale of activations without normalisation."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        blocks = [module for module in self.modules() if isinstance(module, BasicBlock)]
        for block in blocks:
            block.conv2.weight.data.mul_(len(blocks) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's outputs."""
        x = self.stages(F.relu(self.norm(self.conv(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def resnet(
    depth: int, channels: int = 3, outputs: int = 10, *, width: int = 16, norm: Norm = "batch", shortcut: Shortcut = "A"
) -> ResNet:
    """Build a ResNet with 8, 20, 32, 44 or 56 layers, for images of any size.

    Args:
        depth: number of layers with weights.
        channels: number of image channels.
        outputs: number of outputs.
        width: number of channels in the first stage.
        norm: "batch", or "none" for the paper's networks without normalisation.
        shortcut: the shortcut at the start of a stage: "A" pads with zeros, "B" uses a 1x1 convolution.
    """
    if depth not in DEPTHS:
        raise BadArgument("resnet", f"depth must be one of {', '.join(map(str, DEPTHS))}, got {depth!r}")
    if norm not in ("batch", "none") or shortcut not in ("A", "B"):
        message = f'norm must be "batch" or "none", and shortcut must be "A" or "B"; got {norm!r} and {shortcut!r}'
        raise BadArgument("resnet", message)
    return ResNet(depth, channels, outputs, width, norm, shortcut)
