"""Several filtered updates of one record give it back, and noise gives no more than the attacker's own records."""

import dataclasses

import pytest
import torch
from tests.attacks.victims import DIGITS, chance, gain, observe_digits

from fedveil.attacks import first_layer
from fedveil.attacks.observation import DoesNotApply
from fedveil.defences import Plain
from fedveil.defences.compression import Int8, TopK
from fedveil.defences.filtered import Filtered

SAMPLE = DIGITS.train.inputs[:300].flatten(1).double()


class Truncated(Filtered):
    """Truncates elements, and leaves out the smallest, as FLARE's PercentilePrivacy does (test_flare_filters.py)."""

    name = "truncated"

    def __init__(self, percentile, gamma):
        self.percentile, self.gamma = percentile, gamma

    def create_filter(self):
        def apply(arrays):
            sizes = torch.cat([torch.from_numpy(own).abs().flatten() for own in arrays.values()])
            cutoff = float(sizes.quantile(self.percentile / 100))
            return {name: own.clip(-self.gamma, self.gamma) * (abs(own) >= cutoff) for name, own in arrays.items()}

        return apply


@pytest.mark.parametrize("seed", range(2))
def test_truncation_and_missing_elements_hide_little_from_an_attacker_who_knows_of_them(seed):
    observed, true = observe_digits(Truncated(10, 0.01), 6, seed=seed)
    found = gain(first_layer.rebuild_filtered_record(observed), observed, true)
    published = gain(first_layer.rebuild_from_difference(observed), observed, true)
    ignorant = gain(first_layer.rebuild_selected_record(observed), observed, true)
    assert found > max(20, published + 6, ignorant + 6)


@pytest.mark.parametrize("seed", range(2))
def test_what_top_k_leaves_out_it_sends_later(seed):
    observed, true = observe_digits(TopK(0.1), 6, seed=seed)
    found = gain(first_layer.rebuild_delayed_record(observed), observed, true)
    published = gain(first_layer.rebuild_from_difference(observed), observed, true)
    assert found > max(20, published + 6)
    assert found > gain(first_layer.rebuild_filtered_record(observed), observed, true) + 6  # rounds apart


def test_an_update_that_is_not_filtered_gives_the_record_exactly_and_eight_bits_hide_nothing():
    observed, true = observe_digits(Plain(), 3)
    for rebuild in (first_layer.rebuild_filtered_record, first_layer.rebuild_delayed_record):
        assert gain(rebuild(observed), observed, true) > 40
    observed, true = observe_digits(Int8(), 2)
    assert gain(first_layer.rebuild_from_difference(observed), observed, true) > 20


@pytest.mark.parametrize("size", [0.01, 1.0])
def test_noise_alone_gives_the_mean_of_the_attacker_s_records(size):
    for number in range(5):
        noise = size * torch.randn(250, 65, generator=chance(number)).double()
        found = first_layer.fit_record(noise, noise, SAMPLE)
        away = (found - SAMPLE.mean(0)).norm() / SAMPLE.std(0).norm()
        assert away < 1  # closer to the mean than records are


def test_intervals_and_values_say_the_same():
    generator = chance()
    true = torch.cat([DIGITS.train.inputs[400].flatten().double(), torch.ones(1).double()])
    rows = torch.randn(60, 1, generator=generator).double() * true
    exact = first_layer.fit_record(rows, rows, SAMPLE)
    assert torch.allclose(exact, true[:-1], atol=1e-6)
    wide = torch.full_like(rows, 0.0)
    wide[::2] = 0.05
    between = first_layer.fit_record(rows - wide, rows + wide, SAMPLE)
    assert float((between - true[:-1]).abs().max()) < 0.05
    nothing = first_layer.fit_record(torch.full_like(rows, -1e3), torch.full_like(rows, 1e3), SAMPLE)
    assert torch.isfinite(nothing).all()


def test_one_broadcast_is_not_enough():
    observed, _ = observe_digits(Plain())
    alone = dataclasses.replace(observed, rounds=observed.rounds[-1:])
    for rebuild in (first_layer.rebuild_filtered_record, first_layer.rebuild_delayed_record):
        with pytest.raises(DoesNotApply, match="two broadcasts"):
            rebuild(alone)
