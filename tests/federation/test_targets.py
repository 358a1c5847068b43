"""Losses and targets that do not fit are refused before a round: whose, why, and which loss would fit."""

import pandas
import pytest
import torch
from tests.asks import OUTPUTS, ask_of
from tests.small import Records
from torch import Tensor, nn

from fedveil import Federation
from fedveil.errors import BadArgument
from fedveil.models import mlp

SIZE = 12
DRAW = torch.Generator().manual_seed(0)
NUMBERS = torch.randn(SIZE, generator=DRAW)
CLASSES = torch.arange(SIZE) % 3
YES = (torch.arange(SIZE) % 2).float()
ROWS = torch.rand(SIZE, 3, generator=DRAW)
X, ZEROS = torch.zeros(9, 6), torch.zeros(9, 4)


def inputs():
    return torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(1))


def make(targets, outputs, loss=None, good=None):
    """Two clients; only the second has these targets, if there are good ones."""
    first = targets if good is None else good
    return Federation(mlp(4, outputs, hidden=8), [(inputs(), first), (inputs(), targets)], "plain", loss=loss)


REFUSED = {
    "quantities, one output": (NUMBERS, 1, "cross_entropy", "the model has one output", "loss='squared_error'"),
    "quantities in a column": (NUMBERS[:, None], 1, "cross_entropy", "has one output", "loss='squared_error'"),
    "classes, one output": (CLASSES, 1, "cross_entropy", "one output", "a model with one output per class"),
    "quantities, hinge": (NUMBERS, 1, "hinge", "hinge compares classes", "loss='squared_error'"),
    "quantities for classes": (NUMBERS, 3, "cross_entropy", "expects class indices", "loss='squared_error'"),
    "floating classes": (CLASSES.double(), 3, "cross_entropy", "torch.float64", r"use targets.long\(\)"),
    "floating column of classes": (CLASSES[:, None].float(), 3, "hinge", "expects class", r"use targets.long\(\)"),
    "no distribution": (ROWS, 3, "cross_entropy", "expects probabilities", "rows that sum to 1"),
    "negative rows": (torch.randn(SIZE, 3, generator=DRAW), 3, "cross_entropy", "negative", "loss='squared_error'"),
    "several of many": ((ROWS > 0.3).float(), 3, "cross_entropy", "expects prob", "loss='binary_cross_entropy' for se"),
    "rows for hinge": (ROWS / ROWS.sum(1, keepdim=True), 3, "hinge", "one-hot rows", "loss='cross_entropy'"),
    "quantities, yes or no": (NUMBERS, 1, "binary_cross_entropy", "targets from 0 to 1", "loss='squared_error'"),
    "classes, yes or no": (CLASSES, 1, "binary_cross_entropy", "targets from 0 to 1", "loss='cross_entropy'"),
    "counts as integers": (CLASSES, 1, "poisson", "torch.int64 targets are class indices", r"targets.float\(\)"),
    "integers, one output": (
        CLASSES,
        1,
        "squared_error",
        "torch.int64 targets are class indices",
        r"targets.float\(\)",
    ),
    "rows of integers": (CLASSES[:, None].expand(-1, 3), 3, "huber", "class indices", r"targets.float\(\)"),
    "negative counts": (NUMBERS, 1, "poisson", "expects counts", "counts of at least 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_targets_from_which_a_loss_cannot_learn_are_refused_before_a_round(name):
    targets, outputs, loss, text, fix = REFUSED[name]
    with pytest.raises(BadArgument, match=rf"(?s)^client 0: targets: .*{text}.*\n  Fix: .*{fix}") as caught:
        make(targets, outputs, loss)
    assert not any(f"{value:.3f}" in str(caught.value) for value in targets.flatten().tolist() if value % 1)


def test_the_client_whose_targets_do_not_fit_is_named_also_if_they_are_read_batch_by_batch():
    with pytest.raises(BadArgument, match=r"^client 1: targets: .*targets from 0 to 1"):
        make(NUMBERS, 1, "binary_cross_entropy", YES)
    with pytest.raises(BadArgument, match="client 0: targets: cross_entropy compares classes"):
        Federation(mlp(4, 1), [Records(inputs(), NUMBERS)], "plain", loss="cross_entropy").step()


@pytest.mark.parametrize("outputs", [1, 3])
def test_floating_zeros_and_ones_need_a_loss_by_name(outputs):
    targets = YES if outputs == 1 else nn.functional.one_hot(CLASSES, 3).float()
    text = r"(?s)0 or 1: are they classes or quantities\?\n.*loss='binary_cross_entropy'.*loss='squared_error'"
    with pytest.raises(BadArgument, match=text):
        make(targets, outputs)
    for loss in ("binary_cross_entropy", "squared_error"):
        assert make(targets, outputs, loss).fit(1).records


@pytest.mark.parametrize(
    ("outputs", "targets", "loss"),
    [
        (4, torch.randn(20, 4), "squared_error"),
        (4, torch.arange(20) % 4, "cross_entropy"),
        (1, torch.arange(20) % 2, "binary_cross_entropy"),
        (1, torch.randn(20), "squared_error"),
    ],
)
def test_the_default_loss_suits_the_targets(outputs, targets, loss):
    federation = Federation(mlp(6, outputs), [(torch.randn(20, 6), targets)], "veil")
    assert federation.loss.name == loss
    federation.fit(rounds=1)


@pytest.mark.parametrize(
    ("model", "client", "options", "text"),
    [
        (
            mlp(6, 4),
            (torch.zeros(9, 5), ZEROS),
            {},
            r"the clients' records: .* does not accept these inputs .*shape \(5,\)",
        ),
        (mlp(6, 4), (torch.zeros(9, 6).byte(), ZEROS), {}, r"torch.uint8 .*\n.*for bytes, call \.float\(\)"),
        (mlp(6, 4), (X, torch.arange(9) % 4 + 1), {}, "client 0: targets: classes range from 1 to 4.*\n.*from 0 to 3"),
        (mlp(6, 4), (X, torch.zeros(9, 1).long()), {}, r"(?s)got shape \(9, 1\).*Fix: use targets\[:, 0\]"),
        (mlp(6, 4), (X, torch.zeros(9)), {}, r"(?s)shape is \(9,\).*targets.long.. for classes"),
        (
            mlp(6, 4),
            (X, torch.zeros(8, 4)),
            {},
            "inputs has 9 records, but there are 8 targets.*\n.*one target per record",
        ),
        (mlp, (X, ZEROS), {}, r"model must be a torch.nn.Module"),
        (mlp(6, 4).requires_grad_(False), (X, ZEROS), {}, "no parameter of the model requires a gradient"),
        (mlp(6, 4), (X, ZEROS), {"loss": nn.CrossEntropyLoss}, "CrossEntropyLoss is a class"),
        (mlp(6, 4), (X, ZEROS), {"defence": None}, "defence must be .*, got None"),
        (mlp(6, 1), (X, torch.arange(9)), {}, r"(?s)classes or quantities\?\n.*binary_cross_entropy.*floating"),
    ],
)
def test_models_records_and_losses_that_do_not_fit_are_refused_at_once(model, client, options, text):
    with pytest.raises(BadArgument, match=text):
        Federation(model, [client], **options)


@pytest.mark.parametrize("kind", ["veil, decoys", "ppdl", "spn"])
def test_a_client_elsewhere_checks_its_own_targets_against_the_loss_that_it_is_asked_for(kind):
    message, client = ask_of(kind)
    bad = torch.rand(len(client.records[1]), OUTPUTS, generator=torch.Generator().manual_seed(2))
    client.records = client.records[0], bad
    with pytest.raises(BadArgument, match=r"^this client: targets: cross_entropy expects probabilities") as caught:
        client.reply(message)
    assert not any(f"{value:.3f}" in str(caught.value) for value in bad.flatten().tolist())


@pytest.mark.parametrize("form", [Tensor.numpy, lambda own: pandas.Series(own.numpy(), dtype="boolean"), Records])
def test_booleans_are_the_classes_0_and_1(form):
    x = torch.randn(30, 3)
    histories = []
    for targets in (x[:, 0] > 0, (x[:, 0] > 0).long()):
        make = (lambda y: Records(x, y)) if form is Records else lambda y: (x, form(y))
        torch.manual_seed(0)
        run = Federation(mlp(3, 2, hidden=4), [make(targets)], "plain")
        histories.append(run.fit(rounds=2, test=make(targets)).last)
        assert run.loss.name == "cross_entropy"
    assert histories[0].metrics == histories[1].metrics
    assert {"accuracy", "f1", "auc"} <= set(histories[0].metrics)
