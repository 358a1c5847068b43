"""What new users get wrong in Python: each mistake is an error or a warning that says how to mend it."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from fedveil import Federation, errors
from fedveil.defences import Veil
from fedveil.models import mlp

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
CLIENTS = [(X[:20], Y[:20]), (X[20:], Y[20:])]


def federation(clients=CLIENTS, defence="plain", **options):
    return Federation(options.pop("model", None) or mlp(4, 2, hidden=8), clients, defence, **options)


PAIRS = TensorDataset(X, Y)
REFUSED = {
    "a loader for all clients": (lambda: federation(DataLoader(PAIRS, 8, shuffle=True)), "is a DataLoader, not a list"),
    "a dataset for all clients": (lambda: federation(PAIRS), r"is a TensorDataset(?s:.*)\[client\] for one client"),
    "an array for all clients": (lambda: federation(X.numpy()), "clients is a ndarray, not a list of clients"),
    "clients by name": (lambda: federation(dict(enumerate(CLIENTS))), r"is a dict(?s:.*)list\(clients.values\(\)\)"),
    "a list of clients to test": (lambda: federation().fit(1, test=CLIENTS), "^test data: .*(?s:.*)torch.cat"),
    "two clients in one": (lambda: federation([CLIENTS]), "^client 0: .*records of several clients"),
    "a class for a defence": (lambda: federation(defence=Veil), r"(?s)defence is <class.*fedveil.defences.Veil\(\)"),
    "a dict of limits": (lambda: federation(limits={"hostile": 1}), r"(?s)limits is a dict.*fedveil.Limits\("),
    "a text for a seed": (lambda: federation(seed="42"), "seed must be an integer, got '42'"),
    "no seed": (lambda: federation(seed=None), "seed must be an integer, got None"),
    "a seed of NumPy": (lambda: federation(seed=np.int64(3)), "seed must be an integer, got np.int64"),
    "a word for whole_shard": (lambda: federation(whole_shard="no"), "whole_shard must be True or False, got 'no'"),
    "a number for fuse": (lambda: federation(fuse=0), "(?s)fuse must be True or False, got 0.*Fix: use fuse=True"),
    "a rate as text": (
        lambda: federation(optimizer=lambda p: torch.optim.SGD(p, lr="1e-3")),
        r"(?s)optimizer= cannot be created: .*Adam\(parameters, lr=1e-3\)",
    ),
    "a rate below 0": (
        lambda: federation(optimizer=lambda p: torch.optim.SGD(p, lr=-1.0)),
        "optimizer= cannot be created: Invalid learning rate: -1.0",
    ),
    "a schedule without its settings": (
        lambda: federation(schedule=StepLR),
        r"(?s)schedule= cannot be created: .*step_size.*T_max=20",
    ),
    "a word for rounds": (lambda: federation().fit(1, evaluate_every="epoch"), "evaluate_every must be an integer"),
    "rounds below 0": (lambda: federation().fit(1, evaluate_every=-1), "evaluate_every must be .* got -1"),
    "a text for rounds": (lambda: federation().fit(1, checkpoint_every="1"), "checkpoint_every must be"),
    "one-hot integers": (
        lambda: federation([(X, nn.functional.one_hot(Y, 2))]),
        r"(?s)want class indices of shape \(40,\).*targets.argmax\(-1\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused_with_its_fix(name):
    call, text = REFUSED[name]
    with pytest.raises(errors.BadArgument, match=text) as caught:
        call()
    assert caught.value.fix


def test_a_second_fit_that_trains_nothing_says_so(caplog):
    run = federation()
    run.fit(2)
    with caplog.at_level(logging.WARNING):
        run.fit(2)
    assert run.round == 2 * run.rounds_per_epoch
    assert "fit trains nothing" in caplog.text
    assert "fit(epochs=3) trains more" in caplog.text
    caplog.clear()
    run.fit(3)
    assert run.round == 3 * run.rounds_per_epoch
    assert not caplog.text


def ending_in(layer, outputs):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs), layer)


@pytest.mark.parametrize(
    ("layer", "outputs", "loss", "text"),
    [
        (nn.Softmax(dim=1), 2, "cross_entropy", "cross_entropy expects logits.*softmax"),
        (nn.Sigmoid(), 1, "binary_cross_entropy", "binary_cross_entropy expects logits.*sigmoid"),
    ],
)
def test_probabilities_for_a_loss_that_takes_logits_are_warned_of(layer, outputs, loss, text):
    with pytest.warns(UserWarning, match=text):
        federation(model=ending_in(layer, outputs), loss=loss)


def seeded():
    torch.manual_seed(0)
    return mlp(4, 2, hidden=8)


def test_one_hot_test_targets_give_an_accuracy_where_the_loss_compares_classes():
    rows = nn.functional.one_hot(Y, 2).float()
    one, other = (federation(model=seeded()).fit(1, test=(X, held)).last for held in (Y, rows))
    assert "mse" not in other
    assert other["accuracy"] == one["accuracy"]
