"""Attackers that know nothing of a defence: each undoes what was planted for it, and says when it does not apply."""

import dataclasses

import pytest
import torch
from tests.oracle import built
from torch import nn

from fedveil.attacks import Observed, Round, generic
from fedveil.attacks.first_layer import from_plain_difference
from fedveil.attacks.generic import RIDGE, averaged, calibrated, inverted, rebuilt
from fedveil.attacks.observed import PUBLISHED, DoesNotApply, observations
from fedveil.defences import Plain
from fedveil.defences.registry import GENERIC, Record, find
from fedveil.federation import Federation
from fedveil.federation.evaluate import predict
from fedveil.models import mlp, resnet
from fedveil.scheme import CrossEntropy, SquaredError
from fedveil.studies.audit.rebuild import quality
from fedveil.studies.observation import observe

OUTPUTS, ROUNDS = 5, 6


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


def network():
    return built(lambda: mlp(12, OUTPUTS, hidden=32))


def seen(models, inputs, targets, loss=None):
    rounds = tuple(Round(model, model) for model in models)
    return Observed("any", models[-1], models[-1], rounds, inputs, targets, loss or SquaredError(), 0.1, 0.5)


def noised(model, noises):
    found = []
    for noise in noises:
        copy = network()
        copy.load_state_dict({name: value + noise[name] for name, value in model.state_dict().items()})
        found.append(copy)
    return found


def noise_like(model, generator):
    return {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype)
        for name, value in model.state_dict().items()
    }


def away(found, model):
    flat = nn.utils.parameters_to_vector
    return float((flat(found.parameters()) - flat(model.parameters())).detach().norm())


INPUTS = torch.randn(300, 12, generator=chance(1), dtype=torch.float64)


def test_the_mean_of_broadcasts_loses_independent_noise_with_the_root_of_their_number():
    model, generator = network(), chance()
    models = noised(model, [noise_like(model, generator) for _ in range(ROUNDS)])
    found = averaged(seen(models, INPUTS, predict(model, INPUTS)))
    ratio = away(found.model, model) / away(models[-1], model) * ROUNDS**0.5
    numbers = sum(p.numel() for p in model.parameters())
    assert abs(ratio - 1) < 4 * (1 / numbers) ** 0.5  # two norms of normal vectors, each 1 / sqrt(2 n) wide


def test_noise_that_is_taken_back_is_gone():
    model = network()
    noise = noise_like(model, chance())
    models = noised(model, [noise, {name: -value for name, value in noise.items()}])
    assert away(averaged(seen(models, INPUTS, INPUTS)).model, model) < 1e-12 * away(models[0], model)


def test_integers_of_a_broadcast_are_the_last_ones():
    first, last = (built(lambda: resnet(8, 3, OUTPUTS, width=4, norm="batch")) for _ in range(2))
    count = next(name for name in last.state_dict() if name.endswith("num_batches_tracked"))
    last.get_buffer(count).fill_(7)
    assert int(averaged(seen([first, last], INPUTS, INPUTS)).model.state_dict()[count]) == 7


def test_there_must_be_broadcasts_that_can_be_averaged():
    one, other = network(), built(lambda: mlp(12, OUTPUTS, hidden=8))
    for models, why in (([one], "one broadcast"), ([one, one], "the same"), ([other, one], "names or shapes")):
        with pytest.raises(DoesNotApply, match=why):
            averaged(seen(models, INPUTS, INPUTS))


def shifted(model):
    """The model behind a secret affine map of its outputs."""
    secret = nn.Linear(OUTPUTS, OUTPUTS).double()
    with torch.no_grad():
        secret.weight.copy_(torch.linalg.qr(torch.randn(OUTPUTS, OUTPUTS, generator=chance(2)).double())[0] * 5)
        secret.bias.copy_(100 * torch.randn(OUTPUTS, generator=chance(3)))
    return nn.Sequential(model, secret)


@pytest.mark.parametrize("loss", [SquaredError(), CrossEntropy()], ids=lambda loss: loss.name)
def test_a_secret_affine_map_of_the_outputs_is_undone(loss):
    model = network()
    truth = predict(model, INPUTS)
    targets = truth if isinstance(loss, SquaredError) else (5 * truth).softmax(1)
    view, held_out = shifted(model), torch.randn(200, 12, generator=chance(4), dtype=torch.float64)
    found = calibrated(seen([view], INPUTS, targets, loss)).model
    wanted, got = predict(model, held_out), predict(found, held_out)
    assert (predict(view, held_out).argmax(1) == wanted.argmax(1)).double().mean() < 0.5
    assert (got.argmax(1) == wanted.argmax(1)).double().mean() > 0.95
    if isinstance(loss, SquaredError):  # outputs differ in size: the least direction is shrunk most by the ridge
        spectrum = torch.linalg.eigvalsh(torch.corrcoef(predict(view, INPUTS).T))
        assert float((got - wanted).norm() / wanted.norm()) < RIDGE / float(spectrum[0])


def test_labels_without_relation_to_the_records_give_nothing():
    model = network()
    truth = predict(model, INPUTS)
    observed = seen([shifted(model)], INPUTS, truth[torch.randperm(len(truth), generator=chance())])
    answers = predict(calibrated(observed).model, INPUTS).argmax(1)
    constant = (truth.argmax(1) == truth.mean(0).argmax()).double().mean()
    assert (answers == truth.argmax(1)).double().mean() < constant + 0.15


def test_calibration_needs_labels_and_a_row_of_finite_outputs():
    model = network()
    with pytest.raises(DoesNotApply, match="no labelled records"):
        calibrated(seen([model], INPUTS[:0], INPUTS[:0]))
    with pytest.raises(DoesNotApply, match="more than one row"):
        calibrated(seen([nn.Sequential(model, nn.Unflatten(1, (1, OUTPUTS)))], INPUTS, INPUTS))
    with torch.no_grad():
        model[-1].bias.fill_(float("nan"))
    with pytest.raises(DoesNotApply, match="not finite"):
        calibrated(seen([model], INPUTS, INPUTS))


def federation(model, shape):
    records = torch.rand(40, *shape, generator=chance(), dtype=torch.float64)
    if len(shape) == 3:  # a search prefers smooth images, as photographs are
        records = nn.functional.interpolate(records[..., :2, :2], shape[1:], mode="bilinear")
    labels = torch.arange(40) % OUTPUTS
    parts = [(records[:32], labels[:32]), (records[39:], labels[39:])]
    run = Federation(
        model, parts, Plain(), lambda p: torch.optim.SGD(p, 0.1), batch_size=4, loss="cross_entropy", fuse=False
    )
    return observe(run, rounds=2), records[39]


def test_a_record_comes_from_a_dense_first_layer_or_by_a_search_for_an_image(monkeypatch):
    monkeypatch.setattr(generic, "SEARCH", dataclasses.replace(generic.SEARCH, steps=80))
    observed, record = federation(network(), (12,))
    assert torch.equal(rebuilt(observed), from_plain_difference(observed))
    image = built(lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(8 * 36, OUTPUTS)))
    observed, record = federation(image, (1, 8, 8))
    assert quality(rebuilt(observed), record, 1.0) > quality(observed.inputs.mean(0), record, 1.0) + 3
    lost = dataclasses.replace(observed, learning_rate=-observed.learning_rate)  # the wrong way round
    assert quality(rebuilt(lost), record, 1.0) < quality(observed.inputs.mean(0), record, 1.0)


def test_a_search_needs_images_with_classes():
    model = built(lambda: nn.Sequential(nn.Linear(12, 8, bias=False), nn.Linear(8, OUTPUTS)))
    with pytest.raises(DoesNotApply, match="does not begin with a Linear with a bias, and records are no images"):
        rebuilt(federation(model, (12,))[0])
    observed = seen([network()], torch.rand(3, 1, 8, 8), torch.rand(3, 1))
    with pytest.raises(DoesNotApply, match="needs classes"):
        inverted(observed)


def divided(observed):
    """An attacker with a bug."""
    return 1 / 0


def test_an_attacker_that_fails_is_listed_and_the_others_run():
    model = network()
    models = [model, shifted(network())[0], network()]
    models[1].load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    own = {"buggy": f"{__name__}:divided", "gone": "no_such_package:attack"}
    found = observations(Record("mine", "ours", "my:Mine", attackers=own), seen(models, INPUTS, predict(model, INPUTS)))
    assert set(found.attackers) == {PUBLISHED, *GENERIC}
    assert found.left_out["buggy"] == "failed: ZeroDivisionError: division by zero"
    assert "cannot import no_such_package" in found.left_out["gone"]


def test_a_record_of_any_defence_takes_a_further_attacker():
    more = dataclasses.replace(find("plain"), attackers={"mean": "fedveil.attacks.generic:averaged"})
    found = observations(more, seen([network()], INPUTS, INPUTS))
    assert set(found.attackers) == {PUBLISHED}
    assert found.left_out == {"mean": "there is one broadcast"}
    assert (find("plain").collected, Record("a", "b", "c").collected, find("dbcl").collected) == (1, 6, 6)
