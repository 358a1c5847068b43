"""Sums of clipped per-record gradients: three ways against a loop, exact norms, and with a veil."""

from fractions import Fraction

import pytest
import torch
from torch import nn

import fedveil
from fedveil.errors import BadArgument
from fedveil.models import mlp
from fedveil.privacy import gradients
from fedveil.privacy.gradients import RecordGradients, clipped_sums
from fedveil.scheme.losses import find_loss
from fedveil.scheme.messages import Update

CLIP = 0.3


def convolution():
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16, 5)).double()


class Attention(nn.Module):
    """A model whose forward takes two arguments."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = (
            nn.Embedding(11, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 5),
        )

    def forward(self, tokens, scale):
        x = self.embed(tokens) * scale[:, None, None]
        return self.head(self.mix(x, x, x, need_weights=False)[0].mean(1))


def make(kind):
    draw = torch.Generator().manual_seed(1)
    classes = torch.randint(0, 5, (9,), generator=draw)
    if kind == "stack":
        return mlp(6, 5, hidden=7, layers=2).double(), torch.randn(9, 6, generator=draw).double(), classes
    if kind == "convolution":
        return convolution(), torch.randn(9, 3, 6, 6, generator=draw).double(), classes
    tokens = torch.randint(0, 11, (9, 4), generator=draw)
    return Attention().double(), (tokens, torch.rand(9, generator=draw).double()), classes


def one(inputs, row):
    return tuple(own[row : row + 1] for own in inputs) if isinstance(inputs, tuple) else inputs[row : row + 1]


def oracle(model, loss, inputs, targets, clip, included=None):
    """The clipped sum, one record after the other, by autograd."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trainable}
    for row in range(len(targets)):
        if included is not None and not included[row]:
            continue
        record = one(inputs, row)
        outputs = model(*record) if isinstance(record, tuple) else model(record)
        value = {
            "cross_entropy": lambda o, t: nn.functional.cross_entropy(o, t),
            "squared_error": lambda o, t: 0.5 * (o - nn.functional.one_hot(t, 5)).square().sum(),
        }[loss](outputs, targets[row : row + 1])
        found = torch.autograd.grad(value, [p for _, p in trainable])
        norm = torch.cat([own.double().flatten() for own in found]).norm()
        for (name, _), own in zip(trainable, found, strict=True):
            total[name] += own.double() * min(1.0, clip / float(norm))
    return total


def distance(found, wanted):
    gap = [(found[name].reshape(own.shape) - own).flatten() for name, own in wanted.items()]
    return float(torch.cat(gap).norm() / torch.cat([own.flatten() for own in wanted.values()]).norm())


@pytest.mark.parametrize("kind", ["stack", "convolution", "attention"])
@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
@pytest.mark.parametrize("way", ["default", "chunks", "loop"])
def test_every_way_gives_the_sum_of_a_loop(kind, loss, way, monkeypatch):
    model, inputs, targets = make(kind)
    task = RecordGradients.from_model(model, find_loss(loss))
    if way == "loop":
        monkeypatch.setattr(gradients, "find_links", lambda *given: None)
        monkeypatch.setattr(gradients, "needs_loop", lambda task: True)
    memory = 3 * task.parameters() * 32 if way == "chunks" else 2**28
    if way == "chunks":
        monkeypatch.setattr(gradients, "find_links", lambda *given: None)
    included = torch.ones(9, dtype=torch.bool)
    found = clipped_sums(task, inputs, targets, included, CLIP, memory)
    assert distance(found, oracle(model, loss, inputs, targets, CLIP)) < 1e-12
    assert all(own.dtype == torch.float64 for own in found.values())


@pytest.mark.parametrize("kind", ["stack", "convolution"])
def test_records_that_do_not_count_or_are_not_finite_contribute_nothing(kind):
    model, inputs, targets = make(kind)
    included = torch.tensor([True, False, True, True, False, True, True, True, True])
    wanted = oracle(model, "cross_entropy", inputs, targets, CLIP, included & (torch.arange(9) != 3))
    spoilt = inputs.clone()
    spoilt[3] = float("nan")
    spoilt[4] = float("inf")
    task = RecordGradients.from_model(model, find_loss("cross_entropy"))
    assert distance(clipped_sums(task, spoilt, targets, included, CLIP), wanted) < 1e-12
    nothing = clipped_sums(task, inputs, targets, torch.zeros(9, dtype=torch.bool), CLIP)
    assert all(not own.any() for own in nothing.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["stack", "convolution"])
def test_no_contribution_is_longer_than_clip(kind, dtype):
    """In exact arithmetic, whatever the floats round to."""
    model, inputs, targets = make(kind)
    model, inputs = model.to(dtype), inputs.to(dtype)
    task = RecordGradients.from_model(model, find_loss("cross_entropy"))
    clip, longest = 1e-3, Fraction(0)
    for row in range(9):
        included = torch.arange(9) == row
        found = clipped_sums(task, inputs, targets, included, clip)
        square = sum(Fraction(x) ** 2 for own in found.values() for x in own.flatten().tolist())
        assert square <= Fraction(clip) ** 2
        longest = max(longest, square)
    assert longest > (Fraction(clip) * Fraction(999_999, 1_000_000)) ** 2  # and hardly shorter


class Custom(torch.autograd.Function):
    """A product that no torch function shows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return x @ weight.T

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, back):
        x, weight = ctx.saved_tensors
        return back @ weight, back.T @ x


class Dense(nn.Module):
    """Linear layers that are used in several ways; `mid` is not one row per record, or has another use, in some."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls, bias = kind, 0, kind != "no bias"
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.mid, self.head = nn.Linear(8, 8, bias=bias), nn.Linear(8, 5, bias=bias)
        if kind == "tied":
            self.last = nn.Linear(8, 8)
            self.last.weight = self.mid.weight
        if kind == "tied bias":
            self.last = nn.Linear(8, 8)
            self.last.bias = self.mid.bias
        if kind == "frozen":
            self.mid.requires_grad_(False)
        if kind == "frozen weight":
            self.mid.weight.requires_grad_(False)
        if kind == "frozen bias":
            self.mid.bias.requires_grad_(False)

    def forward(self, x):
        self.calls += 1
        x = torch.tanh(self.norm(self.first(x)))
        if self.kind == "rows":
            return self.head(self.mid(torch.stack([x, x.square(), x.sin()], 1)).tanh().mean(1))
        if self.kind == "one row of three dims":
            return self.head(self.mid(x.unsqueeze(1)).tanh().squeeze(1))
        if self.kind == "in its own bias":
            return self.head(nn.functional.linear(x, self.mid.weight, self.mid.bias * self.mid.weight.sum(1)))
        x = self.mid(x).tanh()
        if self.kind == "twice" or (self.kind == "varies" and self.calls % 2 == 0):
            x = self.mid(x)
        if self.kind in ("tied", "tied bias"):
            x = self.last(x)
        if self.kind == "in a product":
            x = x @ self.mid.weight
        if self.kind == "in a function":
            x = Custom.apply(x, self.mid.weight)
        return self.head(x)


ALONE = ["layer norm", "no bias", "frozen bias", "one row of three dims"]
SHARED = ["tied", "tied bias", "twice", "in a product", "in a function", "in its own bias", "rows"]


def make_dense(kind):
    torch.manual_seed(2)
    return Dense(kind).double(), torch.randn(9, 6).double(), torch.randint(0, 5, (9,))


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
@pytest.mark.parametrize("kind", [*ALONE, *SHARED, "frozen", "frozen weight"])
def test_linear_layers_with_one_row_per_record_are_products(kind, loss):
    model, inputs, targets = make_dense(kind)
    task = RecordGradients.from_model(model, find_loss(loss))
    found = {layer.weight for layer in gradients.find_row_layers(task, inputs)[0]}
    assert found == {"first.weight", "head.weight"} | ({"mid.weight"} if kind in ALONE else set())
    every = torch.ones(9, dtype=torch.bool)
    wanted = oracle(model, loss, inputs, targets, CLIP)
    for memory in (2**28, 2**13):
        sums = clipped_sums(task, inputs, targets, every, CLIP, memory)
        assert list(sums) == list(wanted)
        assert distance(sums, wanted) < 1e-12


def test_a_forward_that_calls_a_layer_more_often_than_for_the_first_record():
    model, inputs, targets = make_dense("varies")
    task = RecordGradients.from_model(model, find_loss("squared_error"))
    found = clipped_sums(task, inputs, targets, torch.ones(9, dtype=torch.bool), CLIP)  # once, twice, then once
    assert model.calls == 3
    model.kind = "layer norm"
    assert distance(found, oracle(model, "squared_error", inputs, targets, CLIP)) < 1e-12


def test_a_users_loss_and_outputs_at_several_positions():
    model, inputs, targets = make("convolution")
    own = find_loss(lambda outputs, wanted: nn.functional.cross_entropy(outputs, wanted, reduction="none"))
    every = torch.ones(9, dtype=torch.bool)
    found = clipped_sums(RecordGradients.from_model(model, own), inputs, targets, every, CLIP)
    assert distance(found, oracle(model, "cross_entropy", inputs, targets, CLIP)) < 1e-12
    layers = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5)).double()  # outputs (9, 2, 5)
    rows = torch.randn(9, 2, 6).double()
    task = RecordGradients.from_model(layers, find_loss("cross_entropy"))
    total = {name: torch.zeros_like(p) for name, p in layers.named_parameters()}
    for row in range(9):
        value = nn.functional.cross_entropy(layers(rows[row]), targets[row].expand(2), reduction="sum")
        own_gradient = torch.autograd.grad(value, list(layers.parameters()))
        factor = min(1.0, CLIP / float(torch.cat([own.flatten() for own in own_gradient]).norm()))
        for (name, _), part in zip(layers.named_parameters(), own_gradient, strict=True):
            total[name] += part * factor
    assert distance(clipped_sums(task, rows, targets[:, None].expand(-1, 2), every, CLIP), total) < 1e-12


@pytest.mark.parametrize("kind", ["stack", "convolution"])
def test_no_records_have_sums_of_0(kind):
    model, inputs, targets = make(kind)
    task = RecordGradients.from_model(model, find_loss("cross_entropy"))
    found = clipped_sums(task, inputs[:0], targets[:0], torch.ones(0, dtype=torch.bool), CLIP)
    shapes = {name: (1, *p.shape) for name, p in model.named_parameters()}
    assert {name: tuple(own.shape) for name, own in found.items()} == shapes
    assert not any(own.any() or own.dtype != torch.float64 for own in found.values())


def recover(model, inputs, targets, multiplicative):
    plan = fedveil.analyse(model, one(inputs, 0))
    perturbation = fedveil.Veil(multiplicative=multiplicative, decoys=2).perturb(model, plan, "cross_entropy")
    task = RecordGradients.from_broadcast(model, perturbation.broadcast)
    found = clipped_sums(task, inputs, targets, torch.ones(9, dtype=torch.bool), CLIP)
    broadcast = perturbation.broadcast
    return perturbation.recover([Update(broadcast.round, broadcast.model, 1, found, {})], [1.0]).gradients


@pytest.mark.parametrize("kind", ["stack", "convolution", "attention"])
def test_a_veil_with_factors_of_1_gives_the_plain_clipped_sum(kind):
    model, inputs, targets = make(kind)
    wanted = oracle(model, "cross_entropy", inputs, targets, CLIP)
    assert distance(recover(model, inputs, targets, 1.0), wanted) < 1e-12


def test_other_factors_change_what_is_clipped():
    """Necessity: with factors up to 4 norms of perturbed gradients are not those of the true ones."""
    model, inputs, targets = make("stack")
    wanted = oracle(model, "cross_entropy", inputs, targets, CLIP)
    assert distance(recover(model, inputs, targets, 4.0), wanted) > 0.05


def test_what_has_no_gradient_per_record_is_refused():
    model, inputs, _ = make("stack")
    with pytest.raises(BadArgument, match="no record has a gradient of its own"):
        RecordGradients.from_model(model, find_loss(fedveil.BatchLoss(nn.CrossEntropyLoss())))
    plan = fedveil.analyse(model, inputs[:1])
    with pytest.raises(BadArgument, match=r"(?s)squared error.*decoys=2"):
        RecordGradients.from_broadcast(model, fedveil.Veil().perturb(model, plan, "squared_error").broadcast)


class Branching(nn.Module):
    """Looks at values in forward, which vmap cannot run."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 7), nn.Linear(7, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)) if float(x.sum()) > 0 else torch.relu(self.first(x)))


def test_a_model_that_vmap_cannot_run_goes_record_by_record():
    _, inputs, targets = make("stack")
    model = Branching().double()
    task = RecordGradients.from_model(model, find_loss("cross_entropy"))
    found = clipped_sums(task, inputs, targets, torch.ones(9, dtype=torch.bool), CLIP)
    assert distance(found, oracle(model, "cross_entropy", inputs, targets, CLIP)) < 1e-12


@pytest.mark.parametrize("size", [1e-150, 1e-158, 1e-165, 1e-173])
def test_gradients_whose_factors_underflow_are_not_longer_than_clip(size):
    """A layer with tiny cotangents and huge inputs: their product is long, the squares of one of them are 0."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].weight.fill_(size)
    inputs, targets = torch.tensor([[3.0 / size]]).double(), torch.tensor([[-1.0]]).double()
    task = RecordGradients.from_model(model, find_loss("squared_error"))
    found = clipped_sums(task, inputs, targets, torch.tensor([True]), 1e-6)
    assert sum(float(own.square().sum()) for own in found.values()) <= 1e-12


class Centred(nn.Module):
    """Subtracts the mean of the batch: under privacy every record is a batch of its own."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        return self.head(torch.tanh(x)) + 100 * (x - x.mean(0)).sum(1, keepdim=True)


@pytest.mark.parametrize("loss", ["cross_entropy", "function"])
def test_records_do_not_influence_one_another_even_if_forward_mixes_them(loss):
    _, inputs, targets = make("stack")
    own = find_loss(loss if loss != "function" else lambda y, t: nn.functional.cross_entropy(y, t, reduction="none"))
    task = RecordGradients.from_model(Centred().double(), own)
    alone = clipped_sums(task, inputs[:1], targets[:1], torch.tensor([True]), CLIP)
    among = clipped_sums(task, inputs, targets, torch.arange(9) == 0, CLIP)
    assert distance(among, {name: value[0] for name, value in alone.items()}) < 1e-12
