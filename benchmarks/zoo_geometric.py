"""Models and convolutions of torch_geometric on batches of graphs of one size, as dense tensors of nodes and edges."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_measure import CLASSES, SAMPLES, Case
from benchmarks.zoo_measure import measure as measure_case

NODES, EDGES, FEATURES, WIDTH = 8, 20, 6, 16
MODELS = ("EdgeCNN", "GAT", "GCN", "GIN", "GraphSAGE", "PNA", "PMLP", "Polynormer", "SGFormer", "GraphUNet")
DENSE = ("DenseGATConv", "DenseGCNConv", "DenseGraphConv", "DenseGINConv", "DenseSAGEConv")
PLAIN = (
    "ARMAConv", "ClusterGCNConv", "EGConv", "FeaStConv", "FiLMConv", "GATConv", "GATv2Conv", "GCNConv", "GENConv",
    "GeneralConv", "GraphConv", "HypergraphConv", "LEConv", "MFConv", "ResGatedGraphConv", "SAGEConv", "SGConv",
    "SuperGATConv", "TAGConv",
)  # fmt: skip
OPTIONS: dict[str, dict[str, object]] = {  # arguments beyond the numbers of channels
    "ChebConv": {"K": 3},
    "SSGConv": {"alpha": 0.1},
    "TransformerConv": {"heads": 2, "concat": False},
}
SPECIAL = ("APPNP", "EdgeConv", "GatedGraphConv", "GINConv", "GPSConv", "PNAConv")


class Graphs(nn.Module):
    """A network on a batch of graphs: joined into one graph for `body`, then one prediction per graph.

    Attributes:
        body: maps the nodes' features and the edges to features.
        head: the last layer.
    """

    def __init__(self, body: nn.Module, width: int, *, batched: bool) -> None:
        super().__init__()
        self.body, self.head, self.batched = body, nn.Linear(width, CLASSES), batched

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return one row per graph; `edges` holds the two ends of each graph's edges."""
        from torch_geometric.nn import global_mean_pool

        count, nodes = x.shape[:2]
        first = torch.arange(count, device=x.device) * nodes
        joined = (edges + first[:, None, None]).transpose(0, 1).flatten(1)
        batch = torch.arange(count, device=x.device).repeat_interleave(nodes)
        found = self.body(x.flatten(0, 1), joined, *([batch] if self.batched else []))
        return self.head(global_mean_pool(found, batch, count))  # type: ignore[no-any-return]


class Layers(nn.Module):
    """Two convolutions with ReLU; "dense" ones receive an adjacency matrix instead of edges."""

    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = layer(FEATURES, WIDTH), layer(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return the nodes' features."""
        return self.second(self.first(x, edges).relu(), edges).relu()  # type: ignore[no-any-return]


class Dense(nn.Module):
    """Dense convolutions and a mean over the nodes."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """Return one row per graph."""
        return self.head(self.body(x, adjacency).mean(1))  # type: ignore[no-any-return]


def names() -> list[str]:
    """Return the names of the models and of the convolutions."""
    return [*MODELS, *sorted([*PLAIN, *OPTIONS, *SPECIAL]), *DENSE]


def build(name: str) -> Case:
    """Build a network, and a batch of graphs."""
    from torch_geometric import nn as geometric

    draw = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, NODES, FEATURES, generator=draw).double()
    edges = torch.randint(0, NODES, (SAMPLES, 2, EDGES), generator=draw)
    if name in DENSE:
        adjacency = (torch.rand(SAMPLES, NODES, NODES, generator=draw) < 0.3).double()
        return Dense(Layers(lambda i, o: _layer(name, i, o))), (x, adjacency)
    if name not in MODELS:
        return Graphs(Layers(lambda i, o: _layer(name, i, o)), WIDTH, batched=False), (x, edges)
    kind: Any = getattr(geometric.models, name)  # type: ignore[explicit-any]
    given = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([0, 3, 5])}
    if name in ("PMLP", "GraphUNet"):
        body = kind(FEATURES, WIDTH, WIDTH, 2)
    elif name in ("Polynormer", "SGFormer"):
        body = kind(FEATURES, WIDTH, WIDTH)
    else:
        body = kind(FEATURES, WIDTH, 2, WIDTH, **(given if name == "PNA" else {}))
    return Graphs(body, WIDTH, batched=name in ("Polynormer", "SGFormer", "GraphUNet")), (x, edges)


def _layer(name: str, inputs: int, outputs: int) -> nn.Module:
    from torch_geometric import nn as geometric

    kind: Any = getattr(geometric, name)  # type: ignore[explicit-any]
    pair = nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))
    found: nn.Module
    if name in ("GINConv", "DenseGINConv"):
        found = kind(pair, train_eps=True)
    elif name == "EdgeConv":
        found = kind(nn.Sequential(nn.Linear(2 * inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs)))
    elif name == "GatedGraphConv":
        found = kind(outputs, num_layers=2)
    elif name == "APPNP":
        found = _Then(nn.Linear(inputs, outputs), kind(K=3, alpha=0.1))
    elif name == "GPSConv":
        found = _Then(nn.Linear(inputs, outputs), kind(outputs, geometric.GCNConv(outputs, outputs), heads=2))
    elif name == "PNAConv":
        found = kind(inputs, outputs, ["mean", "max"], ["identity"], torch.tensor([0, 3, 5]))
    else:
        found = kind(inputs, outputs, **OPTIONS.get(name, {}))
    return found


class _Then(nn.Module):
    """A Linear layer, then a convolution."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(self.first(x), edges)  # type: ignore[no-any-return]


def measure(name: str) -> dict[str, object]:
    """Compare a network's recovered gradients with those of autograd."""
    torch.set_default_dtype(torch.float64)  # SGFormer's forward creates tensors of the default dtype
    return measure_case(lambda: build(name))
