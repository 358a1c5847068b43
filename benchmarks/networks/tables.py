"""Tables, recommendations and coordinates."""

import math

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.architecture import Architecture, ids, normal

CATEGORIES = (12, 7, 30, 5)
USERS, ITEMS = 200, 300


class TabTransformer(nn.Module):
    """Categories attend to one another; numbers join them before the last layers. Inputs come by name."""

    def __init__(self, numbers: int = 5, width: int = 16, classes: int = 3) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(size, width) for size in CATEGORIES])
        layer = nn.TransformerEncoderLayer(
            width, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(numbers)
        self.mlp = nn.Sequential(
            nn.Linear(width * len(CATEGORIES) + numbers, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()
        )
        self.head = nn.Linear(32, classes)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        x = torch.stack([embed(categories[:, i]) for i, embed in enumerate(self.embeddings)], dim=1)
        x = self.encoder(x).flatten(1)
        return self.head(self.mlp(torch.cat([x, self.norm(numbers)], dim=1)))


class TwoTowers(nn.Module):
    """Users and items in one space; their products, factor by factor, and their dot product meet a linear head."""

    def __init__(self, width: int = 24, inner: int = 32) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(USERS, width), nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, 16))
        self.item = nn.Sequential(nn.Embedding(ITEMS, width), nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, 16))
        self.head = nn.Linear(17, 2)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, v = self.user(user), self.item(item)
        dot = (u * v).sum(dim=-1, keepdim=True)
        return self.head(torch.cat([u * v, dot], dim=-1))


class NeuralFiltering(nn.Module):
    """A product of embeddings beside a perceptron on others (He et al., 2017)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        self.user_mlp, self.item_mlp = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        self.mlp = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.predict = nn.Linear(width + 16, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        product = self.user_gmf(user) * self.item_gmf(item)
        hidden = self.mlp(torch.cat((self.user_mlp(user), self.item_mlp(item)), -1))
        return self.predict(torch.cat((product, hidden), -1))


class Dlrm(nn.Module):
    """Bags of sparse features and a perceptron on dense ones; their pairwise dot products (Naumov et al., 2019)."""

    def __init__(self, dense: int = 6, width: int = 16) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(80, width, mode="sum") for _ in range(3)])
        self.bottom = nn.Sequential(nn.Linear(dense, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width + 6, 32), nn.ReLU(), nn.Linear(32, 1))
        rows, columns = torch.tril_indices(4, 4, offset=-1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        return self.top(torch.cat([x, products[:, self.rows, self.columns]], dim=1))


class Sine(nn.Module):
    """A linear layer and a fast sine, with SIREN's initial values."""

    def __init__(self, before: int, after: int, first: bool = False, speed: float = 30.0) -> None:
        super().__init__()
        self.speed = speed
        self.linear = nn.Linear(before, after)
        nn.init.uniform_(self.linear.weight, *self.bounds(before, first))

    def bounds(self, before: int, first: bool) -> tuple[float, float]:
        bound = 1 / before if first else math.sqrt(6 / before) / self.speed
        return -bound, bound

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.speed * self.linear(x))


class Siren(nn.Module):
    """From coordinates to colours; the coordinates come back half-way, as in NeRF."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first = nn.Sequential(Sine(3, width, first=True), Sine(width, width))
        self.second = nn.Sequential(Sine(width + 3, width), Sine(width, width))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.cat([self.first(x), x], dim=-1)))


class SoftExperts(nn.Module):
    """Every expert answers, a softmax weighs the answers."""

    def __init__(self, features: int = 12, experts: int = 4, width: int = 32, classes: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width)) for _ in range(experts)]
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        weights = F.softmax(self.gate(x), dim=-1)
        answers = torch.stack([expert(x) for expert in self.experts], dim=1)
        return self.head(self.norm(x + torch.einsum("be,bed->bd", weights, answers)))


def autoencoder(features: int = 40) -> nn.Module:
    """A perceptron with a narrow middle."""
    return nn.Sequential(
        nn.Linear(features, 32),
        nn.ReLU(),
        nn.Linear(32, 8),
        nn.ReLU(),
        nn.Linear(8, 32),
        nn.ReLU(),
        nn.Linear(32, features),
    )


def records(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Categories and numbers by name."""
    columns = [ids(size, samples, 1, generator) for size in CATEGORIES]
    return {"categories": torch.cat(columns, dim=1), "numbers": torch.randn(samples, 5, generator=generator)}


def ratings(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Users and items, a number each."""
    return ids(USERS, samples, 1, generator).squeeze(1), ids(ITEMS, samples, 1, generator).squeeze(1)


def clicks(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Dense features, and three bags of four sparse ones."""
    return torch.randn(samples, 6, generator=generator), torch.randint(80, (samples, 3, 4), generator=generator)


TABLES = (
    Architecture("TabTransformer", "table", TabTransformer, records, quick=True),
    Architecture("two towers", "table", TwoTowers, ratings),
    Architecture("NCF", "table", NeuralFiltering, ratings),
    Architecture("DLRM", "table", Dlrm, clicks),
    Architecture("SIREN", "table", Siren, normal(3)),
    Architecture("soft mixture of experts", "table", SoftExperts, normal(12)),
    Architecture("autoencoder", "table", autoencoder, normal(40)),
)
