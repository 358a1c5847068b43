"""Gradient inversion wins where a gradient leaks, and finds nothing where it does not."""

import math

import pytest
import torch
from tests.attacks.victims import IMAGES, chance
from tests.oracle import built
from torch import nn

from fedveil.attacks.gradients import Search, cosine_distance, reconstruct, squared_distance
from fedveil.attacks.leaked_gradients import Leak, batch_labels, mean_gradients, single_label
from fedveil.attacks.similarity import match, psnr, ssim
from fedveil.errors import BadArgument
from fedveil.models import lenet, mlp
from fedveil.records.shards import generator
from fedveil.scheme import find_loss

BOX = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
INPUTS, TARGETS = IMAGES.train.inputs, IMAGES.train.targets


def build(activation):
    return built(lambda: lenet(1, 10, size=8, activation=activation), dtype=torch.float32)


def leak_gradient(net, inputs, targets, loss="cross_entropy"):
    return Leak(net, mean_gradients(net, find_loss(loss), inputs, targets), find_loss(loss))


def search(leak, how, labels=None, records=1):
    shape = (records, 1, 8, 8)
    return reconstruct(leak, shape, how, classes=10, generator=generator(0), labels=labels, box=BOX)


@pytest.mark.parametrize("method", ["dlg", "idlg"])
def test_one_image_comes_back_from_an_undefended_gradient(method):
    leak = leak_gradient(build("sigmoid"), INPUTS[:1], TARGETS[:1])
    found = search(leak, Search(method, 100, 2), None if method == "dlg" else torch.tensor([single_label(leak)]))
    assert psnr(IMAGES.pixels(found.inputs), INPUTS[:1])[0] > 30
    assert found.labels.tolist() == TARGETS[:1].tolist()
    assert found.distance == min(found.distances)
    assert len(found.distances) == 2


@pytest.mark.parametrize(("method", "activation"), [("idlg", "sigmoid"), ("cosine", "relu")])
@pytest.mark.parametrize("row", range(3))
def test_nothing_comes_back_from_a_gradient_of_noise(method, activation, row):
    """Noise of each layer's true size: the result must not beat the mean image, which needs no gradient."""
    net, true, target = build(activation), INPUTS[row : row + 1], TARGETS[row : row + 1]
    real = leak_gradient(net, true, target)
    noise = {
        name: torch.randn(g.shape, generator=generator(row, name)) * g.square().mean().sqrt()
        for name, g in real.gradients.items()
    }
    found = search(Leak(net, noise, real.loss), Search(method, 60 if method == "cosine" else 20, 1), target)
    mean = IMAGES.pixels(INPUTS.mean(0, keepdim=True))
    assert psnr(IMAGES.pixels(found.inputs), true) <= psnr(mean, true)


def test_signs_of_pixels_gradients_find_images_behind_relu():
    """A dense first layer's gradient determines its input up to a factor, whatever the activation."""
    net = built(lambda: nn.Sequential(nn.Flatten(), mlp(64, 10, layers=1, hidden=100)), dtype=torch.float32)
    leak = leak_gradient(net, INPUTS[:1], TARGETS[:1])
    found = search(leak, Search("cosine", 300, 1, smooth=1e-4), TARGETS[:1]).inputs
    assert psnr(found, INPUTS[:1])[0] > 30
    assert ssim(found, INPUTS[:1])[0] > 0.95
    assert ((found >= 0) & (found <= 1)).all()


def test_a_batch_comes_back_in_some_order():
    leak = leak_gradient(build("sigmoid"), INPUTS[:2], TARGETS[:2])
    labels = torch.tensor(batch_labels(leak, 2, INPUTS[100:132]))
    assert labels.tolist() == sorted(TARGETS[:2].tolist())
    pixels = IMAGES.pixels(search(leak, Search("idlg", 150, 2), labels, 2).inputs)
    assert min(psnr(pixels[match(pixels, INPUTS[:2])], INPUTS[:2])) > 30


def test_distances_are_those_of_plain_loops_over_the_elements_that_were_received():
    random, shapes = chance(), {"w": (3, 2), "b": (4,)}
    a, b = ({name: torch.randn(shape, generator=random) for name, shape in shapes.items()} for _ in range(2))
    mask = {"w": torch.tensor([[True, False], [True, True], [False, True]]), "b": torch.ones(4, dtype=torch.bool)}
    for chosen in (None, mask):
        kept = [(chosen or {}).get(name, torch.ones(shape, dtype=torch.bool)) for name, shape in shapes.items()]
        xs, ys = ([float(v) for g, k in zip(own.values(), kept, strict=True) for v in g[k]] for own in (a, b))
        gap, inner = math.dist(xs, ys) ** 2, sum(map(float.__mul__, xs, ys))
        sizes = [math.hypot(*values) for values in (xs, ys)]
        assert float(squared_distance(a, b, chosen)) == pytest.approx(gap, rel=1e-5)
        assert float(cosine_distance(a, b, chosen)) == pytest.approx(1 - inner / (sizes[0] * sizes[1]), rel=1e-5)
    assert float(cosine_distance(a, {name: 7 * g for name, g in a.items()}, None)) == pytest.approx(0, abs=1e-6)


def test_settings_that_do_not_fit_are_refused():
    leak = leak_gradient(build("relu"), INPUTS[:1], TARGETS[:1])
    for call, why in (
        (lambda: Search("magic"), "there is no method 'magic'"),
        (lambda: search(leak, Search("cosine")), "cosine needs labels"),
        (lambda: search(leak, Search("dlg"), torch.tensor([0])), "dlg does not accept labels"),
    ):
        with pytest.raises(BadArgument, match=why):
            call()
