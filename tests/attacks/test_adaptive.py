"""Each adaptive attacker undoes what it knows how to undo, on a case built for it, and leaves a plain model alone."""

import copy

import pytest
import torch
from tests.oracle import built
from tests.sessions import Session

import fedveil
from fedveil.attacks import Observed, Round
from fedveil.attacks.canonical import canonical, matched
from fedveil.attacks.canonical_rounds import values_of
from fedveil.attacks.dbcl import stacked
from fedveil.attacks.veil import calibrate, calibrated, centred, plan_of, with_values
from fedveil.defences import DBCL, Plain, Veil
from fedveil.federation.evaluate import predict
from fedveil.graph.layout import flatten, unflatten
from fedveil.models import cnn, mlp, resnet
from fedveil.scheme import CrossEntropy, Entropy, SquaredError
from fedveil.scheme.losses import BinaryCrossEntropy, LogCosh

OUTPUTS = 5
NETWORKS = {
    "mlp": (lambda: mlp(12, OUTPUTS, hidden=16), (12,)),
    "no bias": (lambda: mlp(12, OUTPUTS, hidden=16, bias=False), (12,)),
    "cnn": (lambda: cnn(3, OUTPUTS, width=4, size=8), (3, 8, 8)),
    "resnet": (lambda: resnet(8, 3, OUTPUTS, width=4, norm="none"), (3, 8, 8)),
    "batchnorm": (lambda: resnet(8, 3, OUTPUTS, width=4, norm="batch"), (3, 8, 8)),
}


def records(model, shape, count=200):
    inputs = torch.randn(count, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return inputs, predict(model, inputs)


def observe(defence, model, inputs, targets, loss, rounds=2):
    session, seen = Session(defence, model, inputs[:2], loss), []
    for _ in range(rounds):
        broadcast = session.broadcast()
        seen.append(Round(copy.deepcopy(broadcast), defence.client_view(model, broadcast)))
    empty = copy.deepcopy(model)
    for tensor in [*empty.parameters(), *empty.buffers()]:
        tensor.data.zero_()
    return Observed(defence.name, seen[-1].model, empty, tuple(seen), inputs, targets, loss, 0.1, 0.5)


def veiled(name, loss, targets, **noise):
    make, shape = NETWORKS[name]
    model = built(make)
    inputs, outputs = records(model, shape)
    veil = Veil(entropy=Entropy.for_tests(3), **noise)
    return model, inputs, observe(veil, model, inputs, targets(outputs), loss)


def apart(view, model, inputs):
    truth = predict(model, inputs)
    return float((predict(view, inputs) - truth).norm() / truth.norm())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("groups", [1, OUTPUTS])
def test_calibration_finds_the_head_s_noise_when_labels_are_the_true_outputs(name, groups):
    model, inputs, observed = veiled(name, SquaredError(), lambda out: out, groups=groups, additive=100.0)
    assert apart(observed.model, model, inputs) > 10  # what was sent
    assert apart(calibrated(observed).model, model, inputs) < 1e-9
    assert apart(centred(observed).model, model, inputs) < apart(observed.model, model, inputs) / 10


SMOOTH = {
    "cross_entropy": (CrossEntropy(), lambda out: out.softmax(1)),
    "binary": (BinaryCrossEntropy(), lambda out: out.sigmoid()),
    "log_cosh": (LogCosh(), lambda out: out),
}


@pytest.mark.parametrize("loss", SMOOTH)
def test_calibration_fits_any_smooth_loss(loss):
    found, targets = SMOOTH[loss]  # at these targets the true outputs have the least loss
    model, inputs, observed = veiled("mlp", found, targets, additive=100.0)
    truth, seen = predict(model, inputs), predict(calibrated(observed).model, inputs)
    assert float((seen - truth).norm() / truth.norm()) < 1e-3
    assert (seen.argmax(1) == truth.argmax(1)).all()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("permute", [True, False])
def test_alignment_gives_two_veils_of_one_model_the_same_values(name, permute):
    model, inputs, observed = veiled(name, SquaredError(), lambda out: out, permute=permute)
    plan = plan_of(observed)
    entries = plan.layout.entries
    true = flatten({n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}, entries)
    flats = [values_of(plan, calibrate(observed, seen.broadcast)) for seen in observed.rounds]
    assert not torch.allclose(flats[0], flats[1], rtol=0.1)
    first, second, own = (canonical(plan, flat) for flat in (*flats, true))
    for other in (second, own):  # the form does not depend on the veil
        assert torch.allclose(matched(plan, other, first), first, rtol=1e-6, atol=1e-6)
    found = with_values(observed.architecture, unflatten(first, entries))
    assert apart(found, model, inputs) < 1e-6  # and computes the same


@pytest.mark.parametrize("name", ["mlp", "cnn", "batchnorm"])
def test_stacked_sketches_give_the_weights_once_there_are_enough_of_them(name):
    make, shape = NETWORKS[name]
    model = built(make)
    inputs, outputs = records(model, shape)
    defence = DBCL(2, seed=5)
    one = stacked(observe(defence, model, inputs, outputs, SquaredError(), rounds=1))
    few = stacked(observe(defence, model, inputs, outputs, SquaredError(), rounds=6))
    true = torch.cat([model.get_parameter(name).detach().flatten() for name in defence.sketched])
    errors = [
        torch.cat([observed.model.get_parameter(name).detach().flatten() for name in defence.sketched]) - true
        for observed in (one, few)
    ]
    assert errors[0].norm() / true.norm() > 0.5  # half of the numbers are not known
    assert errors[1].norm() / true.norm() < 1e-5


@pytest.mark.parametrize("attacker", [centred, calibrated, stacked])
def test_a_plain_model_is_left_alone(attacker):
    model = built(NETWORKS["mlp"][0])
    inputs, outputs = records(model, (12,))
    observed = observe(Plain(), model, inputs, outputs, SquaredError())
    assert attacker(observed) is observed


def test_an_exposed_head_needs_no_calibration():
    model = built(NETWORKS["mlp"][0])
    inputs, outputs = records(model, (12,))
    observed = observe(Veil(head="exposed"), model, inputs, outputs, SquaredError())
    assert apart(calibrated(observed).model, model, inputs) < 1e-9
    assert fedveil.analyse(model, inputs[:2]).head is not None
