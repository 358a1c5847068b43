"""Models that depend on the sizes of a batch: their plan holds, is made again, or the batch is refused by name."""

import dataclasses

import pytest
import torch
from tests import users
from tests.oracle import Network, assert_close, batch, built, plain
from torch import nn

import fedveil
from fedveil.errors import FedveilError, NotExact
from fedveil.graph import guards
from fedveil.graph.inputs import describe_form
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
    with pytest.raises(NotExact, match="Network: its forward method behaves differently with 6 samples than with 2"):
        step(model, plan, inputs, targets)
    with pytest.raises(NotExact, match="behaves differently with 6 samples"):
        fedveil.Federation(model, [(inputs, targets)]).fit(1)


def test_a_length_for_which_forward_does_something_else_is_refused():
    model, (inputs, targets) = branching(1, 3), batch((5, 4), 3)
    plan = fedveil.analyse(model, inputs[:, :3])
    for length in (3, 2):
        found = step(model, plan, inputs[:, :length], targets)
        assert_close(found, plain(model, inputs[:, :length], targets)[0])
    with pytest.raises(
        NotExact, match=r"behaves differently with inputs .*nx5x4 than with .*nx3x4.*\n  Fix: .*pad all"
    ):
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


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1e-3, 1e-3)


def test_padding_of_another_length_and_frozen_local_parameters_are_checked_and_exact():
    model = built(users.Encoder)
    model.embed.requires_grad_(False)
    model.hidden.requires_grad_(False)
    plan = fedveil.analyse(model, users.batch(2, 6), frozen="local")
    inputs, targets = users.batch(3, 4), torch.tensor([0, 2, 1])
    perturbation = fedveil.Veil(frozen="local").start(plan, "cross_entropy").perturb(model)
    broadcast = perturbation.broadcast
    found = perturbation.recover([fedveil.client_step(model, broadcast, inputs, targets)]).gradients
    loss = torch.nn.functional.cross_entropy(model(**inputs), targets)
    leaves = {name: own for name, own in model.named_parameters() if own.requires_grad}
    assert_close(found, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)))
    with pytest.raises(NotExact, match="behaves differently with inputs"):
        fedveil.client_step(model, dataclasses.replace(broadcast, local=False), users.batch(3, 5), targets)


def test_the_form_of_a_mapping_has_no_values():
    assert describe_form(users.batch(2, 6, seed=0)) == describe_form(users.batch(3, 6, seed=1))
    assert describe_form(users.batch(2, 6)) != describe_form(users.batch(2, 5))


def test_a_user_defined_backward_pass_is_found_behind_a_mapping_of_outputs():
    model = built(lambda: users.Encoder(lambda logits, features: users.Encoding(logits=Clamp.apply(logits))))
    with pytest.raises(NotExact, match=r"the backward pass of Clamp is user-defined"):
        fedveil.analyse(model, users.batch())


def test_a_batch_is_checked_once_for_all_views_of_a_model(monkeypatch):
    model = built(lambda: users.Encoder(lambda logits, features: {"a": features, "b": logits}))
    plan = fedveil.analyse(model, users.batch(), output="b")
    perturbation = fedveil.Veil().start(plan, "cross_entropy").perturb(model)
    calls, own = [], guards.probe
    monkeypatch.setattr(guards, "probe", lambda *given: calls.append(given) or own(*given))
    for _ in range(2):
        fedveil.client_step(model, perturbation.broadcast, users.batch(3), torch.tensor([0, 1, 2]))
    assert len(calls) == 3


def test_a_replaced_forward_that_returns_several_tensors_is_refused():
    model = built(users.Encoder)
    plain_forward = model.forward
    model.forward = lambda *args, **kwargs: {"aux": torch.ones(2, 3), "logits": plain_forward(*args, **kwargs)}
    with pytest.raises(FedveilError, match="replaced forward"):
        fedveil.analyse(model, users.batch(2))
