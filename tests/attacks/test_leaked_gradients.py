"""The gradients that an attacker obtains are those of the victim."""

import dataclasses

import pytest
import torch
from tests.attacks.victims import observe_leaks
from tests.oracle import built

from fedveil.attacks.leaked_gradients import from_difference, from_upload, full_weights, mean_gradients, sketch_weights
from fedveil.attacks.observation import DoesNotApply
from fedveil.defences import DBCL, PPDL, SPN, Plain, Veil
from fedveil.errors import BadArgument
from fedveil.models import lenet
from fedveil.scheme import Entropy, find_loss
from fedveil.studies.gradients.run import MISMATCHED

EPS = torch.finfo(torch.float64).eps


def network():
    return lenet(1, 10, size=8)


def relative(found, wanted, names=None):
    gaps = [float((found[n] - wanted[n]).square().sum()) for n in names or wanted]
    sizes = [float(wanted[n].square().sum()) for n in names or wanted]
    return (sum(gaps) / sum(sizes)) ** 0.5


def rounding(observed, gradients):
    """The error of W - lr g and back: a few halves of a unit of each weight, over lr and the victim's share."""
    size = torch.cat([p.detach().flatten() for p in built(network).parameters()]).norm()
    wanted = torch.cat([g.flatten() for g in gradients.values()]).norm()
    return 8 * EPS * float(size / wanted) / (observed.learning_rate * (1 - observed.share))


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_two_broadcasts_show_the_victims_gradient(loss):
    leaks, observed, victim = observe_leaks(network, Plain(), loss)
    wanted = mean_gradients(built(network), find_loss(loss), *victim)
    assert relative(leaks["V-diff"].gradients, wanted) < rounding(observed, wanted)
    assert relative(leaks["V-up"].gradients, wanted) < 1e3 * EPS


@pytest.mark.parametrize("defence", [PPDL(fraction=0.1, seed=0), SPN(seed=0)])
def test_two_broadcasts_show_the_victims_upload_where_the_model_is_sent(defence):
    leaks, observed, _ = observe_leaks(network, defence)
    wanted = leaks["V-up"].gradients
    assert relative(leaks["V-diff"].gradients, wanted) < rounding(observed, wanted)


def test_sketches_show_the_layers_that_are_not_sketched():
    leaks, observed, victim = observe_leaks(network, DBCL(seed=0))
    own = leaks["V-up"].model
    wanted = mean_gradients(own, find_loss("cross_entropy"), *victim)
    assert relative(leaks["V-up"].gradients, wanted) < 1e3 * EPS
    plain, sketched = ["0.weight", "0.bias", "7.weight", "7.bias"], ["2.weight", "4.weight"]
    assert relative(leaks["V-diff"].gradients, wanted, plain) < rounding(observed, wanted)
    assert relative(leaks["V-diff"].gradients, wanted, sketched) > 1
    again = sketch_weights(own, full_weights(own))
    assert all(torch.allclose(again[name], value, rtol=1e-14, atol=0) for name, value in own.named_parameters())


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_a_veils_upload_is_a_gradient_of_a_network_that_every_client_knows(loss):
    leaks, _, victim = observe_leaks(network, Veil(entropy=Entropy.for_tests(0)), loss)
    leak, before = leaks["V-up"], built(network)
    assert relative(leak.gradients, mean_gradients(leak.model, find_loss(loss), *victim)) < 1e4 * EPS
    plain = mean_gradients(before, find_loss(loss), *victim)
    assert relative(leak.gradients, plain) > 0.5
    assert relative(leaks["V-diff"].gradients, plain) > 1
    assert leaks[MISMATCHED].gradients is leak.gradients
    own = dict(leaks[MISMATCHED].model.named_parameters())
    assert all(torch.equal(value, own[name]) for name, value in before.named_parameters())


def test_the_round_of_a_difference_can_be_chosen_and_must_have_a_next_one_and_gradients():
    leaks, observed, _ = observe_leaks(network, Plain())
    longer = dataclasses.replace(observed, rounds=(*observed.rounds, observed.rounds[-1]))
    assert relative(from_difference(longer, 0).gradients, leaks["V-diff"].gradients) == 0
    with pytest.raises(DoesNotApply, match="the attacker has not answered this round"):
        from_difference(longer)
    with pytest.raises(DoesNotApply, match="it needs a round and the one after it"):
        from_difference(observed, -1)
    with pytest.raises(BadArgument, match="a str holds no gradients"):
        from_upload(observed.rounds[0], "letter", observed.loss)
