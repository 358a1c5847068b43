"""Shifted windows (Liu et al., 2021)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.networks.architecture import Architecture, images
from benchmarks.networks.vit import Mlp


def windows_of(x: Tensor, window: int) -> Tensor:
    """(B, H, W, C) -> (B * windows, window * window, C)."""
    B, H, W, C = x.shape
    x = x.view(B, H // window, window, W // window, window, C)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, window * window, C)


def joined(windows: Tensor, window: int, height: int, width: int) -> Tensor:
    """The inverse of `windows_of`."""
    C = windows.shape[-1]
    x = windows.view(-1, height // window, width // window, window, window, C)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, height, width, C)


def relative_places(window: int) -> Tensor:
    """For each pair of places in a window, the row of the bias table."""
    places = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
    apart = (places[:, :, None] - places[:, None, :]).permute(1, 2, 0) + window - 1
    return apart[..., 0] * (2 * window - 1) + apart[..., 1]


def shift_mask(size: int, window: int, shift: int) -> Tensor:
    """-100 between places that a shift brought into one window from far apart, for each window."""
    regions = torch.zeros(1, size, size, 1)
    cuts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for number, (rows, columns) in enumerate((rows, columns) for rows in cuts for columns in cuts):
        regions[:, rows, columns] = number
    members = windows_of(regions, window).squeeze(-1)
    return torch.where(members.unsqueeze(1) == members.unsqueeze(2), 0.0, -100.0)


class WindowAttention(nn.Module):
    """Attention in each window, with a learned bias for each head and relative place."""

    def __init__(self, width: int, window: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty((2 * window - 1) ** 2, heads), std=0.02))
        self.register_buffer("index", relative_places(window))
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = (q * self.scale) @ k.transpose(-2, -1)
        scores = scores + self.table[self.index.view(-1)].view(N, N, -1).permute(2, 0, 1).unsqueeze(0)
        if mask is not None:
            count = mask.shape[0]
            scores = scores.view(B // count, count, self.heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            scores = scores.view(-1, self.heads, N, N)
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C))


class SwinBlock(nn.Module):
    """A window attention, shifted or not, and a perceptron."""

    def __init__(self, width: int, size: int, window: int, heads: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1 = nn.LayerNorm(width)
        self.attn = WindowAttention(width, window, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 4 * width, nn.GELU)
        self.register_buffer("mask", shift_mask(size, window, shift) if shift else None)

    def forward(self, x: Tensor) -> Tensor:
        _, H, W, _ = x.shape
        y = self.norm1(x)
        if self.shift:
            y = torch.roll(y, shifts=(-self.shift, -self.shift), dims=(1, 2))
        y = joined(self.attn(windows_of(y, self.window), self.mask), self.window, H, W)
        if self.shift:
            y = torch.roll(y, shifts=(self.shift, self.shift), dims=(1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    """Four neighbours become one place of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        corners = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
        return self.reduction(self.norm(torch.cat(corners, -1)))


class Swin(nn.Module):
    """Stages of blocks, each with half the places and twice the width of the one before."""

    def __init__(
        self, image: int, patch: int, width: int, depths: Sequence[int], heads: Sequence[int], window: int, classes: int
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, stride=patch)
        self.patch_norm = nn.LayerNorm(width)
        size = image // patch
        layers: list[nn.Module] = []
        for stage, (depth, count) in enumerate(zip(depths, heads, strict=True)):
            if stage:
                layers.append(PatchMerging(width))
                size, width = size // 2, 2 * width
            for number in range(depth):
                shift = window // 2 if number % 2 and size > window else 0
                layers.append(SwinBlock(width, size, window, count, shift))
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_norm(self.patch_embed(x).permute(0, 2, 3, 1))
        return self.head(self.norm(self.layers(x)).mean(dim=(1, 2)))


def small_swin() -> nn.Module:
    """Two stages with windows of 4 x 4."""
    return Swin(32, 4, 16, (2, 2), (2, 4), 4, 10)


SWINS = (Architecture("Swin", "vision", small_swin, images(32), quick=True),)
