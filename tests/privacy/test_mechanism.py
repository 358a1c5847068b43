"""The grid: its noise is at least what the multiplier promises for the change that one record can cause."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.errors import BadArgument
from fedveil.models import mlp
from fedveil.privacy.accounting import affordable_rounds
from fedveil.privacy.gradients import RecordGradients, clipped_sums
from fedveil.privacy.mechanism import add_noise, make_grid, quantise
from fedveil.privacy.samplers import SCALE
from fedveil.privacy.settings import Privacy
from fedveil.scheme import Entropy
from fedveil.scheme.losses import find_loss


@pytest.mark.parametrize("noise", [0.3, 1.0, 40.0])
@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("candidates", [1, 3])
def test_noise_is_the_multiplier_times_the_sensitivity(noise, shares, candidates):
    grid = make_grid(noise, 2.0, 1000, candidates=candidates, shares=shares)
    total = SCALE * grid.unit * math.sqrt(shares)
    assert total == pytest.approx(noise * grid.sensitivity, rel=1e-12)
    exact = math.sqrt(candidates) * 2.0 + grid.unit * math.sqrt(candidates * 1000)
    assert exact < grid.sensitivity < exact * (1 + 2e-5)


def test_a_coarse_grid_is_refused():
    with pytest.raises(BadArgument, match="needs a grid finer than"):
        make_grid(1000.0, 1.0, 10**7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_record_changes_the_rounded_sum_by_at_most_the_sensitivity(dtype):
    """Measured over neighbouring data, on a grid so coarse that its rounding shows."""
    torch.manual_seed(0)
    model, inputs, targets = mlp(20, 5, hidden=30).to(dtype), torch.randn(40, 20, dtype=dtype), torch.arange(40) % 5
    task = RecordGradients.from_model(model, find_loss("cross_entropy"))
    numbers, clip, every = task.count_values(), 1e-3, torch.ones(40, dtype=torch.bool)
    grid = make_grid(9000.0, clip, numbers)
    whole = clipped_sums(task, inputs, targets, every, clip)
    changes = []
    for row in range(40):
        less = clipped_sums(task, inputs, targets, every & (torch.arange(40) != row), clip)
        gaps = [(quantise(whole[name], grid) - quantise(less[name], grid)).flatten() for name in whole]
        changes.append(float(torch.cat(gaps).norm()) * grid.unit)
    assert clip < max(changes) <= grid.sensitivity  # above clip: without the grid's share the bound would not hold


def test_noise_is_added_on_the_grid():
    sums = torch.arange(-3, 3, dtype=torch.float64).repeat(5000)
    noise = (add_noise(sums, Entropy()) - sums).numpy()
    assert np.array_equal(noise, np.round(noise))
    assert stats.kstest(noise / SCALE, "norm").statistic < 0.0197  # exceeded with probability below 1e-10


@pytest.mark.parametrize("records", [1, 20, 300, 8000, 60_000])
@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.3, 1.0])
def test_samples_fit_into_the_public_number_of_records(records, rate):
    room = Privacy(noise=1.0, rate=rate).capacity(records)
    assert stats.binom(records, rate).sf(room) < 1e-8
    assert 1 <= room <= records


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "neither epsilon nor noise is set"),
        ({"epsilon": 3.0, "unit": "client"}, "depends on the number of rounds"),
        ({"noise": -1.0}, "noise must be a number"),
        ({"noise": 1.0, "delta": 0.0}, "delta must be"),
        ({"noise": 1.0, "rate": 0.0}, "rate must be"),
        ({"noise": 1.0, "unit": "person"}, "no unit 'person'"),
        ({"noise": 1.0, "unit": "client", "rate": 0.1}, "rate applies only to records"),
        ({"noise": 1.0, "unit": "client", "noise_by": "clients"}, "only if the unit is a record"),
        ({"noise": 1.0, "colluding": 0}, "colluding must be"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, text):
    with pytest.raises(BadArgument, match=text):
        Privacy(**options)


def test_the_noise_follows_from_a_budget():
    found = Privacy(epsilon=3.0, rounds=100).resolve(0.1)
    assert found.rate == 0.1
    assert 100 <= affordable_rounds(3.0, found.noise, found.delta, found.rate) <= 102
