"""Odd modules: `analyse`, `client_step` and `Federation` are exact, or refuse them with the reason and a fix."""

import pytest
import torch
from tests.oracle import Network, assert_close, batch, built
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import fedveil
from fedveil.errors import FedveilError


def network(forward, **extra):
    return lambda: Network(forward, body=nn.Linear(5, 6), head=nn.Linear(6, 3), **extra)


def run(model, x):
    return model.head(model.body(x).relu())


def fail(model, x):
    raise KeyError("lost")


def stack(change=lambda layer: layer, kind=nn.Linear):
    return lambda: nn.Sequential(change(kind(5, 6)), nn.ReLU(), nn.Linear(6, 3))


def write_in_place(model, x):
    y = model.body(x)
    y[:, 0] = 0
    y += 1
    y[:, 1:3] *= 2
    return model.head(y.relu())


def keep_mean(model, x):
    y = model.body(x)
    model.mean.mul_(0.9).add_(0.1 * y.mean(0).detach())
    model.seen = 0.5 * y.detach()  # an attribute
    return model.head((y - model.mean).relu())


def without_gradients(model, x):
    with torch.no_grad():
        gate = model.body(x).sigmoid()
    return model.head(model.body(x).relu() * gate)


def named(name):
    def forward(model, x):
        return model.head(model._modules[name](x).relu())

    model = Network(forward, head=nn.Linear(6, 3))
    model._modules[name] = nn.Linear(5, 6)
    return model


def with_buffer():
    return Network(keep_mean, body=nn.Linear(5, 6), head=nn.Linear(6, 3), mean=nn.Buffer(torch.zeros(6)))


def rerun(reentrant):
    return lambda m, x: checkpoint(m.head, m.body(x).relu(), use_reentrant=reentrant)


EXACT = {
    "a dict in a dict beside logits": network(lambda m, x: {"a": {"b": 2 * run(m, x)}, "logits": run(m, x)}),
    "keys that are integers": network(lambda m, x: {0: run(m, x)}),
    "layers named like methods of dict": lambda: named("items"),
    "a layer named like a parameter": lambda: named("weight"),
    "checkpoint around all": network(lambda m, x: checkpoint(lambda y: run(m, y), x, use_reentrant=False)),
    "checkpoint around the head": network(rerun(reentrant=False)),
    "checkpoint around the head, and a layer": network(lambda m, x: torch.tanh(rerun(reentrant=False)(m, x))),
    "checkpoint around the head, and coupled outputs": network(
        lambda m, x: (lambda y: y - y.mean(0))(rerun(reentrant=False)(m, x)),
    ),
    "old weight_norm": stack(weight_norm),
    "old weight_norm along columns": stack(lambda layer: weight_norm(layer, dim=1)),
    "old spectral_norm": stack(spectral_norm),
    "prune": stack(lambda layer: prune.l1_unstructured(layer, "weight", 0.3)),
    "orthogonal": stack(parametrizations.orthogonal),
    "spectral_norm": stack(parametrizations.spectral_norm),
    "a buffer and an attribute that forward changes": with_buffer,
    "a sub-graph without gradients": network(without_gradients),
    "writes in place": network(write_in_place),
    "a change of its input in place": network(lambda m, x: run(m, x.add_(1))),
    "a change of its input in place, with coupled outputs": network(
        lambda m, x: (lambda y: y - 0.1 * y.mean(0))(run(m, x.add_(1))),
    ),
    "a setting of its own attribute": network(lambda m, x: (setattr(m, "body", m.body), run(m, x))[1]),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", EXACT)
def test_an_odd_module_is_exact(name):
    model, (inputs, targets) = built(EXACT[name]), batch((5,), 3)
    true = plain_of_original(model, inputs.clone(), targets)
    before = inputs.clone()
    perturbation = fedveil.Veil().perturb(model, fedveil.analyse(model, inputs))
    update = fedveil.client_step(model, perturbation.broadcast, inputs, targets)
    assert_close(perturbation.recover([update]).gradients, true)
    assert torch.equal(inputs, before)
    fedveil.Federation(model, [(inputs, targets)]).fit(1)


def plain_of_original(model, inputs, targets):
    """Gradients, also of a model whose attributes cannot be copied; its buffers stay as they were."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    outputs = torch.func.functional_call(model, buffers, inputs)
    outputs = outputs.get("logits", outputs.get(0)) if isinstance(outputs, dict) else outputs
    loss = 0.5 * (outputs - targets).square().sum(1).mean()
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


REFUSED = {
    "None": (network(lambda m, x: None), "Network: .*returns a NoneType with no floating-point tensor.*Fix: return"),
    "an integer": (network(lambda m, x: 3), "Network: .*returns an int with no floating-point tensor.*Fix: return"),
    "a nested dict": (
        network(lambda m, x: {"a": {"b": run(m, x)}}),
        "Network: .*returns a dict with no floating-point t.*Fix: return",
    ),
    "booleans": (network(lambda m, x: run(m, x) > 0), r"Network: .*have dtype torch.bool.*Fix: return a dense tensor"),
    "classes": (network(lambda m, x: run(m, x).argmax(1)), "Network: .*have dtype torch.int64.*Fix: return a dense"),
    "complex": (
        network(lambda m, x: torch.complex(run(m, x), run(m, x))),
        "Network: .*complex128.*Fix: return a dense",
    ),
    "sparse": (network(lambda m, x: run(m, x).to_sparse()), "Network: .*layout torch.sparse_coo.*Fix: return a dense"),
    "half": (
        network(lambda m, x: run(m, x).half()),
        "Network: it rounds its outputs to torch.float16.*Fix: return the",
    ),
    "a mean": (network(lambda m, x: run(m, x).mean()), "Network: the model returns one number.*Fix: return one row"),
    "an exception": (
        lambda: nn.Sequential(nn.Linear(5, 6), Network(fail)),
        r"1 .Network., test_odd_modules.py:\d+ .*: torch.export .*: 'lost'.\n  Fix: check",
    ),
    "a layer named like a method": (lambda: named("train"), "torch.export confuses its layer 'train' .*Fix: rename"),
    "lazy": (stack(kind=lambda _, n: nn.LazyLinear(n)), "0.weight: it has no shape yet.*Fix: run the model once"),
    "reentrant": (network(rerun(reentrant=True)), "Network: its reentrant checkpoint.*Fix: pass use_reentrant"),
    "meta": (lambda: nn.Linear(5, 3, device="meta"), "analyse: weight is on the meta device.*Fix: load"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_an_odd_module_is_refused_with_the_reason_and_a_fix(name):
    build, text = REFUSED[name]
    model, (inputs, targets) = built(build), batch((5,), 3)
    with pytest.raises(FedveilError, match=f"(?s){text}"):
        fedveil.analyse(model, inputs)
    if name == "lazy":  # a federation runs the model first
        fedveil.Federation(model, [(inputs, targets)]).fit(1)
        assert fedveil.analyse(model, inputs).coverage == 1  # what the fix says
        return
    with pytest.raises(FedveilError, match="Fix: "):
        fedveil.Federation(model, [(inputs, targets)]).fit(1)
