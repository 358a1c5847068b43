"""Two veiled broadcasts show a victim's gradient: its directions under SGD, its signs under Adam."""

import dataclasses

import pytest
import torch

from fedveil.attacks.canonical_gradient import from_canonical_difference
from fedveil.attacks.canonical_signs import cut_mean
from fedveil.attacks.gradients import cosine_distance
from fedveil.attacks.labels import batch_labels, single_label
from fedveil.attacks.leaks import from_difference, gradients_of
from fedveil.attacks.observed import DoesNotApply
from fedveil.data import load
from fedveil.defences import Plain, Veil
from fedveil.federation.local import Federation
from fedveil.graph.layout import flatten
from fedveil.models import cnn, lenet, mlp, resnet
from fedveil.scheme import Entropy
from fedveil.studies.gradients.run import observe_leaks

NETWORKS = {
    "mlp": lambda: torch.nn.Sequential(torch.nn.Flatten(), mlp(64, 10, layers=2, hidden=20)),
    "lenet": lambda: lenet(1, 10, size=8),
    "cnn": lambda: cnn(1, 10, width=4, size=8),
    "resnet": lambda: resnet(8, 1, 10, width=4, norm="none"),
}
SGD = lambda p: torch.optim.SGD(p, 0.1)  # noqa: E731
ADAM = lambda p: torch.optim.Adam(p, 1e-3)  # noqa: E731


@pytest.fixture(scope="module")
def digits():
    return load("digits", flat=False)


def observed_of(digits, network="lenet", optimizer=SGD, secret=0, defence=None, **noise):
    """One round of two clients; the attacker has 10 records, the victim 2."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = NETWORKS[network]().double()
    inputs, targets = digits.train.inputs.double(), digits.train.targets
    parts = [(inputs[10:20], targets[10:20]), (inputs[:2], targets[:2])]
    defence = defence or Veil(entropy=Entropy.for_tests(secret), **noise)
    federation = Federation(net, parts, defence, optimizer, loss="cross_entropy", fuse=False)
    return observe_leaks(federation)[1], parts[1], (inputs[20:22], targets[:2])


def seen_part(compare, gradients):
    flat = flatten(gradients, compare.entries)
    for directions in compare.hidden:
        flat = compare.blocks.without(flat, directions)
    return flat


@pytest.mark.parametrize("network", NETWORKS)
def test_directions_within_blocks_are_exact_for_a_step_of_any_size(digits, network):
    observed, victim, other = observed_of(digits, network, multiplicative=100.0)
    leak = from_canonical_difference(observed)
    compare, blocks = leak.compare, leak.compare.blocks
    true = gradients_of(leak.model, leak.loss, *victim)
    wanted, found = seen_part(compare, true), compare.wanted
    sizes = [blocks.inner(v, v) for v in (wanted, found)]
    clear = sizes[0] > 1e-6 * sizes[0].max()
    cosines = blocks.inner(wanted, found) / (sizes[0] * sizes[1]).sqrt()
    assert int(clear.sum()) > 10
    # rounding, 1e-16 of a weight, over lr and the smallest clear gradient, 1e-4 of a weight or more: 1e-11, squared
    assert float((1 - cosines[clear]).max()) < 1e-12
    false = seen_part(compare, gradients_of(leak.model, leak.loss, *other))
    cosines = blocks.inner(false, found) / (blocks.inner(false, false) * sizes[1]).sqrt()
    assert float((1 - cosines[clear]).nanmedian()) > 0.01
    assert float(compare(true)) < float(compare(gradients_of(leak.model, leak.loss, *other)))


def test_other_secrets_show_the_same(digits):
    distances = []
    for secret in (0, 1):
        observed, *batches = observed_of(digits, secret=secret, multiplicative=100.0)
        leak = from_canonical_difference(observed)
        distances.append([float(leak.compare(gradients_of(leak.model, leak.loss, *batch))) for batch in batches])
    assert distances[0] == pytest.approx(distances[1], rel=1e-6)


def test_both_directions_have_to_go(digits):
    """The change of factors moves blocks along C; an inexact k leaves some of the attacker's own part."""
    observed, victim, _ = observed_of(digits)
    leak = from_canonical_difference(observed)
    true = gradients_of(leak.model, leak.loss, *victim)
    least = float(leak.compare(true))
    plain = from_difference(observed)
    assert float(cosine_distance(true, plain.gradients, None)) > 0.5
    for number in range(2):
        one = dataclasses.replace(leak.compare, hidden=leak.compare.hidden[number : number + 1])
        assert float(one(true)) > 2 * least


def test_labels_follow_from_two_veiled_broadcasts(digits):
    observed, victim, _ = observed_of(digits)
    assert batch_labels(from_canonical_difference(observed), 2, observed.inputs) == sorted(victim[1].tolist())


@pytest.mark.parametrize("network", ["mlp", "lenet"])
def test_adams_first_step_shows_every_sign(digits, network):
    observed, victim, other = observed_of(digits, network, ADAM, multiplicative=100.0)
    leak = from_canonical_difference(observed)
    compare = leak.compare
    true = gradients_of(leak.model, leak.loss, *victim)
    both = observed.share * compare.own + (1 - observed.share) * flatten(true, compare.entries)
    clear = both.abs() > 1e-5  # at the canonical model; Adam's eps is 1e-8
    assert int(clear.sum()) > 100
    assert torch.equal(compare.signs[clear], both.sign()[clear])
    assert float(compare(true)) < 1e-9 < 1e-6 < float(compare(gradients_of(leak.model, leak.loss, *other)))
    single_label(leak)


def test_a_cut_normal_distribution_has_the_mean_of_its_samples():
    chance = torch.Generator().manual_seed(0)
    samples = 2.0 * torch.randn(200_000, generator=chance, dtype=torch.float64)
    for sign, bound in ((1.0, 0.5), (-1.0, 0.5), (1.0, -3.0)):
        inside = samples[sign * (bound + samples) > 0]
        found = cut_mean(*(torch.tensor([v], dtype=torch.float64) for v in (sign, bound, 2.0)))
        assert float(found) == pytest.approx(float(inside.mean()), abs=5 * float(inside.std()) / len(inside) ** 0.5)


def test_it_needs_two_veiled_rounds(digits):
    observed, _, _ = observed_of(digits)
    with pytest.raises(DoesNotApply, match="the one after it"):
        from_canonical_difference(dataclasses.replace(observed, rounds=observed.rounds[-1:]))
    plain, _, _ = observed_of(digits, defence=Plain())
    with pytest.raises(DoesNotApply, match="are not veiled"):
        from_canonical_difference(plain)
