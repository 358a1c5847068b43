"""Gradient inversion wins where a gradient leaks, and finds nothing where it does not."""

import math

import pytest
import torch
from torch import nn

from fedveil.attacks.gradients import Search, cosine_distance, reconstruct, squared_distance
from fedveil.attacks.labels import batch_labels, single_label
from fedveil.attacks.leaks import Leak, gradients_of
from fedveil.attacks.similarity import match, psnr, ssim
from fedveil.data import load
from fedveil.errors import BadArgument
from fedveil.models import lenet, mlp
from fedveil.records.shards import generator
from fedveil.scheme import find_loss

BOX = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)


@pytest.fixture(scope="module")
def digits():
    return load("digits", flat=False)


def net_of(activation, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return lenet(1, 10, size=8, activation=activation)


def leak_of(net, inputs, targets, loss="cross_entropy"):
    return Leak(net, gradients_of(net, find_loss(loss), inputs, targets), find_loss(loss))


def floor_of(data, inputs):
    return psnr(data.pixels(data.train.inputs.mean(0, keepdim=True)).expand_as(inputs), inputs)


def search(leak, shape, how, labels=None, seed=0):
    return reconstruct(leak, shape, how, classes=10, generator=generator(seed), labels=labels, box=BOX)


@pytest.mark.parametrize("method", ["dlg", "idlg"])
def test_one_image_comes_back_from_an_undefended_gradient(digits, method):
    x, y = digits.train.inputs[:1], digits.train.targets[:1]
    leak = leak_of(net_of("sigmoid"), x, y)
    labels = None if method == "dlg" else torch.tensor([single_label(leak)])
    found = search(leak, (1, 1, 8, 8), Search(method, 100, 2), labels)
    assert psnr(digits.pixels(found.inputs), x)[0] > 30
    assert found.labels.tolist() == y.tolist()
    assert found.distance == min(found.distances)
    assert len(found.distances) == 2


@pytest.mark.parametrize(("method", "activation"), [("idlg", "sigmoid"), ("cosine", "relu")])
def test_nothing_comes_back_from_a_gradient_of_noise(digits, method, activation):
    """Noise of each layer's true size: what is found must not beat the mean image, which needs no gradient."""
    x, y = digits.train.inputs[:3], digits.train.targets[:3]
    net = net_of(activation)
    better = 0
    for number in range(3):
        real = leak_of(net, x[number : number + 1], y[number : number + 1])
        noise = {
            name: torch.randn(g.shape, generator=generator(number, name)) * g.square().mean().sqrt()
            for name, g in real.gradients.items()
        }
        how = Search(method, 60 if method == "cosine" else 20, 1)
        found = search(Leak(net, noise, real.loss), (1, 1, 8, 8), how, y[number : number + 1])
        better += psnr(digits.pixels(found.inputs), x[number : number + 1]) > floor_of(digits, x[number : number + 1])
    assert better == 0


def test_signs_of_pixels_slopes_find_images_behind_relu(digits):
    """A dense first layer's gradient determines its input up to a factor, whatever the activation."""
    x, y = digits.train.inputs[:1], digits.train.targets[:1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), mlp(64, 10, layers=1, hidden=100))
    found = search(leak_of(net, x, y), (1, 1, 8, 8), Search("cosine", 300, 1, smooth=1e-4), y)
    assert psnr(found.inputs, x)[0] > 30
    assert ssim(found.inputs, x)[0] > 0.95
    assert (found.inputs >= 0).all()
    assert (found.inputs <= 1).all()


def test_a_batch_comes_back_in_some_order(digits):
    x, y = digits.train.inputs[:2], digits.train.targets[:2]
    leak = leak_of(net_of("sigmoid"), x, y)
    own = digits.train.inputs[100:132]
    labels = torch.tensor(batch_labels(leak, 2, own))
    assert labels.tolist() == sorted(y.tolist())
    found = search(leak, (2, 1, 8, 8), Search("idlg", 150, 2), labels)
    pixels = digits.pixels(found.inputs)
    assert min(psnr(pixels[match(pixels, x)], x)) > 30


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_rows_of_a_dense_first_layer_are_the_input(digits, loss):
    """dL/dW1 = delta x^T for one record: every row that is not 0 has |cosine| 1 with x, up to rounding."""
    x, y = digits.train.inputs[:1].flatten(1).double(), digits.train.targets[:1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = mlp(64, 10, layers=2, hidden=20).double()
    rows = leak_of(net, x, y, loss).gradients["0.weight"]
    rows = rows[rows.norm(dim=1) > 0]
    assert len(rows) > 3
    cosines = torch.nn.functional.cosine_similarity(rows, x, dim=1).abs()
    assert (1 - cosines).abs().max() < 64 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
@pytest.mark.parametrize("bias", [True, False])
def test_labels_follow_from_the_head(digits, loss, bias):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = mlp(64, 10, layers=1, hidden=200, bias=bias)
    inputs, targets = digits.train.inputs.flatten(1), digits.train.targets
    singles = [leak_of(net, inputs[k : k + 1], targets[k : k + 1], loss) for k in range(20)]
    assert [single_label(leak) for leak in singles] == targets[:20].tolist()
    repeated = torch.cat([targets[:4], targets[:4]])
    batch = leak_of(net, torch.cat([inputs[:4], inputs[:4]]), repeated, loss)
    assert batch_labels(batch, 8, inputs[100:]) == sorted(repeated.tolist())


def test_distances_are_what_they_are_called():
    chance = torch.Generator().manual_seed(0)
    a, b = ({"w": torch.randn(3, 2, generator=chance), "b": torch.randn(4, generator=chance)} for _ in range(2))
    flat_a, flat_b = ([float(v) for g in each.values() for v in g.flatten()] for each in (a, b))
    gap = sum((x - y) ** 2 for x, y in zip(flat_a, flat_b, strict=True))
    assert float(squared_distance(a, b, None)) == pytest.approx(gap, rel=1e-5)
    inner = sum(x * y for x, y in zip(flat_a, flat_b, strict=True))
    sizes = [math.sqrt(sum(x * x for x in each)) for each in (flat_a, flat_b)]
    assert float(cosine_distance(a, b, None)) == pytest.approx(1 - inner / (sizes[0] * sizes[1]), rel=1e-5)
    assert float(cosine_distance(a, {n: 7 * g for n, g in a.items()}, None)) == pytest.approx(0, abs=1e-6)


def test_what_was_not_received_does_not_count():
    chance = torch.Generator().manual_seed(0)
    a = {"w": torch.randn(3, 2, generator=chance)}
    mask = {"w": torch.tensor([[True, False], [True, True], [False, True]])}
    b = {"w": torch.where(mask["w"], a["w"], 100.0)}
    for distance in (squared_distance, cosine_distance):
        assert float(distance(a, b, mask)) == pytest.approx(0, abs=1e-6)
        assert float(distance(a, b, None)) > 0.1


def test_what_cannot_be_searched_is_refused(digits):
    leak = leak_of(net_of("relu"), digits.train.inputs[:1], digits.train.targets[:1])
    with pytest.raises(BadArgument, match="there is no method 'magic'"):
        Search("magic")
    with pytest.raises(BadArgument, match="cosine needs labels"):
        search(leak, (1, 1, 8, 8), Search("cosine"))
    with pytest.raises(BadArgument, match="dlg finds its own labels"):
        search(leak, (1, 1, 8, 8), Search("dlg"), torch.tensor([0]))
