"""A client refuses a broadcast that is not for its model, batches without a gradient, and modes that lose digits."""

import pytest
import torch
from tests.oracle import batch, built, perturb
from torch import nn

import fedveil
from fedveil import errors


@pytest.fixture
def model():
    return built(lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)))


@pytest.fixture
def broadcast(model):
    return perturb(model, fedveil.analyse(model, torch.zeros(1, 5).double())).broadcast


def test_a_clients_model_must_match_the_broadcast(model, broadcast):
    inputs, targets = batch((5,), 3)
    other = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    with pytest.raises(errors.ModelMismatch, match=r"0.weight: the broadcast has \(6, 5\), the model \(7, 5\)"):
        fedveil.client_step(other, broadcast, inputs, targets)
    model[1].eval()
    with pytest.raises(
        errors.ModelMismatch, match=r"(?s)^1: .* train mode here.*call model.get_submodule\('1'\).train"
    ):
        fedveil.client_step(model, broadcast, inputs, targets)
    with pytest.raises(errors.ModelMismatch, match=r"(?s)Sequential: .* train mode here.*Fix: call model.train\(\)"):
        fedveil.client_step(model.eval(), broadcast, inputs, targets)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x, y: (x[:0], y[:0]), "0 inputs and 0 targets: there must be equally many, at least 1"),
        (lambda x, y: (x, y[:5]), "6 inputs and 5 targets"),
        (lambda x, y: (x, torch.zeros(6).long()), r"(?s)shape is \(6,\).* have \(6, 3\).*one_hot\(targets, 3\)"),
        (lambda x, y: (x, torch.zeros(6)), r"(?s)shape is \(6,\).*Fix: use targets of shape .*targets.long\(\) for cl"),
        (lambda x, y: (x, y[:, :2]), r"(?s)shape is \(6, 2\).*Fix: use targets of shape \(6, 3\)"),
    ],
)
def test_batches_that_do_not_fit_are_refused(model, broadcast, change, text):
    with pytest.raises(errors.BadArgument, match=text):
        fedveil.client_step(model, broadcast, *change(*batch((5,), 3)))


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_without_exact_gradients_are_refused(model, broadcast, mode):
    with mode(), pytest.raises(errors.BadArgument, match=r"(?s)client_step: torch\.(inf|aut).*Fix: call it outside"):
        fedveil.client_step(model, broadcast, *batch((5,), 3))
