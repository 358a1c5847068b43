"""Networks that mix places without attention: perceptrons, gates, convolutions, pooling."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.architecture import Architecture, images, tokens
from benchmarks.networks.vit import Mlp


class MixerBlock(nn.Module):
    """A perceptron over places, then one over channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.tokens = Mlp(places, 2 * places, nn.GELU)
        self.norm2 = nn.LayerNorm(width)
        self.channels = Mlp(width, 2 * width, nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self, width: int = 32, layers: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*(MixerBlock(16, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


class SpatialGate(nn.Module):
    """One half of the channels, mixed over places, multiplies the other."""

    def __init__(self, inner: int, places: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inner // 2)
        self.proj = nn.Conv1d(places, places, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        u, v = x.chunk(2, dim=-1)
        return u * self.proj(self.norm(v))


class GmlpBlock(nn.Module):
    """Wider, gated, back."""

    def __init__(self, width: int, inner: int, places: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.proj_in = nn.Linear(width, inner)
        self.gate = SpatialGate(inner, places)
        self.proj_out = nn.Linear(inner // 2, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj_out(self.gate(F.gelu(self.proj_in(self.norm(x)))))


class Gmlp(nn.Module):
    """gMLP for text."""

    def __init__(self, vocabulary: int = 100, length: int = 12, width: int = 32, classes: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(GmlpBlock(width, 128, length) for _ in range(2)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(x))).mean(1))


class ChannelsFirstNorm(nn.Module):
    """LayerNorm over the channels of images, as ConvNeXt's own code writes it."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNextBlock(nn.Module):
    """A depthwise convolution of 7 x 7, then a perceptron on channels last, scaled."""

    def __init__(self, channels: int, scale: float = 0.1) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(scale * torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.gamma * self.pwconv2(self.act(self.pwconv1(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """Two stages."""

    def __init__(self, channels: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 4, stride=4), ChannelsFirstNorm(channels))
        self.stage1 = nn.Sequential(ConvNextBlock(channels), ConvNextBlock(channels))
        self.down = nn.Sequential(ChannelsFirstNorm(channels), nn.Conv2d(channels, 2 * channels, 2, stride=2))
        self.stage2 = nn.Sequential(ConvNextBlock(2 * channels), ConvNextBlock(2 * channels))
        self.norm = nn.LayerNorm(2 * channels, eps=1e-6)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage2(self.down(self.stage1(self.stem(x))))
        return self.head(self.norm(x.mean([-2, -1])))


class PoolBlock(nn.Module):
    """The average of neighbours, less the place itself, in place of attention (MetaFormer)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(1, channels)
        self.pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        self.norm2 = nn.GroupNorm(1, channels)
        self.fc1 = nn.Conv2d(channels, 4 * channels, 1)
        self.fc2 = nn.Conv2d(4 * channels, channels, 1)
        self.scale1 = nn.Parameter(0.1 * torch.ones(channels))
        self.scale2 = nn.Parameter(0.1 * torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.scale1.unsqueeze(-1).unsqueeze(-1) * (self.pool(y) - y)
        return x + self.scale2[:, None, None] * self.fc2(F.gelu(self.fc1(self.norm2(x))))


class PoolFormer(nn.Module):
    """Two stages of pooling blocks."""

    def __init__(self, channels: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, stride=4, padding=2)
        self.stage1 = nn.Sequential(PoolBlock(channels), PoolBlock(channels))
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.stage2 = nn.Sequential(PoolBlock(2 * channels), PoolBlock(2 * channels))
        self.norm = nn.GroupNorm(1, 2 * channels)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stage2(self.down(self.stage1(self.stem(x)))))
        return self.head(x.mean([-2, -1]))


MIXERS = (
    Architecture("MLP-Mixer", "vision", Mixer, images(16)),
    Architecture("gMLP", "text", Gmlp, tokens(100, 12)),
    Architecture("ConvNeXt", "vision", ConvNext, images(32)),
    Architecture("PoolFormer", "vision", PoolFormer, images(32)),
)
