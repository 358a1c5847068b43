"""Losses of torch that take the mean themselves: the fix that is printed can be pasted, and means the same."""

from functools import partial

import pytest
import torch
from tests.oracle import built
from torch import nn
from torch.nn import functional as F

import fedveil
from fedveil.errors import BadArgument
from fedveil.models import mlp

CLASSES = torch.tensor([0, 1, 2, 2, 1, 0])
WEIGHT = torch.tensor([0.25, 1.5, 3.0])
NUMBERS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).double()
YES = (NUMBERS > 0).double()


def inputs():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()


def printed_fix(loss):
    """The code after the last `loss=` of the message, and the message."""
    with pytest.raises(BadArgument) as caught:
        fedveil.Federation(built(lambda: mlp(4, 3)), [(inputs(), CLASSES)], "plain", loss=loss)
    assert "\n" not in caught.value.fix
    return caught.value.fix.rpartition("loss=")[2], str(caught.value)


def trained_gradient(loss, targets, defence="plain"):
    """The gradient that one round of a federation gives to the optimiser."""
    model = built(lambda: mlp(4, 3, hidden=8))
    federation = fedveil.Federation(model, [(inputs(), targets)], defence, lambda p: torch.optim.SGD(p, 0.1), loss=loss)
    federation.step()
    return [parameter.grad for parameter in model.parameters()]


def torch_gradient(loss, targets):
    model = built(lambda: mlp(4, 3, hidden=8))
    loss(model(inputs()), targets).backward()
    return [parameter.grad for parameter in model.parameters()]


def per_sample(function, **settings):
    """The mean over samples of torch's own values, which the fix should give."""
    return lambda y, t: function(y, t, **settings, reduction="none").reshape(len(y), -1).mean(1).mean()


W, P = WEIGHT.double(), torch.tensor([2.0, 0.5, 1.0])
CASES = {
    "weights": (nn.CrossEntropyLoss(weight=WEIGHT), CLASSES, per_sample(F.cross_entropy, weight=W)),
    "smoothing and weights": (
        nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
        CLASSES,
        per_sample(F.cross_entropy, weight=W, label_smoothing=0.1),
    ),
    "a class that is left out": (
        nn.CrossEntropyLoss(ignore_index=2),
        CLASSES,
        per_sample(F.cross_entropy, ignore_index=2),
    ),
    "plain": (nn.CrossEntropyLoss(), CLASSES, F.cross_entropy),
    "positive weights": (
        nn.BCEWithLogitsLoss(pos_weight=P),
        YES,
        lambda y, t: F.binary_cross_entropy_with_logits(y, t, pos_weight=P.double()),
    ),
    "two weights": (
        nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=P),
        YES,
        lambda y, t: F.binary_cross_entropy_with_logits(y, t, weight=W, pos_weight=P.double()),
    ),
    "squares": (nn.MSELoss(), NUMBERS, F.mse_loss),
    "a sum": (nn.MSELoss(reduction="sum"), NUMBERS, lambda y, t: F.mse_loss(y, t, reduction="sum") / len(y)),
    "a delta": (nn.HuberLoss(delta=0.5), NUMBERS, lambda y, t: F.huber_loss(y, t, delta=0.5)),
    "the function": (F.cross_entropy, CLASSES, F.cross_entropy),
    "the function with weights": (
        partial(F.cross_entropy, weight=WEIGHT),
        CLASSES,
        per_sample(F.cross_entropy, weight=W),
    ),
    "the function with positive weights": (
        partial(F.binary_cross_entropy_with_logits, pos_weight=P),
        YES,
        lambda y, t: F.binary_cross_entropy_with_logits(y, t, pos_weight=P.double()),
    ),
    "the function of numbers": (F.smooth_l1_loss, NUMBERS, F.smooth_l1_loss),
}


@pytest.mark.parametrize("defence", ["plain", "veil"])
@pytest.mark.parametrize("name", CASES)
def test_the_printed_fix_can_be_pasted_and_keeps_every_setting(name, defence):
    loss, targets, wanted = CASES[name]
    code, _ = printed_fix(loss)
    pasted = eval(code, {"torch": torch, "fedveil": fedveil})
    found = trained_gradient(pasted, targets, defence)
    for own, known in zip(found, torch_gradient(wanted, targets), strict=True):
        torch.testing.assert_close(own, known, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.25}])
def test_the_loss_of_the_library_that_is_named_beside_it_is_the_same(settings):
    with pytest.raises(BadArgument) as caught:
        trained_gradient(nn.CrossEntropyLoss(weight=WEIGHT, **settings), CLASSES)
    named = caught.value.fix.partition("loss=")[2].partition(", or loss=")[0]
    found = trained_gradient(eval(named, {"fedveil": fedveil}), CLASSES)
    wanted = torch_gradient(per_sample(F.cross_entropy, weight=W, **settings), CLASSES)
    for own, known in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, known, rtol=1e-9, atol=1e-9)


def test_a_weighted_mean_is_said_to_differ_and_can_be_kept():
    code, message = printed_fix(nn.CrossEntropyLoss(weight=WEIGHT))
    assert "takes the mean itself, over the sum of the weights" in message
    assert "their mean is over samples" in message
    assert "loss=fedveil.BatchLoss(your_loss)" in message
    assert "[0.25, 1.5, 3.0]" in code
    found = trained_gradient(fedveil.BatchLoss(nn.CrossEntropyLoss(weight=W)), CLASSES)
    for own, known in zip(found, torch_gradient(nn.CrossEntropyLoss(weight=W), CLASSES), strict=True):
        torch.testing.assert_close(own, known, rtol=1e-9, atol=1e-9)


def test_many_weights_are_named_and_not_printed():
    code, _ = printed_fix(nn.CrossEntropyLoss(weight=torch.ones(1000)))
    assert "weight=your_loss.weight.to(outputs)" in code
    assert len(code) < 250
