"""Losses give what torch gives, and a veil recovers their gradients."""

import json

import pytest
import torch
from tests.oracle import Network, batch, built, contrastive, perturb, plain, veiled_round, worst
from torch import nn
from torch.nn import functional as F

import fedveil
from fedveil.errors import BadArgument
from fedveil.models import mlp
from fedveil.scheme.broadcast import resolve_loss
from fedveil.scheme.losses import LOSSES, BatchLoss, CrossEntropy, Huber, find_loss

FLOAT64 = 1e-9  # rounding of float64, amplified by the noise
LABELS = torch.tensor([0, 2, 1, 1, 0, 2])
SOFT = torch.softmax(torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), 1)
WEIGHT = (0.5, 2.0, 1.0)
COUNTS = torch.tensor([[0.0, 1, 2], [3, 0, 1], [1, 1, 1], [0, 0, 4], [2, 2, 0], [1, 0, 0]]).double()
YES = (SOFT > 0.3).double()


def weighted(outputs, _):
    return F.cross_entropy(outputs, LABELS, torch.tensor(WEIGHT).double(), reduction="sum") / len(LABELS)


CASES = {
    "indices": ("cross_entropy", LABELS, lambda y, _: F.cross_entropy(y, LABELS)),
    "one-hot": ("cross_entropy", F.one_hot(LABELS, 3).double(), lambda y, _: F.cross_entropy(y, LABELS)),
    "soft": ("cross_entropy", SOFT, lambda y, _: F.cross_entropy(y, SOFT)),
    "smoothed": (
        CrossEntropy(label_smoothing=0.1), LABELS, lambda y, _: F.cross_entropy(y, LABELS, label_smoothing=0.1),
    ),
    "class weights": (CrossEntropy(weight=WEIGHT), LABELS, weighted),
    "both, soft": (
        CrossEntropy(weight=WEIGHT, label_smoothing=0.2), SOFT,
        lambda y, _: F.cross_entropy(y, SOFT, torch.tensor(WEIGHT).double(), label_smoothing=0.2),
    ),
    "binary": ("binary_cross_entropy", YES, lambda y, t: F.binary_cross_entropy_with_logits(y, t, reduction="sum") / 6),
    "log-cosh": ("log_cosh", COUNTS, lambda y, _: (y - COUNTS).cosh().log().sum() / 6),
    "poisson": ("poisson", COUNTS, lambda y, _: F.poisson_nll_loss(y, COUNTS, reduction="sum") / 6),
    "absolute": ("absolute_error", COUNTS, lambda y, _: (y - COUNTS).abs().sum() / 6),
    "huber": (Huber(0.5), COUNTS, lambda y, _: F.huber_loss(y, COUNTS, reduction="sum", delta=0.5) / 6),
    "hinge": ("hinge", LABELS, lambda y, _: 3 * F.multi_margin_loss(y, LABELS)),
    "a batch's": (BatchLoss(contrastive), LABELS, lambda y, _: contrastive(y, LABELS)),
    "squared": ("squared_error", COUNTS, lambda y, _: (y - COUNTS).square().sum() / 12),
    "a function": (
        lambda y, t: (1 + (y - t).square()).sqrt().sum(1), COUNTS,
        lambda y, _: (1 + (y - COUNTS).square()).sqrt().sum() / 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_torchs(name):
    loss, targets, truth = CASES[name]
    loss = find_loss(loss)
    outputs = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    dense = loss.dense(targets, outputs.detach())
    expected = truth(outputs, targets)
    (gradient,) = torch.autograd.grad(expected, outputs)
    torch.testing.assert_close(loss.values(outputs.detach(), dense).mean(), expected.detach())
    torch.testing.assert_close(loss.gradient(outputs.detach(), dense) / 6, gradient)


@pytest.mark.parametrize("name", CASES)
def test_a_veil_recovers_its_gradient(name):
    loss, targets, truth = CASES[name]
    model = built(lambda: mlp(5, 3, layers=2, hidden=16))
    inputs, _ = batch((5,), 3)
    for groups in (1, 3):
        found = veiled_round(model, inputs, targets, loss=loss, groups=groups, additive=1e4)
        assert worst(found.gradients, plain(model, inputs, targets, truth)[0]) < 1e-9


def test_a_loss_travels_with_its_settings_and_a_function_does_not():
    model = built(lambda: mlp(5, 3, layers=1, hidden=8))
    plan = fedveil.analyse(model, torch.zeros(1, 5).double())
    for loss in (*[kind() for kind in LOSSES.values()], CrossEntropy((1, 2, 3), 0.1), Huber(0.3)):
        metadata, tensors = perturb(model, plan, loss).broadcast.pack()
        assert fedveil.Broadcast.unpack(json.loads(json.dumps(metadata)), tensors).loss == loss

    def own(outputs, targets):
        return (outputs - targets).square().sum(1)

    metadata, tensors = perturb(model, plan, own).broadcast.pack()
    with pytest.raises(BadArgument, match="is a custom function"):
        fedveil.Broadcast.unpack(metadata, tensors)
    assert fedveil.Broadcast.unpack(metadata, tensors, loss=own).loss.function is own
    with pytest.raises(BadArgument, match="the server's loss is"):
        fedveil.Broadcast.unpack(metadata, tensors, loss="log_cosh")


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("log_cosh", {"width": 3}, "log_cosh has no setting 'width'"),
        *[("huber", {"delta": bad}, "delta of huber must be a float, finite") for bad in (10**200, "x", None, True)],
        *[
            ("cross_entropy", {"weight": bad}, "weight of cross_entropy must be a list of numbers or None")
            for bad in ([1, "2"], [1.0] * (2**18 + 1), "12", 1.0, [[1.0]])
        ],
        ("cross_entropy", {"average_positions": 1}, "average_positions of cross_entropy must be a bool"),
        ("torch.nn.CrossEntropyLoss", {"ignore_index": 1.0}, "ignore_index of .* must be a int"),
        ("torch.nn.MSELoss", {"delta": 1.0}, "torch.nn.MSELoss has no setting 'delta'"),
        ("torch.nn.MSELoss", {"reduction": "median"}, "there is no reduction 'median'"),
        ("torch.nn.MultiMarginLoss", {"p": 3}, "torch.nn.MultiMarginLoss cannot be built"),
        ("torch.nn.Linear", {}, "'torch.nn.Linear' is a custom function"),
        ("torch.nn.GaussianNLLLoss", {}, "requires more than outputs and targets"),
    ],
)
def test_a_loss_that_a_server_may_not_ask_for_is_refused(name, settings, text):
    with pytest.raises(BadArgument, match=text):
        resolve_loss("ask", name, settings, None)


@pytest.mark.parametrize(
    ("loss", "targets", "text"),
    [
        (
            "cross_entropy",
            torch.tensor([0, 1, 2, 3, 0, 0]),
            "classes range from 0 to 3, but the model has",
        ),
        ("cross_entropy", torch.tensor([0, 1, -1, 1, 0, 0]), "classes range from -1 to 1"),
        (CrossEntropy(weight=(1, 2)), LABELS, "there are 2 class weights, but the model has 3 outputs"),
        ("binary_cross_entropy", torch.zeros(6, 2), r"shape is \(6, 2\)"),
        (lambda y, t: (y - t).square().mean(), COUNTS, r"(?s)of shape \(\) .*not one value.*fedveil.BatchLoss"),
        (lambda y, t: (y - t).abs() @ t.T, COUNTS, r"a tensor of shape \(6, 6\) for outputs of shape \(6, 3\)"),
        (lambda y, t: 1.0, COUNTS, "returned a float"),
        (BatchLoss(lambda y, t: (y - t).abs().sum(1)), COUNTS, r"shape \(6,\), not one number for the batch"),
        (lambda y, t: t.sum(1), COUNTS, "it does not depend on the outputs"),
    ],
)
def test_targets_and_functions_that_do_not_fit_are_refused(loss, targets, text):
    model = built(lambda: mlp(5, 3, layers=1, hidden=8))
    with pytest.raises(BadArgument, match=text):
        veiled_round(model, batch((5,), 3)[0], targets, loss=loss)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: CrossEntropy(label_smoothing=1.0), "label_smoothing must be at least 0 and below 1"),
        (lambda: CrossEntropy(weight=(1.0, -1.0)), "class weights must be finite and nonnegative"),
        (lambda: find_loss(3), "expected a loss, got int"),
        (lambda: find_loss("focal"), "(?s)unknown loss 'focal'.*Fix: use one of .squared_error"),
        (lambda: find_loss(nn.MSELoss), r"(?s)MSELoss is a class.*Fix: pass an instance: MSELoss\(\)"),
        (lambda: Huber(0.0), "delta must be positive and finite"),
    ],
)
def test_losses_that_make_no_sense_are_refused(make, text):
    with pytest.raises(BadArgument, match=text):
        make()


def test_a_users_function_gets_dense_targets_of_a_convolution_as_they_are():
    """Classes on axis 1 of square maps: moved targets would have the same shape, and give another gradient."""
    model = built(lambda: nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1)))
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(5, channels, 4, 4, generator=generator).double() for channels in (2, 4))

    def loss(outputs, asked):
        return (outputs - asked).square().flatten(1).sum(1) + (outputs[:, 0] * asked[:, 1]).flatten(1).sum(1)

    found = veiled_round(model, inputs, targets, loss=loss, additive=1e3)
    truth = plain(model, inputs, targets, lambda y, t: loss(y, t).mean())[0]
    assert worst(found.gradients, truth) < FLOAT64


def joined(outputs):
    """Outputs of two positions side by side, or one output that is squeezed."""
    layers = {"body": nn.Linear(3, 5), "head": nn.Linear(5, outputs)}
    return Network(lambda m, x: m.head(m.body(x.reshape(-1, 2, 3)).tanh()).squeeze(-1).flatten(1), **layers)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("samples", [2, 5])
def test_a_users_function_gets_outputs_in_the_models_shape(outputs, samples):
    """With as many samples as positions, values of another shape would broadcast without an error."""
    model, classes = built(lambda: joined(outputs)), 2 * outputs
    inputs, targets = batch((6,), classes, samples=samples)
    soft = targets.softmax(1)
    for loss, truth in [
        (lambda y, t: (y - t).square().sum(1), lambda y, t: (y - t).square().sum(1).mean()),
        (lambda y, t: F.cross_entropy(y, t, reduction="none"), F.cross_entropy),
        (nn.CrossEntropyLoss(), F.cross_entropy),
    ]:
        found = veiled_round(model, inputs, soft, loss=loss, additive=1e3)
        assert worst(found.gradients, plain(model, inputs, soft, truth)[0]) < FLOAT64
