"""Each operation lets through what the table says, in every form in which users write it, and stays exact."""

import pytest
import torch
from tests.oracle import Network, batch, built, perturb, plain, planned, recovery_error, worst
from torch import nn
from torch.nn import functional as F

import fedveil


def do(function):
    return Network(lambda _, x: function(x))


def net(operation, channels=4, after=None):
    """A convolution, the operation under test, a pointwise convolution, a head."""
    return Network(
        lambda m, x: m.head(m.second(m.operation(m.first(x))).relu().flatten(2).mean(2)),
        first=nn.Conv2d(3, channels, 3, padding=1),
        operation=operation if isinstance(operation, nn.Module) else do(operation),
        second=nn.Conv2d(after or channels, 5, 1),
        head=nn.Linear(5, 3),
    )


def in_place(x):
    x += x.clone()
    return x


def rows(x, spread=True):
    """For each element, the row to write it into or to take it from: the same for all channels, or others for each."""
    index = torch.arange(6).view(6, 1).expand(x.shape) // 2
    return index if spread else (index + torch.arange(x.shape[1]).view(-1, 1, 1)) % 6


def join_rows(reduce, spread=True):
    return lambda x: torch.zeros_like(x).scatter_reduce(2, rows(x, spread), x, reduce)


ELEMENTWISE = {
    "positive": {
        "nn.ReLU": nn.ReLU(),
        "nn.ReLU in place": nn.ReLU(inplace=True),
        "x.relu_()": lambda x: x.relu_(),
        "F.leaky_relu": lambda x: F.leaky_relu(x, 0.2),
        "nn.PReLU, one weight": nn.PReLU(),
        "nn.PReLU, one a channel": nn.PReLU(4),
        "abs": lambda x: x.abs(),
        "nn.MaxPool2d": nn.MaxPool2d(3, 2, 1),
        "scatter_reduce, the largest": join_rows("amax"),
    },
    "signs": {
        "nn.Tanh": nn.Tanh(),
        "sin": torch.sin,
        "nn.Hardtanh": nn.Hardtanh(),
        "F.hardtanh": lambda x: F.hardtanh(x, -2.0, 2.0),
        "BatchNorm, not affine": nn.BatchNorm2d(4, affine=False),
        "InstanceNorm": nn.InstanceNorm2d(4),
        "x * x": lambda x: x * x,
    },
    "pinned": {
        "nn.Hardtanh, not symmetric": nn.Hardtanh(-1.0, 2.0),
        "nn.GELU": nn.GELU(),
        "F.silu": F.silu,
        "sigmoid": torch.sigmoid,
        "nn.ReLU6": nn.ReLU6(),
        "softmax": lambda x: x.softmax(1),
        "x + 1": lambda x: x + 1,
        "1 - x": lambda x: 1 - x,
        "scatter_add to ones": lambda x: torch.ones_like(x).scatter_add(2, rows(x), x),
        "pad with ones": lambda x: F.pad(x, (1, 1, 1, 1), value=1.0),
    },
    "any": {
        "nn.Identity": nn.Identity(),
        "nn.Dropout": nn.Dropout(0.0),
        "nn.AvgPool2d": nn.AvgPool2d(2),
        "F.adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 3),
        "nn.Upsample": nn.Upsample(scale_factor=2, mode="bilinear"),
        "F.interpolate": lambda x: F.interpolate(x, scale_factor=2),
        "zero padding": nn.ZeroPad2d(1),
        "reflection padding": nn.ReflectionPad2d(1),
        "2 * x": lambda x: 2 * x,
        "x / 3": lambda x: x / 3,
        "-x": lambda x: x.neg(),
        "torch.add": lambda x: torch.add(x, x, alpha=2),
        "x += x": in_place,
        "x - x / 2": lambda x: torch.sub(x, x / 2),
        "x + 0": lambda x: x + 0,
        "mean over pixels": lambda x: x.mean((2, 3), keepdim=True),
        "sum over rows": lambda x: torch.sum(x, 2, keepdim=True),
        "view": lambda x: x.view(x.shape[0], x.size(1), -1, 1),
        "permute and back": lambda x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2),
        "slices put back": lambda x: torch.cat([x[:, 2:], x[:, :2]], 1),
        "split": lambda x: torch.cat(x.split([1, 3], dim=1), 1),
        "chunk": lambda x: torch.cat(torch.chunk(x, 2, 1), 1),
        "nn.ChannelShuffle": nn.ChannelShuffle(2),
        "flip of channels": lambda x: torch.flip(x, (1,)),
        "scatter_add": lambda x: x.new_zeros(x.shape).scatter_add_(2, rows(x), x),
        "scatter_reduce, the mean": join_rows("mean"),
        "scatter": lambda x: x.scatter(2, rows(x) + 3, x.flip(2)),
        "index_add": lambda x: torch.zeros_like(x).index_add_(2, torch.arange(6) // 2, x),
        "index_copy": lambda x: x.index_copy(2, torch.arange(3), x[:, :, 3:]),
        "gather": lambda x: x.gather(2, rows(x)),
        "slice_scatter": lambda x: torch.slice_scatter(x, x[:, :, 1:4], 2, 2, 5),
        "select_scatter": lambda x: torch.select_scatter(x, x[:, :, 3], 2, -1),
        "sum of products with ones": lambda x: x * x.new_ones(x.shape),
    },
}


@pytest.mark.parametrize(
    ("symmetry", "operation"),
    [pytest.param(kind, own, id=name) for kind, cases in ELEMENTWISE.items() for name, own in cases.items()],
)
def test_the_first_axis_allows_what_its_reader_lets_through(symmetry, operation):
    model = built(lambda: net(operation))
    inputs, targets = batch((3, 6, 6), 3)
    plan = planned(model, inputs)
    axis = next(axis for axis in plan.axes if "first.weight" in axis.written_by)
    assert axis.symmetry.words == symmetry, plan
    assert recovery_error(model, inputs, targets, groups=2, multiplicative=10.0) < 1e-9


def square_alias(x):
    other = x.view(x.shape)
    x.square_()
    return x + other


CHANNELS = {
    "cat with zeros": (lambda x: torch.cat([x, torch.zeros_like(x)], 1), 8),
    "new zeros": (lambda x: torch.cat([x.new_zeros(x.shape[0], 2, 6, 6), x], 1), 6),
    "padding of channels": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)), 7),
    "cat with itself": (lambda x: torch.cat([x, x], 1), 8),
    "cat with its relu": (lambda x: torch.cat([x, x.relu()], 1), 8),
    "every second channel": (lambda x: x[:, ::2], 2),
    "one channel": (lambda x: x[:, 1:2], 1),
    "repeat": (lambda x: x.repeat(1, 3, 1, 1), 12),
    "stack": (lambda x: torch.stack([x, x.neg()], 2).flatten(1, 2), 8),
    "nn.PixelShuffle": (nn.PixelShuffle(2), 1),
    "pixels to channels": (lambda x: F.pixel_unshuffle(x, 2), 16),
    "sum with its flip": (lambda x: x + x.flip(1), 4),
    "roll": (lambda x: x + torch.roll(x, 1, 1), 4),
    "products of all pairs": (lambda x: (x.unsqueeze(1) * x.unsqueeze(2)).flatten(1, 2), 16),
    "index_add of channels": (lambda x: torch.zeros_like(x).index_add(1, torch.arange(4) // 2, x), 4),
    "scatter_add, by channel": (join_rows("sum", spread=False), 4),
    "scatter_reduce, by channel": (lambda x: x.scatter_reduce(2, rows(x, spread=False), x, "amax"), 4),
    "gather by channel": (lambda x: x.gather(2, rows(x, spread=False)), 4),
    "gather of channels": (lambda x: x.gather(1, torch.arange(3, -1, -1).view(4, 1, 1).expand(x.shape)), 4),
    "two channels replaced": (lambda x: torch.slice_scatter(x, x[:, :2].relu(), 1, 1, 3), 4),
    "a channel replaced": (lambda x: torch.select_scatter(x, x[:, 0].relu(), 1, -2), 4),
    "channels set to 0 in place": (lambda x: write_into(x.clone(), slice(1, 3)), 4),
    "F.glu": (lambda x: F.glu(x, 1), 2),
    "unbind": (lambda x: torch.stack(x.unbind(1)[:3], 1), 3),
    "two channels multiplied": (lambda x: torch.cat([x[:, :2] * x[:, 2:], x], 1), 6),
    "a square in place, with an alias": (square_alias, 4),
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
    model = built(lambda: net(operation, after=after))
    error = recovery_error(model, *batch((3, 6, 6), 3), groups=3, multiplicative=10.0)
    assert error < 1e-8  # first.bias before a norm: g = 0


def write_into(x, channels=0):
    x = x.clone()
    x[:, channels] = 0
    return x


def put_together(x):
    out = torch.empty_like(x)
    out[:, :2], out[:, 2:] = x[:, 2:], x[:, :2]
    return out


@pytest.mark.parametrize("operation", [write_into, put_together])
def test_writing_into_parts_of_a_tensor_stays_exact(operation):
    model = built(lambda: net(nn.Sequential(nn.BatchNorm2d(4), do(operation))))
    inputs, targets = batch((3, 6, 6), 3)
    axes = {axis.written_by[0]: axis.symmetry.words for axis in planned(model, inputs).axes}
    assert axes["first.weight"] == "signs"  # BatchNorm keeps its rule in the graph without writes
    assert recovery_error(model, inputs, targets, multiplicative=10.0) < 1e-8


@pytest.mark.parametrize(
    ("norm", "training", "symmetry"),
    [
        (nn.BatchNorm2d(4), False, "any"),
        (nn.BatchNorm2d(4, track_running_stats=False), True, "signs"),
        (nn.BatchNorm2d(4, affine=False, track_running_stats=False), False, "signs"),
    ],
)
def test_norms_keep_their_rules_in_a_graph_without_writes(norm, training, symmetry):
    model = built(lambda: net(nn.Sequential(norm, do(write_into)))).train(training)
    inputs, targets = batch((3, 6, 6), 3)
    axes = {axis.written_by[0]: axis.symmetry.words for axis in planned(model, inputs).axes}
    assert axes["first.weight"] == symmetry
    assert recovery_error(model, inputs, targets, multiplicative=10.0) < 1e-8  # first.bias before a norm: g = 0


def tied(again):
    """A layer that is used twice, by `again`."""
    layers = {"first": nn.Linear(5, 6), "again": nn.Linear(6, 6), "head": nn.Linear(6, 3)}
    return Network(lambda m, x: m.head(again(m, m.again(m.first(x).relu()).relu()).relu()), **layers)


def shared_weight():
    model = tied(lambda m, x: m.other(x))
    model.other = nn.Linear(6, 6)
    model.other.weight = model.again.weight
    return model


TIED = {
    "itself": lambda: tied(lambda m, x: m.again(x)),
    "its weight": shared_weight,
    "its transpose": lambda: tied(lambda m, x: F.linear(x, m.again.weight.t())),
}


def stack(*modules):
    return lambda: nn.Sequential(*modules)


MyLinear, RELU, FLATTEN = type("MyLinear", (nn.Linear,), {}), nn.ReLU(), nn.Flatten()
LAYERS = {
    "Conv1d": ((2, 6), stack(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), RELU, FLATTEN, nn.Linear(16, 3))),
    "Conv3d": ((1, 4, 4, 4), stack(nn.Conv3d(1, 4, 2), RELU, nn.AdaptiveMaxPool3d(2), FLATTEN, nn.Linear(32, 3))),
    "BatchNorm1d": ((5,), stack(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), RELU, nn.Linear(6, 3))),
    "running mean": ((5,), stack(nn.Linear(5, 6, False), nn.BatchNorm1d(6, momentum=None), RELU, nn.Linear(6, 3))),
    "LayerNorm": ((5,), stack(nn.Linear(5, 6), nn.LayerNorm(6), RELU, nn.Linear(6, 3))),
    "LayerNorm, no weights": ((5,), stack(nn.Linear(5, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3))),
    "RMSNorm": ((5,), stack(nn.Linear(5, 6), nn.RMSNorm(6), RELU, nn.Linear(6, 3))),
    "head without bias": ((5,), stack(nn.Linear(5, 6), RELU, nn.Linear(6, 3, bias=False))),
    "Linear twice": ((5,), stack(nn.Linear(5, 6), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))),
    "a subclass of Linear": ((5,), stack(MyLinear(5, 6), RELU, nn.Linear(6, 3))),
    "Unflatten": (
        (5,),
        stack(nn.Linear(5, 12), RELU, nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 2), FLATTEN, nn.Linear(4, 3)),
    ),
    **{f"tied weights, {name}": ((5,), build) for name, build in TIED.items()},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_every_kind_stay_exact(name):
    shape, build = LAYERS[name]
    model = built(build)
    inputs, _ = batch(shape)
    targets = torch.randn_like(model(inputs).detach())
    error = recovery_error(model, inputs, targets, groups=2, multiplicative=10.0)
    assert error < 1e-8  # a bias before BatchNorm: g = 0
    if name in ("a subclass of Linear", "tied weights, itself"):  # also before and behind a layer that is called twice
        (axis,) = planned(model, inputs).axes
        assert axis.symmetry.words == "positive"


def mask_bias(model, x):
    """Three layers in one, of which the second has no bias, as in Swin v2."""
    bias = model.bias.clone()
    bias[4:8].zero_()
    a, b, c = F.linear(x, model.wide.weight, bias).chunk(3, 1)
    return model.head(torch.cat([a.relu(), b.relu(), c], 1))


def join_bias(model, x):
    bias = torch.cat([model.bias[:4], model.bias.new_zeros(4), model.bias[4:]])
    a, b, c = F.linear(x, model.wide.weight, bias).chunk(3, 1)
    return model.head(torch.cat([a.relu(), b.relu(), c], 1))


@pytest.mark.parametrize(("forward", "size"), [(mask_bias, 12), (join_bias, 8)])
def test_a_computed_bias_is_veiled_like_its_weight(forward, size):
    layers = {"wide": nn.Linear(5, 12, bias=False), "head": nn.Linear(12, 3), "bias": nn.Parameter(torch.randn(size))}
    model = built(lambda: Network(forward, **layers))
    inputs, targets = batch((5,), 3)
    assert planned(model, inputs).shares["scaled"] == 1
    assert recovery_error(model, inputs, targets, groups=2, multiplicative=10.0) < 1e-9


def add_positions(model, tokens):
    """Read parameters that belong to no layer."""
    x = model.embed(tokens) + model.positions
    x = torch.cat([model.start.expand(x.shape[0], -1, -1), x], 1)
    x = model.mix(x.relu()) * model.gain * model.scale
    return model.head((x.relu() * model.constant).mean(1))


def positions():
    values = {"positions": torch.randn(4, 6), "start": torch.randn(1, 1, 6), "gain": torch.rand(6) + 0.5}
    values |= {"scale": torch.tensor(0.7), "unused": torch.zeros(3)}
    layers = {"embed": nn.Embedding(9, 6, padding_idx=0), "mix": nn.Linear(6, 6), "head": nn.Linear(6, 3)}
    model = Network(add_positions, **layers, **{name: nn.Parameter(value) for name, value in values.items()})
    model.register_buffer("constant", torch.randn(6))
    return model


def test_parameters_read_by_forward_itself_are_veiled_and_exact():
    model = built(positions)
    tokens = torch.randint(0, 9, (5, 4), generator=torch.Generator().manual_seed(0))
    targets = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = fedveil.analyse(model, tokens)
    assert plan.layout.unused == ("unused",)
    secret = perturb(model, plan)
    assert not torch.isclose(secret.broadcast.parameters["positions"], model.positions).any()
    recovered = secret.recover([fedveil.client_step(model, secret.broadcast, tokens, targets)])
    del model.unused
    assert worst(recovered.gradients, plain(model, tokens, targets)[0]) < 1e-9


@pytest.mark.parametrize("embedding", [nn.Embedding(9, 6, max_norm=1.0), nn.Embedding(9, 6, sparse=True)])
def test_embeddings_with_odd_gradients_are_pinned(embedding):
    model = nn.Sequential(embedding, nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.warns(UserWarning, match="of the parameter values are sent unchanged, because 0 "):
        plan = fedveil.analyse(model, torch.zeros(1, 4).long())
    assert any(where.startswith("0 (Embedding)") for where, _ in plan.pinned)


def test_hooks_are_followed_like_the_rest_of_forward():
    model = built(stack(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3)))
    model[1].register_forward_hook(lambda module, inputs, output: output + 1)
    model[4].register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    model.register_forward_hook(lambda module, inputs, output: None)
    inputs, targets = batch((5,), 3)
    assert planned(model, inputs).pinned == (("1 (ReLU)", "it adds a constant"),)
    assert recovery_error(model, inputs, targets) < 1e-9


@pytest.mark.parametrize(
    ("groups", "outputs", "sizes"),
    [(4, 4, [4]), (2, 6, [1, 1, 2, 2, 3, 3])],  # two inputs and three outputs per group, and the two groups themselves
    ids=["depthwise ties the order", "grouped keeps to its groups"],
)
def test_groups_limit_the_order(groups, outputs, sizes):
    layers = nn.Conv2d(3, 4, 1), nn.Conv2d(4, outputs, 3, groups=groups), nn.Flatten(), nn.Linear(16 * outputs, 3)
    cells = fedveil.analyse(nn.Sequential(*layers), torch.zeros(1, 3, 6, 6)).cells
    assert sorted(int((cells == cell).sum()) for cell in set(cells.tolist()) - {0}) == sizes


def test_a_permutation_really_moves_units():
    model = built(stack(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 3)))
    plan, weight = fedveil.analyse(model, torch.zeros(1, 5)), model[0].weight
    moved, kept = (perturb(model, plan, multiplicative=1.0, permute=on).broadcast.parameters for on in (True, False))
    assert sorted(moved["0.weight"][:, 0].tolist()) == sorted(weight[:, 0].tolist())
    assert (moved["0.weight"] != weight).any()
    assert torch.equal(kept["0.weight"], weight)
