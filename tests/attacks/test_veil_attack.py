"""Attackers of the veil remove its noise: with own labels, or with two broadcasts and no data."""

import dataclasses
import itertools

import pytest
import torch
from tests.attacks.victims import NETWORKS, OUTPUTS, build_victim, chance, observe_broadcasts
from tests.oracle import Network
from torch import nn

from fedveil.attacks import veil
from fedveil.attacks.observation import DoesNotApply
from fedveil.attacks.veil import CanonicalHead, fit_noise, fit_own_labels, remove_noise, remove_offset
from fedveil.defences import Plain, Veil
from fedveil.federation.evaluate import predict
from fedveil.scheme import CrossEntropy, Entropy, SquaredError
from fedveil.scheme.losses import BinaryCrossEntropy, LogCosh


def attention():
    """An encoder layer over five tokens and a head."""
    parts = {"layer": nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True), "head": nn.Linear(8, OUTPUTS)}
    return Network(lambda m, x: m.head(m.layer(x.unflatten(1, (5, 8))).mean(1)), **parts)


EVERY = {**NETWORKS, "attention": (attention, (40,))}


def veiled(name, loss=None, targets=None, rounds=2, moved=0.0, **noise):
    """A network that moves by a random step between rounds, and what a client observes of it."""
    model, inputs, outputs = build_victim(name, EVERY)
    classes = nn.functional.one_hot(torch.arange(len(inputs)) % OUTPUTS).double()
    targets, generator = targets(outputs) if targets else classes, chance(5)

    def step(model):
        with torch.no_grad():
            for value in model.parameters():
                value += moved * value.std() * torch.randn(value.shape, generator=generator, dtype=value.dtype)

    defence = Veil(entropy=Entropy.for_tests(3), additive=100.0, **noise)
    return model, observe_broadcasts(defence, model, inputs, targets, loss or SquaredError(), rounds, step)


def error(observed, model):
    truth = predict(model, observed.inputs)
    return float((predict(observed.model, observed.inputs) - truth).norm() / truth.norm())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("groups", [1, OUTPUTS])
def test_own_labels_determine_the_noise_if_they_are_the_true_outputs(name, groups):
    model, observed = veiled(name, targets=lambda out: out, groups=groups)
    assert error(observed, model) > 10
    assert error(fit_own_labels(observed), model) < 1e-9
    assert error(remove_offset(observed), model) < error(observed, model) / 10


@pytest.mark.parametrize(
    ("loss", "targets"),
    [(CrossEntropy(), lambda y: y.softmax(1)), (BinaryCrossEntropy(), torch.sigmoid), (LogCosh(), lambda y: y)],
)
def test_own_labels_fit_any_smooth_loss(loss, targets):
    model, observed = veiled("mlp", loss, targets)  # at these targets the true outputs have the least loss
    found = fit_own_labels(observed)
    assert error(found, model) < 1e-3
    assert (predict(found.model, observed.inputs).argmax(1) == predict(model, observed.inputs).argmax(1)).all()


def test_a_plain_model_is_left_alone_and_an_exposed_head_needs_no_calibration():
    model, inputs, outputs = build_victim("mlp")
    observed = observe_broadcasts(Plain(), model, inputs, outputs, SquaredError())
    assert remove_offset(observed) is fit_own_labels(observed) is observed
    with pytest.raises(DoesNotApply, match="not veiled"):
        remove_noise(observed)
    observed = observe_broadcasts(Veil(head="exposed"), model, inputs, outputs, SquaredError())
    assert error(fit_own_labels(observed), model) < 1e-9


@pytest.mark.parametrize(("groups", "loss"), [(1, CrossEntropy()), (OUTPUTS, SquaredError())])
@pytest.mark.parametrize("name", EVERY)
def test_two_broadcasts_of_the_same_model_determine_it(name, groups, loss):
    model, observed = veiled(name, loss, groups=groups)
    assert error(remove_offset(observed), model) > 1e-3
    assert error(remove_noise(observed), model) < 1e-7


@pytest.mark.parametrize(("name", "groups"), [("mlp", 1), ("mlp", OUTPUTS), ("batchnorm", OUTPUTS)])
def test_while_the_model_moves_the_error_is_about_as_large_as_a_step(name, groups):
    model, observed = veiled(name, rounds=6, moved=1e-3, groups=groups)
    two, six = (error(remove_noise(observed, count), model) for count in (2, 6))
    assert two < 0.05
    assert max(two, six) < error(remove_offset(observed), model) / 4


def test_two_broadcasts_of_different_rounds_are_needed_and_no_record(monkeypatch):
    model, observed = veiled("mlp", groups=OUTPUTS)
    for count in (1, 2):
        with pytest.raises(DoesNotApply, match="two broadcasts from different rounds"):
            remove_noise(dataclasses.replace(observed, rounds=observed.rounds[-1:] * count))
    blind = {"inputs": torch.zeros_like(observed.inputs), "targets": torch.zeros_like(observed.targets)}
    found = remove_noise(dataclasses.replace(observed, **blind))
    assert error(dataclasses.replace(observed, model=found.model), model) < 1e-7
    form = veil.canonical_form

    def forget_factors(*given, **named):
        found = form(*given, **named)
        return found._replace(factors=torch.ones_like(found.factors))

    monkeypatch.setattr(veil, "canonical_form", forget_factors)  # with columns as received, two broadcasts do not fit
    assert error(remove_noise(observed), model) > 1e-2


def plant(rounds, groups, generator, *, redraw=True, drift=0.0, uneven=1.0):
    """Heads with noise of known sizes; the first half of the elements moves `uneven` times as far as the rest."""
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    values, noise, sizes, heads = draw(60), draw(groups, 60), draw(rounds, groups), []
    for size in sizes:
        noise = draw(groups, 60) if redraw else noise
        heads.append(CanonicalHead(values + size @ noise, noise))
        values = values + drift * draw(60) * torch.tensor([uneven, 1.0]).repeat_interleave(30)
    return heads, sizes


def test_the_fit_finds_planted_noise_of_noise_that_stays_only_its_changes_and_the_true_candidates():
    for groups in (1, 5):
        heads, sizes = plant(3, groups, chance(1))
        assert torch.allclose(fit_noise(heads), sizes, atol=1e-9)
    heads, sizes = plant(2, 1, chance(2), redraw=False)
    found = fit_noise(heads)
    assert torch.allclose(found[0] - found[1], sizes[0] - sizes[1], atol=1e-6)
    assert not torch.allclose(found, sizes, atol=1e-2)
    generator, true = chance(3), [2, 0, 1, 2]
    heads, sizes = plant(4, 3, generator, drift=0.05)
    candidates = [torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in true]
    for some, size, index in zip(candidates, sizes, true, strict=True):
        some[index] = size
    assert veil.pick_candidates(heads, candidates) == true


def test_elements_that_move_little_count_more(monkeypatch):
    errors = {turns: 0.0 for turns in (veil.NUM_ITERATIONS, 1)}  # the first turn has equal weights
    for seed, turns in itertools.product(range(20), errors):
        heads, sizes = plant(6, 1, chance(seed), drift=1e-3, uneven=100.0)
        monkeypatch.setattr(veil, "NUM_ITERATIONS", turns)
        errors[turns] += float((fit_noise(heads) - sizes).abs().mean())
    weighted, plain = errors.values()
    assert weighted < plain / 3
