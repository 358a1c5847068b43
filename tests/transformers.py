"""Random small attention and recurrent networks for property tests."""

import torch
from hypothesis import strategies as st
from tests.oracle import Network
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, INNER, TOKENS = 8, 2, 4, 3


def rotated(x: Tensor) -> Tensor:
    """Rotary positions, in halves."""
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Attention(nn.Module):
    """Attention in one of the forms in which people write it."""

    def __init__(self, form: str, shared: int, norm: str, bias: bool) -> None:
        super().__init__()
        self.form, self.norm = form, norm
        self.groups = HEADS // shared
        self.q = nn.Linear(WIDTH, HEADS * INNER, bias=bias)
        self.k = nn.Linear(WIDTH, self.groups * INNER, bias=bias)
        self.v = nn.Linear(WIDTH, self.groups * INNER, bias=bias)
        self.o = nn.Linear(HEADS * INNER, WIDTH)
        if norm in ("layer", "rms"):
            self.norms = nn.ModuleList([nn.LayerNorm(INNER) if norm == "layer" else nn.RMSNorm(INNER) for _ in "qk"])
        self.table = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS)) if form == "bias" else None

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = (
            layer(x).view(n, t, heads, INNER).transpose(1, 2)
            for layer, heads in ((self.q, HEADS), (self.k, self.groups), (self.v, self.groups))
        )
        if self.norm in ("layer", "rms"):
            q, k = self.norms[0](q), self.norms[1](k)
        if self.norm == "length":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if self.form == "rotary":
            q, k = rotated(q), rotated(k)
        if self.form in ("fused", "bias", "rotary", "causal"):
            options = {"is_causal": self.form == "causal", "enable_gqa": self.groups != HEADS}
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.table, **options)
        else:
            k, v = (a.repeat_interleave(HEADS // self.groups, 1) for a in (k, v))
            if self.form == "einsum":
                weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
                out = torch.einsum("bhij,bhjd->bhid", weights, v)
            else:
                weights = (q @ k.transpose(-2, -1) / INNER**0.5).softmax(-1)
                out = weights @ v
        return self.o(out.transpose(1, 2).reshape(n, t, -1))


def whole(batch_first: bool, weights: bool, extra: bool) -> nn.Module:
    """nn.MultiheadAttention of a tensor with itself."""

    def run(model, x):  # type: ignore[no-untyped-def]
        x = x if batch_first else x.transpose(0, 1)
        out = model.inner(x, x, x, need_weights=weights)[0]
        return out if batch_first else out.transpose(0, 1)

    return Network(run, inner=nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, add_bias_kv=extra))


def gate(function: str) -> nn.Module:
    """A product of two layers, one behind a function."""
    act = nn.Identity() if function == "none" else getattr(torch, function)
    layers = {"gate": nn.Linear(WIDTH, 6), "value": nn.Linear(WIDTH, 6), "out": nn.Linear(6, WIDTH)}
    return Network(lambda m, x: m.out(act(m.gate(x)) * m.value(x)), **layers)


class Block(nn.Module):
    """A residual connection around a norm and a layer, in either order."""

    def __init__(self, inner: nn.Module, norm: nn.Module, first: bool, scaled: bool) -> None:
        super().__init__()
        self.inner, self.norm, self.first = inner, norm, first
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(self.norm(x) if self.first else x)
        out = out if self.gain is None else out * self.gain
        return x + out if self.first else self.norm(x + out)


class Stream(nn.Module):
    """Tokens, positions, a class token, blocks and a head."""

    def __init__(self, blocks: list[nn.Module], start: bool, mean: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        count = TOKENS - 1 if start else TOKENS
        self.positions = nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.start = nn.Parameter(torch.randn(1, 1, WIDTH)) if start else None
        self.blocks, self.mean, self.count = nn.Sequential(*blocks), mean, count
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids[:, : self.count])
        if self.start is not None:
            x = torch.cat([self.start.expand(len(x), -1, -1), x], 1)
        x = self.blocks(x + self.positions)
        return self.head(x.mean(1) if self.mean else x[:, 0])


def shaken(model: nn.Module) -> nn.Module:
    """No parameter stays constant: equal numbers would hide a wrong permutation."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double()


@st.composite
def attention_networks(draw) -> nn.Module:  # type: ignore[no-untyped-def]
    """A network of token ids (n, 3) with four outputs, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(draw(st.integers(0, 2**32)))
        blocks: list[nn.Module] = []
        for _ in range(draw(st.integers(1, 2))):
            norm = draw(st.sampled_from([nn.LayerNorm, nn.RMSNorm, lambda _: nn.Identity()]))
            first, scaled = draw(st.booleans()), draw(st.booleans())
            if draw(st.booleans()):
                form = draw(st.sampled_from(["fused", "causal", "bias", "rotary", "plain", "einsum"]))
                shared, own = draw(st.sampled_from([1, 2])), draw(st.sampled_from(["none", "layer", "rms", "length"]))
                inner: nn.Module = Attention(form, shared, own, draw(st.booleans()))
            else:
                inner = whole(draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))
            blocks.append(Block(inner, norm(WIDTH), first, scaled))
            function = draw(st.sampled_from(["relu", "sigmoid", "tanh", "none"]))
            mixing: nn.Module = gate(function)
            if draw(st.booleans()):
                activation = draw(st.sampled_from([nn.ReLU, nn.GELU, nn.Tanh]))()
                mixing = nn.Sequential(nn.Linear(WIDTH, 6), activation, nn.Linear(6, WIDTH))
            blocks.append(Block(mixing, norm(WIDTH), first, scaled))
        return shaken(Stream(blocks, draw(st.booleans()), draw(st.booleans())))


class Recurrent(nn.Module):
    """A recurrent network over token ids, read at its end, in the middle, or everywhere."""

    def __init__(self, layer: nn.Module, width: int, read: str, start: bool) -> None:
        super().__init__()
        self.embedding, self.layer, self.read = nn.Embedding(7, 5), layer, read
        self.head = nn.Linear(width, 4)
        sizes = (layer.num_layers * (2 if layer.bidirectional else 1), 1)
        self.states = None
        if start:
            hidden = [getattr(layer, "proj_size", 0) or layer.hidden_size]
            hidden += [layer.hidden_size] if isinstance(layer, nn.LSTM) else []
            self.states = nn.ParameterList([nn.Parameter(torch.randn(*sizes, size)) for size in hidden])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if not self.layer.batch_first:
            x = x.transpose(0, 1)
        if self.states is not None:
            given = tuple(s.expand(-1, len(ids), -1).contiguous() for s in self.states)
            out, last = self.layer(x, given if isinstance(self.layer, nn.LSTM) else given[0])
        else:
            out, last = self.layer(x)
        out = out if self.layer.batch_first else out.transpose(0, 1)
        if self.read == "state":
            last = last[0] if isinstance(last, tuple) else last
            directions = 2 if self.layer.bidirectional else 1
            return self.head(torch.cat(list(last[-directions:]), -1))
        return self.head({"last": out[:, -1], "mean": out.mean(1), "max": out.amax(1)}[self.read])


def steps(kind: type[nn.Module]) -> nn.Module:
    """A cell that is called once per token."""

    def run(model, ids):  # type: ignore[no-untyped-def]
        state = None
        for x in model.embedding(ids).unbind(1):
            state = model.cell(x, state)
        return model.head(state[0] if isinstance(state, tuple) else state)

    return Network(run, embedding=nn.Embedding(7, 5), cell=kind(5, 6), head=nn.Linear(6, 4))


@st.composite
def recurrent_networks(draw) -> nn.Module:  # type: ignore[no-untyped-def]
    """A network of token ids with four outputs, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(draw(st.integers(0, 2**32)))
        if draw(st.integers(0, 3)) == 0:
            return shaken(steps(draw(st.sampled_from([nn.LSTMCell, nn.GRUCell, nn.RNNCell]))))
        kind = draw(st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]))
        both = draw(st.booleans())
        options = {"num_layers": draw(st.integers(1, 2)), "bidirectional": both, "bias": draw(st.booleans())}
        options["batch_first"] = draw(st.booleans())
        if kind is nn.RNN:
            options["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
        size = 6
        if kind is nn.LSTM and draw(st.booleans()):
            options["proj_size"] = size = 3
        layer = kind(5, 6, **options)
        read = draw(st.sampled_from(["last", "mean", "max", "state"]))
        return shaken(Recurrent(layer, size * (2 if both else 1), read, draw(st.booleans())))
