"""Networks in which something follows the layer that takes the noise."""

import copy
import json

import pytest
import torch
from tests.oracle import batch, built, perturb, planned, worst
from torch import nn
from torch.nn import functional as F

import fedveil
from fedveil import errors
from fedveil.defences import Plain, Veil
from fedveil.federation import Federation
from fedveil.graph.export import export
from fedveil.graph.head import find_head
from fedveil.graph.tail import keeps_samples_apart


def truth(model, loss, inputs, targets, seed=7):
    """Gradients and buffers of a plain pass on a copy, with dropout as a veiled pass draws it."""
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    value = loss(model(inputs), targets).mean()
    found = torch.autograd.grad(value, list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), found, strict=True)), dict(model.named_buffers())


def veiled(model, loss, inputs, targets, seed=7, **noise):
    secret = perturb(model, planned(model, inputs), loss, entropy=fedveil.Entropy.for_tests(1), **noise)
    broadcast = secret.broadcast
    torch.manual_seed(seed)
    return secret.recover([fedveil.client_step(model, broadcast, inputs, targets)])


def assert_close(found, gradients):
    """A bias before BatchNorm has no gradient, only rounding errors: it is compared with all gradients."""
    total = torch.stack([g.norm() for g in gradients.values()]).norm()
    for key, g in gradients.items():
        assert (found[key] - g).norm() <= 1e-9 * g.norm() + 1e-12 * total, key


def apart(outputs, targets):
    """One value per sample, for outputs of any shape."""
    return (outputs.flatten(1).sin() * torch.linspace(1, 2, outputs[0].numel()).to(outputs)).sum(1)


class Then(nn.Module):
    """Convolutions, the layer that takes the noise, and what follows it."""

    def __init__(self, after, layer=None):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.layer, self.after = layer or nn.Conv2d(6, 4, 1), after

    def forward(self, x):
        return self.after(self.layer(self.body(x)))


class Around(nn.Module):
    """A way around every layer but the first."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 5, 1)

    def forward(self, x):
        u = F.relu(self.first(x))
        return (u + self.layer(u)).mean((2, 3)).view(x.shape[0], -1)


class Twice(nn.Module):
    """A layer that is called twice, and no other."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(192, 192), nn.Parameter(torch.full((192,), 0.5))

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x.flatten(1)))).relu() * self.scale


class Functional(nn.Module):
    """A layer that is no module."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(192, 8)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return F.linear(self.first(x.flatten(1)).relu(), self.weight, self.bias).softmax(1)


class Branches(nn.Module):
    """Two last layers side by side: the noise goes to the one before them, which both depend on."""

    def __init__(self):
        super().__init__()
        self.shared, self.left, self.right = nn.Linear(192, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x):
        x = self.shared(x.flatten(1)).relu()
        return torch.cat([self.left(x), self.right(x)], 1)


STACKED = {
    "squeeze": lambda: Then(nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())),
    "softmax": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 9), nn.ReLU(), nn.Linear(9, 4), nn.Softmax(1)),
    "log softmax": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.LogSoftmax(-1)),
    "max pool": lambda: Then(nn.MaxPool2d(2)),
    "pixel shuffle": lambda: Then(nn.PixelShuffle(2)),
    "layer norm": lambda: Then(nn.LayerNorm([4, 8, 8])),
    "batch norm in eval mode": lambda: Then(nn.BatchNorm2d(4).eval()),
    "mean over classes": lambda: Then(lambda x: x.mean(1)),
    "grouped last layer": lambda: Then(nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2))),
    "tanh behind a transposed convolution": lambda: Then(nn.Tanh(), nn.ConvTranspose2d(6, 4, 2, stride=2)),
    "functional": Functional,
}
REPEATED = {
    "batch norm": lambda: Then(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())),
    "mean over samples": lambda: Then(lambda x: x - x.mean(0)),
    "samples and classes changed": lambda: Then(lambda x: x.relu().transpose(0, 1)),
    "a way around": Around,
    "twice": Twice,
}
NETWORKS = STACKED | REPEATED


@pytest.mark.parametrize("name", NETWORKS)
def test_whatever_follows_is_exact(name):
    model = built(NETWORKS[name])
    inputs, _ = batch((3, 8, 8))
    assert planned(model, inputs).head.tail == ("stacked" if name in STACKED else "repeated")
    if name == "samples and classes changed":
        return  # outputs whose first dim does not count samples have no loss per sample
    gradients, buffers = truth(model, apart, inputs, None)
    for noise in ({"groups": 1}, {"groups": 3, "additive": 1e4, "multiplicative": 10.0, "decoys": 3}):
        found = veiled(model, apart, inputs, torch.zeros(6), **noise)
        assert_close(found.gradients, gradients)
        for key, value in buffers.items():
            torch.testing.assert_close(found.buffers[key], value, rtol=1e-9, atol=1e-12)


def test_branches_share_the_noise_of_the_layer_before_them():
    model = built(Branches)
    inputs, _ = batch((3, 8, 8))
    assert planned(model, inputs).head.path == "shared"
    found = veiled(model, apart, inputs, torch.zeros(6), groups=4)
    assert worst(found.gradients, truth(model, apart, inputs, None)[0]) < 1e-9


def test_dropout_behind_the_head_leaves_out_the_same_units_for_every_candidate():
    model = built(lambda: Then(nn.Sequential(nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.3))))
    inputs, _ = batch((3, 8, 8))
    assert planned(model, inputs).head.tail == "repeated"
    found = veiled(model, apart, inputs, torch.zeros(6), permute=False)  # units in their places: dropout hits by place
    gradients, _ = truth(model, apart, inputs, None)
    assert worst(found.gradients, gradients) < 1e-6  # a bias before BatchNorm has almost no gradient
    torch.manual_seed(7)
    model(inputs)
    expected = torch.rand(3)
    veiled(model, apart, inputs, torch.zeros(6), permute=False)
    assert torch.equal(torch.rand(3), expected)  # and the stream goes on as after one forward pass


def test_a_loss_of_the_batch_is_computed_for_each_candidate_by_itself():
    model = built(STACKED["squeeze"])
    inputs, _ = batch((3, 8, 8))

    def smooth(outputs, targets):
        near = (outputs.unsqueeze(0) - outputs.unsqueeze(1)).square().sum(2)
        return (near + 1e-3).sqrt().mean()

    found = veiled(model, fedveil.BatchLoss(smooth), inputs, torch.zeros(6), groups=2)
    assert_close(found.gradients, truth(model, smooth, inputs, None)[0])


@pytest.mark.filterwarnings("ignore:Around. 17.6%")
@pytest.mark.parametrize("name", ["squeeze", "batch norm", "softmax", "a way around"])
@pytest.mark.parametrize("whole_shard", [False, True])
def test_training_is_lossless(name, whole_shard):
    loss = "cross_entropy" if name != "softmax" else "squared_error"
    clients = [(batch((3, 8, 8), samples=n, seed=n)[0], torch.arange(n) % 4) for n in (8, 12)]
    pooled = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    build = (lambda: Then(copy.deepcopy(pooled))) if name == "batch norm" else NETWORKS[name]
    runs = []
    for defence in (Plain(), Veil(groups=2, additive=100.0, entropy=fedveil.Entropy.for_tests(0))):
        model = built(build)
        settings = {"batch_size": 4, "loss": loss, "whole_shard": whole_shard}
        Federation(model, clients, defence, lambda p: torch.optim.SGD(p, 0.1), **settings).fit(rounds=5)
        runs.append({key: v for key, v in model.state_dict().items() if v.is_floating_point()})
    assert worst(runs[1], runs[0]) < 1e-9


@pytest.mark.parametrize(
    ("after", "kept"),
    [
        (nn.ReLU(), True),
        (lambda x: x.softmax(0), False),
        (lambda x: x.sum(), False),
        (lambda x: x.flatten(0, 1), False),
        (lambda x: x.permute(1, 0, 2, 3), False),
        (lambda x: x.permute(0, 2, 3, 1).softmax(-1), True),
        (lambda x: x / x.norm(dim=0), False),
        (lambda x: x.sort(0)[0], False),
        (lambda x: torch.cumsum(x, 0), False),
        (lambda x: x.flip(0), False),
        (lambda x: x[0:1].relu(), False),
        (lambda x: F.dropout(x, 0.5, training=False).relu(), True),
    ],
)
def test_what_couples_samples_is_known(after, kept):
    model = built(lambda: Then(after))
    exported = export(model, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
    node = next(n for n in reversed(exported.graph.nodes) if "conv2d" in str(n.target))
    assert keeps_samples_apart(exported, node) is kept


def test_a_candidate_s_buffers_are_not_anothers():
    """The tail's statistics follow the candidate: only those of the true one are plain training's."""
    model = built(REPEATED["batch norm"])
    inputs, _ = batch((3, 8, 8))
    secret = perturb(model, planned(model, inputs), apart, decoys=2)
    update = fedveil.client_step(model, secret.broadcast, inputs, torch.zeros(6))
    statistics = update.buffers["after.0.running_mean"]
    assert statistics.shape == (3, 4)
    assert (statistics[0] - statistics[1]).abs().max() > 1e-6
    assert torch.equal(update.buffers["body.1.running_mean"][0], update.buffers["body.1.running_mean"][1])


def test_the_head_s_node_is_none_where_something_follows():
    inputs = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    for name, build in (*STACKED.items(), ("a way around", Around)):
        model = built(build)
        head, node = find_head(model, export(model, inputs), inputs)
        assert head.within, name
        assert node is None


@pytest.mark.parametrize("name", ["squeeze", "batch norm"])
def test_broadcast_and_update_travel(name):
    model = built(NETWORKS[name])
    inputs, _ = batch((3, 8, 8))
    secret = perturb(model, planned(model, inputs), apart, groups=3)
    values, tensors = secret.broadcast.pack()
    broadcast = fedveil.Broadcast.unpack(json.loads(json.dumps(values)), tensors, loss=apart)
    update = fedveil.Update.unpack(*fedveil.client_step(model, broadcast, inputs, torch.zeros(6)).pack())
    found, gradients = secret.recover([update]).gradients, truth(model, apart, inputs, None)[0]
    assert worst({"layer.weight": found["layer.weight"]}, {"layer.weight": gradients["layer.weight"]}) < 1e-9
    values["head"]["tail"] = "somewhere"
    with pytest.raises(errors.BadArgument, match="there is no tail 'somewhere'"):
        fedveil.Broadcast.unpack(values, tensors, loss=apart)
