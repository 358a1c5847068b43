"""The paper's networks have their shapes, and a veil covers them whole."""

import pytest
import torch

import fedveil
from fedveil.errors import BadArgument
from fedveil.models import cnn, lenet, mlp, resnet

IMAGE = torch.zeros(2, 3, 32, 32)


@pytest.mark.parametrize("layers", [3, 5, 7])
def test_an_mlp_has_its_layers_and_is_covered_whole(layers):
    net = mlp(48, 1, layers=layers, hidden=50, bias=False)
    assert sum(p.numel() for p in net.parameters()) == 48 * 50 + (layers - 1) * 2500 + 50
    plan = fedveil.analyse(net, torch.zeros(2, 48))
    assert plan.coverage == 1
    assert [(a.size, a.symmetry.words) for a in plan.axes] == [(50, "positive")] * layers


PARAMETERS = {8: 75_290, 20: 269_722, 32: 464_154, 44: 658_586, 56: 853_018}


@pytest.mark.parametrize("kind", [*PARAMETERS, cnn])
def test_networks_have_the_papers_sizes_and_a_veil_covers_them_whole(kind):
    net = resnet(kind) if kind in PARAMETERS else kind()
    if kind in PARAMETERS:
        assert sum(p.numel() for p in net.parameters()) == PARAMETERS[kind]
    assert net(IMAGE).shape == (2, 10)
    plan = fedveil.analyse(net, IMAGE)
    assert plan.coverage == 1
    assert not plan.pinned
    for shortcut in ("A", "B") if kind == 20 else ():
        plan = fedveil.analyse(resnet(20, norm="none", shortcut=shortcut), IMAGE)
        assert plan.coverage == 1
        assert {axis.symmetry.words for axis in plan.axes} == {"positive"}


@pytest.mark.parametrize(("activation", "symmetry"), [("relu", "positive"), ("sigmoid", "pinned")])
def test_the_network_of_dlg_has_its_size_and_sigmoids_take_permutations_only(activation, symmetry):
    net = lenet(activation=activation)
    assert sum(p.numel() for p in net.parameters()) == (75 + 300 + 300 + 3) * 12 + 7690
    assert net(IMAGE).shape == (2, 10)
    plan = fedveil.analyse(net, IMAGE)
    assert plan.coverage == 1  # by permutations and the head's noise, where no factor goes through
    assert {axis.symmetry.words for axis in plan.axes} == {symmetry}
    if activation == "sigmoid":
        assert max(float(p.detach().abs().max()) for p in net.parameters()) <= 0.5


def test_what_cannot_be_built_is_refused():
    calls = {
        "there is no activation 'tanh'": lambda: lenet(activation="tanh"),
        "depth must be one of 8, 20, 32, 44, 56, got 18": lambda: resnet(18),
        'norm must be "batch" or "none"': lambda: resnet(20, norm="layer"),
        "layers must be an integer of at least 1, got 0": lambda: mlp(3, 1, layers=0),
    }
    for text, call in calls.items():
        with pytest.raises(BadArgument, match=text):
            call()
