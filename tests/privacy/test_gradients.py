"""Sums of clipped per-record gradients: three ways against a loop, exact norms, and with a veil."""

import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from tests.oracle import Network, flat
from torch import nn

import fedveil
from fedveil.errors import BadArgument
from fedveil.graph.inputs import call
from fedveil.models import mlp
from fedveil.privacy import gradients
from fedveil.privacy.gradients import RecordGradients, clipped_sums
from fedveil.scheme.broadcast import Update
from fedveil.scheme.losses import find_loss

CLIP = 0.3


def convolution():
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16, 5)).double()


def attend(model, tokens, scale):
    """Take two arguments."""
    x = model.embed(tokens) * scale[:, None, None]
    return model.head(model.mix(x, x, x, need_weights=False)[0].mean(1))


def attention():
    layers = {"embed": nn.Embedding(11, 8), "mix": nn.MultiheadAttention(8, 2, batch_first=True)}
    return Network(attend, **layers, head=nn.Linear(8, 5)).double()


def make(kind):
    draw = torch.Generator().manual_seed(1)
    classes = torch.randint(0, 5, (9,), generator=draw)
    if kind == "stack":
        return mlp(6, 5, hidden=7, layers=2).double(), torch.randn(9, 6, generator=draw).double(), classes
    if kind == "convolution":
        return convolution(), torch.randn(9, 3, 6, 6, generator=draw).double(), classes
    tokens = torch.randint(0, 11, (9, 4), generator=draw)
    return attention(), (tokens, torch.rand(9, generator=draw).double()), classes


def one(inputs, row):
    return tuple(own[row : row + 1] for own in inputs) if isinstance(inputs, tuple) else inputs[row : row + 1]


VALUES = {
    "cross_entropy": lambda o, t: nn.functional.cross_entropy(o, t),
    "squared_error": lambda o, t: 0.5 * (o - nn.functional.one_hot(t, 5)).square().sum(),
}
EVERY = torch.ones(9, dtype=torch.bool)


def oracle(model, loss, inputs, targets, included=EVERY, clip=CLIP):
    """The clipped sum, one record after the other, by autograd."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trainable.items()}
    for row in included.nonzero()[:, 0].tolist():
        value = VALUES.get(loss, loss)(call(model, one(inputs, row)), targets[row : row + 1])
        found = dict(zip(trainable, torch.autograd.grad(value, list(trainable.values())), strict=True))
        factor = min(1.0, clip / float(flat(found).double().norm()))
        for name, own in found.items():
            total[name] += own.double() * factor
    return total


def sums(model, loss, inputs, targets, included=EVERY, clip=CLIP, **options):
    return clipped_sums(RecordGradients.from_model(model, find_loss(loss)), inputs, targets, included, clip, **options)


def distance(found, wanted):
    gap = [(found[name].reshape(own.shape) - own).flatten() for name, own in wanted.items()]
    return float(torch.cat(gap).norm() / torch.cat([own.flatten() for own in wanted.values()]).norm())


@pytest.mark.parametrize("kind", ["stack", "convolution", "attention"])
@pytest.mark.parametrize("loss", VALUES)
@pytest.mark.parametrize("way", ["default", "chunks", "loop"])
def test_every_way_gives_the_sum_of_a_loop(kind, loss, way, monkeypatch):
    model, inputs, targets = make(kind)
    numbers = sum(p.numel() for p in model.parameters())
    if way != "default":
        monkeypatch.setattr(gradients, "find_layer_paths", lambda *given: None)
    if way == "loop":
        monkeypatch.setattr(gradients, "needs_loop", lambda task: True)
    found = sums(model, loss, inputs, targets, memory=3 * numbers * 32 if way == "chunks" else 2**28)
    assert distance(found, oracle(model, loss, inputs, targets)) < 1e-12
    assert all(own.dtype == torch.float64 for own in found.values())


@pytest.mark.parametrize("kind", ["stack", "convolution"])
def test_records_that_do_not_count_or_are_not_finite_contribute_nothing(kind):
    model, inputs, targets = make(kind)
    included = torch.tensor([True, False, True, True, False, True, True, True, True])
    wanted = oracle(model, "cross_entropy", inputs, targets, included & (torch.arange(9) != 3))
    spoilt = inputs.clone()
    spoilt[3], spoilt[4] = float("nan"), float("inf")
    assert distance(sums(model, "cross_entropy", spoilt, targets, included), wanted) < 1e-12
    assert not any(own.any() for own in sums(model, "cross_entropy", inputs, targets, ~EVERY).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["stack", "convolution"])
def test_no_contribution_is_longer_than_clip(kind, dtype):
    """In exact arithmetic, whatever the floats round to."""
    model, inputs, targets = make(kind)
    model, inputs, clip, squares = model.to(dtype), inputs.to(dtype), 1e-3, []
    for row in range(9):
        found = sums(model, "cross_entropy", inputs, targets, torch.arange(9) == row, clip)
        squares.append(sum(Fraction(x) ** 2 for x in flat(found).tolist()))
    assert max(squares) <= Fraction(clip) ** 2
    assert max(squares) > (Fraction(clip) * Fraction(999_999, 1_000_000)) ** 2  # and hardly shorter


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
        self.kind, bias, type(self).calls = kind, kind != "no bias", 0
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.mid, self.head = nn.Linear(8, 8, bias=bias), nn.Linear(8, 5, bias=bias)
        if kind.startswith("tied"):
            self.last = nn.Linear(8, 8)
            setattr(self.last, kind[5:], getattr(self.mid, kind[5:]))
        if kind.startswith("frozen"):
            (getattr(self.mid, kind[7:]) if kind[7:] else self.mid).requires_grad_(False)

    def forward(self, x):
        type(self).calls += 1  # attributes of the object are restored
        x = torch.tanh(self.norm(self.first(x)))
        if self.kind == "rows":
            return self.head(self.mid(torch.stack([x, x.square(), x.sin()], 1)).tanh().mean(1))
        if self.kind == "one row of three dims":
            return self.head(self.mid(x.unsqueeze(1)).tanh().squeeze(1))
        if self.kind == "in its own bias":
            return self.head(nn.functional.linear(x, self.mid.weight, self.mid.bias * self.mid.weight.sum(1)))
        x = self.mid(x).tanh()
        if self.kind == "twice" or (self.kind == "varies" and self.calls == 2):
            x = self.mid(x)
        if self.kind.startswith("tied"):
            x = self.last(x)
        if self.kind == "in a product":
            x = x @ self.mid.weight
        if self.kind == "in a function":
            x = Custom.apply(x, self.mid.weight)
        return self.head(x)


ALONE = ["layer norm", "no bias", "frozen bias", "one row of three dims"]
SHARED = ["tied weight", "tied bias", "twice", "in a product", "in a function", "in its own bias", "rows"]


def make_dense(kind):
    torch.manual_seed(2)
    return Dense(kind).double(), torch.randn(9, 6).double(), torch.randint(0, 5, (9,))


@pytest.mark.parametrize("loss", VALUES)
@pytest.mark.parametrize("kind", [*ALONE, *SHARED, "frozen", "frozen weight"])
def test_linear_layers_with_one_row_per_record_are_products(kind, loss):
    model, inputs, targets = make_dense(kind)
    task = RecordGradients.from_model(model, find_loss(loss))
    found = {layer.weight for layer in gradients.find_row_layers(task, inputs)[0]}
    assert found == {"first.weight", "head.weight"} | ({"mid.weight"} if kind in ALONE else set())
    wanted = oracle(model, loss, inputs, targets)
    for memory in (2**28, 2**13):
        clipped = sums(model, loss, inputs, targets, memory=memory)
        assert list(clipped) == list(wanted)
        assert distance(clipped, wanted) < 1e-12


def test_a_forward_that_calls_a_layer_more_often_than_for_the_first_record():
    model, inputs, targets = make_dense("varies")
    found = sums(model, "squared_error", inputs, targets)  # once, twice, once for zeros, then once
    assert model.calls == 4
    model.kind = "layer norm"
    assert distance(found, oracle(model, "squared_error", inputs, targets)) < 1e-12


def test_a_users_loss_and_outputs_at_several_positions():
    model, inputs, targets = make("convolution")
    found = sums(model, partial(nn.functional.cross_entropy, reduction="none"), inputs, targets)
    assert distance(found, oracle(model, "cross_entropy", inputs, targets)) < 1e-12
    layers = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5)).double()  # outputs (9, 2, 5)
    rows, both = torch.randn(9, 2, 6).double(), targets[:, None].expand(-1, 2)
    wanted = oracle(layers, lambda o, t: nn.functional.cross_entropy(o[0], t[0], reduction="sum"), rows, both)
    assert distance(sums(layers, "cross_entropy", rows, both), wanted) < 1e-12


@pytest.mark.parametrize("kind", ["stack", "convolution"])
def test_no_records_have_sums_of_0(kind):
    model, inputs, targets = make(kind)
    found = sums(model, "cross_entropy", inputs[:0], targets[:0], EVERY[:0])
    shapes = {name: (1, *p.shape) for name, p in model.named_parameters()}
    assert {name: tuple(own.shape) for name, own in found.items()} == shapes
    assert not any(own.any() or own.dtype != torch.float64 for own in found.values())


def recover(model, inputs, targets, multiplicative):
    plan = fedveil.analyse(model, one(inputs, 0))
    perturbation = fedveil.Veil(multiplicative=multiplicative, decoys=2).perturb(model, plan, "cross_entropy")
    task = RecordGradients.from_broadcast(model, perturbation.broadcast)
    found = clipped_sums(task, inputs, targets, EVERY, CLIP)
    broadcast = perturbation.broadcast
    return perturbation.recover([Update(broadcast.round, broadcast.model, 1, found, {})], [1.0]).gradients


@pytest.mark.parametrize("kind", ["stack", "convolution", "attention"])
def test_a_veil_with_factors_of_1_gives_the_plain_clipped_sum_and_others_do_not(kind):
    model, inputs, targets = make(kind)
    wanted = oracle(model, "cross_entropy", inputs, targets)
    assert distance(recover(model, inputs, targets, 1.0), wanted) < 1e-12
    if kind == "stack":  # necessity: norms of perturbed gradients are not those of the true ones
        assert distance(recover(model, inputs, targets, 4.0), wanted) > 0.05


def test_what_has_no_gradient_per_record_is_refused():
    model, inputs, _ = make("stack")
    with pytest.raises(BadArgument, match="single records have no gradient"):
        RecordGradients.from_model(model, find_loss(fedveil.BatchLoss(nn.CrossEntropyLoss())))
    plan = fedveil.analyse(model, inputs[:1])
    with pytest.raises(BadArgument, match=r"(?s)squared error.*decoys=2"):
        RecordGradients.from_broadcast(model, fedveil.Veil().perturb(model, plan, "squared_error").broadcast)


def look(model, x):
    """Look at values in forward, which vmap cannot run."""
    return model.head(torch.tanh(model.first(x)) if float(x.sum()) > 0 else torch.relu(model.first(x)))


def test_a_model_that_vmap_cannot_run_goes_record_by_record():
    _, inputs, targets = make("stack")
    model = Network(look, first=nn.Linear(6, 7), head=nn.Linear(7, 5)).double()
    found = sums(model, "cross_entropy", inputs, targets)
    assert distance(found, oracle(model, "cross_entropy", inputs, targets)) < 1e-12


@pytest.mark.parametrize("size", [1e-150, 1e-158, 1e-165, 1e-173])
def test_gradients_whose_factors_underflow_are_not_longer_than_clip(size):
    """A layer with tiny cotangents and huge inputs: their product is long, the squares of one of them are 0."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].weight.fill_(size)
    inputs, targets = torch.tensor([[3.0 / size]]).double(), torch.tensor([[-1.0]]).double()
    found = sums(model, "squared_error", inputs, targets, torch.tensor([True]), 1e-6)
    assert float(flat(found).square().sum()) <= 1e-12


def subtract_mean(model, x):
    """Subtract the mean of the batch: under privacy every record is a batch of its own."""
    return model.head(torch.tanh(x)) + 100 * (x - x.mean(0)).sum(1, keepdim=True)


@pytest.mark.parametrize("loss", ["cross_entropy", partial(nn.functional.cross_entropy, reduction="none")])
def test_records_do_not_influence_one_another_even_if_forward_mixes_them(loss):
    _, inputs, targets = make("stack")
    model = Network(subtract_mean, head=nn.Linear(6, 5)).double()
    alone = sums(model, loss, inputs[:1], targets[:1], EVERY[:1])
    among = sums(model, loss, inputs, targets, torch.arange(9) == 0)
    assert distance(among, {name: value[0] for name, value in alone.items()}) < 1e-12


class Remember(nn.Module):
    """A model whose forward pass changes a buffer."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 5)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.seen.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)
        return self.lin(x - self.seen)


def relative_to_batch(outputs, targets):
    """One value per record, but each depends on the others in the batch."""
    values = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return values / values.detach().sum()


@pytest.mark.parametrize("veiled", [False, True])
@pytest.mark.parametrize("loss", ["cross_entropy", relative_to_batch], ids=["cross_entropy", "relative"])
def test_a_record_that_is_not_included_changes_nothing(loss, veiled):
    """Whatever the record, its buffers and its loss, and also if it comes first."""
    _, inputs, targets = make("stack")
    model = Remember().double()
    if veiled:
        plan = fedveil.analyse(model, inputs[:2])
        broadcast = fedveil.Veil(multiplicative=1.0, decoys=2).perturb(model, plan, loss).broadcast
        task = RecordGradients.from_broadcast(model, broadcast)
    else:
        task = RecordGradients.from_model(model, find_loss(loss))
    found = []
    for scale in (1.0, 1e6):
        given = inputs.clone()
        given[0] *= scale
        found.append(clipped_sums(task, given, targets, torch.arange(9) > 0, CLIP))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert all(bool(own.any()) for own in found[0].values())


def fail_for_zero(model, x):
    if not x.any():
        raise ValueError("this record is empty")
    return model.head(x)


def test_padding_for_which_the_model_fails_is_ignored_and_records_are_not():
    _, inputs, targets = make("stack")
    model = Network(fail_for_zero, head=nn.Linear(6, 5)).double()
    given = inputs.clone()
    given[2] = 0
    included = torch.arange(9) != 2
    assert (
        distance(
            sums(model, "cross_entropy", given, targets, included),
            oracle(model, "cross_entropy", inputs, targets, included),
        )
        < 1e-12
    )
    with pytest.raises(ValueError, match="empty"):
        sums(model, "cross_entropy", given, targets)


def reject_zeros(outputs, targets):
    """A loss that is undefined for targets of 0."""
    return -torch.distributions.LogNormal(outputs, 1.0, validate_args=True).log_prob(targets).sum(1)


@pytest.mark.parametrize("kind", ["stack", "convolution"])
def test_padding_for_which_the_loss_fails_is_ignored_and_records_are_not(kind):
    model, inputs, _ = make(kind)
    targets, included = torch.rand(9, 5).double() + 0.1, torch.arange(9) != 2
    wanted = sums(model, reject_zeros, inputs, targets, included)
    targets[2] = 0
    found = sums(model, reject_zeros, inputs, targets, included)
    assert distance(found, wanted) < 1e-12
    with pytest.raises(ValueError, match="support"):
        sums(model, reject_zeros, inputs, targets)


def look_up(model, tokens):
    """Rescale embeddings in place, and use all of them for the outputs."""
    return model.embed(tokens).mean(1) @ model.embed.weight.T


def look_up_one_by_one(model, tokens):
    """The same, where vmap does not run it."""
    return look_up(model, tokens) * (1.0 if bool((tokens >= 0).all()) else 0.0)


@pytest.mark.parametrize("forward", [look_up, look_up_one_by_one])
def test_a_model_that_changes_its_parameters_is_refused(forward):
    """Otherwise, the tokens of one record would change the outputs for the next."""
    model, tokens = Network(forward, embed=nn.Embedding(11, 4, max_norm=1.0)).double(), torch.arange(18).view(9, 2) % 11
    with pytest.raises(BadArgument, match=r"forward changes embed\.weight"):
        sums(model, "cross_entropy", tokens, make("stack")[2])


def test_the_slopes_of_a_users_loss_belong_to_the_units_that_dropout_left():
    """The gradient of the last weight is the slope times the hidden units; both are recovered from the sum."""
    layers = {"first": nn.Linear(6, 50), "head": nn.Linear(50, 1)}
    model = Network(lambda own, x: own.head(nn.functional.dropout(own.first(x), 0.5)), **layers).double()
    inputs, targets = torch.ones(1, 6).double(), torch.zeros(1, 1).double()
    loss = lambda outputs, wanted: (outputs - wanted).square().sum(1) / 2  # noqa: E731
    found = sums(model, loss, inputs, targets, EVERY[:1], 1e9)
    slope = found["head.bias"]
    hidden = found["head.weight"] / slope
    assert slope.item() == pytest.approx(model.head(hidden).item())


@pytest.mark.parametrize("width", [1, 4096])
def test_norms_neither_underflow_nor_overflow(width):
    """A wide layer whose cotangents have squares of 0 and whose inputs have infinite squares."""
    rows = torch.full((1, width), 1.5e-162, dtype=torch.float64)
    assert float(gradients.norms(rows)) == pytest.approx(1.5e-162 * width**0.5, rel=1e-12)
    assert float(gradients.norms(rows * 1e162 * 1e153)) == pytest.approx(1.5e153 * width**0.5, rel=1e-12)
    assert gradients.norms(torch.zeros(2, 0)).tolist() == [0, 0]
    assert gradients.norms(torch.tensor([[math.inf, 1.0], [math.nan, 1.0], [0.0, 0.0]])).isfinite().tolist() == [
        False,
        False,
        True,
    ]
