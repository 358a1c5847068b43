"""The gradients that an attacker gets hold of are what they are said to be."""

import copy
import dataclasses

import pytest
import torch

from fedveil.attacks.leaks import as_sketched, from_difference, from_upload, full_weights, gradients_of
from fedveil.data import load
from fedveil.defences import DBCL, PPDL, SPN, Plain, Veil
from fedveil.errors import BadArgument
from fedveil.federation.local import Federation
from fedveil.models import lenet
from fedveil.scheme import Entropy, find_loss
from fedveil.studies.gradients.run import MISMATCHED, observe_leaks

RATE = 0.1
EPS = torch.finfo(torch.float64).eps
DEFENCES = {
    "plain": Plain,
    "ppdl": lambda: PPDL(fraction=0.1, seed=0),
    "dbcl": lambda: DBCL(seed=0),
    "spn": lambda: SPN(seed=0),
    "veil": lambda: Veil(entropy=Entropy.for_tests(0)),
}


@pytest.fixture(scope="module")
def digits():
    return load("digits", flat=False)


def caught(digits, defence, loss="cross_entropy", records=2):
    """One round of two clients, the second of them the victim; the server's model before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = lenet(1, 10, size=8).double()
    inputs, targets = digits.train.inputs.double(), digits.train.targets
    parts = [(inputs[10:20], targets[10:20]), (inputs[:records], targets[:records])]
    optimizer = lambda p: torch.optim.SGD(p, RATE)  # noqa: E731
    federation = Federation(net, parts, DEFENCES[defence](), optimizer, loss=loss, fuse=False)
    before = copy.deepcopy(net)
    leaks, observed = observe_leaks(federation)
    return before, leaks, observed, parts[1]


def relative(found, wanted, names=None):
    gaps = [float((found[n] - wanted[n]).square().sum()) for n in names or wanted]
    sizes = [float(wanted[n].square().sum()) for n in names or wanted]
    return (sum(gaps) / sum(sizes)) ** 0.5


def rounding(before, observed, gradients):
    """What W - lr g and back loses: a few halves of a unit of each weight, over lr and the victim's share."""
    size = torch.cat([p.detach().flatten() for p in before.parameters()]).norm()
    wanted = torch.cat([g.flatten() for g in gradients.values()]).norm()
    return 8 * EPS * float(size / wanted) / (RATE * (1 - observed.share))


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_two_broadcasts_are_the_victims_gradient(digits, loss):
    before, leaks, observed, victim = caught(digits, "plain", loss)
    wanted = gradients_of(before, find_loss(loss), *victim)
    assert relative(leaks["V-diff"].gradients, wanted) < rounding(before, observed, wanted)
    assert relative(leaks["V-up"].gradients, wanted) < 1e3 * EPS


@pytest.mark.parametrize("defence", ["ppdl", "spn"])
def test_two_broadcasts_are_the_victims_upload_where_the_model_is_sent(digits, defence):
    before, leaks, observed, _ = caught(digits, defence)
    wanted = leaks["V-up"].gradients
    assert relative(leaks["V-diff"].gradients, wanted) < rounding(before, observed, wanted)


def test_sketches_give_the_layers_away_that_are_not_sketched(digits):
    before, leaks, observed, victim = caught(digits, "dbcl")
    own = leaks["V-up"].model
    wanted = gradients_of(own, find_loss("cross_entropy"), *victim)
    assert relative(leaks["V-up"].gradients, wanted) < 1e3 * EPS
    open_names, hidden = ["0.weight", "0.bias", "7.weight", "7.bias"], ["2.weight", "4.weight"]
    assert relative(leaks["V-diff"].gradients, wanted, open_names) < rounding(before, observed, wanted)
    assert relative(leaks["V-diff"].gradients, wanted, hidden) > 1
    parameters = dict(own.named_parameters())
    again = as_sketched(own, full_weights(own))
    assert all(torch.allclose(again[name], parameters[name], rtol=1e-14, atol=0) for name in parameters)


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_a_veils_upload_is_a_gradient_of_a_network_that_every_client_knows(digits, loss):
    before, leaks, _, victim = caught(digits, "veil", loss)
    leak = leaks["V-up"]
    assert relative(leak.gradients, gradients_of(leak.model, find_loss(loss), *victim)) < 1e4 * EPS
    plain = gradients_of(before, find_loss(loss), *victim)
    assert relative(leak.gradients, plain) > 0.5
    assert relative(leaks["V-diff"].gradients, plain) > 1
    assert leaks[MISMATCHED].gradients is leak.gradients
    own = dict(leaks[MISMATCHED].model.named_parameters())
    assert all(torch.equal(value, own[name]) for name, value in before.named_parameters())


def test_the_difference_of_an_earlier_round_is_that_rounds(digits):
    _, leaks, observed, _ = caught(digits, "plain")
    longer = dataclasses.replace(observed, rounds=(*observed.rounds, observed.rounds[-1]))
    assert relative(from_difference(longer, 0).gradients, leaks["V-diff"].gradients) == 0


def test_what_holds_no_gradient_is_refused(digits):
    _, _, observed, _ = caught(digits, "plain")
    with pytest.raises(BadArgument, match="a difference needs a round and the one after it"):
        from_difference(dataclasses.replace(observed, rounds=observed.rounds[-1:]))
    with pytest.raises(BadArgument, match="a str holds no gradients"):
        from_upload(observed.rounds[0], "letter", observed.loss)
