"""A user's loss is evaluated as it is trained: in the model's dtype, and tried before the first round."""

import numpy as np
import pytest
import torch
from tests.small import Records
from torch import nn
from torch.nn import functional as F

from fedveil import BatchLoss, Federation
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import predict
from fedveil.models import mlp

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(40) % 3
YES = (X[:, :1] > 0).float()
WEIGHT = torch.tensor([1.0, 2.0, 3.0])
FACTOR = torch.tensor([3.0])


def sigmoid():
    return nn.Sequential(mlp(4, 1, hidden=8), nn.Sigmoid())


LOSSES = {
    "weights in a batch": (lambda: mlp(4, 3, hidden=8), BatchLoss(nn.CrossEntropyLoss(weight=WEIGHT)), CLASSES),
    "weights": (lambda: mlp(4, 3, hidden=8), nn.CrossEntropyLoss(weight=WEIGHT, reduction="none"), CLASSES),
    "probabilities": (sigmoid, nn.BCELoss(reduction="none"), YES),
    "double targets": (sigmoid, nn.BCELoss(reduction="none"), YES.double()),
    "arrays": (sigmoid, nn.BCELoss(reduction="none"), YES.double().numpy()),
    "logits": (lambda: mlp(4, 1, hidden=8), nn.BCEWithLogitsLoss(pos_weight=FACTOR, reduction="none"), YES),
    "several logits": (lambda: mlp(4, 2, hidden=8), nn.BCEWithLogitsLoss(reduction="none"), (X[:, :2] > 0).float()),
}


@pytest.mark.parametrize("form", [lambda *pair: pair, Records])
@pytest.mark.parametrize("defence", ["plain", "veil"])
@pytest.mark.parametrize("name", LOSSES)
def test_torchs_losses_are_trained_and_evaluated(name, defence, form):
    make, loss, targets = LOSSES[name]
    test = form(X[:10], targets[:10])
    federation = Federation(make(), [(X, targets)], defence, loss=loss)
    found = federation.fit(1, test=test).last["loss"]
    outputs = predict(federation.model, X[:10])
    wanted = torch.as_tensor(targets[:10])
    wanted = wanted.float() if wanted.is_floating_point() else wanted
    values = getattr(loss, "function", loss)(outputs, wanted).detach()
    assert found == float(values if not values.dim() else values.reshape(10, -1).sum(1).double().mean())


@pytest.mark.parametrize("wrap", [lambda loss: loss, BatchLoss])
def test_evaluation_gives_a_function_the_dtypes_of_training(wrap):
    seen = set()

    def own(outputs, targets):
        seen.add((outputs.dtype, targets.dtype))
        values = (outputs - targets).square().sum(1)
        return values.mean() if wrap is BatchLoss else values

    quantities = np.asarray(X[:, :1].double())
    for dtype in (torch.float64, torch.float32):
        seen.clear()
        model = mlp(4, 1, hidden=8).to(dtype)
        Federation(model, [(X, quantities)], "plain", loss=wrap(own)).fit(1, test=(X, quantities))
        assert seen == {(dtype, dtype)}


def broadcast(outputs, targets):
    return (outputs - targets).square()  # (n, 1) and (n,): every pair


def test_values_in_the_outputs_shape_are_summed_but_not_those_of_every_pair():
    states = []
    for loss in (
        nn.BCEWithLogitsLoss(reduction="none"),
        lambda outputs, targets: F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").sum(1),
    ):
        torch.manual_seed(0)
        federation = Federation(mlp(4, 2, hidden=8), [(X, (X[:, :2] > 0).float())], "plain", loss=loss)
        federation.fit(2)
        states.append(federation.model.state_dict())
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    flat = nn.Sequential(mlp(4, 1, hidden=8), nn.Flatten(0))
    for model, loss in ((mlp(4, 1, hidden=8), broadcast), (flat, lambda *pair: broadcast(*pair).mean())):
        federation = Federation(model, [(X, X[:, 0])], "plain", loss=loss)
        with pytest.raises(BadArgument, match=r"(?s)it returned shape .* not one value per sample.*sum over other"):
            federation.fit(1)
        assert federation.round == 0


def test_values_at_positions_are_summed():
    pictures, labels = X.reshape(40, 1, 2, 2), (X.reshape(40, 2, 2) > 0).long()
    federation = Federation(
        nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)),
        [(pictures, labels)],
        "veil",
        loss=nn.CrossEntropyLoss(reduction="none"),
    )
    found = federation.fit(1, test=(pictures, labels)).last["loss"]
    truth = F.cross_entropy(predict(federation.model, pictures), labels, reduction="none")
    assert found == float(truth.flatten(1).sum(1).double().mean())


def late(message):
    """Fails on the whole test set, not on the first two of its records or on a client's batch."""

    def own(outputs, targets):
        if int(targets.max()) > 2:
            raise RuntimeError(message)
        return F.cross_entropy(outputs, targets, reduction="none")

    return own


@pytest.mark.parametrize(
    ("loss", "form"),
    [
        (late("class 3"), lambda *pair: pair),
        (BatchLoss(lambda outputs, targets: late("class 3")(outputs, targets).mean()), lambda *pair: pair),
        (BatchLoss(lambda outputs, targets: late("class 3")(outputs, targets).mean()), Records),
    ],
)
def test_what_evaluation_would_refuse_is_refused_before_the_first_round(loss, form):
    federation = Federation(mlp(4, 3, hidden=8), [(X, CLASSES)], "plain", loss=loss)
    with pytest.raises(BadArgument, match=r"(?s)^test data: targets: .*class 3.*Fix: use targets in the form of"):
        federation.fit(1, test=form(X, torch.arange(40) % 4))
    assert federation.round == 0


def test_a_loss_that_compares_samples_may_need_more_than_two():
    def ranked(outputs, targets):
        if len(outputs) < 5:
            raise RuntimeError("too few samples")
        return torch.pdist(outputs).mean()

    federation = Federation(mlp(4, 3, hidden=8), [(X, CLASSES)], "plain", loss=BatchLoss(ranked), batch_size=20)
    assert "loss" in federation.fit(1, test=(X, CLASSES)).last
    other = Federation(mlp(4, 3, hidden=8), [(X, CLASSES)], "plain", loss=BatchLoss(ranked), batch_size=20)
    with pytest.raises(BadArgument, match="too few samples"):
        other.fit(1, test=(X[:4], CLASSES[:4]))
    assert other.round == 0
