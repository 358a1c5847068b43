"""Flower's own mods and strategy clip updates and add the noise that Flower's documentation states."""

import logging
import math

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from tests.defences.runs import federation

from fedveil.defences.flower_mods import FlowerClipping, FlowerLocalDp
from fedveil.defences.plain import PlainUpdate
from fedveil.errors import BadArgument
from fedveil.models import mlp
from fedveil.scheme.losses import find_loss


def arrays(size=4000, norm=5.0):
    values = np.random.default_rng(0).standard_normal(size)
    values *= norm / np.linalg.norm(values)
    return {"a": values[: size // 2].reshape(2, -1), "b": values[size // 2 :]}


def flat(found):
    return np.concatenate([own.ravel() for own in found.values()])


@pytest.mark.parametrize("norm", [5.0, 0.5, 0.0])
def test_a_message_is_clipped_and_has_the_noise_of_its_claim(norm):
    own, size = FlowerLocalDp(2.0, 4.0, 1.0, 1e-5), 4000
    values = arrays(size, norm) if norm else {"a": np.zeros((2, size // 2)), "b": np.zeros(0)}
    noise = flat(own.create_filter()({name: value.copy() for name, value in values.items()})) - min(
        1.0, 2.0 / (norm or 1.0)
    ) * flat(values)
    deviation = 4.0 * math.sqrt(2 * math.log(1.25e5))
    assert own.noise == pytest.approx(deviation)
    spread = 6 / math.sqrt(2 * size)  # six standard deviations of an estimated standard deviation, relative to it
    assert abs(np.std(noise) / deviation - 1) < spread
    assert abs(noise.mean()) < 6 * deviation / math.sqrt(size)


@pytest.mark.parametrize("norm", [5.0, 0.5])
def test_clients_clip_exactly_and_add_nothing(norm):
    found = flat(FlowerClipping(2.0).create_filter()(arrays(norm=norm)))
    assert np.allclose(found, min(1.0, 2.0 / norm) * flat(arrays(norm=norm)), rtol=1e-12, atol=0)


def round_of(noise, model):
    defence = FlowerClipping(1.0, noise)
    example = torch.zeros(2, 40)
    return defence.server(model, example, find_loss("squared_error")).start_round(model)


def test_the_server_adds_the_noise_of_the_multiplier_to_the_weighted_mean():
    model = mlp(40, 30, hidden=60).double()
    draw = torch.Generator().manual_seed(0)
    updates = [
        PlainUpdate({n: torch.randn(p.shape, generator=draw).double() for n, p in model.named_parameters()}, {})
        for _ in range(3)
    ]
    weights = [1.0, 2.0, 5.0]
    mean = {n: sum(w * u.gradients[n] for w, u in zip(weights, updates, strict=True)) / 8 for n in updates[0].gradients}
    exact = round_of(0.0, model).recover(updates, weights).gradients
    assert all(torch.allclose(exact[name], own, rtol=1e-12, atol=1e-15) for name, own in mean.items())
    noisy = round_of(6.0, model).recover(updates, weights).gradients
    noise = torch.cat([(noisy[name] - own).flatten() for name, own in mean.items()])
    deviation = 6.0 * 1.0 / 3
    assert abs(float(noise.std()) / deviation - 1) < 6 / math.sqrt(2 * len(noise))
    each = round_of(6.0, model).recover_each(updates)  # a curious server sees updates without noise
    assert all(
        torch.equal(one.gradients[n], u.gradients[n]) for one, u in zip(each, updates, strict=True) for n in mean
    )
    combined = round_of(6.0, model).combine(each).gradients
    assert all(not torch.equal(combined[name], own) for name, own in mean.items())


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: FlowerLocalDp(clipping_norm=0), "clipping_norm must be a finite number above 0"),
        (lambda: FlowerLocalDp(sensitivity=0), "sensitivity must be a finite number above 0"),
        (lambda: FlowerLocalDp(epsilon=0), "epsilon must be a finite number above 0"),
        (lambda: FlowerLocalDp(delta=0), "delta must be above 0 and below 1"),
        (lambda: FlowerClipping(noise_multiplier=-1), "noise_multiplier must be a number from 0"),
        (lambda: FlowerClipping(clipping_norm=math.inf), "clipping_norm must be a finite number above 0"),
    ],
)
def test_settings_without_noise_that_flower_accepts_are_refused(make, what):
    with pytest.raises(BadArgument, match=what):
        make()


def test_rounds_print_nothing_and_bound_what_clients_send(caplog):
    run = federation("mlp", FlowerClipping(1e-3, 0.0))
    with caplog.at_level(logging.INFO):
        gradients = run.step().gradients
    assert not caplog.messages
    norm = math.sqrt(sum(float(own.square().sum()) for own in gradients.values()))
    assert 1e-4 < norm <= 1e-3 * (1 + 1e-9)
