"""Causal language models, and attention in the forms that followed: rotary, grouped, normed, biased, linear."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.architecture import Architecture, normal, tokens

VOCABULARY, LENGTH = 100, 10


class CausalAttention(nn.Module):
    """Packed query, key and value of a width that heads share."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class AlibiAttention(CausalAttention):
    """Scores fall with distance, by a fixed slope for each head; written out."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in (q, k, v))
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / self.heads) for h in range(self.heads)]).to(x)
        places = torch.arange(T, device=x.device)
        distance = places.view(1, -1) - places.view(-1, 1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)) + slopes.view(-1, 1, 1) * distance
        scores = scores.masked_fill(distance > 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class LinearAttention(nn.Module):
    """Positive features in place of softmax: keys meet values first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], self.heads, -1)
        q, k = F.elu(self.q(x).view(split)) + 1, F.elu(self.k(x).view(split)) + 1
        pairs = torch.einsum("bnhd,bnhe->bhde", k, self.v(x).view(split))
        total = torch.einsum("bnhd,bhd->bnh", q, k.sum(dim=1))
        y = torch.einsum("bnhd,bhde->bnhe", q, pairs) / (total.unsqueeze(-1) + 1e-6)
        return self.out(y.flatten(2))


class NormedAttention(nn.Module):
    """Queries and keys pass a norm that all heads share."""

    def __init__(self, width: int, heads: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_norm, self.k_norm = norm(width // heads), norm(width // heads)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class BiasedAttention(nn.Module):
    """A learned bias for each head and distance is added to the scores, which are not divided (T5)."""

    def __init__(self, width: int, heads: int, length: int = LENGTH) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.bias = nn.Embedding(2 * length - 1, heads)
        places = torch.arange(length)
        self.register_buffer("distance", places.view(-1, 1) - places + length - 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(3, 2)) + self.bias(self.distance).permute(2, 0, 1).unsqueeze(0)
        return self.o(torch.matmul(scores.softmax(-1), v).transpose(1, 2).reshape(x.shape))


class GptBlock(nn.Module):
    """Norm, attention, norm, perceptron."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = attention
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """A language model: logits at each position, from a separate head."""

    def __init__(self, attention: Callable[[int, int], nn.Module], positions: bool = True) -> None:
        super().__init__()
        width, heads = 32, 4
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(LENGTH, width) if positions else None
        self.h = nn.ModuleList([GptBlock(width, attention(width, heads)) for _ in range(2)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class RMSNorm(nn.Module):
    """As language models write it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotate_half(x: Tensor) -> Tensor:
    """(a, b) -> (-b, a) for the halves of a head."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_neighbours(x: Tensor) -> Tensor:
    """(a, b) -> (-b, a) for neighbours in a head."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class GroupedAttention(nn.Module):
    """Rotary positions; several query heads share a head of keys and values."""

    def __init__(self, width: int, heads: int, shared: int, rotary: Literal["halves", "neighbours"]) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.q_proj = nn.Linear(width, heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, shared * self.size, bias=False)
        self.v_proj = nn.Linear(width, shared * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, width, bias=False)
        self.rotate = rotate_half if rotary == "halves" else rotate_neighbours
        speeds = 1e4 ** (-torch.arange(0, self.size, 2) / self.size)
        angles = torch.outer(torch.arange(LENGTH), speeds)
        angles = torch.cat([angles, angles], -1) if rotary == "halves" else angles.repeat_interleave(2, -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        length = x.shape[2]
        return x * self.cos[:length] + self.rotate(x) * self.sin[:length]

    def repeat(self, x: Tensor) -> Tensor:
        batch, shared, length, size = x.shape
        times = self.heads // self.shared
        return x[:, :, None].expand(batch, shared, times, length, size).reshape(batch, self.heads, length, size)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.size)
        q = self.turn(self.q_proj(x).view(shape).transpose(1, 2))
        k = self.turn(self.k_proj(x).view(shape).transpose(1, 2))
        v = self.v_proj(x).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class LlamaBlock(nn.Module):
    """RMSNorm, grouped attention, RMSNorm, SwiGLU."""

    def __init__(self, width: int, inner: int, attention: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(width)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    """A language model without biases."""

    def __init__(self, rotary: Literal["halves", "neighbours"]) -> None:
        super().__init__()
        width = 32
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        blocks = [LlamaBlock(width, 80, GroupedAttention(width, 4, 2, rotary)) for _ in range(2)]
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another."""

    def __init__(self, width: int, context: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, heads * size, bias=False)
        self.to_kv = nn.Linear(context, 2 * heads * size, bias=False)
        self.to_out = nn.Linear(heads * size, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q = self.to_q(x).unflatten(-1, (self.heads, -1))
        k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.to_kv(context).chunk(2, dim=-1))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        return self.to_out(torch.einsum("bhij,bjhd->bihd", scores.softmax(dim=-1), v).flatten(2))


class Perceiver(nn.Module):
    """Learned latents read a long input, then one another."""

    def __init__(self, channels: int = 6, latents: int = 8, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, width))
        self.context_norm = nn.LayerNorm(channels)
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.LayerNorm(width) for _ in range(4))
        self.read = CrossAttention(width, channels, 1, 16)
        self.think = CrossAttention(width, width, 4, 8)
        self.mlp1 = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.mlp2 = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, data: Tensor) -> Tensor:
        x = self.latents.unsqueeze(0).repeat(data.shape[0], 1, 1)
        x = x + self.read(self.norm1(x), self.context_norm(data))
        x = x + self.mlp1(self.norm2(x))
        y = self.norm3(x)
        x = x + self.think(y, y)
        x = x + self.mlp2(self.norm4(x))
        return self.head(x.mean(dim=1))


def language(name: str, build: Callable[[], nn.Module], quick: bool = False) -> Architecture:
    """A model of the same few tokens."""
    return Architecture(name, "transformer", build, tokens(VOCABULARY, LENGTH), quick)


DECODERS = (
    language("GPT", partial(Gpt, CausalAttention), quick=True),
    language("GPT, ALiBi", partial(Gpt, AlibiAttention, positions=False)),
    language("GPT, qk-LayerNorm", partial(Gpt, partial(NormedAttention, norm=nn.LayerNorm))),
    language("GPT, qk-RMSNorm", partial(Gpt, partial(NormedAttention, norm=nn.RMSNorm))),
    language("relative position bias", partial(Gpt, BiasedAttention, positions=False)),
    language("linear attention", partial(Gpt, LinearAttention)),
    language("Llama, rotary halves", partial(Llama, "halves"), quick=True),
    language("Llama, rotary neighbours", partial(Llama, "neighbours")),
    Architecture("Perceiver", "transformer", Perceiver, normal(24, 6)),
)
