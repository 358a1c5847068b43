"""The gradients that an attacker obtains are those of the victim, or of sums of clients; they reveal labels."""

import dataclasses

import pytest
import torch
from tests.attacks.victims import DIGITS, chance, observe_leaks
from tests.oracle import built, flat

from fedveil.attacks import leaked_gradients as leaked
from fedveil.attacks.leaked_gradients import Leak, from_difference, mean_gradients, secure_sum, single_label
from fedveil.attacks.observation import DoesNotApply
from fedveil.defences import DBCL, PPDL, SPN, Plain, Veil
from fedveil.errors import BadArgument
from fedveil.models import lenet, mlp
from fedveil.scheme import Entropy, find_loss
from fedveil.studies.gradients.run import MISMATCHED

EPS = torch.finfo(torch.float64).eps
LOSSES = pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])


def network():
    return lenet(1, 10, size=8)


def relative(found, wanted, names=None):
    own, true = (flat({name: one[name] for name in names or wanted}) for one in (found, wanted))
    return float((own - true).norm() / true.norm())


def rounding(observed, gradients):
    """The error of W - lr g and back: a few halves of a unit of each weight, over lr and the victim's share."""
    size = flat(dict(built(network).state_dict())).norm() / flat(gradients).norm()
    return 8 * EPS * float(size) / (observed.learning_rate * (1 - observed.share))


@LOSSES
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
    again = leaked.sketch_weights(own, leaked.full_weights(own))
    assert all(torch.allclose(again[name], value, rtol=1e-14, atol=0) for name, value in own.named_parameters())


@LOSSES
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
    with pytest.raises(DoesNotApply, match="the attack needs a round and the next round"):
        from_difference(observed, -1)
    with pytest.raises(BadArgument, match="cannot read gradients from an upload of type str"):
        leaked.from_upload(observed.rounds[0], "letter", observed.loss)


@LOSSES
@pytest.mark.parametrize("bias", [True, False])
def test_labels_follow_from_the_head(loss, bias):
    net = built(lambda: mlp(64, 10, layers=1, hidden=200, bias=bias), dtype=torch.float32)
    inputs, targets, found = DIGITS.train.inputs, DIGITS.train.targets, find_loss(loss)

    def leak(rows):
        return Leak(net, mean_gradients(net, found, inputs[rows], targets[rows]), found)

    assert [single_label(leak([row])) for row in range(20)] == targets[:20].tolist()
    twice = [*range(4), *range(4)]
    assert leaked.batch_labels(leak(twice), 8, inputs[100:]) == sorted(targets[twice].tolist())
    with pytest.raises(BadArgument, match="no Linear"):
        single_label(Leak(torch.nn.Conv2d(1, 1, 1), {}, found))


def test_the_difference_of_two_sums_is_the_update_of_the_client_that_is_in_one_of_them():
    random, records = chance(), (3, 1, 7, 2, 5)
    own = [
        {name: torch.randn(s, generator=random) for name, s in (("weight", (4, 3)), ("bias", (4,)))} for _ in records
    ]
    total, others = secure_sum(own, records), secure_sum(own[1:], records[1:])
    found = total - others
    assert (total.records, found.records) == (sum(records), records[0])
    for name, wanted in own[0].items():
        weighted = torch.stack([count * one[name].double() for one, count in zip(own, records, strict=True)])
        # fixed point for n <= 5 clients: n 2^-51 of the largest value in each sum; float64 rounds four times
        bound = (5 + 4) * 2.0**-51 * weighted.abs().max() + 4 * 2.0**-53 * weighted.flatten(1).abs().amax(1).sum()
        assert (total.values[name] - weighted.sum(0)).abs().max() <= bound
        assert (found.mean()[name] - wanted.double()).abs().max() <= bound / records[0]
        assert (total.mean()[name] - wanted).abs().max() > 1e6 * bound  # the sum itself is far away
    for sum_, count in ((others - total, -3), (leaked.Sum({}, 0), 0)):
        with pytest.raises(BadArgument, match=f"at least one record, got {count}"):
            sum_.mean()
