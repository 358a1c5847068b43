"""Attackers that know nothing of a defence: each reverses what was planted for it, and says when it does not apply."""

import dataclasses

import pytest
import torch
from tests.attacks.victims import OUTPUTS, chance, gain, sgd
from tests.oracle import built
from torch import nn

from fedveil.attacks import Observation, Round, generic
from fedveil.attacks.first_layer import rebuild_from_difference
from fedveil.attacks.generic import RIDGE, average_broadcasts, calibrate_outputs, invert_gradient, rebuild_record
from fedveil.attacks.observation import DoesNotApply
from fedveil.defences import Plain
from fedveil.federation import Federation
from fedveil.federation.evaluate import predict
from fedveil.models import mlp, resnet
from fedveil.scheme import CrossEntropy, SquaredError
from fedveil.studies.federations import observe

ROUNDS = 6
INPUTS = torch.randn(300, 12, generator=chance(1), dtype=torch.float64)


def network(hidden=32):
    return built(lambda: mlp(12, OUTPUTS, hidden=hidden))


def observe_models(models, inputs=INPUTS, targets=INPUTS, loss=None):
    rounds = tuple(Round(model, model) for model in models)
    return Observation("any", models[-1], models[-1], rounds, inputs, targets, loss or SquaredError(), 0.1, 0.5)


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def add_noise(noises):
    """The network with each of the noises added to its parameters."""
    models = [network() for _ in noises]
    for model, noise in zip(models, noises, strict=True):
        nn.utils.vector_to_parameters(flat(model) + noise, model.parameters())
    return models


def test_the_mean_of_broadcasts_loses_noise_that_is_independent_or_subtracted_again():
    true = flat(network())
    noise = torch.randn(ROUNDS, len(true), generator=chance(), dtype=torch.float64)
    models = add_noise(noise)
    found = average_broadcasts(observe_models(models)).model
    ratio = float((flat(found) - true).norm() / (flat(models[-1]) - true).norm()) * ROUNDS**0.5
    assert abs(ratio - 1) < 4 * (1 / len(true)) ** 0.5  # two norms of normal vectors, each 1 / sqrt(2 n) wide
    found = average_broadcasts(observe_models(add_noise([noise[0], -noise[0]]))).model
    assert (flat(found) - true).norm() < 1e-12 * noise[0].norm()


def test_broadcasts_can_be_averaged_if_they_differ_in_values_only_and_integers_are_the_last_ones():
    one, other = network(), network(8)
    for models, why in (([one], "one broadcast"), ([one, one], "the same"), ([other, one], "names or shapes")):
        with pytest.raises(DoesNotApply, match=why):
            average_broadcasts(observe_models(models))
    first, last = (built(lambda: resnet(8, 3, OUTPUTS, width=4, norm="batch")) for _ in range(2))
    count = next(name for name in last.state_dict() if name.endswith("num_batches_tracked"))
    last.get_buffer(count).fill_(7)
    assert int(average_broadcasts(observe_models([first, last])).model.state_dict()[count]) == 7


def shift(model):
    """The model behind a secret affine map of its outputs."""
    secret = nn.Linear(OUTPUTS, OUTPUTS).double()
    with torch.no_grad():
        secret.weight.copy_(torch.linalg.qr(torch.randn(OUTPUTS, OUTPUTS, generator=chance(2)).double())[0] * 5)
        secret.bias.copy_(100 * torch.randn(OUTPUTS, generator=chance(3)))
    return nn.Sequential(model, secret)


@pytest.mark.parametrize("loss", [SquaredError(), CrossEntropy()], ids=lambda loss: loss.name)
def test_a_secret_affine_map_of_the_outputs_is_reversed(loss):
    model = network()
    truth = predict(model, INPUTS)
    targets = truth if isinstance(loss, SquaredError) else (5 * truth).softmax(1)
    view, held_out = shift(model), torch.randn(200, 12, generator=chance(4), dtype=torch.float64)
    found = calibrate_outputs(observe_models([view], targets=targets, loss=loss)).model
    wanted, got = predict(model, held_out), predict(found, held_out)
    assert (predict(view, held_out).argmax(1) == wanted.argmax(1)).double().mean() < 0.5
    assert (got.argmax(1) == wanted.argmax(1)).double().mean() > 0.95
    if isinstance(loss, SquaredError):  # outputs differ in size: the least direction is shrunk most by the ridge
        spectrum = torch.linalg.eigvalsh(torch.corrcoef(predict(view, INPUTS).T))
        assert float((got - wanted).norm() / wanted.norm()) < RIDGE / float(spectrum[0])


def test_labels_without_relation_to_the_records_give_nothing():
    model = network()
    truth = predict(model, INPUTS)
    observed = observe_models([shift(model)], targets=truth[torch.randperm(len(truth), generator=chance())])
    answers = predict(calibrate_outputs(observed).model, INPUTS).argmax(1)
    constant = (truth.argmax(1) == truth.mean(0).argmax()).double().mean()
    assert (answers == truth.argmax(1)).double().mean() < constant + 0.15


def observe_plain(model, shape):
    records = torch.rand(40, *shape, generator=chance(), dtype=torch.float64)
    if len(shape) == 3:  # a search prefers smooth images, as photographs are
        records = nn.functional.interpolate(records[..., :2, :2], shape[1:], mode="bilinear")
    labels = torch.arange(40) % OUTPUTS
    parts = [(records[:32], labels[:32]), (records[39:], labels[39:])]
    run = Federation(model, parts, Plain(), sgd, batch_size=4, loss="cross_entropy", fuse=False)
    return observe(run, rounds=2), records[39]


def test_a_record_comes_from_a_dense_first_layer_or_by_a_search_for_an_image(monkeypatch):
    monkeypatch.setattr(generic, "SEARCH", dataclasses.replace(generic.SEARCH, steps=80))
    observed, _ = observe_plain(network(), (12,))
    assert torch.equal(rebuild_record(observed), rebuild_from_difference(observed))
    image = built(lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(8 * 36, OUTPUTS)))
    observed, true = observe_plain(image, (1, 8, 8))
    assert gain(rebuild_record(observed), observed, true) > 3
    opposite = dataclasses.replace(observed, learning_rate=-observed.learning_rate)
    assert gain(rebuild_record(opposite), observed, true) < 0


def test_a_search_needs_images_with_classes_and_calibration_labels_and_a_row_of_finite_outputs():
    model = built(lambda: nn.Sequential(nn.Linear(12, 8, bias=False), nn.Linear(8, OUTPUTS)))
    with pytest.raises(DoesNotApply, match="the network is not a Linear with a bias, and records are not images"):
        rebuild_record(observe_plain(model, (12,))[0])
    with pytest.raises(DoesNotApply, match="needs class labels"):
        invert_gradient(observe_models([network()], torch.rand(3, 1, 8, 8), torch.rand(3, 1)), "it is convolutional")
    model, broken = network(), network()
    nn.init.constant_(broken[-1].bias, float("nan"))
    deep = nn.Sequential(model, nn.Unflatten(1, (1, OUTPUTS)))
    for given, records, why in ((model, 0, "no labelled"), (deep, 9, "not have the shape"), (broken, 9, "not finite")):
        with pytest.raises(DoesNotApply, match=why):
            calibrate_outputs(observe_models([given], INPUTS[:records], INPUTS[:records]))
