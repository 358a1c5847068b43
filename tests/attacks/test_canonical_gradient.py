"""Two veiled broadcasts show a victim's gradient: its directions under SGD, its signs under Adam."""

import dataclasses

import pytest
import torch
from tests.attacks.victims import IMAGES, chance, observe_leaks, sgd

from fedveil.attacks.canonical_gradient import from_canonical_difference, truncated_mean
from fedveil.attacks.gradients import cosine_distance
from fedveil.attacks.leaked_gradients import batch_labels, from_difference, mean_gradients, single_label
from fedveil.attacks.observation import DoesNotApply
from fedveil.defences import Plain, Veil
from fedveil.graph.plan import flatten
from fedveil.models import cnn, lenet, mlp, resnet
from fedveil.scheme import Entropy

NETWORKS = {
    "mlp": lambda: torch.nn.Sequential(torch.nn.Flatten(), mlp(64, 10, layers=2, hidden=20)),
    "lenet": lambda: lenet(1, 10, size=8),
    "cnn": lambda: cnn(1, 10, width=4, size=8),
    "resnet": lambda: resnet(8, 1, 10, width=4, norm="none"),
}


def derive(network="lenet", optimizer=sgd, secret=0, **noise):
    """The observation, the leak, and the gradients of the victim's batch and of other records at the leak's model."""
    veil = Veil(entropy=Entropy.for_tests(secret), **noise)
    _, observed, victim = observe_leaks(NETWORKS[network], veil, optimizer=optimizer)
    leak = from_canonical_difference(observed)
    other = IMAGES.train.inputs[20:22].double(), victim[1]
    return observed, leak, *(mean_gradients(leak.model, leak.loss, *batch) for batch in (victim, other))


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-3)


@pytest.mark.parametrize("network", NETWORKS)
def test_directions_within_blocks_are_exact_for_a_step_of_any_size(network):
    _, leak, true, false = derive(network, multiplicative=100.0)
    compare, blocks = leak.compare, leak.compare.blocks

    def cosines(gradients):
        flat = flatten(gradients, compare.entries)
        for directions in compare.hidden_directions:
            flat = blocks.project_out(flat, directions)
        sizes = [blocks.inner_product(v, v) for v in (flat, compare.leaked_gradient)]
        return blocks.inner_product(flat, compare.leaked_gradient) / (sizes[0] * sizes[1]).sqrt(), sizes[0]

    exact, sizes = cosines(true)
    clear = sizes > 1e-6 * sizes.max()
    assert int(clear.sum()) > 10
    # rounding, 1e-16 of a weight, over lr and the smallest clear gradient, 1e-4 of a weight or more: 1e-11, squared
    assert float((1 - exact[clear]).max()) < 1e-12
    assert float((1 - cosines(false)[0][clear]).nanmedian()) > 0.01
    assert float(compare(true)) < float(compare(false))


def test_other_secrets_show_the_same_both_directions_must_be_removed_and_labels_follow():
    """The change of factors moves blocks along C; an inexact k leaves some of the attacker's own part."""
    observed, leak, true, false = derive(multiplicative=100.0)
    other = derive(secret=1, multiplicative=100.0)
    distances = [[float(own.compare(one)) for one in both] for own, *both in ((leak, true, false), other[1:])]
    assert distances[0] == pytest.approx(distances[1], rel=1e-6)
    assert float(cosine_distance(true, from_difference(observed).gradients, None)) > 0.5
    for number in range(2):
        one = dataclasses.replace(leak.compare, hidden_directions=leak.compare.hidden_directions[number : number + 1])
        assert float(one(true)) > 2 * float(leak.compare(true))
    assert batch_labels(leak, 2, observed.inputs) == sorted(IMAGES.train.targets[:2].tolist())


@pytest.mark.parametrize("network", ["mlp", "lenet"])
def test_adams_first_step_shows_every_sign(network):
    observed, leak, true, false = derive(network, adam, multiplicative=100.0)
    compare = leak.compare
    both = observed.share * compare.own_gradient + (1 - observed.share) * flatten(true, compare.entries)
    clear = both.abs() > 1e-5  # at the canonical model; Adam's eps is 1e-8
    assert int(clear.sum()) > 100
    assert torch.equal(compare.signs[clear], both.sign()[clear])
    assert float(compare(true)) < 1e-9 < 1e-6 < float(compare(false))
    single_label(leak)


def test_a_truncated_normal_distribution_has_the_mean_of_its_samples():
    samples = 2.0 * torch.randn(200_000, generator=chance(), dtype=torch.float64)
    for sign, bound in ((1.0, 0.5), (-1.0, 0.5), (1.0, -3.0)):
        inside = samples[sign * (bound + samples) > 0]
        found = truncated_mean(*(torch.tensor([v], dtype=torch.float64) for v in (sign, bound, 2.0)))
        assert float(found) == pytest.approx(float(inside.mean()), abs=5 * float(inside.std()) / len(inside) ** 0.5)


def test_it_needs_two_veiled_rounds():
    _, observed, _ = observe_leaks(NETWORKS["lenet"], Plain())
    with pytest.raises(DoesNotApply, match="are not veiled"):
        from_canonical_difference(observed)
