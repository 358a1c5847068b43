"""The layer that receives additive noise: the final one, or one that any other operations follow."""

import copy
import json

import pytest
import torch
from tests.oracle import Network, assert_close, batch, built, perturb, plain, planned, recovery_error, worst
from torch import nn
from torch.nn import functional as F

import fedveil
from fedveil import errors
from fedveil.defences import Plain, Veil
from fedveil.federation import Federation
from fedveil.graph.export import export
from fedveil.graph.head import find_head, keeps_samples_independent
from fedveil.graph.outputs import choose_output


def then(after, layer=None):
    """Convolutions, the layer that takes the noise, and what follows it."""
    body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
    layer = layer or nn.Conv2d(6, 4, 1)
    return Network(lambda m, x: m.after(m.layer(m.body(x))), body=body, layer=layer, after=after)


# A final layer, behind nothing but what is linear and equal for every output.
FINAL = {
    "3x3": then(nn.Identity(), nn.Conv2d(6, 4, 3, padding=1)),
    "no bias": then(nn.Identity(), nn.Conv2d(6, 4, 3, bias=False)),
    "stride and dilation": then(nn.Identity(), nn.Conv2d(6, 4, 3, stride=2, dilation=2, padding=2)),
    "reflect": then(nn.Identity(), nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect")),
    "replicate": then(nn.Identity(), nn.Conv2d(6, 4, 3, padding=1, padding_mode="replicate")),
    "circular": then(nn.Identity(), nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular")),
    "average pool": then(lambda x: F.adaptive_avg_pool2d(x, 2), nn.Conv2d(6, 4, 3)),
    "mean": then(lambda x: x.mean((2, 3))),
    "bicubic": then(lambda x: F.interpolate(x, size=(7, 9), mode="bicubic")),
    "nearest": then(lambda x: F.interpolate(x, scale_factor=2)),
    "crop": then(lambda x: x[:, :, 1:-1, 1:-1]),
    "flattened pixels": then(lambda x: x.flatten(2)),
    "classes last": then(lambda x: x.permute(0, 2, 3, 1)),
}
PIXELWISE = {  # classes on axis 1
    "1x1": then(nn.Identity()),
    "transposed": then(nn.Identity(), nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1)),
    "bilinear": then(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)),
    "global average": then(lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1)),
}
OTHER_DIMS = {
    "1d": (nn.Conv1d(3, 6, 3), nn.Conv1d(6, 4, 2), (3, 8)),
    "3d": (nn.Conv3d(1, 6, 2), nn.Conv3d(6, 4, 1), (1, 3, 4, 3)),
    "transposed 1d": (nn.Conv1d(3, 6, 3), nn.ConvTranspose1d(6, 4, 2, stride=2), (3, 8)),
    "transposed 3d": (nn.Conv3d(1, 6, 2), nn.ConvTranspose3d(6, 4, 2), (1, 3, 4, 3)),
}
CASES = {name: (model, (3, 6, 6)) for name, model in (FINAL | PIXELWISE).items()}
CASES |= {name: (nn.Sequential(body, nn.ReLU(), head), shape) for name, (body, head, shape) in OTHER_DIMS.items()}


@pytest.mark.parametrize("name", CASES)
def test_convolutions_and_what_may_follow_them_are_exact(name):
    model, shape = built(lambda: CASES[name][0]), CASES[name][1]
    inputs, _ = batch(shape)
    targets = torch.randn_like(model(inputs).detach())
    for groups in (1, 3):
        assert recovery_error(model, inputs, targets, groups=groups, additive=1e3, multiplicative=10.0) < 1e-9


def summed_entropy(outputs, wanted):
    return F.cross_entropy(outputs, wanted, reduction="none").reshape(len(outputs), -1).sum(1)


@pytest.mark.parametrize("loss", ["cross_entropy", summed_entropy])
@pytest.mark.parametrize("name", PIXELWISE)
def test_cross_entropy_per_pixel_has_its_classes_on_axis_1(name, loss):
    model = built(lambda: PIXELWISE[name])
    inputs, _ = batch((3, 6, 6))
    n, _, *pixels = model(inputs).shape
    targets = torch.randint(0, 4, (n, *pixels), generator=torch.Generator().manual_seed(0))
    found = veiled(model, loss, inputs, targets, groups=4).gradients
    total = F.cross_entropy(model(inputs), targets, reduction="sum") / n
    wanted = torch.autograd.grad(total, list(model.parameters()))
    assert worst(found, dict(zip(dict(model.named_parameters()), wanted, strict=True))) < 1e-9


def tied():
    """A language model whose head is its embedding."""
    layers = {"embedding": nn.Embedding(9, 6), "mix": nn.Linear(6, 6), "norm": nn.LayerNorm(6)}
    model = Network(
        lambda m, ids: m.head(m.norm((x := m.embedding(ids)) + m.mix(x).relu())),
        **layers, head=nn.Linear(6, 9, bias=False),
    )  # fmt: skip
    model.head.weight = model.embedding.weight
    return model


def test_a_tied_embedding_leaves_the_noise_to_another_layer_unless_the_head_is_exposed():
    ids = torch.randint(0, 9, (5, 4), generator=torch.Generator().manual_seed(0))
    targets = torch.randn(5, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = built(tied)
    plan = planned(model, ids)
    assert (plan.head.path, plan.head.tail) == ("mix", "repeated")  # a skip leads around it
    assert recovery_error(model, ids, targets, groups=3, additive=1e3, multiplicative=10.0) < 1e-9
    plan = fedveil.analyse(model, ids, head="exposed")
    assert plan.shares["bare"] < 0.1
    secret = perturb(model, plan, multiplicative=10.0)
    assert not torch.equal(secret.broadcast.parameters["embedding.weight"], model.embedding.weight)
    update = fedveil.client_step(model, secret.broadcast, ids, targets)
    assert worst(secret.recover([update]).gradients, plain(model, ids, targets)[0]) < 1e-9
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    assert planned(model, ids[:, :2]).head.path == "head"
    assert recovery_error(model, ids, targets, groups=3) < 1e-9


def test_an_addmm_takes_noise_only_if_it_adds_a_bias_to_a_product():
    ids = torch.randint(0, 9, (5, 4), generator=torch.Generator().manual_seed(0))
    targets = torch.randn(5, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def projected(**factors):
        """A tied language model whose only other layer is an addmm."""
        return Network(
            lambda m, ids: torch.addmm(m.bias, m.embedding(ids).flatten(0, 1), m.weight, **factors).relu().unflatten(
                0, ids.shape
            )
            @ m.embedding.weight.T,
            embedding=nn.Embedding(9, 6), weight=nn.Parameter(torch.randn(6, 6)), bias=nn.Parameter(torch.randn(6)),
        )  # fmt: skip

    model = built(projected)
    assert planned(model, ids).head.weight == "weight"
    assert recovery_error(model, ids, targets, groups=3, additive=1e3, multiplicative=10.0) < 1e-9
    with pytest.raises(errors.HeadNotLinear, match="it is not the sum of a product and a bias"):
        planned(built(lambda: projected(beta=2)), ids)


def answering(name):
    """A model that returns a dict with two tensors."""

    def run(model, values, mask):
        hidden = model.body(values * mask).relu()
        return {name: model.classifier(hidden), "hidden": hidden}

    return Network(run, body=nn.Linear(6, 8), classifier=nn.Linear(8, 3))


def test_an_ambiguous_dict_is_refused_with_a_fix_that_works():
    values, targets = batch((6,), 3)
    inputs = {"values": values, "mask": (values > 0).double()}
    with pytest.raises(
        errors.BadArgument, match=r"(?s)Network.*several floating-point tensors.*output=\"last_hidden_state\""
    ):
        fedveil.analyse(answering("scores"), inputs)
    model = choose_output(built(lambda: answering("scores")), "scores")
    assert recovery_error(model, inputs, targets, groups=2, multiplicative=10.0) < 1e-9
    assert recovery_error(built(lambda: answering("logits")), inputs, targets, groups=2, multiplicative=10.0) < 1e-9


# A head that other operations follow.


def truth(model, loss, inputs, targets, seed=7):
    """Gradients and buffers of a plain pass on a copy, with dropout as a veiled pass draws it."""
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    found = torch.autograd.grad(loss(model(inputs), targets).mean(), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), found, strict=True)), dict(model.named_buffers())


def veiled(model, loss, inputs, targets, seed=7, **noise):
    """A veiled round in which broadcast and update are sent."""
    secret = perturb(model, planned(model, inputs), loss, entropy=fedveil.Entropy.for_tests(1), **noise)
    values, tensors = secret.broadcast.pack()
    own = None if isinstance(loss, str) else loss
    broadcast = fedveil.Broadcast.unpack(json.loads(json.dumps(values)), tensors, loss=own)
    torch.manual_seed(seed)
    update = fedveil.client_step(model, broadcast, inputs, targets)
    return secret.recover([fedveil.Update.unpack(*update.pack())])


def separate(outputs, targets):
    """One value per sample, for outputs of any shape."""
    return (outputs.flatten(1).sin() * torch.linspace(1, 2, outputs[0].numel()).to(outputs)).sum(1)


def around():
    """A way around every layer but the first."""
    return Network(
        lambda m, x: ((u := F.relu(m.first(x))) + m.layer(u)).mean((2, 3)).view(x.shape[0], -1),
        first=nn.Conv2d(3, 5, 3, padding=1),
        layer=nn.Conv2d(5, 5, 1),
    )


def twice():
    """A layer that is called twice, and no other."""
    parts = {"layer": nn.Linear(192, 192), "scale": nn.Parameter(torch.full((192,), 0.5))}
    return Network(lambda m, x: m.layer(torch.tanh(m.layer(x.flatten(1)))).relu() * m.scale, **parts)


def functional():
    """A layer that is not a module."""
    parts = {"weight": nn.Parameter(torch.randn(4, 8)), "bias": nn.Parameter(torch.randn(4))}
    return Network(
        lambda m, x: F.linear(m.first(x.flatten(1)).relu(), m.weight, m.bias).softmax(1),
        first=nn.Linear(192, 8),
        **parts,
    )


def transposed():
    """A layer whose weight is transposed, as in GPT-2."""
    parts = {"weight": nn.Parameter(torch.randn(8, 4)), "bias": nn.Parameter(torch.randn(4))}
    return Network(
        lambda m, x: torch.addmm(m.bias, m.first(x.flatten(1)).relu(), m.weight).softmax(1),
        first=nn.Linear(192, 8),
        **parts,
    )


def multiplied(transpose):
    """A layer that is a product with a matrix or its transpose."""
    parts = {"weight": nn.Parameter(torch.randn(4, 192) if transpose else torch.randn(192, 4))}
    return lambda: Network(
        lambda m, x: (torch.sin(m.table * x.flatten(1)) @ (m.weight.T if transpose else m.weight)).softmax(1),
        table=nn.Parameter(torch.randn(1, 192)),
        **parts,
    )


def branches():
    """Two last layers side by side: the noise goes to the one before them, which both depend on."""
    layers = {"shared": nn.Linear(192, 8), "left": nn.Linear(8, 3), "right": nn.Linear(8, 2)}
    return Network(lambda m, x: torch.cat([m.left(u := m.shared(x.flatten(1)).relu()), m.right(u)], 1), **layers)


STACKED = {
    "squeeze": lambda: then(nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())),
    "softmax": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 9), nn.ReLU(), nn.Linear(9, 4), nn.Softmax(1)),
    "max pool": lambda: then(nn.MaxPool2d(2)),
    "pixel shuffle": lambda: then(nn.PixelShuffle(2)),
    "layer norm": lambda: then(nn.LayerNorm([4, 8, 8])),
    "batch norm in eval mode": lambda: then(nn.BatchNorm2d(4).eval()),
    "mean over classes": lambda: then(lambda x: x.mean(1)),
    "grouped last layer": lambda: then(nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2))),
    "tanh behind a transposed convolution": lambda: then(nn.Tanh(), nn.ConvTranspose2d(6, 4, 2, stride=2)),
    "functional": functional,
    "transposed": transposed,
    "matrix": multiplied(False),
    "transposed matrix": multiplied(True),
    "branches": branches,
}
REPEATED = {
    "batch norm": lambda: then(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())),
    "mean over samples": lambda: then(lambda x: x - x.mean(0)),
    "samples and classes changed": lambda: then(lambda x: x.relu().transpose(0, 1)),
    "a way around": around,
    "twice": twice,
}
NETWORKS, IMAGES = STACKED | REPEATED, batch((3, 8, 8))[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_whatever_follows_is_exact(name):
    model = built(NETWORKS[name])
    head, node = find_head(model, export(model, IMAGES), IMAGES)
    assert head.tail == ("stacked" if name in STACKED and name != "branches" else "repeated")
    assert head.is_inner
    assert node is None
    if name == "branches":
        assert head.path == "shared"
    if name == "samples and classes changed":
        return  # outputs whose first dim does not count samples have no loss per sample
    gradients, buffers = truth(model, separate, IMAGES, None)
    for noise in ({"groups": 1}, {"groups": 3, "additive": 1e4, "multiplicative": 10.0, "decoys": 3}):
        found = veiled(model, separate, IMAGES, torch.zeros(6), **noise)
        assert_close(found.gradients, gradients)
        for key, value in buffers.items():
            torch.testing.assert_close(found.buffers[key], value, rtol=1e-9, atol=1e-12)


def test_dropout_behind_the_head_leaves_out_the_same_units_for_every_candidate():
    model = built(lambda: then(nn.Sequential(nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.3))))
    assert planned(model, IMAGES).head.tail == "repeated"
    found = veiled(model, separate, IMAGES, torch.zeros(6), permute=False)  # dropout hits units by position
    gradients, _ = truth(model, separate, IMAGES, None)
    assert worst(found.gradients, gradients) < 1e-6  # a bias before BatchNorm has almost no gradient
    torch.manual_seed(7)
    model(IMAGES)
    expected = torch.rand(3)
    veiled(model, separate, IMAGES, torch.zeros(6), permute=False)
    assert torch.equal(torch.rand(3), expected)  # the stream continues as after one forward pass


def test_a_loss_of_the_batch_is_computed_for_each_candidate_separately():
    def smooth(outputs, targets):
        near = (outputs.unsqueeze(0) - outputs.unsqueeze(1)).square().sum(2)
        return (near + 1e-3).sqrt().mean()

    model = built(STACKED["squeeze"])
    found = veiled(model, fedveil.BatchLoss(smooth), IMAGES, torch.zeros(6), groups=2)
    assert_close(found.gradients, truth(model, smooth, IMAGES, None)[0])


@pytest.mark.filterwarnings("ignore:Network. 17.6%")
@pytest.mark.parametrize("name", ["squeeze", "batch norm", "softmax", "a way around"])
@pytest.mark.parametrize("whole_shard", [False, True])
def test_training_is_lossless(name, whole_shard):
    loss = "cross_entropy" if name != "softmax" else "squared_error"
    clients = [(batch((3, 8, 8), samples=n, seed=n)[0], torch.arange(n) % 4) for n in (8, 12)]
    pooled = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    build = (lambda: then(copy.deepcopy(pooled))) if name == "batch norm" else NETWORKS[name]
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
def test_operations_that_couple_samples_are_known(after, kept):
    exported = export(built(lambda: then(after)), IMAGES)
    node = next(n for n in reversed(exported.graph.nodes) if "conv2d" in str(n.target))
    assert keeps_samples_independent(exported, node) is kept
