"""Models that depend on the sizes of a batch: their plan holds, is made again, or the batch is refused by name."""

import pytest
import torch
from tests.oracle import Network, assert_close, batch, built, plain
from torch import nn

import fedveil
from fedveil.errors import NotExact
from fedveil.graph.probe import agree


def branching(dim, limit):
    """A network whose activation depends on the size of a dim."""

    def run(model, x):
        hidden = model.body(x)
        hidden = torch.relu(hidden) if x.shape[dim] <= limit else torch.tanh(hidden)
        return model.head(hidden.flatten(1, -2).mean(1) if hidden.dim() > 2 else hidden)

    return built(lambda: Network(run, body=nn.Linear(4, 8), head=nn.Linear(8, 3)))


def step(model, plan, inputs, targets):
    perturbation = fedveil.Veil().perturb(model, plan)
    return perturbation.recover([fedveil.client_step(model, perturbation.broadcast, inputs, targets)]).gradients


def test_a_batch_size_for_which_forward_does_something_else_is_refused():
    model, (inputs, targets) = branching(0, 3), batch((4,), 3)
    plan = fedveil.analyse(model, inputs)
    found = step(model, plan, inputs[:3], targets[:3])
    assert_close(found, plain(model, inputs[:3], targets[:3])[0])
    with pytest.raises(NotExact, match="Network: its forward method does something else with 6 samples than with 2"):
        step(model, plan, inputs, targets)
    with pytest.raises(NotExact, match="something else with 6 samples"):
        fedveil.Federation(model, [(inputs, targets)]).fit(1)


def test_a_length_for_which_forward_does_something_else_is_refused():
    model, (inputs, targets) = branching(1, 3), batch((5, 4), 3)
    plan = fedveil.analyse(model, inputs[:, :3])
    for length in (3, 2):
        found = step(model, plan, inputs[:, :length], targets)
        assert_close(found, plain(model, inputs[:, :length], targets)[0])
    with pytest.raises(NotExact, match=r"something else with inputs .*nx5x4 than with .*nx3x4.*\n  Fix: .*pad all"):
        step(model, plan, inputs, targets)
    step(model, fedveil.analyse(model, inputs), inputs, targets)  # what the fix says


@pytest.mark.filterwarnings("ignore:.*sent unchanged")
def test_sizes_that_do_not_change_the_plan_are_accepted():
    def run(model, x):
        state = torch.zeros(len(x), 5, dtype=x.dtype)
        for part in x.unbind(1):
            state = torch.relu(model.body(part) + model.again(state))
        return model.head(state) / len(x)

    model = built(lambda: Network(run, body=nn.Linear(4, 5), again=nn.Linear(5, 5), head=nn.Linear(5, 3)))
    inputs, targets = batch((3, 4), 3)
    plan = fedveil.analyse(model, inputs)
    for samples, length in ((6, 3), (1, 3), (6, 2)):
        part = inputs[:samples, :length], targets[:samples]
        assert_close(step(model, plan, *part), plain(model, *part)[0])


def test_integers_agree_only_if_they_differ_by_multiples_of_the_sizes_difference():
    one, other = [("view", "x", 2, 10)], [("view", "x", 99, 10)]
    assert agree(one, other, 97)
    assert not agree(one, [("view", "x", 98, 10)], 97)
    assert not agree(one, [("view", "y", 2, 10)], 97)
    assert not agree(one, [*one, *one], 97)
    assert not agree([("scale", "x", 0.5)], [("scale", "x", 0.25)], 97)
