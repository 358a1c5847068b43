"""What export copies, and what its errors say about users' code."""

import logging
import threading
import warnings

import pytest
import torch
from tests.oracle import Network, assert_close, batch, built, plain, recovery_error
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import fedveil
from fedveil.errors import BadArgument, FedveilError, NotTraceable
from fedveil.graph.export import silence_torch


def pruned():
    model = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def weight_normed():
    with warnings.catch_warnings(action="ignore"):
        model = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
        nn.utils.weight_norm(model[0])
    return model


@pytest.mark.parametrize("build", [pruned, weight_normed])
@pytest.mark.filterwarnings("ignore:.*sent unchanged")
def test_weights_that_a_hook_computes_are_copied(build):
    model, (inputs, targets) = build(), batch((4,), 3)
    perturbation = fedveil.Veil().perturb(model, fedveil.analyse(model, inputs))
    fedveil.client_view(model, perturbation.broadcast)
    found = perturbation.recover([fedveil.client_step(model, perturbation.broadcast, inputs, targets)]).gradients
    with torch.no_grad():
        model(inputs)  # so that the oracle can copy the model
    assert_close(found, plain(model, inputs, targets)[0])


class Inner(nn.Module):
    def forward(this, x):
        return x[{}["missing"]]


def limited():
    def run(model, x):
        assert len(x) < 5, "too many"
        return model.head(x)

    return Network(run, head=nn.Linear(4, 3))


def test_an_error_shows_one_line_of_the_users_code_and_no_graph():
    model = nn.Sequential(nn.Linear(4, 4), Inner())
    with pytest.raises(NotTraceable) as error:
        fedveil.analyse(model, torch.zeros(2, 4))
    assert str(error.value).startswith("1 (Inner), test_export.py:")
    assert 'return x[{}["missing"]]' in str(error.value)
    assert error.value.__suppress_context__


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Network(lambda m, x: m.head(x).mean(), head=nn.Linear(4, 3)), "one number for the whole batch"),
        (Network(lambda m, x: m.head(x), head=nn.Linear(4, 3), lock=torch.ops), "it cannot be copied"),
        (nn.Linear, "model must be a torch.nn.Module, got <class"),
    ],
    ids=["scalar", "copy", "class"],
)
def test_models_that_raised_other_exceptions_are_refused(model, text):
    with pytest.raises(FedveilError, match=f"{text}.*\n  Fix: "):
        fedveil.analyse(model, torch.zeros(2, 4))


def test_a_batch_for_which_forward_fails_is_refused_by_every_entry_point():
    model, (inputs, targets) = limited().double(), batch((4,), 3)
    broadcast = fedveil.Veil().perturb(model, fedveil.analyse(model, inputs)).broadcast
    for call in (
        lambda: fedveil.client_step(model, broadcast, inputs, targets),
        lambda: fedveil.client_step(model, broadcast, inputs[:2, :3], targets[:2]),
        lambda: fedveil.Federation(model, [(inputs, targets)]).step(),
        lambda: fedveil.Federation(model, [(inputs[:, :3], targets)]),
    ):
        with pytest.raises(FedveilError, match=r"(too many|shape|mat1|size|reduction).*\n  Fix: "):
            call()


def checkpointed(m, x):
    """A head inside a checkpoint, and an operation that follows it."""
    return checkpoint(lambda x: torch.tanh(m.head(x)), m.body(x).relu(), use_reentrant=False)


def test_a_checkpoint_around_the_head_runs_again_with_the_noise_subtracted():
    model = built(lambda: Network(checkpointed, body=nn.Linear(4, 6), head=nn.Linear(6, 3)))
    inputs, targets = batch((4,), 3)
    assert fedveil.analyse(model, inputs).head.path == "head"
    assert recovery_error(model, inputs, targets, groups=2, additive=1e3, multiplicative=10.0) < 1e-9


def test_a_checkpoint_that_calls_a_function_of_the_heads_weight_is_refused():
    def run(m, x):
        return checkpoint(
            lambda x: nn.functional.linear(x, m.head.weight).tanh(), m.body(x).relu(), use_reentrant=False
        )

    model = built(lambda: Network(run, body=nn.Linear(4, 6), head=nn.Linear(6, 3, bias=False)))
    with pytest.raises(BadArgument, match=r"backward pass fails: torch.utils.checkpoint.*\n  Fix: do not checkpoint"):
        fedveil.Federation(model, [batch((4,), 3)]).step()


def test_threads_that_analyse_at_the_same_time_leave_logging_as_it_was():
    entered, joined, left = threading.Event(), threading.Event(), threading.Event()

    def first():
        with silence_torch():
            entered.set()
            joined.wait(0.3)  # the second cannot enter before this thread has left
        left.set()

    def second():
        entered.wait(10)
        with silence_torch():
            joined.set()
            left.wait(10)

    threads = [threading.Thread(target=call) for call in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert logging.root.manager.disable == logging.NOTSET
