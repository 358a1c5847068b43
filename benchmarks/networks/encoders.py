"""Transformers made of PyTorch's own layers, and BERT's."""

import math
from functools import partial
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.architecture import Architecture, ids, tokens

VOCABULARY, LENGTH = 200, 12


class EncoderClassifier(nn.Module):
    """Token and position embeddings, nn.TransformerEncoder, a linear head on the mean token or on a class token."""

    def __init__(
        self,
        *,
        vocabulary: int = VOCABULARY,
        length: int = LENGTH,
        width: int = 32,
        heads: int = 4,
        feedforward: int = 128,
        layers: int = 2,
        classes: int = 10,
        activation: Literal["relu", "gelu"] = "relu",
        norm_first: bool = False,
        pool: Literal["mean", "class"] = "mean",
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.cls = nn.Parameter(torch.zeros(1, 1, width)) if pool == "class" else None
        self.positions = nn.Parameter(0.02 * torch.randn(1, length + (pool == "class"), width))
        layer = nn.TransformerEncoderLayer(
            width, heads, feedforward, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
        )
        norm = nn.LayerNorm(width) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=not norm_first)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        if self.cls is not None:
            x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.encoder(x + self.positions)
        return self.head(x.mean(1) if self.cls is None else x[:, 0])


class PaddedEncoder(nn.Module):
    """nn.TransformerEncoder with fixed sine positions, told by a mask which tokens are padding (number 0)."""

    def __init__(self, vocabulary: int = VOCABULARY, length: int = LENGTH, width: int = 32, classes: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        angles = torch.arange(length).unsqueeze(1) / 1e4 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        padding = x == 0
        x = self.embedding(x) * math.sqrt(self.width) + self.positions
        x = self.encoder(x, src_key_padding_mask=padding).masked_fill(padding.unsqueeze(-1), 0.0)
        return self.head(x.sum(1) / (~padding).sum(1, keepdim=True))


class MemoryDecoder(nn.Module):
    """nn.TransformerDecoder over token embeddings, with features of something else as its memory."""

    def __init__(self, vocabulary: int = 60, length: int = 8, features: int = 20, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.memory = nn.Linear(features, width)
        layer = nn.TransformerDecoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor, features: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device, dtype=features.dtype)
        x = self.embedding(x) + self.positions(torch.arange(length, device=x.device))
        x = self.decoder(x, self.memory(features), tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)


class Translator(nn.Module):
    """nn.Transformer from one language to another."""

    def __init__(self, source: int = 80, target: int = 70, length: int = 8, width: int = 32) -> None:
        super().__init__()
        self.source = nn.Embedding(source, width)
        self.target = nn.Embedding(target, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.transformer = nn.Transformer(
            width, 4, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=64, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(width, target)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        after = target.shape[1]
        mask = torch.triu(torch.ones(after, after, dtype=torch.bool, device=target.device), diagonal=1)
        left = self.source(source) + self.positions[: source.shape[1]]
        right = self.target(target) + self.positions[:after]
        return self.head(self.transformer(left, right, tgt_mask=mask, tgt_is_causal=True))


class BertLayer(nn.Module):
    """Separate query, key and value; an additive mask; a norm after each sum."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.intermediate = nn.Linear(width, inner)
        self.dense = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, self.size).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.size) + mask
        context = torch.matmul(scores.softmax(-1), v).permute(0, 2, 1, 3).contiguous()
        x = self.attention_norm(self.output(context.view(x.shape)) + x)
        return self.norm(self.dense(F.gelu(self.intermediate(x))) + x)


class Bert(nn.Module):
    """A sequence classifier that takes `input_ids` and `attention_mask` by name."""

    def __init__(self, vocabulary: int = VOCABULARY, length: int = LENGTH, width: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(length, width)
        self.kinds = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList([BertLayer(width, 4, 4 * width) for _ in range(2)])
        self.pooler = nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.words(input_ids) + self.positions(positions) + self.kinds(torch.zeros_like(input_ids)))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, mask)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


def padded(samples: int, generator: Generator) -> Tensor:
    """Sentences of several lengths, the rest of each 0."""
    found = ids(VOCABULARY - 1, samples, LENGTH, generator) + 1
    return found * attended(samples, generator)


def attended(samples: int, generator: Generator) -> Tensor:
    """1 for tokens, 0 for padding: from 3 tokens on."""
    lengths = torch.randint(3, LENGTH + 1, (samples, 1), generator=generator)
    return (torch.arange(LENGTH) < lengths).long()


def sentences(samples: int, generator: Generator) -> dict[str, Tensor]:
    """What a tokenizer returns."""
    mask = attended(samples, generator)
    return {"input_ids": ids(VOCABULARY, samples, LENGTH, generator) * mask, "attention_mask": mask}


def with_memory(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Tokens and features."""
    return ids(60, samples, 8, generator), torch.randn(samples, 5, 20, generator=generator)


def pairs(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Sentences in two languages."""
    return ids(80, samples, 8, generator), ids(70, samples, 7, generator)


def encoder(
    name: str, activation: Literal["relu", "gelu"], norm_first: bool, pool: Literal["mean", "class"], quick: bool
) -> Architecture:
    """One of the four common kinds."""
    build = partial(EncoderClassifier, activation=activation, norm_first=norm_first, pool=pool)
    return Architecture(f"TransformerEncoder, {name}", "transformer", build, tokens(VOCABULARY, LENGTH), quick)


ENCODERS = (
    encoder("post-norm ReLU", "relu", False, "mean", True),
    encoder("post-norm GELU", "gelu", False, "class", False),
    encoder("pre-norm ReLU", "relu", True, "class", False),
    encoder("pre-norm GELU", "gelu", True, "mean", False),
    Architecture("TransformerEncoder, padding mask", "transformer", PaddedEncoder, padded),
    Architecture("TransformerDecoder with memory", "transformer", MemoryDecoder, with_memory),
    Architecture("nn.Transformer", "transformer", Translator, pairs),
    Architecture("BERT", "transformer", Bert, sentences, quick=True),
)
