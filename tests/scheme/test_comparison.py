"""The comparison of a recovered gradient with a plain one: it finds what nothing else does, and nothing secret."""

import pytest
import torch
from tests.oracle import Network, batch, built
from torch import nn

import fedveil
from fedveil.errors import NotExact
from fedveil.graph import Symmetry
from fedveil.graph.rules import elementwise
from fedveil.models import resnet
from fedveil.scheme.comparison import check_exact


def counting():
    """A network that clamps gradients without a hook: its activation depends on how often it was called."""

    def run(model, x):
        model.calls += 1
        hidden = model.body(x)
        return model.head(torch.relu(hidden) if model.calls <= model.limit else torch.tanh(hidden))

    model = built(lambda: Network(run, body=nn.Linear(4, 8), head=nn.Linear(8, 3)))
    model.calls, model.limit = 0, 10**9
    return model


def difference(model, inputs, targets, loss="squared_error"):
    perturbation = fedveil.Veil().perturb(model, fedveil.analyse(model, inputs), loss)
    return check_exact(perturbation, model, inputs, targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
def test_the_difference_of_a_residual_network_is_explained_by_rounding(dtype, loss):
    model, (inputs, targets) = built(lambda: resnet(8), dtype=dtype), batch((3, 16, 16), dtype=dtype)
    found = difference(model, inputs, targets if loss == "squared_error" else targets.argmax(1), loss)
    assert found is not None
    assert 0 < found.value <= found.rounding < 1e-2


@pytest.mark.filterwarnings("ignore:.*sent unchanged")
def test_random_layers_are_compared_with_constants_in_place_of_their_draws():
    def run(model, x):
        hidden = nn.functional.dropout(torch.relu(model.body(x)), 0.5)
        return model.head(hidden + 0.1 * torch.randn_like(hidden) * torch.rand(1, dtype=x.dtype))

    model = built(lambda: Network(run, body=nn.Linear(4, 8), head=nn.Linear(8, 3)))
    state = torch.get_rng_state()
    assert difference(model, *batch((4,), 3)) is not None
    assert torch.equal(torch.get_rng_state(), state)  # the run's own draws do not change


def test_random_operations_that_cannot_be_fixed_are_not_judged():
    model = built(lambda: nn.Sequential(nn.Linear(4, 8), nn.RReLU(), nn.Linear(8, 3)))
    assert difference(model, *batch((4,), 3)) is None


def test_a_federation_stops_in_its_first_round_with_both_figures():
    model, records = counting(), batch((4,), 3)
    federation = fedveil.Federation(model, [records])
    model.limit = model.calls
    with pytest.raises(NotExact, match=r"differs .* by 0\.\d+ of its norm, but rounding .* most \d.*e-1"):
        federation.step()


def test_the_message_is_the_same_whatever_the_noise_except_for_the_figures():
    found = set()
    for _ in range(3):
        model, records = counting(), batch((4,), 3)
        federation = fedveil.Federation(model, [records])
        model.limit = model.calls
        with pytest.raises(NotExact) as error:
            federation.step()
        words = [word for word in str(error.value).split() if not any(digit in word for digit in "0123456789")]
        found.add((" ".join(words), len(str(error.value).split()) - len(words)))
    assert len(found) == 1
    assert found.pop()[1] == 2


def test_training_is_the_same_with_and_without_the_comparison():
    ends = []
    for compared in (False, True):
        torch.manual_seed(0)
        model = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)))
        entropy = fedveil.Entropy.for_tests(1)
        federation = fedveil.Federation(model, [batch((4,), 3)], fedveil.Veil(entropy=entropy))
        federation._compared = not compared
        federation.fit(rounds=2)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


def test_a_wrong_rule_is_found(monkeypatch):
    monkeypatch.setitem(elementwise.SYMMETRIES, "tanh", Symmetry.POSITIVE)
    model, records = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))), batch((4,), 3)
    with pytest.raises(NotExact, match="differs from the plain one"):
        fedveil.Federation(model, [records]).step()
