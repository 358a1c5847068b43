"""Federations to attack, and what one of their clients observes."""

import copy

import torch
from tests.oracle import built
from tests.sessions import Session

from fedveil.attacks import Observation, Round
from fedveil.data import load
from fedveil.federation import Federation
from fedveil.federation.evaluate import predict
from fedveil.models import cnn, mlp, resnet
from fedveil.studies.audit.run import quality
from fedveil.studies.federations import _architecture as emptied
from fedveil.studies.federations import observe
from fedveil.studies.gradients import run as gradients_run

OUTPUTS = 5
WIDTH, CLASSES = 48, 4  # of records that a network can only memorise
NETWORKS = {
    "mlp": (lambda: mlp(12, OUTPUTS, hidden=16), (12,)),
    "no bias": (lambda: mlp(12, OUTPUTS, hidden=16, bias=False), (12,)),
    "cnn": (lambda: cnn(3, OUTPUTS, width=4, size=8), (3, 8, 8)),
    "resnet": (lambda: resnet(8, 3, OUTPUTS, width=4, norm="none"), (3, 8, 8)),
    "batchnorm": (lambda: resnet(8, 3, OUTPUTS, width=4, norm="batch"), (3, 8, 8)),
}
DIGITS = load("digits")
IMAGES = load("digits", flat=False)


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def build_victim(name, networks=NETWORKS):
    """A network, 200 random records and its outputs for them."""
    make, shape = networks[name]
    model = built(make)
    inputs = torch.randn(200, *shape, generator=chance(1), dtype=torch.float64)
    return model, inputs, predict(model, inputs)


def observe_broadcasts(defence, model, inputs, targets, loss, rounds=2, step=lambda model: None):
    """What a client receives of a model that takes a step between rounds."""
    session, seen = Session(defence, model, inputs[:2], loss), []
    for number in range(rounds):
        if number:
            step(model)
        broadcast = session.broadcast()
        seen.append(Round(copy.deepcopy(broadcast), defence.client_view(model, broadcast)))
    return Observation(defence.name, seen[-1].model, emptied(model), tuple(seen), inputs, targets, loss, 0.1, 0.5)


def observe_digits(defence, rounds=2, *, own=100, victim=1, batch=4, seed=0):
    """What a client sees of an MLP that it trains with one victim, and the victim's first record."""
    records, targets, last = DIGITS.train.inputs.double(), DIGITS.train.targets, slice(1000, 1000 + victim)
    parts = [(records[:own], targets[:own]), (records[last], targets[last])]
    network = built(lambda: mlp(64, 10), seed)
    federation = Federation(network, parts, defence, sgd, batch_size=batch, fuse=False, seed=seed)
    return observe(federation, rounds), records[1000]


def observe_leaks(make, defence, loss="cross_entropy", optimizer=sgd):
    """One round of a client with 10 images and a victim with 2: leaks, what the client observed, the victim's batch."""
    inputs, targets = IMAGES.train.inputs.double(), IMAGES.train.targets
    parts = [(inputs[10:20], targets[10:20]), (inputs[:2], targets[:2])]
    return *gradients_run.observe_leaks(
        Federation(built(make), parts, defence, optimizer, loss=loss, fuse=False)
    ), parts[1]


def gain(found, observed, true):
    """Decibels by which a reconstruction is nearer to a record than the mean of the attacker's own records."""
    return quality(found.clamp(0, 1), true, 1.0) - quality(observed.inputs.mean(0), true, 1.0)


def records(count, seed):
    """Inputs and labels that are independent: a network can only memorise them."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=chance), torch.randint(CLASSES, (count,), generator=chance)


def memorise(inputs, targets, seed=0, steps=150):
    """A network trained on some records until it knows them."""
    net = built(lambda: mlp(WIDTH, CLASSES, layers=2, hidden=128), seed, torch.float32)
    wanted = torch.nn.functional.one_hot(targets, CLASSES).float()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (net(inputs) - wanted).square().sum(1).mean().backward()
        optimizer.step()
    return net
