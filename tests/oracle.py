"""The slow, obvious truth: plain autograd on the true model; and how far a recovered gradient is from it."""

import copy
import warnings
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

import fedveil
from fedveil.graph.inputs import call, each, tensors
from fedveil.scheme.noise import HeadNoise, UnitNoise


def squared_error(outputs, targets):
    """Half the squared distance, summed over outputs, averaged over samples."""
    return 0.5 * (outputs - targets).pow(2).reshape(len(outputs), -1).sum(1).mean()


def contrastive(outputs, targets):
    """Samples of a batch with the same target together, all others apart."""
    near = (outputs.unsqueeze(0) - outputs.unsqueeze(1)).square().sum(2)
    same = (targets.unsqueeze(0) == targets.unsqueeze(1)).to(outputs.dtype)
    return (same * near + (1 - same) * (1 - near).relu()).mean()


def in_dtype(inputs, dtype):
    """The same inputs, floating ones in another dtype."""
    return each(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, inputs)


def plain(model, inputs, targets, loss=squared_error):
    """Gradients and buffers after one pass, of a copy of the model; `loss` gives one number for the batch."""
    model = copy.deepcopy(model)
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss(call(model, inputs), targets), list(wanted.values()))
    return dict(zip(wanted, gradients, strict=True)), {k: b.clone() for k, b in model.named_buffers()}


def worst(found, true):
    """The largest |found - true| / max(|true|, 1e-6 |all true|) of a parameter, in float64."""
    assert set(found) == set(true)
    total = torch.stack([g.double().norm() for g in true.values()]).norm()
    return max(
        float((found[name].double() - g.double()).norm() / torch.maximum(g.double().norm(), 1e-6 * total))
        for name, g in true.items()
    )


def flat(tensors):
    """All tensors as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def assert_close(found, true):
    """Compare with 1e-9 of each gradient; where terms cancel (a bias before a norm), with 1e-12 of all gradients."""
    total = torch.stack([g.norm() for g in true.values()]).norm()
    for name, g in true.items():
        assert (found[name] - g).norm() <= 1e-9 * g.norm() + 1e-12 * total, name


def batch(shape, outputs=10, *, samples=6, seed=0, dtype=torch.float64):
    """Normal inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, *shape, generator=generator, dtype=torch.float64)
    targets = torch.randn(samples, outputs, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), targets.to(dtype)


def built(build, seed=0, dtype=torch.float64):
    """A network with repeatable values, in float64 unless said; the global seed stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().to(dtype)


class Network(nn.Module):
    """Layers and parameters by name, and a forward that is a function of the network and its inputs."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        """Call the function."""
        return self.run(self, *args, **kwargs)


_PLANS = WeakKeyDictionary()


def planned(model, inputs):
    """The model's plan; analysed once per model, dtype, modes and shapes, because tests ask for many rounds."""
    modes = tuple(module.training for module in model.modules())
    shapes = tuple(tensor.shape[1:] for tensor in tensors(inputs))
    kinds = tuple((p.dtype, p.requires_grad) for p in model.parameters())
    known = _PLANS.setdefault(model, {})
    key = (modes, shapes, kinds)
    if key not in known:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # exactness does not depend on how much is covered
            known[key] = fedveil.analyse(model, inputs)
    return known[key]


def perturb(model, plan, loss="squared_error", groups=1, *, entropy=None, **settings):
    """Perturb a model once."""
    return fedveil.Veil(groups, entropy=entropy, **settings).perturb(model, plan, loss)


class Known(NamedTuple):
    """A perturbation with the noise that it was made with."""

    perturbation: fedveil.Perturbation
    units: UnitNoise
    head: HeadNoise

    @property
    def gamma(self):
        """The paper's gamma, for each output; of squared error."""
        coefficients = self.perturbation.recovery.coefficients
        return (torch.from_numpy(self.head.offset) - torch.tensor(coefficients[1:-1]).double())[self.head.partition]


def perturb_known(model, plan, loss="squared_error", **settings):
    """Perturb a model once, and tell the noise."""
    session = fedveil.Veil(keep_noise=True, **settings).start(plan, loss)
    perturbation = session.perturb(model)
    assert session._reserve.kept_noise
    units, head = session._reserve.kept_noise
    assert head
    return Known(perturbation, units, head)


def veiled_round(model, inputs, targets, *, seed=None, **noise):
    """Perturb, client_step, recover."""
    entropy = None if seed is None else fedveil.Entropy.for_tests(seed)
    perturbation = perturb(model, planned(model, inputs), entropy=entropy, **noise)
    return perturbation.recover([fedveil.client_step(model, perturbation.broadcast, inputs, targets)])


def answered(model, inputs, targets, tamper=lambda plan: None, seed=1, **settings):
    """A secret, an update of its round, and the true gradient; under a plan that may have been tampered with."""
    plan = fedveil.analyse(model, inputs)
    tamper(plan)
    secret = perturb(model, plan, entropy=fedveil.Entropy.for_tests(seed), **settings)
    return secret, fedveil.client_step(model, secret.broadcast, inputs, targets), plain(model, inputs, targets)[0]


def recovery_error(model, inputs, targets, **noise):
    """The largest error of a gradient after a veiled round."""
    return worst(veiled_round(model, inputs, targets, seed=0, **noise).gradients, plain(model, inputs, targets)[0])
