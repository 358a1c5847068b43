"""Losses and targets that do not go together are refused before a round: by whom, why, and which loss would do."""

import pytest
import torch
from tests.asks import INPUTS, OUTPUTS, RECORDS, ask_of
from tests.engines import Loopback, member
from tests.oracle import built
from torch import nn
from torch.utils.data import Dataset

from fedveil import Federation
from fedveil.errors import BadArgument
from fedveil.federation.remote import ClientState, reply
from fedveil.federation.rounds import RemoteServer
from fedveil.models import mlp

SIZE = 12
DRAW = torch.Generator().manual_seed(0)
NUMBERS = torch.randn(SIZE, generator=DRAW)
CLASSES = torch.arange(SIZE) % 3
YES = (torch.arange(SIZE) % 2).float()
ROWS = torch.rand(SIZE, 3, generator=DRAW)


def inputs():
    return torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(1))


def federation(targets, outputs, loss=None, good=None):
    """Two clients; only the second has these targets, if there are good ones."""
    first = targets if good is None else good
    return Federation(mlp(4, outputs, hidden=8), [(inputs(), first), (inputs(), targets)], "plain", loss=loss)


REFUSED = {
    "quantities, one output": (NUMBERS, 1, "cross_entropy", "the model has one output", "loss='squared_error'"),
    "quantities in a column": (NUMBERS[:, None], 1, "cross_entropy", "has one output", "loss='squared_error'"),
    "yes or no, one output": (YES, 1, "cross_entropy", "one output", "loss='binary_cross_entropy' for 0 and 1"),
    "classes, one output": (CLASSES, 1, "cross_entropy", "one output", "a model with one output per class"),
    "quantities, hinge": (NUMBERS, 1, "hinge", "hinge compares classes", "loss='squared_error'"),
    "quantities for classes": (NUMBERS, 3, "cross_entropy", "takes class indices", "loss='squared_error'"),
    "floating classes": (CLASSES.double(), 3, "cross_entropy", "torch.float64", r"use targets.long\(\)"),
    "floating column of classes": (CLASSES[:, None].float(), 3, "hinge", "takes class", r"targets\[:, 0\].long\(\)"),
    "no distribution": (ROWS, 3, "cross_entropy", "takes probabilities", "rows with the sum 1"),
    "negative rows": (torch.randn(SIZE, 3, generator=DRAW), 3, "cross_entropy", "negative", "loss='squared_error'"),
    "several of many": ((ROWS > 0.3).float(), 3, "cross_entropy", "takes prob", "loss='binary_cross_entropy' for sev"),
    "rows for hinge": (ROWS / ROWS.sum(1, keepdim=True), 3, "hinge", "one-hot rows", "loss='cross_entropy'"),
    "quantities, yes or no": (NUMBERS, 1, "binary_cross_entropy", "targets from 0 to 1", "loss='squared_error'"),
    "classes, yes or no": (CLASSES, 1, "binary_cross_entropy", "targets from 0 to 1", "loss='cross_entropy'"),
    "counts as integers": (CLASSES, 1, "poisson", "means class indices", r"targets.float\(\)"),
    "integers, one output": (CLASSES, 1, "squared_error", "means class indices", r"targets.float\(\)"),
    "only zeros, one output": (CLASSES * 0, 1, "squared_error", "means class indices", r"targets.float\(\)"),
    "rows of integers": (CLASSES[:, None].expand(-1, 3), 3, "huber", "class indices", r"targets.float\(\)"),
    "negative counts": (NUMBERS, 1, "poisson", "takes counts", "counts from 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_targets_from_which_a_loss_cannot_learn_are_refused_before_a_round(name):
    targets, outputs, loss, text, fix = REFUSED[name]
    with pytest.raises(BadArgument, match=rf"(?s)^client 0: targets: .*{text}.*\n  Fix: .*{fix}") as caught:
        federation(targets, outputs, loss)
    assert not any(f"{value:.3f}" in str(caught.value) for value in targets.flatten().tolist() if value % 1)


@pytest.mark.parametrize(
    ("good", "bad", "outputs", "loss", "text"),
    [
        (YES, NUMBERS, 1, "binary_cross_entropy", "targets from 0 to 1"),
        (ROWS / ROWS.sum(1, keepdim=True), ROWS, 3, "cross_entropy", "takes probabilities"),
        (NUMBERS.abs(), NUMBERS, 1, "poisson", "takes counts"),
    ],
)
def test_the_client_whose_targets_do_not_fit_is_named(good, bad, outputs, loss, text):
    with pytest.raises(BadArgument, match=f"^client 1: targets: .*{text}"):
        federation(bad, outputs, loss, good)


class Read(Dataset):
    def __init__(self, targets):
        self.inputs, self.targets = inputs(), targets

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def test_records_that_are_read_batch_by_batch_are_checked_too():
    with pytest.raises(BadArgument, match="client 0: targets: cross_entropy compares classes"):
        Federation(mlp(4, 1), [Read(NUMBERS)], "plain", loss="cross_entropy").step()


@pytest.mark.parametrize("outputs", [1, 3])
def test_floating_zeros_and_ones_need_a_loss_by_name(outputs):
    targets = YES if outputs == 1 else nn.functional.one_hot(CLASSES, 3).float()
    text = r"(?s)all of them 0 or 1: classes or quantities\?\n.*loss='binary_cross_entropy'.*loss='squared_error'"
    with pytest.raises(BadArgument, match=text):
        federation(targets, outputs)
    for loss in ("binary_cross_entropy", "squared_error"):
        assert federation(targets, outputs, loss).fit(1).records


def client(model, targets):
    return lambda message: reply(message, ClientState(), model, (inputs_of(len(targets)), targets), client=0)


def inputs_of(size):
    return torch.randn(size, INPUTS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["veil, decoys", "ppdl", "spn"])
def test_a_client_elsewhere_checks_its_own_targets_against_the_loss_that_it_is_asked_for(kind):
    message, honest = ask_of(kind)
    bad = torch.rand(RECORDS, OUTPUTS, generator=torch.Generator().manual_seed(2))
    with pytest.raises(BadArgument, match=r"^this client: targets: cross_entropy takes probabilities") as caught:
        client(honest.model, bad)(message)
    assert not any(f"{value:.3f}" in str(caught.value) for value in bad.flatten().tolist())


def test_a_server_elsewhere_is_told_why_a_client_does_not_train():
    def net():
        return built(lambda: mlp(INPUTS, 1)).float()

    sites = {"site": member(net, (inputs_of(SIZE), NUMBERS), 0)}
    server = RemoteServer(
        Loopback(sites), net(), inputs_of(2), "plain", loss="cross_entropy", timeout=60.0, pause=0.0, min_answers=1
    )
    with pytest.raises(Exception, match="this client: targets: cross_entropy compares classes"):
        server.fit(rounds=1)
