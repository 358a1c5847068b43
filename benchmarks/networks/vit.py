"""Vision transformers."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.architecture import Architecture, images

Activation = Callable[[], nn.Module]


class Attention(nn.Module):
    """Packed query, key and value, and the fused kernel."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class ModuleAttention(nn.Module):
    """nn.MultiheadAttention with its defaults: it also computes weights that are not used."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.attention(x, x, x)
        return out


class Mlp(nn.Module):
    """Two layers, wider inside."""

    def __init__(self, width: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.act = activation()
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """Norms before attention and perceptron, whose outputs are added."""

    def __init__(self, width: int, attention: nn.Module, activation: Activation) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = attention
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 4 * width, activation)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Patches by a convolution, a class token, learned positions, blocks, a head on the class token."""

    def __init__(
        self,
        *,
        image: int = 16,
        patch: int = 4,
        width: int = 32,
        heads: int = 4,
        layers: int = 2,
        classes: int = 10,
        activation: Activation = nn.GELU,
        attention: Callable[[int, int], nn.Module] = Attention,
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, attention(width, heads), activation) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class ScaledBlock(nn.Module):
    """Each branch is multiplied by a small weight for each channel (LayerScale)."""

    def __init__(self, width: int, attention: nn.Module, scale: float = 0.1) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = attention
        self.gamma_1 = nn.Parameter(scale * torch.ones(width))
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 2 * width, nn.GELU)
        self.gamma_2 = nn.Parameter(scale * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma_1 * self.attn(self.norm1(x))
        return x + self.gamma_2 * self.mlp(self.norm2(x))


class ClassAttention(nn.Module):
    """The class token alone asks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q = self.q(x[:, 0]).reshape(B, 1, self.heads, C // self.heads).permute(0, 2, 1, 3) * (C // self.heads) ** -0.5
        k = self.k(x).reshape(B, N, self.heads, C // self.heads).permute(0, 2, 1, 3)
        v = self.v(x).reshape(B, N, self.heads, C // self.heads).permute(0, 2, 1, 3)
        scores = (q @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((scores @ v).transpose(1, 2).reshape(B, 1, C))


class ClassBlock(nn.Module):
    """Only the class token changes."""

    def __init__(self, width: int, heads: int, scale: float = 0.1) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = ClassAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 2 * width, nn.GELU)
        self.gamma_1 = nn.Parameter(scale * torch.ones(width))
        self.gamma_2 = nn.Parameter(scale * torch.ones(width))

    def forward(self, x: Tensor, cls: Tensor) -> Tensor:
        cls = cls + self.gamma_1 * self.attn(self.norm1(torch.cat([cls, x], dim=1)))
        return cls + self.gamma_2 * self.mlp(self.norm2(cls))


class Cait(nn.Module):
    """Patches talk among themselves in blocks with LayerScale, then a class token reads them."""

    def __init__(self, width: int = 32, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, stride=4)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.ModuleList([ScaledBlock(width, Attention(width, heads)) for _ in range(2)])
        self.class_block = ClassBlock(width, heads)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        cls = self.class_block(x, self.cls_token.expand(x.shape[0], -1, -1))
        return self.head(self.norm(torch.cat([cls, x], dim=1))[:, 0])


VISION_TRANSFORMERS = (
    Architecture("ViT, GELU", "vision", VisionTransformer, images(16), quick=True),
    Architecture("ViT, ReLU", "vision", partial(VisionTransformer, activation=nn.ReLU), images(16)),
    Architecture(
        "ViT, nn.MultiheadAttention", "vision", partial(VisionTransformer, attention=ModuleAttention), images(16)
    ),
    Architecture("CaiT, LayerScale", "vision", Cait, images(16)),
)
