"""The final layer: a Linear or any convolution, behind nothing but what is linear and equal for every output."""

import pytest
import torch
from tests.oracle import batch, built, perturb, plain, planned, recovery_error, worst
from torch import nn
from torch.nn import functional as F

import fedveil
from fedveil import errors


class Then(nn.Module):
    """A layer, and a function of what it returns."""

    def __init__(self, layer, after):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.layer, self.after = layer, after

    def forward(self, x):
        return self.after(self.layer(self.body(x)))


def same(x):
    return x


HEADS = {
    "1x1": (nn.Conv2d(6, 4, 1), same),
    "3x3": (nn.Conv2d(6, 4, 3, padding=1), same),
    "no bias": (nn.Conv2d(6, 4, 3, bias=False), same),
    "stride and dilation": (nn.Conv2d(6, 4, 3, stride=2, dilation=2, padding=2), same),
    "reflect": (nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"), same),
    "replicate": (nn.Conv2d(6, 4, 3, padding=1, padding_mode="replicate"), same),
    "circular": (nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"), same),
    "transposed": (nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1), same),
    "average pool": (nn.Conv2d(6, 4, 3), lambda x: F.adaptive_avg_pool2d(x, 2)),
    "global average": (nn.Conv2d(6, 4, 1), lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1)),
    "mean": (nn.Conv2d(6, 4, 1), lambda x: x.mean((2, 3))),
    "bilinear": (nn.Conv2d(6, 4, 1), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)),
    "bicubic": (nn.Conv2d(6, 4, 1), lambda x: F.interpolate(x, size=(7, 9), mode="bicubic")),
    "nearest": (nn.Conv2d(6, 4, 1), lambda x: F.interpolate(x, scale_factor=2)),
    "crop": (nn.Conv2d(6, 4, 1), lambda x: x[:, :, 1:-1, 1:-1]),
    "flattened pixels": (nn.Conv2d(6, 4, 1), lambda x: x.flatten(2)),
    "classes last": (nn.Conv2d(6, 4, 1), lambda x: x.permute(0, 2, 3, 1)),
}


@pytest.mark.parametrize("name", HEADS)
def test_convolutions_and_what_may_follow_them_are_exact(name):
    layer, after = HEADS[name]
    model = built(lambda: Then(layer, after))
    inputs, _ = batch((3, 6, 6), 4)
    with torch.no_grad():
        targets = torch.randn_like(model(inputs))
    for groups in (1, 3):
        assert recovery_error(model, inputs, targets, groups=groups, additive=1e3, multiplicative=10.0) < 1e-9


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ((nn.Conv1d(3, 6, 3), nn.ReLU(), nn.Conv1d(6, 4, 2)), (3, 8)),
        ((nn.Conv3d(1, 6, 2), nn.ReLU(), nn.Conv3d(6, 4, 1)), (1, 3, 4, 3)),
        ((nn.Conv1d(3, 6, 3), nn.ReLU(), nn.ConvTranspose1d(6, 4, 2, stride=2)), (3, 8)),
        ((nn.Conv3d(1, 6, 2), nn.ReLU(), nn.ConvTranspose3d(6, 4, 2)), (1, 3, 4, 3)),
    ],
    ids=["1d", "3d", "transposed 1d", "transposed 3d"],
)
def test_convolutions_of_other_dimensions_are_exact(layers, shape):
    model = built(lambda: nn.Sequential(*layers))
    inputs, _ = batch(shape, 4)
    targets = torch.randn_like(model(inputs).detach())
    assert recovery_error(model, inputs, targets, groups=2) < 1e-9


def pixelwise(model, inputs, targets):
    """PyTorch's own cross-entropy, summed over positions and averaged over samples."""
    loss = F.cross_entropy(model(inputs), targets, reduction="sum") / len(inputs)
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        *[(name, "cross_entropy") for name in ("1x1", "transposed", "bilinear", "global average")],
        *[(name, "function") for name in ("1x1", "transposed", "bilinear")],
    ],
)
def test_cross_entropy_per_pixel_has_its_classes_on_axis_1(name, loss):
    layer, after = HEADS[name]
    model = built(lambda: Then(layer, after))
    inputs, _ = batch((3, 6, 6), 4)
    with torch.no_grad():
        shape = model(inputs).shape
    targets = torch.randint(0, 4, (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(0))

    def function(outputs, wanted):
        return F.cross_entropy(outputs, wanted, reduction="none").flatten(1).sum(1)

    plan = fedveil.analyse(model, inputs)
    secret = perturb(
        model, plan, function if loss == "function" else loss, groups=4, entropy=fedveil.Entropy.for_tests(0)
    )
    update = fedveil.client_step(model, secret.broadcast, inputs, targets)
    assert worst(secret.recover([update]).gradients, pixelwise(model, inputs, targets)) < 1e-9


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.mix, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(self.norm(x + self.mix(x).relu()))


def tokens():
    ids = torch.randint(0, 9, (5, 4), generator=torch.Generator().manual_seed(0))
    return ids, torch.randn(5, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_tied_embedding_leaves_the_noise_to_another_layer():
    model, (ids, targets) = built(Tied), tokens()
    plan = planned(model, ids)
    assert (plan.head.path, plan.head.tail) == ("mix", "repeated")  # a skip leads around it
    assert recovery_error(model, ids, targets, groups=3, additive=1e3, multiplicative=10.0) < 1e-9
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    assert planned(model, ids[:, :2]).head.path == "head"
    assert recovery_error(model, ids, targets, groups=3) < 1e-9


def test_an_exposed_head_may_be_tied():
    model, (ids, targets) = built(Tied), tokens()
    plan = fedveil.analyse(model, ids, head="exposed")
    assert plan.shares["bare"] < 0.1
    secret = perturb(model, plan, multiplicative=10.0)
    broadcast = secret.broadcast
    assert not torch.equal(broadcast.parameters["embedding.weight"], model.embedding.weight)
    update = fedveil.client_step(model, broadcast, ids, targets)
    assert worst(secret.recover([update]).gradients, plain(model, ids, targets)[0]) < 1e-9


class Answering(nn.Module):
    """A model that returns a dict, as many on the Hugging Face hub do."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.classifier = nn.Embedding(9, 6), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids) * attention_mask.unsqueeze(-1)
        return {"logits": self.classifier(self.body(x.sum(1)).relu()), "hidden": x}


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return self.model(**inputs)["logits"]


def test_a_dict_output_is_refused_with_a_fix_that_works():
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "input_ids": torch.randint(0, 9, (5, 4), generator=generator),
        "attention_mask": torch.randint(0, 2, (5, 4), generator=generator).double(),
    }
    with pytest.raises(errors.AnalysisError, match=r"(?s)Answering.*more than one tensor.*\(\*\*inputs\)\[.logits.\]"):
        fedveil.analyse(Answering(), inputs)
    model = built(lambda: Logits(Answering()))
    targets = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    assert recovery_error(model, inputs, targets, groups=2, multiplicative=10.0) < 1e-9
