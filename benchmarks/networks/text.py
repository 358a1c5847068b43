"""Classifiers of text without recurrence or attention."""

from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.architecture import Architecture, ids, tokens

VOCABULARY, LENGTH = 200, 16


class TextCnn(nn.Module):
    """Convolutions of several widths over embeddings, the maximum over time (Kim, 2014)."""

    def __init__(self, width: int = 24, channels: int = 16, classes: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.convs = nn.ModuleList([nn.Conv1d(width, channels, size) for size in (3, 4, 5)])
        self.fc = nn.Linear(3 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x).transpose(1, 2)
        found = [F.relu(conv(x)) for conv in self.convs]
        return self.fc(torch.cat([F.max_pool1d(y, y.size(2)).squeeze(2) for y in found], 1))


class BagClassifier(nn.Module):
    """nn.EmbeddingBag and two layers."""

    def __init__(self, mode: str, width: int = 24, classes: int = 6) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(VOCABULARY, width, mode=mode)
        self.hidden = nn.Linear(width, 32)
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.embedding(x))))


class FastText(nn.Module):
    """Words and pairs of words in a bag each, averaged."""

    def __init__(self, words: int = 150, pairs: int = 300, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(words, width, mode="mean")
        self.pairs = nn.EmbeddingBag(pairs, width, mode="mean")
        self.fc = nn.Linear(width, classes)

    def forward(self, words: Tensor, pairs: Tensor) -> Tensor:
        return self.fc((self.words(words) + self.pairs(pairs)) / 2)


class Highway(nn.Module):
    """A gate chooses between a layer and its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        g = torch.sigmoid(self.gate(x))
        return g * F.relu(self.transform(x)) + (1 - g) * x


class CharacterCnn(nn.Module):
    """Characters, convolutions with tanh, the maximum over time, two highway layers (Kim et al., 2016)."""

    def __init__(self, characters: int = 60, width: int = 12, classes: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.convs = nn.ModuleList([nn.Conv1d(width, 4 * size, size) for size in (2, 3, 4)])
        self.highways = nn.Sequential(Highway(36), Highway(36))
        self.head = nn.Linear(36, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x).permute(0, 2, 1)
        x = torch.cat([torch.tanh(conv(x)).max(dim=2).values for conv in self.convs], dim=1)
        return self.head(self.highways(x))


def two_bags(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Words and pairs of words."""
    return ids(150, samples, 12, generator), ids(300, samples, 11, generator)


TEXT = (
    Architecture("text CNN", "text", TextCnn, tokens(VOCABULARY, LENGTH)),
    Architecture("EmbeddingBag, sum", "text", partial(BagClassifier, "sum"), tokens(VOCABULARY, LENGTH)),
    Architecture("EmbeddingBag, mean", "text", partial(BagClassifier, "mean"), tokens(VOCABULARY, LENGTH)),
    Architecture("EmbeddingBag, max", "text", partial(BagClassifier, "max"), tokens(VOCABULARY, LENGTH)),
    Architecture("fastText, two bags", "text", FastText, two_bags),
    Architecture("character CNN, highway", "text", CharacterCnn, tokens(60, 20)),
)
