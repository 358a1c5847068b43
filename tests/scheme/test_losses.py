"""Losses give what torch gives, and a veil recovers their gradients."""

import json

import pytest
import torch
from tests.oracle import batch, built, perturb, worst
from tests.zoo import ZOO
from torch import nn
from torch.nn import functional as F

import fedveil
from fedveil.errors import BadArgument
from fedveil.models import mlp, resnet
from fedveil.scheme import (
    AbsoluteError,
    BatchLoss,
    BinaryCrossEntropy,
    CrossEntropy,
    Hinge,
    Huber,
    LogCosh,
    Poisson,
    SquaredError,
)
from fedveil.scheme.losses import find_loss

FLOAT64 = 1e-9  # rounding of float64, amplified by the noise


def true_gradients(model, loss, inputs):
    names = [name for name, _ in model.named_parameters()]
    found = torch.autograd.grad(loss(model(inputs)), list(model.parameters()))
    return dict(zip(names, found, strict=True))


def recovered(model, loss, inputs, targets, seed=0, **how):
    plan = fedveil.analyse(model, inputs)
    secret = perturb(model, plan, loss, entropy=fedveil.Entropy.for_tests(seed), **how)
    return secret.recover([fedveil.client_step(model, secret.broadcast, inputs, targets)])


LABELS = torch.tensor([0, 2, 1, 1, 0, 2])
SOFT = torch.softmax(torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), 1)
WEIGHT = (0.5, 2.0, 1.0)
COUNTS = torch.tensor([[0.0, 1, 2], [3, 0, 1], [1, 1, 1], [0, 0, 4], [2, 2, 0], [1, 0, 0]]).double()
YES = (SOFT > 0.3).double()


def weighted(outputs):
    return F.cross_entropy(outputs, LABELS, torch.tensor(WEIGHT).double(), reduction="sum") / len(LABELS)


def pairs(outputs, targets):
    """Contrastive: samples of one class together, others apart."""
    near = (outputs.unsqueeze(0) - outputs.unsqueeze(1)).square().sum(2)
    same = (targets.unsqueeze(0) == targets.unsqueeze(1)).to(outputs.dtype)
    return (same * near + (1 - same) * (2 - near).relu()).mean()


CASES = {
    "indices": ("cross_entropy", LABELS, lambda y: F.cross_entropy(y, LABELS)),
    "one-hot": ("cross_entropy", F.one_hot(LABELS, 3).double(), lambda y: F.cross_entropy(y, LABELS)),
    "soft": ("cross_entropy", SOFT, lambda y: F.cross_entropy(y, SOFT)),
    "smoothed": (
        CrossEntropy(label_smoothing=0.1), LABELS, lambda y: F.cross_entropy(y, LABELS, label_smoothing=0.1),
    ),
    "class weights": (CrossEntropy(weight=WEIGHT), LABELS, weighted),
    "both, soft": (
        CrossEntropy(weight=WEIGHT, label_smoothing=0.2), SOFT,
        lambda y: F.cross_entropy(y, SOFT, torch.tensor(WEIGHT).double(), label_smoothing=0.2),
    ),
    "binary": ("binary_cross_entropy", YES, lambda y: F.binary_cross_entropy_with_logits(y, YES, reduction="sum") / 6),
    "log-cosh": ("log_cosh", COUNTS, lambda y: (y - COUNTS).cosh().log().sum() / 6),
    "poisson": ("poisson", COUNTS, lambda y: F.poisson_nll_loss(y, COUNTS, reduction="sum") / 6),
    "absolute": ("absolute_error", COUNTS, lambda y: (y - COUNTS).abs().sum() / 6),
    "huber": (Huber(0.5), COUNTS, lambda y: F.huber_loss(y, COUNTS, reduction="sum", delta=0.5) / 6),
    "hinge": ("hinge", LABELS, lambda y: 3 * F.multi_margin_loss(y, LABELS)),
    "a batch's": (BatchLoss(pairs), LABELS, lambda y: pairs(y, LABELS)),
    "squared": ("squared_error", COUNTS, lambda y: (y - COUNTS).square().sum() / 12),
    "a function": (
        lambda y, t: (1 + (y - t).square()).sqrt().sum(1), COUNTS,
        lambda y: (1 + (y - COUNTS).square()).sqrt().sum() / 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_torchs(name):
    loss, targets, truth = CASES[name]
    loss = find_loss(loss)
    outputs = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    dense = loss.dense(targets, outputs.detach())
    expected = truth(outputs)
    (gradient,) = torch.autograd.grad(expected, outputs)
    torch.testing.assert_close(loss.values(outputs.detach(), dense).mean(), expected.detach())
    torch.testing.assert_close(loss.gradient(outputs.detach(), dense) / 6, gradient)


@pytest.mark.parametrize("name", CASES)
def test_a_veil_recovers_its_gradient(name):
    loss, targets, truth = CASES[name]
    model = built(lambda: mlp(5, 3, layers=2, hidden=16))
    inputs, _ = batch((5,), 3)
    for groups in (1, 3):
        found = recovered(model, loss, inputs, targets, groups=groups, additive=1e4)
        assert worst(found.gradients, true_gradients(model, truth, inputs)) < 1e-9


@pytest.mark.parametrize("name", ["CNN", "Bottleneck ResNet", "DenseNet"])
def test_networks_with_norms_and_branches_are_recovered(name):
    build, shape = ZOO[name]
    model = built(build)
    inputs, _ = batch(shape)
    labels = torch.arange(6)
    found = recovered(model, "cross_entropy", inputs, labels)
    assert worst(found.gradients, true_gradients(model, lambda y: F.cross_entropy(y, labels), inputs)) < FLOAT64


def test_sequences_sum_over_positions():
    model = built(lambda: mlp(5, 3, layers=1, hidden=8))
    inputs = torch.randn(4, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 3, (4, 7), generator=torch.Generator().manual_seed(1))
    truth = true_gradients(
        model, lambda y: F.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction="sum") / 4, inputs
    )
    assert worst(recovered(model, "cross_entropy", inputs, labels).gradients, truth) < FLOAT64


def test_an_exposed_head_takes_any_loss_in_one_pass():
    model = built(lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3), nn.Tanh()))
    inputs, _ = batch((5,), 3)
    secret = perturb(model, fedveil.analyse(model, inputs, head="exposed"), "cross_entropy")
    update = fedveil.client_step(model, secret.broadcast, inputs, LABELS)
    assert update.passes["0.weight"].shape[0] == 1
    truth = true_gradients(model, lambda y: F.cross_entropy(y, LABELS), inputs)
    assert worst(secret.recover([update]).gradients, truth) < 1e-9


def test_a_loss_travels_with_its_settings_and_a_function_does_not():
    model = built(lambda: mlp(5, 3, layers=1, hidden=8))
    plan = fedveil.analyse(model, torch.zeros(1, 5).double())
    named = (SquaredError(), CrossEntropy((1, 2, 3), 0.1), BinaryCrossEntropy(), LogCosh(), Poisson())
    for loss in (*named, AbsoluteError(), Huber(0.3), Hinge()):
        metadata, tensors = perturb(model, plan, loss).broadcast.pack()
        assert fedveil.Broadcast.unpack(json.loads(json.dumps(metadata)), tensors).loss == loss

    def own(outputs, targets):
        return (outputs - targets).square().sum(1)

    metadata, tensors = perturb(model, plan, own).broadcast.pack()
    with pytest.raises(BadArgument, match="is the server's own function"):
        fedveil.Broadcast.unpack(metadata, tensors)
    assert fedveil.Broadcast.unpack(metadata, tensors, loss=own).loss.function is own
    with pytest.raises(BadArgument, match="the server's loss is"):
        fedveil.Broadcast.unpack(metadata, tensors, loss="log_cosh")


def test_settings_that_a_loss_does_not_have_are_refused():
    model = built(lambda: mlp(5, 3, layers=1, hidden=8))
    plan = fedveil.analyse(model, torch.zeros(1, 5).double())
    metadata, tensors = perturb(model, plan, "log_cosh").broadcast.pack()
    with pytest.raises(BadArgument, match="log_cosh has no settings"):
        fedveil.Broadcast.unpack(metadata | {"loss_settings": {"width": 3}}, tensors)


@pytest.mark.parametrize(
    ("loss", "targets", "text"),
    [
        ("cross_entropy", torch.tensor([0, 1, 2, 3, 0, 0]), "classes are from 0 to 3, the model has outputs 0 to 2"),
        ("cross_entropy", torch.tensor([0, 1, -1, 1, 0, 0]), "classes are from -1 to 1"),
        (CrossEntropy(weight=(1, 2)), LABELS, "there are 2 class weights, the model has 3 outputs"),
        ("binary_cross_entropy", torch.zeros(6, 2), r"shape is \(6, 2\)"),
        (lambda y, t: (y - t).square().mean(), COUNTS, r"(?s)returned shape \(\) .*not one value.*fedveil.BatchLoss"),
        (lambda y, t: (y - t).abs() @ t.T, COUNTS, r"returned shape \(6, 6\) for outputs of shape \(6, 3\)"),
        (lambda y, t: 1.0, COUNTS, "returned a float"),
        (BatchLoss(lambda y, t: (y - t).abs().sum(1)), COUNTS, r"returned shape \(6,\), not one number for the batch"),
        (lambda y, t: t.sum(1), COUNTS, "it does not depend on the outputs"),
    ],
)
def test_targets_and_functions_that_do_not_fit_are_refused(loss, targets, text):
    model = built(lambda: mlp(5, 3, layers=1, hidden=8))
    with pytest.raises(BadArgument, match=text):
        recovered(model, loss, batch((5,), 3)[0], targets)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: CrossEntropy(label_smoothing=1.0), "label_smoothing must be at least 0 and below 1"),
        (lambda: CrossEntropy(weight=(1.0, -1.0)), "class weights must be finite and not negative"),
        (lambda: find_loss(3), "a int is not a loss"),
        (lambda: Huber(0.0), "delta must be a number above 0"),
    ],
)
def test_losses_that_make_no_sense_are_refused(make, text):
    with pytest.raises(BadArgument, match=text):
        make()


def test_batch_norm_statistics_are_the_plain_ones():
    model = built(lambda: resnet(8, 3, 4, width=4))
    inputs, _ = batch((3, 8, 8), 4)
    found = recovered(model, "cross_entropy", inputs, torch.arange(6) % 4)
    model(inputs)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(found.buffers[name], buffer)


def test_a_users_function_gets_dense_targets_of_a_convolution_as_they_are():
    """Classes on axis 1 of square maps: moved targets would have the same shape, and give another gradient."""
    model = built(lambda: nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1)))
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(5, channels, 4, 4, generator=generator).double() for channels in (2, 4))

    def loss(outputs, asked):
        return (outputs - asked).square().flatten(1).sum(1) + (outputs[:, 0] * asked[:, 1]).flatten(1).sum(1)

    found = recovered(model, loss, inputs, targets, additive=1e3)
    assert worst(found.gradients, true_gradients(model, lambda y: loss(y, targets).mean(), inputs)) < FLOAT64
