"""Nodes: the polynomial through them, its estimated error, and how many it takes."""

import math

import numpy as np
import pytest
import torch
from tests.oracle import built
from torch.nn import functional as F

import fedveil
from fedveil.models import cnn, densenet, mlp, resnet
from fedveil.scheme import NodeCount
from fedveil.scheme.anchor import standard_error
from fedveil.scheme.nodes import REMEMBERED, Spectrum, chebyshev, lagrange, polynomials, transform


@pytest.mark.parametrize("count", [3, 4, 9, 64])
@pytest.mark.parametrize("place", [-1.0, -0.3, 0.0, 0.77, 1.0])
def test_a_polynomial_of_lower_degree_is_met_exactly(count, place):
    coefficients = np.random.default_rng(0).normal(size=count)
    values = np.polynomial.chebyshev.chebval(chebyshev(count), coefficients)
    found = np.array(lagrange(count, place)) @ values
    rounding = 1e-15 * count * np.abs(coefficients).sum()  # sums of `count` terms
    assert abs(found - np.polynomial.chebyshev.chebval(place, coefficients)) < rounding
    assert np.allclose(transform(count) @ values, coefficients, atol=rounding)
    assert np.allclose(polynomials(count, place) @ coefficients, found, atol=rounding)


@pytest.mark.parametrize("pole", [0.3, 1.0, 5.0])
def test_the_error_of_a_function_with_poles_is_foreseen(pole):
    """1 / (1 + (u / pole)^2): coefficients fall by sqrt(1 + pole^2) - pole a node, every other one is 0."""
    for count in (9, 17, 33):
        for place in np.random.default_rng(count).uniform(-1, 1, 20):
            values = 1 / (1 + (chebyshev(count) / pole) ** 2)
            true = 1 / (1 + (place / pole) ** 2)
            sizes = np.abs(transform(count) @ values) + 1e-17
            # the odd ones, which are 0, are filled as a gradient's never are empty: with their neighbours' mean
            sizes[1:-1:2] = np.sqrt(sizes[0:-2:2] * sizes[2::2])
            spectrum = Spectrum(tuple(sizes / true), 2e-16, 1.0)
            error = abs(np.array(lagrange(count, place)) @ values - true) / true
            assert error <= 10 * spectrum.error(place) + 1e-15 * count  # a sum of `count` terms


def run_rounds(model, inputs, labels, tolerance, rounds, seed):
    """Recovered rounds as a federation has them: counts adapt, a round that missed by far is repeated once."""
    plan, count = fedveil.analyse(model, inputs), NodeCount(tolerance)
    tokens = iter(range(seed, seed + 10_000))

    def once():
        secret = fedveil.draw_secret(
            plan, "cross_entropy", nodes=count, entropy=fedveil.Entropy.for_tests(next(tokens))
        )
        update = fedveil.client_step(model, fedveil.perturb(model, secret), inputs, labels)
        found = fedveil.recover(secret, [update])
        count.observe(found.spectrum)
        return found

    for _ in range(rounds):
        found = once()
        yield once() if found.spectrum.truncation() > 10 * tolerance else found


def shift_of(model, plan, inputs, seed):
    """The largest shift of a logit over the interval, to either side."""
    secret = fedveil.draw_secret(plan, "cross_entropy", nodes=8, entropy=fedveil.Entropy.for_tests(seed))
    broadcast = fedveil.perturb(model, secret)
    head = broadcast.head
    seen = []
    view = fedveil.client_view(model, broadcast, centred=True)
    view.get_submodule(head.path).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        view(inputs)
    alpha = seen[0].sum(-1) + bool(head.bias)
    reach = float(head.candidates[:, 0].abs().max()) / math.cos(math.pi / 16)
    return reach * float(alpha.abs().max()) * float(head.direction.abs().max())


NETWORKS = {
    "MLP": (lambda c: mlp(20, c, layers=2, hidden=64), (20,), 32),
    "CNN": (lambda c: cnn(3, c, width=8, size=16), (3, 16, 16), 16),
    "ResNet20, no norm": (lambda c: resnet(20, 3, c, width=4, norm="none"), (3, 8, 8), 8),
    "ResNet20, BatchNorm": (lambda c: resnet(20, 3, c, width=4, norm="batch"), (3, 8, 8), 8),
    "DenseNet": (lambda c: densenet(3, c, growth=4, layers=2), (3, 8, 8), 8),
}
SLOW = pytest.mark.slow
GRID = [
    pytest.param(name, c, shift, dtype, marks=[] if name == "MLP" or (c == 10 and shift == 3) else SLOW)
    for name in NETWORKS
    for c in (2, 10, 100)
    for shift in (1, 3, 10)
    for dtype in (torch.float64, torch.float32)
]


def case(name, classes, shift, dtype):
    """A network whose head is scaled until the logits' shift over the interval has the wanted size (median of 9)."""
    build, shape, samples = NETWORKS[name]
    model = built(lambda: build(classes), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, *shape, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, classes, (samples,), generator=generator)
    plan = fedveil.analyse(model, inputs)
    scale = shift / float(np.median([shift_of(model, plan, inputs, seed) for seed in range(9)]))
    with torch.no_grad():
        for name in filter(None, (plan.head.weight, plan.head.bias)):
            model.get_parameter(name).mul_(scale)
    return model, inputs, labels


def flat_gradient(model, inputs, labels):
    found = torch.autograd.grad(F.cross_entropy(model(inputs), labels), list(model.parameters()))
    return torch.cat([g.reshape(-1) for g in found]).double()


@pytest.mark.parametrize(("name", "classes", "shift", "dtype"), GRID)
def test_cross_entropy_is_exact_and_its_error_foreseen(name, classes, shift, dtype):
    model, inputs, labels = case(name, classes, shift, dtype)
    twin = built(lambda: NETWORKS[name][0](classes))
    twin.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in model.state_dict().items()})
    truth = flat_gradient(twin, inputs.double(), labels)
    own = float((flat_gradient(model, inputs, labels) - truth).norm() / truth.norm())  # plain autograd's rounding
    double = dtype == torch.float64
    rounding = 1e-12 if double else own  # of the oracle itself: eps times the condition of softmax - target
    names = [n for n, _ in model.named_parameters()]
    rounds = list(run_rounds(model, inputs, labels, 1e-6 if double else 1e-5, REMEMBERED + 10, seed=1000))
    for found in rounds[REMEMBERED:]:  # the first rounds learn the count
        error = float(
            (torch.cat([found.gradients[n].reshape(-1) for n in names]).double() - truth).norm() / truth.norm()
        )
        assert error <= (1e-6 if double else 1e-5 + 5 * own)
        if error < 1e-3:
            assert error <= 10 * found.error + rounding
            assert found.error <= 100 * max(error, found.spectrum.floor, rounding)


def test_what_the_interval_gives_away_is_about_a_tenth_of_a_bit():
    """Over 10,000 draws it is 0.105; the bound is 0.15 with a doubt of three standard errors.

    Bits are -log2 of the chance that an offset drawn without the condition lies inside (standard width)."""
    inside, draws = 0, 0
    for seed in range(5):
        model = built(lambda: mlp(20, 10, layers=2, hidden=64), seed=seed)
        plan = fedveil.analyse(model, torch.zeros(1, 20).double())
        for number in range(200):
            entropy = fedveil.Entropy.for_tests(1000 * seed + number)
            secret = fedveil.draw_secret(plan, "cross_entropy", spread=1000.0, nodes=8, entropy=entropy)
            fedveil.perturb(model, secret)
            inside += abs(secret._sent.how.place) * 1000 <= 2
            draws += 1
    share = inside / draws
    doubt = 3 * math.sqrt(share * (1 - share) / draws)
    assert -math.log2(share - doubt) < 0.15


def test_the_nodes_follow_from_the_public_head_alone():
    """Whoever has the broadcast can compute them; the secret's place does not move them."""
    model = built(lambda: mlp(20, 10, layers=2, hidden=64))
    plan = fedveil.analyse(model, torch.zeros(1, 20).double())
    for seed in range(20):
        secret = fedveil.draw_secret(plan, "cross_entropy", nodes=9, entropy=fedveil.Entropy.for_tests(seed))
        broadcast = fedveil.perturb(model, secret)
        head = broadcast.head
        base = torch.cat([broadcast.parameters[head.weight], broadcast.parameters[head.bias].unsqueeze(1)], 1)
        reach = 2 * standard_error(base.numpy(), head.direction.numpy())
        assert np.allclose(head.candidates[:, 0].numpy(), reach * chebyshev(9), rtol=1e-12)
        assert abs(secret._sent.how.place) <= 1


def test_a_head_that_leans_to_one_side_gets_a_wider_interval():
    model = built(lambda: mlp(5, 1, layers=1, hidden=64))
    with torch.no_grad():
        model[-1].weight.copy_(model[-1].weight.abs() / 8 + 1 / 8)
        model[-1].bias.fill_(1 / 8)
    inputs = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0.0], [1], [1], [0], [1], [0]], dtype=torch.float64)
    secret = fedveil.draw_secret(
        fedveil.analyse(model, inputs), "binary_cross_entropy", nodes=64, entropy=fedveil.Entropy.for_tests(0)
    )
    broadcast = fedveil.perturb(model, secret)
    found = fedveil.recover(secret, [fedveil.client_step(model, broadcast, inputs, targets)])
    truth = torch.autograd.grad(F.binary_cross_entropy_with_logits(model(inputs), targets), list(model.parameters()))
    for gradient, true in zip(found.gradients.values(), truth, strict=True):
        assert float((gradient - true).norm() / true.norm()) < 1e-6
    base = broadcast.parameters[broadcast.head.weight]
    base = torch.cat([base, broadcast.parameters[broadcast.head.bias].unsqueeze(1)], 1)
    narrow = 2 * standard_error(base.numpy(), broadcast.head.direction.numpy())
    assert float(broadcast.head.candidates[:, 0].max()) > narrow


def test_fewer_nodes_than_three_are_refused():
    plan = fedveil.analyse(mlp(5, 3), torch.zeros(1, 5))
    with pytest.raises(fedveil.FedveilError, match="nodes must be from 3 to 128, got 2"):
        fedveil.draw_secret(plan, "cross_entropy", nodes=2)


def test_a_gradient_of_zero_teaches_nothing_wrong():
    count = NodeCount(1e-6)
    count.observe(Spectrum((0.0,) * 8, 0.0, 0.1))
    assert 3 < count(0.1) < 20
