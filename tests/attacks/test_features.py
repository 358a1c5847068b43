"""The last layers of any network, and what comes with them."""

import pytest
import torch
from benchmarks.networks.mobile import densenet
from tests.attacks.victims import chance
from tests.oracle import built
from tests.sessions import Session
from torch import nn
from torch.nn import functional as F

from fedveil.attacks.features import layer_outputs, losses, record_features
from fedveil.defences import DBCL, SPN, Veil
from fedveil.models import cnn, mlp, resnet
from fedveil.scheme import CrossEntropy, SquaredError

IMAGES = torch.randn(7, 3, 16, 16, generator=chance(1))
ROWS = torch.randn(4, 6, generator=chance())
CLASSES = torch.tensor([0, 3, 1, 2, 4, 0, 1])


def made(build):
    return built(build, dtype=torch.float32)


def test_layers_are_hidden_activations_of_rows_and_of_sequences():
    net = made(lambda: mlp(6, 5, layers=3, hidden=8))
    for found, module in zip(layer_outputs(net, ROWS), (net, net[:6], net[:4]), strict=True):
        assert torch.allclose(found, module(ROWS))
    net, x = net[4:], torch.randn(4, 9, 8, generator=chance())
    for found, module in zip(layer_outputs(net, x), (net, net[:2]), strict=True):
        assert torch.allclose(found, module(x))
    assert layer_outputs(net, x.repeat(1, 20, 1))[1].shape == (4, 64, 8)  # at most 64 steps


def test_layers_of_a_resnet_are_its_maps_and_their_mean():
    net = made(lambda: resnet(8, 3, 5, width=4)).train()
    last, second, third = layer_outputs(net, IMAGES, batch_size=3)
    assert net.training
    net.eval()
    maps = net.stages(F.relu(net.norm(net.conv(IMAGES))))
    assert torch.allclose(last, net(IMAGES), atol=1e-6)
    assert torch.allclose(second, maps.mean((2, 3)), atol=1e-6)
    assert third.shape == (7, 16, 4, 4)


def test_maps_that_a_network_flattens_stay_maps_up_to_eight_by_eight():
    net = made(lambda: cnn(3, 5, width=4, size=16))
    _, second, third = layer_outputs(net, IMAGES)
    assert torch.allclose(third, net[:8](IMAGES), atol=1e-6)
    assert torch.allclose(second, net[:11](IMAGES), atol=1e-6)
    large = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(2 * 256, 5))
    found = record_features(large, IMAGES, CLASSES, SquaredError())
    assert torch.allclose(found["second"], F.avg_pool2d(large[0](IMAGES), 2), atol=1e-6)  # of 16 x 16
    assert found["gradient"].shape == (7, 5, 2 * 256 + 1)  # of what the Linear takes in, not of averaged maps


@pytest.mark.parametrize("build", [lambda: cnn(3, 5, width=4, size=16), lambda: densenet(5), lambda: resnet(8, 3, 5)])
@pytest.mark.parametrize("defence", [Veil, DBCL, SPN])
def test_views_of_every_defence_have_three_layers_and_a_head(build, defence):
    net, chosen = made(build), defence()
    view = chosen.client_view(net, Session(chosen, net, IMAGES[:2]).broadcast())
    found = record_features(view, IMAGES, CLASSES, SquaredError())
    assert list(found) == ["last", "second", "third", "label", "loss", "gradient"]
    assert all(len(values) == 7 and torch.isfinite(values).all() for values in found.values())
    assert found["label"].argmax(1).tolist() == CLASSES.tolist()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in view.modules())


@pytest.mark.parametrize("loss", [CrossEntropy(), SquaredError()])
def test_the_head_gradient_is_that_of_autograd(loss):
    net = made(lambda: mlp(6, 5, layers=2, hidden=8))
    found = record_features(net, ROWS, CLASSES[:4], loss)
    for row in range(4):
        value = losses(loss, net(ROWS[row : row + 1]), CLASSES[row : row + 1]).sum()
        weight, bias = torch.autograd.grad(value, [net[-1].weight, net[-1].bias])
        assert torch.allclose(found["gradient"][row], torch.cat([weight, bias.unsqueeze(1)], 1), atol=1e-6)
        assert float(found["loss"][row, 0]) == pytest.approx(float(value.detach()), rel=1e-5)


def test_shallow_networks_have_fewer_layers_and_those_that_end_otherwise_no_gradient():
    assert [len(layer_outputs(net, ROWS)) for net in (made(lambda: mlp(6, 5, layers=1)), nn.Linear(6, 5))] == [2, 1]
    softmax = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Softmax(1))
    found = record_features(softmax, ROWS, CLASSES[:4], CrossEntropy())
    assert list(found) == ["last", "second", "label", "loss"]
