"""A small densely connected network (Huang et al., 2017)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DenseLayer(nn.Module):
    """Norm, ReLU and convolution; the output is concatenated to the input."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with the new channels."""
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class Transition(nn.Module):
    """A layer that halves the channels and the image size."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(before)
        self.conv = nn.Conv2d(before, after, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply norm, ReLU, 1x1 convolution and average pooling."""
        return F.avg_pool2d(self.conv(F.relu(self.norm(x))), 2)


class DenseNet(nn.Module):
    """Dense blocks with transitions between them."""

    def __init__(self, channels: int, outputs: int, growth: int, layers: int, blocks: int) -> None:
        super().__init__()
        width = 2 * growth
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        stack: list[nn.Module] = []
        for block in range(blocks):
            for _ in range(layers):
                stack.append(DenseLayer(width, growth))
                width += growth
            if block < blocks - 1:
                stack.append(Transition(width, width // 2))
                width //= 2
        self.blocks = nn.Sequential(*stack)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the head."""
        x = F.relu(self.norm(self.blocks(self.conv(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]


def densenet(channels: int = 3, outputs: int = 10, *, growth: int = 12, layers: int = 4, blocks: int = 3) -> DenseNet:
    """Build a DenseNet with `blocks` blocks of `layers` layers that add `growth` channels each."""
    return DenseNet(channels, outputs, growth, layers, blocks)
