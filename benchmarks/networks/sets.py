"""Graphs, sets and clouds of points."""

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.architecture import Architecture, normal

NODES, FEATURES = 9, 8


class GraphConv(nn.Module):
    """A linear layer, then the sum over neighbours."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(before, after)))
        self.bias = nn.Parameter(torch.zeros(after))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ (x @ self.weight) + self.bias


class Gcn(nn.Module):
    """Two graph convolutions (Kipf and Welling, 2017), the mean over nodes, a head."""

    def __init__(self, features: int = FEATURES, hidden: int = 48, classes: int = 7) -> None:
        super().__init__()
        self.gc1 = GraphConv(features, hidden)
        self.gc2 = GraphConv(hidden, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = F.relu(self.gc1(x, adjacency))
        x = F.relu(self.gc2(x, adjacency))
        return self.head(x.mean(dim=1))


class GraphAttention(nn.Module):
    """Each head scores pairs of neighbours by a vector for each end, behind LeakyReLU."""

    def __init__(self, before: int, after: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.fc = nn.Linear(before, heads * after, bias=False)
        self.source = nn.Parameter(nn.init.xavier_uniform_(torch.empty(heads, after)))
        self.target = nn.Parameter(nn.init.xavier_uniform_(torch.empty(heads, after)))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.fc(x).view(*x.shape[:2], self.heads, -1)
        left, right = (h * self.source).sum(-1), (h * self.target).sum(-1)
        scores = F.leaky_relu(left.unsqueeze(2) + right.unsqueeze(1), 0.2)
        weights = scores.masked_fill(edges.unsqueeze(-1) == 0, float("-inf")).softmax(dim=2)
        return torch.einsum("bijh,bjhd->bihd", weights, h).flatten(2)


class Gat(nn.Module):
    """Two layers of graph attention; an answer for each node."""

    def __init__(self, features: int = FEATURES, classes: int = 5) -> None:
        super().__init__()
        self.first = GraphAttention(features, 12, 4)
        self.second = GraphAttention(48, 16, 2)
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.elu(self.first(x, edges))
        return self.head(F.elu(self.second(x, edges)))


class DeepSets(nn.Module):
    """A network for each element, the sum, a network for the set."""

    def __init__(self, features: int = 4, hidden: int = 32, outputs: int = 3) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.rho = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.rho(self.phi(x).sum(dim=1))


class PointNet(nn.Module):
    """Points are turned by a matrix that the cloud suggests; convolutions of width 1; the maximum over points."""

    def __init__(self, classes: int = 8) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1), nn.ReLU())
        self.matrix = nn.Linear(32, 9)
        self.features = nn.Sequential(
            nn.Conv1d(3, 32, 1, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1, bias=False)
        )
        self.norm = nn.BatchNorm1d(64)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, classes)

    def forward(self, points: Tensor) -> Tensor:
        x = points.transpose(2, 1)
        turn = self.matrix(torch.max(self.turn(x), 2)[0]).view(-1, 3, 3)
        turn = turn + torch.eye(3, dtype=x.dtype, device=x.device)
        x = torch.bmm(points, turn).transpose(2, 1)
        x = torch.max(self.norm(self.features(x)), 2, keepdim=True)[0]
        return self.fc2(F.relu(self.fc1(x.view(-1, 64))))


def edges(samples: int, generator: Generator) -> Tensor:
    """Which nodes are neighbours, each of itself too."""
    found = torch.rand(samples, NODES, NODES, generator=generator) < 0.3
    return (found | found.transpose(1, 2) | torch.eye(NODES, dtype=torch.bool)).float()


def graphs(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Nodes and edges."""
    return torch.randn(samples, NODES, FEATURES, generator=generator), edges(samples, generator)


def scaled_graphs(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Nodes, and edges divided by the square roots of both degrees."""
    nodes, found = graphs(samples, generator)
    roots = found.sum(-1).rsqrt()
    return nodes, roots.unsqueeze(1) * found * roots.unsqueeze(2)


SETS = (
    Architecture("GCN", "set", Gcn, scaled_graphs),
    Architecture("GAT", "set", Gat, graphs),
    Architecture("DeepSets", "set", DeepSets, normal(10, 4)),
    Architecture("PointNet", "set", PointNet, normal(24, 3)),
)
