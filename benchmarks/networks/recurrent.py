"""Networks with a state that moves through time."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.architecture import Architecture, normal, tokens

VOCABULARY, LENGTH = 200, 10


class LstmClassifier(nn.Module):
    """Embeddings, nn.LSTM, a linear head on the last state of the last layer, both directions side by side."""

    def __init__(
        self,
        *,
        vocabulary: int = VOCABULARY,
        width: int = 24,
        hidden: int = 32,
        layers: int = 1,
        bidirectional: bool = False,
        proj_size: int = 0,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True, bidirectional=bidirectional, proj_size=proj_size)
        self.head = nn.Linear((proj_size or hidden) * (2 if bidirectional else 1), classes)
        self.bidirectional = bidirectional

    def forward(self, x: Tensor) -> Tensor:
        _, (h, _) = self.lstm(self.embedding(x))
        return self.head(torch.cat([h[-2], h[-1]], dim=1) if self.bidirectional else h[-1])


class GruClassifier(nn.Module):
    """Embeddings, nn.GRU, a linear head on the last output, or on the mean of both directions' outputs."""

    def __init__(
        self,
        *,
        vocabulary: int = VOCABULARY,
        width: int = 24,
        hidden: int = 32,
        layers: int = 1,
        bidirectional: bool = False,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.gru = nn.GRU(width, hidden, layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(hidden * (2 if bidirectional else 1), classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.gru(self.embedding(x))
        return self.head(outputs.mean(dim=1) if self.gru.bidirectional else outputs[:, -1])


class RnnRegressor(nn.Module):
    """nn.RNN over a series, with sequences first as is its default; a prediction at each step."""

    def __init__(self, nonlinearity: str, features: int = 6, hidden: int = 32, outputs: int = 4) -> None:
        super().__init__()
        self.rnn = nn.RNN(features, hidden, num_layers=2, nonlinearity=nonlinearity)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.rnn(x.transpose(0, 1))
        return self.head(outputs).transpose(0, 1)


class CellLoop(nn.Module):
    """nn.LSTMCell step by step, from states of zeros."""

    def __init__(self, features: int = 8, hidden: int = 32, classes: int = 5) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = nn.LSTMCell(features, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.size(0), self.hidden)
        c = torch.zeros_like(h)
        for t in range(x.size(1)):
            h, c = self.cell(x[:, t], (h, c))
        return self.head(h)


class ConvLstm(nn.Module):
    """Convolutions over a signal, an LSTM over what they found (as for speech or sensors)."""

    def __init__(self, channels: int = 4, hidden: int = 24, classes: int = 6) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(channels, 16, 5, padding=2),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(16, 24, 3, padding=1),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.MaxPool1d(2),
        )
        self.lstm = nn.LSTM(24, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.features(x).permute(0, 2, 1))
        return self.head(outputs[:, -1, :])


class AttentionPooling(nn.Module):
    """A learned query weighs the outputs of a GRU in both directions."""

    def __init__(self, width: int = 24, hidden: int = 24, classes: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.gru = nn.GRU(width, hidden, batch_first=True, bidirectional=True)
        self.project = nn.Linear(2 * hidden, 32)
        self.query = nn.Linear(32, 1, bias=False)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.gru(self.embedding(x))
        weights = self.query(torch.tanh(self.project(outputs))).softmax(dim=1)
        return self.head((weights * outputs).sum(dim=1))


class Retention(nn.Module):
    """RetNet's layer in its parallel form: scores decay with distance; a norm for each head; a SiLU gate."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.g_proj = nn.Linear(width, width, bias=False)
        self.group_norm = nn.LayerNorm(width // heads, elementwise_affine=False)
        self.out_proj = nn.Linear(width, width, bias=False)
        self.register_buffer("decay", 1 - 2.0 ** (-5 - torch.arange(heads).float()))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (p(x).view(B, T, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        places = torch.arange(T, device=x.device)
        apart = places[:, None] - places[None, :]
        mask = torch.where(apart >= 0, self.decay[:, None, None] ** apart.clamp(min=0), 0.0)
        scores = (q @ k.transpose(-1, -2)) * (C // self.heads) ** -0.5 * mask
        out = self.group_norm((scores @ v).transpose(1, 2)).reshape(B, T, C)
        return self.out_proj(F.silu(self.g_proj(x)) * out)


class RetNet(nn.Module):
    """Two retention blocks, logits at each position."""

    def __init__(self, vocabulary: int = 100, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.retentions = nn.ModuleList([Retention(width, 4) for _ in range(2)])
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(2)]
        )
        self.norms1 = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.norms2 = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for norm1, retention, norm2, mlp in zip(self.norms1, self.retentions, self.norms2, self.mlps, strict=True):
            x = retention(norm1(x)) + x
            x = mlp(norm2(x)) + x
        return self.head(x)


class MinGru(nn.Module):
    """A state that a gate, made of the input alone, mixes with a candidate."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear_z = nn.Linear(width, hidden)
        self.linear_h = nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gates, candidates = torch.sigmoid(self.linear_z(x)), self.linear_h(x)
        h = torch.zeros_like(candidates[:, 0])
        states = []
        for t in range(x.shape[1]):
            h = (1 - gates[:, t]) * h + gates[:, t] * candidates[:, t]
            states.append(h)
        return torch.stack(states, dim=1)


class MinGruClassifier(nn.Module):
    """Two minGRU layers around a residual."""

    def __init__(self, width: int = 32, classes: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norm = nn.LayerNorm(width)
        self.first, self.second = MinGru(width, width), MinGru(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = x + self.first(self.norm(x))
        return self.head(self.second(x)[:, -1])


class Sru(nn.Module):
    """A simple recurrent unit: forget and reset gates see their own state through one weight for each unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, 3 * width)
        self.v = nn.Parameter(0.1 * torch.randn(2, width))

    def forward(self, x: Tensor) -> Tensor:
        candidates, forget, reset = self.projection(x).chunk(3, dim=-1)
        c = torch.zeros_like(x[:, 0])
        outputs = []
        for t in range(x.shape[1]):
            f = torch.sigmoid(forget[:, t] + self.v[0] * c)
            r = torch.sigmoid(reset[:, t] + self.v[1] * c)
            c = f * c + (1 - f) * candidates[:, t]
            outputs.append(r * torch.tanh(c) + (1 - r) * x[:, t])
        return torch.stack(outputs, 1)


class SruRegressor(nn.Module):
    """Two simple recurrent units over a series."""

    def __init__(self, features: int = 6, width: int = 32, outputs: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.layers = nn.Sequential(Sru(width), Sru(width))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x))[:, -1])


class SelectiveScan(nn.Module):
    """Mamba's block: a gated state space whose step, input and output depend on the input."""

    def __init__(self, width: int, inner: int, state: int, rank: int) -> None:
        super().__init__()
        self.state, self.rank = state, rank
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, state + 1)).repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :length]).transpose(1, 2)
        step, B, C = self.x_proj(x).split([self.rank, self.state, self.state], dim=-1)
        step = F.softplus(self.dt_proj(step))
        A = -torch.exp(self.A_log)
        h = x.new_zeros(x.shape[0], x.shape[2], self.state)
        outputs = []
        for t in range(length):
            dt = step[:, t].unsqueeze(-1)
            h = torch.exp(dt * A) * h + dt * B[:, t].unsqueeze(1) * x[:, t].unsqueeze(-1)
            outputs.append((h * C[:, t].unsqueeze(1)).sum(-1))
        y = torch.stack(outputs, dim=1) + x * self.D
        return self.out_proj(y * F.silu(z))


class Mamba(nn.Module):
    """Two blocks with RMSNorm before each."""

    def __init__(self, vocabulary: int = 100, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
        self.mixers = nn.ModuleList([SelectiveScan(width, 2 * width, 8, 4) for _ in range(2)])
        self.norm_f = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.lm_head(self.norm_f(x))


def text(name: str, build: Callable[[], nn.Module], vocabulary: int = VOCABULARY, quick: bool = False) -> Architecture:
    """A network that reads tokens."""
    return Architecture(name, "recurrent", build, tokens(vocabulary, LENGTH), quick)


def series(name: str, build: Callable[[], nn.Module], length: int, features: int) -> Architecture:
    """A network that reads numbers."""
    return Architecture(name, "recurrent", build, normal(length, features))


RECURRENT = (
    text("LSTM", LstmClassifier, quick=True),
    text("LSTM, 2 layers, bidirectional", partial(LstmClassifier, layers=2, bidirectional=True)),
    text("LSTM, proj_size", partial(LstmClassifier, layers=2, proj_size=12)),
    text("GRU", GruClassifier, quick=True),
    text("GRU, bidirectional", partial(GruClassifier, bidirectional=True)),
    series("RNN, tanh", partial(RnnRegressor, "tanh"), 7, 6),
    series("RNN, ReLU", partial(RnnRegressor, "relu"), 7, 6),
    series("LSTMCell loop", CellLoop, 6, 8),
    series("convolution and LSTM", ConvLstm, 4, 32),
    text("GRU, attention pooling", AttentionPooling),
    text("RetNet", RetNet, 100),
    text("minGRU", MinGruClassifier),
    series("SRU", SruRegressor, 6, 6),
    text("Mamba", Mamba, 100),
)
