"""A crafted first layer gives away every record that is alone in its bin, even in a sum over clients."""

import pytest
import torch
from tests.attacks.victims import DIGITS, chance
from tests.oracle import built
from torch import nn

from fedveil.attacks.imprint import craft_imprint, imprint_bin, read_imprint, second_linear
from fedveil.attacks.leaked_gradients import Leak, mean_gradients, secure_sum
from fedveil.attacks.observation import DoesNotApply
from fedveil.models import cnn, mlp
from fedveil.scheme import find_loss

INPUTS, LABELS = DIGITS.train.inputs, DIGITS.train.targets
LOSS = find_loss("cross_entropy")


def crafted(hidden=100, dtype=torch.float64):
    model = built(lambda: mlp(64, 10, hidden=hidden), dtype=dtype)
    return model, craft_imprint(model, DIGITS.test.inputs[:64], chance())


def distances(found, records):
    return torch.cdist(records.double(), found, compute_mode="donot_use_mm_for_euclid_dist").amin(1)


@pytest.mark.parametrize("clients", [1, 30])
def test_records_that_are_alone_in_their_bin_are_read_and_others_are_not(clients):
    model, net = crafted()
    rows = torch.arange(30)
    inputs, labels = INPUTS[rows].double(), LABELS[rows]
    if clients == 1:
        gradients = mean_gradients(net, LOSS, inputs, labels)
    else:  # secure aggregation: the server has the sum of clients with one record each
        own = [mean_gradients(net, LOSS, inputs[row : row + 1], labels[row : row + 1]) for row in rows]
        gradients = secure_sum(own, [1] * clients).mean()
    found = read_imprint(Leak(net, gradients, LOSS), "0")
    bins = imprint_bin(net, "0", inputs)
    alone = torch.tensor([bool(one > 0 and (bins == one).sum() == 1) for one in bins])
    near = distances(found, inputs)
    assert 10 < int(alone.sum()) < 30  # both kinds exist
    assert near[alone].max() < 1e-5  # rounding of float64 over derivatives of at least 1.5e-8 of the largest
    assert near[~alone].min() > 1e-2
    plain = read_imprint(Leak(model, mean_gradients(model, LOSS, inputs, labels), LOSS), "0")
    assert (distances(plain, inputs) < 1e-5).sum() < 5  # a unit that only one record activates


def test_the_crafted_model_has_the_same_form_and_the_original_is_unchanged():
    before = built(lambda: mlp(64, 10, hidden=100))
    model, net = crafted()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before.state_dict()[name].to(value))
        assert net.state_dict()[name].shape == value.shape
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, model.state_dict()[name])}
    assert changed == {"0.weight", "0.bias", "2.weight"}


def test_noise_as_large_as_for_differential_privacy_hides_all_records():
    _, net = crafted()
    inputs, labels, rng = INPUTS[:10].double(), LABELS[:10], chance(1)
    gradients = mean_gradients(net, LOSS, inputs, labels)
    norm = torch.cat([value.flatten() for value in gradients.values()]).norm()
    noisy = {
        name: value + norm / 10 * torch.randn(value.shape, generator=rng, dtype=value.dtype)
        for name, value in gradients.items()
    }
    assert distances(read_imprint(Leak(net, gradients, LOSS), "0"), inputs).min() < 1e-5
    floor = (inputs - inputs.mean(0)).norm(dim=1)
    assert (distances(read_imprint(Leak(net, noisy, LOSS), "0"), inputs) > 0.5 * floor).all()


def test_other_networks_are_refused():
    with pytest.raises(DoesNotApply, match="is not a Linear with a bias"):
        craft_imprint(cnn(1, 10, size=8), INPUTS[:9].reshape(9, 1, 8, 8), chance())
    smooth = nn.Sequential(nn.Linear(64, 5), nn.Sigmoid(), nn.Linear(5, 10))
    with pytest.raises(DoesNotApply, match="no ReLU follows"):
        craft_imprint(smooth, INPUTS[:9], chance())
    with pytest.raises(DoesNotApply, match="no Linear follows"):
        second_linear(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LayerNorm(5)), "0")
