"""Each operation lets through what the table says, in every form in which users write it, and stays exact."""

import pytest
import torch
from tests.oracle import batch, built, perturb, plain, planned, recovery_error, worst
from torch import nn
from torch.nn import functional as F

import fedveil


class Net(nn.Module):
    """A convolution, the operation under test, a pointwise convolution, a head."""

    def __init__(self, operation, channels=4, after=None):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.operation = operation
        self.second = nn.Conv2d(after or channels, 5, 1)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = self.second(self.operation(self.first(x))).relu()
        return self.head(x.flatten(2).mean(2))


class Do(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def in_place(x):
    x += x.clone()
    return x


POSITIVE, SIGNS, PINNED, ANY = "positive", "signs", "pinned", "any"
ELEMENTWISE = {
    "nn.ReLU": (nn.ReLU(), POSITIVE),
    "nn.ReLU in place": (nn.ReLU(inplace=True), POSITIVE),
    "F.relu": (Do(F.relu), POSITIVE),
    "torch.relu": (Do(torch.relu), POSITIVE),
    "x.relu()": (Do(lambda x: x.relu()), POSITIVE),
    "x.relu_()": (Do(lambda x: x.relu_()), POSITIVE),
    "nn.LeakyReLU": (nn.LeakyReLU(0.1), POSITIVE),
    "F.leaky_relu": (Do(lambda x: F.leaky_relu(x, 0.2)), POSITIVE),
    "nn.PReLU, one weight": (nn.PReLU(), POSITIVE),
    "nn.PReLU, one a channel": (nn.PReLU(4), POSITIVE),
    "abs": (Do(lambda x: x.abs()), POSITIVE),
    "nn.MaxPool2d": (nn.MaxPool2d(3, 2, 1), POSITIVE),
    "F.max_pool2d": (Do(lambda x: F.max_pool2d(x, 2)), POSITIVE),
    "nn.Tanh": (nn.Tanh(), SIGNS),
    "torch.tanh": (Do(torch.tanh), SIGNS),
    "x.tanh()": (Do(lambda x: x.tanh()), SIGNS),
    "sin": (Do(torch.sin), SIGNS),
    "nn.Hardtanh": (nn.Hardtanh(), SIGNS),
    "F.hardtanh": (Do(lambda x: F.hardtanh(x, -2.0, 2.0)), SIGNS),
    "nn.Hardtanh, not symmetric": (nn.Hardtanh(-1.0, 2.0), PINNED),
    "BatchNorm, not affine": (nn.BatchNorm2d(4, affine=False), SIGNS),
    "InstanceNorm": (nn.InstanceNorm2d(4), SIGNS),
    "nn.GELU": (nn.GELU(), PINNED),
    "F.silu": (Do(F.silu), PINNED),
    "sigmoid": (Do(torch.sigmoid), PINNED),
    "nn.ReLU6": (nn.ReLU6(), PINNED),
    "softmax": (Do(lambda x: x.softmax(1)), PINNED),
    "x * x": (Do(lambda x: x * x), SIGNS),
    "x + 1": (Do(lambda x: x + 1), PINNED),
    "1 - x": (Do(lambda x: 1 - x), PINNED),
    "pad with ones": (Do(lambda x: F.pad(x, (1, 1, 1, 1), value=1.0)), PINNED),
    "nn.Identity": (nn.Identity(), ANY),
    "nn.Dropout": (nn.Dropout(0.0), ANY),
    "nn.AvgPool2d": (nn.AvgPool2d(2), ANY),
    "F.adaptive_avg_pool2d": (Do(lambda x: F.adaptive_avg_pool2d(x, 3)), ANY),
    "nn.Upsample": (nn.Upsample(scale_factor=2, mode="bilinear"), ANY),
    "F.interpolate": (Do(lambda x: F.interpolate(x, scale_factor=2)), ANY),
    "zero padding": (nn.ZeroPad2d(1), ANY),
    "reflection padding": (nn.ReflectionPad2d(1), ANY),
    "2 * x": (Do(lambda x: 2 * x), ANY),
    "x / 3": (Do(lambda x: x / 3), ANY),
    "-x": (Do(lambda x: x.neg()), ANY),
    "x + x": (Do(lambda x: x + x), ANY),
    "torch.add": (Do(lambda x: torch.add(x, x, alpha=2)), ANY),
    "x += x": (Do(in_place), ANY),
    "x - x / 2": (Do(lambda x: torch.sub(x, x / 2)), ANY),
    "x + 0": (Do(lambda x: x + 0), ANY),
    "mean over pixels": (Do(lambda x: x.mean((2, 3), keepdim=True)), ANY),
    "sum over rows": (Do(lambda x: torch.sum(x, 2, keepdim=True)), ANY),
    "view": (Do(lambda x: x.view(x.shape[0], x.size(1), -1, 1)), ANY),
    "permute and back": (Do(lambda x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2)), ANY),
    "slices put back": (Do(lambda x: torch.cat([x[:, 2:], x[:, :2]], 1)), ANY),
    "split": (Do(lambda x: torch.cat(x.split([1, 3], dim=1), 1)), ANY),
    "chunk": (Do(lambda x: torch.cat(torch.chunk(x, 2, 1), 1)), ANY),
    "nn.ChannelShuffle": (nn.ChannelShuffle(2), ANY),
    "flip of channels": (Do(lambda x: torch.flip(x, (1,))), ANY),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_first_axis_allows_what_its_reader_lets_through(name):
    operation, expected = ELEMENTWISE[name]
    model = built(lambda: Net(operation))
    inputs, targets = batch((3, 6, 6), 3)
    plan = planned(model, inputs)
    axis = next(axis for axis in plan.axes if "first.weight" in axis.written_by)
    assert axis.symmetry.words == expected, plan
    assert recovery_error(model, inputs, targets, groups=2, multiplicative=10.0) < 1e-9


CHANNELS = {
    "cat with zeros": (Do(lambda x: torch.cat([x, torch.zeros_like(x)], 1)), 8),
    "new zeros": (Do(lambda x: torch.cat([x.new_zeros(x.shape[0], 2, 6, 6), x], 1)), 6),
    "padding of channels": (Do(lambda x: F.pad(x, (0, 0, 0, 0, 1, 2))), 7),
    "cat with itself": (Do(lambda x: torch.cat([x, x], 1)), 8),
    "cat with its relu": (Do(lambda x: torch.cat([x, x.relu()], 1)), 8),
    "every second channel": (Do(lambda x: x[:, ::2]), 2),
    "one channel": (Do(lambda x: x[:, 1:2]), 1),
    "repeat": (Do(lambda x: x.repeat(1, 3, 1, 1)), 12),
    "stack": (Do(lambda x: torch.stack([x, x.neg()], 2).flatten(1, 2)), 8),
    "nn.PixelShuffle": (nn.PixelShuffle(2), 1),
    "pixels to channels": (Do(lambda x: F.pixel_unshuffle(x, 2)), 16),
    "sum with its flip": (Do(lambda x: x + x.flip(1)), 4),
    "roll": (Do(lambda x: x + torch.roll(x, 1, 1)), 4),
    "products of all pairs": (Do(lambda x: (x.unsqueeze(1) * x.unsqueeze(2)).flatten(1, 2)), 16),
    "F.glu": (Do(lambda x: F.glu(x, 1)), 2),
    "unbind": (Do(lambda x: torch.stack(x.unbind(1)[:3], 1)), 3),
    "two channels multiplied": (Do(lambda x: torch.cat([x[:, :2] * x[:, 2:], x], 1)), 6),
    "ConvTranspose": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), 6),
    "Conv with dilation": (nn.Conv2d(4, 6, 3, dilation=2, stride=2, padding_mode="circular", padding=1), 6),
    "depthwise ConvTranspose": (nn.ConvTranspose2d(4, 8, 2, groups=4), 8),
    "BatchNorm": (nn.BatchNorm2d(4), 4),
    "InstanceNorm with weights": (nn.InstanceNorm2d(4, affine=True), 4),
    "GroupNorm": (nn.GroupNorm(2, 4), 4),
    "LayerNorm over pixels": (nn.LayerNorm((4, 6, 6)), 4),
}


@pytest.mark.parametrize("name", CHANNELS)
def test_channels_that_move_or_mix_stay_exact(name):
    operation, after = CHANNELS[name]
    model = built(lambda: Net(operation, after=after))
    inputs, targets = batch((3, 6, 6), 3)
    error = recovery_error(model, inputs, targets, groups=3, multiplicative=10.0)
    assert error < 1e-8  # first.bias before a norm: g = 0


def stack(*modules):
    return lambda: nn.Sequential(*modules)


SEQUENCES = {
    "Conv1d": (stack(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)), (2, 6)),
    "Conv3d": (
        stack(nn.Conv3d(1, 4, 2), nn.ReLU(), nn.AdaptiveMaxPool3d(2), nn.Flatten(), nn.Linear(32, 3)), (1, 4, 4, 4)
    ),
    "BatchNorm1d": (stack(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)), (5,)),
    "BatchNorm that counts": (
        stack(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6, momentum=None), nn.ReLU(), nn.Linear(6, 3)), (5,)
    ),
    "LayerNorm": (stack(nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)), (5,)),
    "LayerNorm, no weights": (stack(nn.Linear(5, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3)), (5,)),
    "RMSNorm": (stack(nn.Linear(5, 6), nn.RMSNorm(6), nn.ReLU(), nn.Linear(6, 3)), (5,)),
    "head without bias": (stack(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3, bias=False)), (5,)),
    "Linear twice": (stack(nn.Linear(5, 6), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)), (5,)),
    "Unflatten": (
        stack(
            nn.Linear(5, 12), nn.ReLU(), nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 3)
        ),
        (5,),
    ),
}  # fmt: skip


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.again(self.again(self.first(x).relu()).relu()).relu())


class SharedWeight(Tied):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(6, 6)
        self.other.weight = self.again.weight

    def forward(self, x):
        return self.head(self.other(self.again(self.first(x).relu()).relu()).relu())


class TiedBothWays(Tied):
    def forward(self, x):
        x = self.again(self.first(x).relu()).relu()
        return self.head(F.linear(x, self.again.weight.t()).relu())


class Positions(nn.Module):
    """Parameters that forward reads by itself."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(4, 6))
        self.start = nn.Parameter(torch.randn(1, 1, 6))
        self.gain = nn.Parameter(torch.rand(6) + 0.5)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.zeros(3))
        self.register_buffer("constant", torch.randn(6))
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions
        x = torch.cat([self.start.expand(x.shape[0], -1, -1), x], 1)
        x = self.mix(x.relu()) * self.gain * self.scale
        return self.head((x.relu() * self.constant).mean(1))


TIED = {f"tied weights, {build.__name__}": (build, (5,)) for build in (Tied, SharedWeight, TiedBothWays)}


@pytest.mark.parametrize(
    ("build", "shape"), [pytest.param(*case, id=name) for name, case in (SEQUENCES | TIED).items()]
)
def test_layers_of_every_kind_stay_exact(build, shape):
    assert recovery_error(built(build), *batch(shape, 3), groups=2, multiplicative=10.0) < 1e-9


def test_a_module_called_twice_shares_one_axis_before_and_behind_it():
    plan = fedveil.analyse(Tied(), torch.zeros(1, 5))
    assert [axis.written_by for axis in plan.axes] == [("first.weight", "again.weight")]


def test_parameters_read_by_forward_itself_are_veiled_and_exact():
    model = built(Positions)
    tokens = torch.randint(0, 9, (5, 4), generator=torch.Generator().manual_seed(0))
    targets = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = fedveil.analyse(model, tokens)
    assert plan.layout.unused == ("unused",)
    secret = perturb(model, plan)
    broadcast = secret.broadcast
    assert not torch.isclose(broadcast.parameters["positions"], model.positions).any()
    recovered = secret.recover([fedveil.client_step(model, broadcast, tokens, targets)])
    del model.unused
    assert worst(recovered.gradients, plain(model, tokens, targets)[0]) < 1e-9


def test_a_subclass_of_linear_is_followed_into_its_functional_form():
    model = built(stack(type("MyLinear", (nn.Linear,), {})(5, 6), nn.ReLU(), nn.Linear(6, 3)))
    inputs, targets = batch((5,), 3)
    assert planned(model, inputs).axes[0].symmetry.words == "positive"
    assert recovery_error(model, inputs, targets) < 1e-9


@pytest.mark.parametrize("embedding", [nn.Embedding(9, 6, max_norm=1.0), nn.Embedding(9, 6, sparse=True)])
def test_embeddings_with_odd_gradients_are_pinned(embedding):
    model = nn.Sequential(embedding, nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.warns(UserWarning, match="of the parameters' values are sent as they are, because 0 "):
        plan = fedveil.analyse(model, torch.zeros(1, 4).long())
    assert any(where.startswith("0 (Embedding)") for where, _ in plan.pinned)


def test_an_unknown_operation_pins_its_axis_and_the_plan_says_so():
    layers = (nn.Linear(5, 6), Do(torch.special.i0), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    model = built(stack(*layers))
    with pytest.warns(UserWarning, match="33.0% of the parameters' values are sent as they are"):
        plan = fedveil.analyse(model, torch.zeros(1, 5))
    assert plan.pinned == (("1 (special_i0)", "there is no rule for it"),)
    assert "1 (special_i0): there is no rule for it" in str(plan)
    weight = model[0].weight
    broadcast = perturb(model, plan).broadcast
    assert torch.equal(broadcast.parameters["0.weight"], weight)
    assert 0 < plan.coverage < 1
    changed = sum(float((value != model.get_parameter(name)).sum()) for name, value in broadcast.parameters.items())
    changed += 0 if broadcast.head.masked_bias else 3  # a bias too small for the noise of this draw stays as it is
    assert changed / sum(p.numel() for p in model.parameters()) == pytest.approx(plan.coverage, abs=0.02)


def test_hooks_are_followed_like_the_rest_of_forward():
    model = built(stack(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3)))
    model[1].register_forward_hook(lambda module, inputs, output: output + 1)
    model[4].register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    model.register_forward_hook(lambda module, inputs, output: None)
    inputs, targets = batch((5,), 3)
    assert planned(model, inputs).pinned == (("1 (ReLU)", "it adds a constant"),)
    assert recovery_error(model, inputs, targets) < 1e-9


def test_depthwise_ties_the_order_and_grouped_keeps_to_its_groups():
    depthwise = stack(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(64, 3))()
    cells = fedveil.analyse(depthwise, torch.zeros(1, 3, 6, 6)).cells
    assert sorted(cells[cells > 0].tolist()) == [cells.max()] * 4
    grouped = stack(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(96, 3))()
    cells = fedveil.analyse(grouped, torch.zeros(1, 3, 6, 6)).cells
    sizes = [int((cells == cell).sum()) for cell in set(cells.tolist()) - {0}]
    assert sorted(sizes) == [1, 1, 2, 2, 3, 3]  # two inputs and three outputs per group, and the two groups themselves


def test_a_permutation_really_moves_units():
    model = built(stack(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 3)))
    plan = fedveil.analyse(model, torch.zeros(1, 5))
    broadcast = perturb(model, plan, multiplicative=1.0).broadcast
    moved = broadcast.parameters["0.weight"]
    assert sorted(moved[:, 0].tolist()) == sorted(model[0].weight[:, 0].tolist())
    assert (moved != model[0].weight).any()
    kept = perturb(model, plan, multiplicative=1.0, permute=False).broadcast
    assert torch.equal(kept.parameters["0.weight"], model[0].weight)


def test_a_square_in_place_changes_its_aliases_too():
    def alias(x):
        other = x.view(x.shape)
        x.square_()
        return x + other

    assert recovery_error(built(lambda: Net(Do(alias))), *batch((3, 6, 6), 3), multiplicative=10.0) < 1e-9


def written_into(x):
    x = x.clone()
    x[:, 0] = 0
    return x


def put_together(x):
    out = torch.empty_like(x)
    out[:, :2], out[:, 2:] = x[:, 2:], x[:, :2]
    return out


@pytest.mark.parametrize("operation", [written_into, put_together])
def test_writing_into_parts_of_a_tensor_stays_exact(operation):
    model = built(lambda: Net(nn.Sequential(nn.BatchNorm2d(4), Do(operation))))
    inputs, targets = batch((3, 6, 6), 3)
    axes = {axis.written_by[0]: axis.symmetry.words for axis in planned(model, inputs).axes}
    assert axes["first.weight"] == SIGNS  # BatchNorm keeps its rule in the graph without writes
    assert recovery_error(model, inputs, targets, multiplicative=10.0) < 1e-8
