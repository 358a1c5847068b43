"""Records that do not fit model or loss are refused before the first round; users' losses are evaluated as trained."""

import numpy as np
import pytest
import torch
from tests.oracle import Network, built
from tests.small import Records
from torch import nn
from torch.nn import functional as F

from fedveil import BatchLoss, Federation
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import predict
from fedveil.models import mlp


def records(size=12, width=4, classes=3):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(size, width, generator=draw), torch.arange(size) % classes


def check_refusal(federation, test, *texts):
    """Such test data are refused without a round or a change of the model."""
    before = [parameter.clone() for parameter in federation.model.parameters()]
    with pytest.raises(BadArgument, match=r"^test data") as caught:
        federation.fit(2, test=test)
    assert all(text in str(caught.value) for text in texts), str(caught.value)
    assert federation.round == 0
    assert all(torch.equal(a, b) for a, b in zip(before, federation.model.parameters(), strict=True))


def own(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


INPUTS, TARGETS = records()
WIDE = records(width=5)


@pytest.mark.parametrize(
    ("loss", "test", "texts"),
    [
        (None, WIDE, ["inputs: torch.float32 of shape (5,)", "the clients have inputs: torch.float32 of shape (4,)"]),
        (None, Records(*WIDE), ["inputs: torch.float32 of shape (5,)", "the clients have inputs: torch.float32 of"]),
        (None, (INPUTS.long(), TARGETS), ["torch.int64 of shape (4,)", "torch.float32 of shape (4,)"]),
        (None, (INPUTS, TARGETS.float()), ["test data: targets", "targets.long()"]),
        (
            own,
            (INPUTS, TARGETS.float()),
            ["test data: targets", "own does not accept these targets (torch.float32 of shape ()"],
        ),
        (None, (INPUTS[:0], TARGETS[:0]), ["there are no records"]),
        (None, (INPUTS, TARGETS[:9]), ["inputs has 12 records, but there are 9 targets"]),
        (None, (INPUTS / 0, TARGETS), ["test data, record 0: found NaN or infinity in inputs"]),
        (None, Records(INPUTS / 0, TARGETS), ["test data, record 0: found NaN or infinity in inputs"]),
        ("squared_error", (INPUTS, INPUTS[:, :3] / 0), ["test data, record 0: found NaN or infinity in targets"]),
        (None, INPUTS, ["got a Tensor"]),
        *[(loss, records(classes=4), ["the model has outputs 0 to 2"]) for loss in (None, "squared_error", "hinge")],
    ],
)
def test_test_data_that_do_not_fit_are_refused_before_the_first_round(loss, test, texts):
    check_refusal(Federation(mlp(4, 3, hidden=8), [records()], "plain", loss=loss), test, *texts)


def test_another_number_or_kind_of_inputs_is_named():
    ids, mask = torch.arange(24).reshape(12, 2) % 10, torch.ones(12, 2)
    run = lambda own, ids, mask: own.head((own.embed(ids) * mask[:, :, None]).mean(1))  # noqa: E731
    model = Network(run, embed=nn.Embedding(10, 8), head=nn.Linear(8, 3))
    federation = Federation(model, [((ids, mask), TARGETS)], "plain")
    check_refusal(federation, (ids, TARGETS), "inputs: torch.int64 of shape (2,)", "inputs[1]: torch.float32 of")
    check_refusal(federation, ((ids.float(), mask), TARGETS), "inputs[0]: torch.float32", "inputs[0]: torch.int64")


def pooled():
    """A model whose first norm takes a single record, and whose second does not."""
    body = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*body, nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def flat():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def parts(shape, sizes):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, *shape, generator=generator), torch.randn(n, 2, generator=generator)) for n in sizes]


@pytest.mark.parametrize("defence", ["plain", "veil"])
@pytest.mark.parametrize(("build", "shape"), [(flat, (6,)), (pooled, (3, 6, 6))])
def test_a_client_with_one_record_is_refused_with_its_number(build, shape, defence):
    data = parts(shape, (5, 4, 1, 3))
    with pytest.raises(
        BadArgument, match=r"(?s)client 2 has a single record, .* needs at least two.*Fix: merge this client"
    ):
        Federation(built(build), data, defence)
    Federation(built(build).eval(), data, defence).fit(1)


@pytest.mark.parametrize("whole_shard", [False, True])
def test_batches_of_one_record_are_refused_too(whole_shard):
    with pytest.raises(BadArgument, match=r"(?s)batch_size=1, .* normalises over the batch.*Fix: set batch_size"):
        Federation(built(flat), parts((6,), (5, 4)), "plain", batch_size=1, whole_shard=whole_shard)
    with pytest.raises(BadArgument, match="client 0 has a single record"):  # before the analysis
        Federation(built(flat), parts((6,), (1,)), "veil", whole_shard=whole_shard)


@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_one_image_has_many_values_and_trains(defence):
    model = built(pooled)
    model[5].eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    run = Federation(model, parts((3, 6, 6), (5, 1)), defence)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    run.fit(rounds=2)


X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(40) % 3
YES = (X[:, :1] > 0).float()
WEIGHT, FACTOR = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0])


def net(outputs=3, *more):
    return nn.Sequential(*mlp(4, outputs, hidden=8), *more)


LOSSES = {  # outputs and last layers of the model, loss, targets
    "weights in a batch": ([3], BatchLoss(nn.CrossEntropyLoss(weight=WEIGHT)), CLASSES),
    "weights": ([3], nn.CrossEntropyLoss(weight=WEIGHT, reduction="none"), CLASSES),
    "probabilities": ([1, nn.Sigmoid()], nn.BCELoss(reduction="none"), YES),
    "arrays": ([1, nn.Sigmoid()], nn.BCELoss(reduction="none"), YES.double().numpy()),
    "logits": ([1], nn.BCEWithLogitsLoss(pos_weight=FACTOR, reduction="none"), YES),
    "several logits": ([2], nn.BCEWithLogitsLoss(reduction="none"), (X[:, :2] > 0).float()),
}


@pytest.mark.parametrize("form", [lambda *pair: pair, Records])
@pytest.mark.parametrize("defence", ["plain", "veil"])
@pytest.mark.parametrize("name", LOSSES)
def test_torchs_losses_are_trained_and_evaluated(name, defence, form):
    layers, loss, targets = LOSSES[name]
    test = form(X[:10], targets[:10])
    federation = Federation(net(*layers), [(X, targets)], defence, loss=loss)
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


def test_values_in_the_outputs_shape_are_summed_but_not_those_of_every_pair():
    states = []
    single = nn.BCEWithLogitsLoss(reduction="none")
    for loss in (single, lambda outputs, targets: single(outputs, targets).sum(1)):
        federation = Federation(built(lambda: net(2)), [(X.double(), (X[:, :2] > 0).double())], "plain", loss=loss)
        federation.fit(2)
        states.append(federation.model.state_dict())
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    every = lambda outputs, targets: (outputs - targets).square()  # noqa: E731  (of (n, 1) and (n,): every pair)
    for model, loss in ((net(1), every), (net(1, nn.Flatten(0)), lambda *pair: every(*pair).mean())):
        federation = Federation(model, [(X, X[:, 0])], "plain", loss=loss)
        with pytest.raises(BadArgument, match=r"(?s)it returned a tensor .* not one value per .*sum over the other"):
            federation.fit(1)
        assert federation.round == 0


def test_values_at_positions_are_summed():
    pictures, labels = X.reshape(40, 1, 2, 2), (X.reshape(40, 2, 2) > 0).long()
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    federation = Federation(model, [(pictures, labels)], "veil", loss=nn.CrossEntropyLoss(reduction="none"))
    found = federation.fit(1, test=(pictures, labels)).last["loss"]
    truth = F.cross_entropy(predict(federation.model, pictures), labels, reduction="none")
    assert found == float(truth.flatten(1).sum(1).double().mean())


def late(outputs, targets):
    """Fails on the whole test set, not on the first two of its records or on a client's batch."""
    if int(targets.max()) > 2:
        raise RuntimeError("class 3")
    return F.cross_entropy(outputs, targets, reduction="none")


def late_mean(outputs, targets):
    return late(outputs, targets).mean()


@pytest.mark.parametrize(
    ("loss", "form"),
    [(late, lambda *pair: pair), (BatchLoss(late_mean), lambda *pair: pair), (BatchLoss(late_mean), Records)],
)
def test_what_evaluation_would_refuse_is_refused_before_the_first_round(loss, form):
    federation = Federation(mlp(4, 3, hidden=8), [(X, CLASSES)], "plain", loss=loss)
    with pytest.raises(BadArgument, match=r"(?s)^test data: targets: .*class 3.*Fix: use targets of the same form as"):
        federation.fit(1, test=form(X, torch.arange(40) % 4))
    assert federation.round == 0


def test_a_loss_that_compares_samples_may_need_more_than_two():
    def ranked(outputs, targets):
        if len(outputs) < 5:
            raise RuntimeError("too few samples")
        return torch.pdist(outputs).mean()

    federation = Federation(net(), [(X, CLASSES)], "plain", loss=BatchLoss(ranked), batch_size=20)
    with pytest.raises(BadArgument, match="too few samples"):
        federation.fit(1, test=(X[:4], CLASSES[:4]))
    assert federation.round == 0
    assert "loss" in federation.fit(1, test=(X, CLASSES)).last
