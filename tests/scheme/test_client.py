"""A client refuses what it cannot compute exactly; the perceptron's side-by-side passes are autograd's."""

import pytest
import torch
from tests.oracle import batch, built, perturb, plain, veiled_round, worst
from torch import nn

import fedveil
from fedveil import errors
from fedveil.models import mlp
from fedveil.scheme.client import find_layer_paths


@pytest.fixture
def model():
    return built(lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)))


@pytest.fixture
def broadcast(model):
    return perturb(model, fedveil.analyse(model, torch.zeros(1, 5).double())).broadcast


def test_a_clients_model_must_match_the_broadcast(model, broadcast):
    inputs, targets = batch((5,), 3)
    other = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    with pytest.raises(
        errors.ModelMismatch, match=r"0.weight: the broadcast has shape \(6, 5\), but the model has shape \(7, 5\)"
    ):
        fedveil.client_step(other, broadcast, inputs, targets)
    model[1].eval()
    with pytest.raises(errors.ModelMismatch, match=r"(?s)^1: .* in train mode.*get_submodule\('1'\).train"):
        fedveil.client_step(model, broadcast, inputs, targets)
    with pytest.raises(errors.ModelMismatch, match=r"(?s)Sequential: .* in train mode.*Fix: call model.train\(\)"):
        fedveil.client_step(model.eval(), broadcast, inputs, targets)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x, y: (x[:0], y[:0]), "got 0 inputs and 0 targets; their numbers must be equal and at least 1"),
        (lambda x, y: (x, y[:5]), "6 inputs and 5 targets"),
        (lambda x, y: (x, torch.zeros(6).long()), r"(?s)shape is \(6,\).* have shape \(6, 3\).*one_hot\(targets, 3\)"),
        (lambda x, y: (x, torch.zeros(6)), r"(?s)shape is \(6,\).*Fix: use targets of shape .*targets.long\(\) for cl"),
        (lambda x, y: (x, y[:, :2]), r"(?s)shape is \(6, 2\).*Fix: use targets of shape \(6, 3\)"),
    ],
)
def test_batches_that_do_not_fit_are_refused(model, broadcast, change, text):
    with pytest.raises(errors.BadArgument, match=text):
        fedveil.client_step(model, broadcast, *change(*batch((5,), 3)))


def test_a_step_without_gradients_is_refused(model, broadcast):
    with (
        torch.inference_mode(),
        pytest.raises(errors.BadArgument, match=r"(?s)client_step: torch\.inf.*Fix: call client_step"),
    ):
        fedveil.client_step(model, broadcast, *batch((5,), 3))


class Same(nn.Sequential):
    """A subclass, which takes the general path."""


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("frozen", [(), (0,), (2, 6)])
def test_a_chain_gives_the_passes_that_autograd_gives(bias, groups, frozen):
    chain = built(lambda: mlp(5, 4, layers=3, hidden=7, bias=bias))
    for number in frozen:
        chain[number].requires_grad_(False)
    general = Same(*chain)
    inputs, targets = batch((5,), 4)
    names = {name for name, _ in chain.named_parameters()}
    assert find_layer_paths(chain, inputs, names) == ["0", None, "2", None, "4", None, "6"]
    assert find_layer_paths(general, inputs, names) is None
    broadcast = perturb(chain, fedveil.analyse(chain, inputs), groups=groups).broadcast
    found, expected = (fedveil.client_step(net, broadcast, inputs, targets) for net in (chain, general))
    assert list(found.passes) == list(expected.passes)
    for number in range(groups + 2):
        passes, truth = ({name: stack[number] for name, stack in u.passes.items()} for u in (found, expected))
        assert worst(passes, truth) < 1e-9  # a float64 rounding error, and the 1e-6 floor of a pass that is 0


def hooked():
    model = mlp(5, 4)
    model[1].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4)), (2, 5)),
        (nn.Sequential(nn.Sequential(nn.Linear(5, 5)), nn.ReLU(), nn.Linear(5, 4)), (2, 5)),
        (nn.Linear(5, 4), (2, 5)),
        (mlp(5, 4), (2, 3, 5)),
        (hooked(), (2, 5)),
    ],
)
def test_other_networks_and_inputs_take_the_general_path(model, shape):
    assert find_layer_paths(model, torch.zeros(shape), set(model.state_dict())) is None


def twice():
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(5, 4))


def shared(name):
    def build():
        model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 4))
        setattr(model[2], name, getattr(model[0], name))
        return model

    return build


@pytest.mark.parametrize("build", [twice, shared("weight"), shared("bias")], ids=["module", "weight", "bias"])
def test_a_stack_that_shares_a_module_or_a_tensor_is_exact(build):
    model = built(build)
    inputs, targets = batch((5,), 4)
    assert worst(veiled_round(model, inputs, targets, seed=0).gradients, plain(model, inputs, targets)[0]) < 1e-9
