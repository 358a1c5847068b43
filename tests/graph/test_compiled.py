"""Compiled models train as their originals do."""

import warnings

import pytest
import torch
from tests.oracle import assert_close, built
from torch import nn

import fedveil


def net():
    return built(lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)))


def compiled_in_place():
    model = net()
    model.compile(backend="eager")
    return model


def compiled_inside():
    model = net()
    model[0] = torch.compile(model[0], backend="eager")
    return model


@pytest.mark.parametrize(
    "make",
    [lambda: torch.compile(net(), backend="eager"), compiled_in_place, compiled_inside],
    ids=["a wrapper", "in place", "a layer"],
)
def test_a_compiled_model_trains_as_its_original_with_a_note(make):
    records = torch.randn(6, 1, 4, 4, dtype=torch.float64), torch.arange(6) % 2
    ends = []
    for model, defence in ((make(), "veil"), (net(), "plain")):
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            fedveil.Federation(model, [records], defence, lambda p: torch.optim.SGD(p, lr=0.1)).fit(2)
        ends.append({name.replace("_orig_mod.", ""): p.detach() for name, p in model.named_parameters()})
        assert any("run without the compiled code" in str(note.message) for note in notes) == (defence == "veil")
    assert_close(*ends)


def test_each_step_by_hand_accepts_a_compiled_model():
    model, inputs = torch.compile(net(), backend="eager"), torch.randn(6, 1, 4, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="compiled"):
        plan = fedveil.analyse(model, inputs)
    perturbation = fedveil.Veil().perturb(model, plan, "cross_entropy")
    update = fedveil.client_step(model, perturbation.broadcast, inputs, torch.arange(6) % 2)
    assert perturbation.recover([update]).gradients.keys() == dict(net().named_parameters()).keys()
    assert type(fedveil.client_view(model, perturbation.broadcast)) is nn.Sequential
